"""FuseAttention where axes look alike, masks differ, and types or regions change on the way."""

from __future__ import annotations

import math
from typing import Any

import attention_spellings as spellings
import attention_spellings_wider as wider
import pytest
import torch
import torch.nn.attention.flex_attention  # noqa: F401 (makes its operator known)
import torch.nn.functional as F
from attention_helpers import Rewritten, Tensors, inputs, only_site, results
from attention_spellings import HEADS, ROOT, join, keys, split_all, valid
from torch.utils.checkpoint import checkpoint

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


# --- Traps: equal sizes, other permutations, other axes. ---------------------------------------


def square(*sizes: int) -> Tensors:
    return [torch.randn(sizes, requires_grad=True) for _ in range(3)]


def transpose_missing(q, k, v):
    return (q @ k).softmax(-1) @ v


def keys_permuted_another_way(q, k, v):
    """[B, S, H, D] straight to [B, H, D, S], where S == H."""
    return (q @ k.permute(0, 1, 3, 2)).softmax(-1) @ v


def keys_as_heads(q, k, v):
    return (q @ k.permute(0, 2, 3, 1)).softmax(-1) @ v


def weights_transposed(q, k, v):
    return (q @ k.mT).softmax(-1).mT @ v


def values_transposed(q, k, v):
    return (q @ k.mT).softmax(-1) @ v.mT


def heads_summed(q, k, v):
    return torch.einsum("bhqk,bhkd->bqd", (q @ k.mT).softmax(-1), v)


def batch_and_heads_swapped(q, k, v):
    return (q.transpose(0, 1) @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    "fn",
    [
        transpose_missing,
        keys_permuted_another_way,
        keys_as_heads,
        weights_transposed,
        values_transposed,
        heads_summed,
        batch_and_heads_swapped,
    ],
)
def test_square_shapes_hide_nothing(fn: Any, dynamic: bool) -> None:
    Rewritten(fn, dynamic).check(square(4, 4, 4, 4))


@pytest.mark.parametrize("dim", [0, 1, 2, -2, -4])
def test_softmax_over_another_axis_is_declined(dim: int) -> None:
    run = Rewritten(lambda q, k, v: (q @ k.mT / 2).softmax(dim) @ v, dynamic=False)
    run.check(square(4, 4, 4, 4))
    kind = "the query axis" if dim in (2, -2) else "a batch or head axis"
    assert only_site(run).reason == f"softmax runs over {kind}, not the keys"


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("where", ["rows", "batch"])
def test_mask_of_equal_sides_is_read_along_its_own_axes(where: str, dynamic: bool) -> None:
    """B == L: a [B, L] mask on [B, L, L] scores broadcasts as [L, L]."""

    def attend(q, k, v, mask):
        mask = mask if where == "rows" else mask[:, None, :]
        return (q @ k.mT).masked_fill(~mask, -1e9).softmax(-1) @ v

    q, k, v = square(6, 6, 8)
    run = Rewritten(attend, dynamic)
    run.check([q, k, v, torch.rand(6, 6) > 0.3])
    run.report.expect(attention=1)


@pytest.mark.parametrize("fill", [-1e9, float("-inf")])
def test_mask_over_queries_is_not_one_over_keys(fill: float) -> None:
    def attend(q, k, v, lens):
        q, k, v = split_all(q, k, v)
        rows = valid(lens, q.shape[2])[:, None, :, None]
        p = (q @ k.mT / ROOT).masked_fill(~rows, fill).softmax(-1)
        return join(p @ v) if fill == -1e9 else join(p.nan_to_num(0.0) @ v)

    run = Rewritten(attend)
    run.check(inputs())
    assert only_site(run).details["mask"] == "queries"


MASKS = {
    "bool [B, L]": lambda: (torch.rand(3, 1, 1, 6) > 0.4, "keys"),
    "numbers [B, L]": lambda: ((torch.rand(3, 1, 1, 6) > 0.4).long(), "keys"),
    "[L]": lambda: (torch.tensor([1, 0, 1, 1, 0, 1]).bool(), "keys"),
    "[B, L, L]": lambda: (torch.rand(3, 1, 6, 6) > 0.4, "bias"),
    "[H, L, L]": lambda: (torch.rand(HEADS, 6, 6) > 0.4, "bias"),
    "[B, H, L, L]": lambda: (
        torch.rand(3, HEADS, 6, 6) > 0.4,
        "the mask is as large as the scores",
    ),
}


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("activation", [torch.softmax, F.silu], ids=["softmax", "silu"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_from_outside(name: str, activation: Any, dynamic: bool) -> None:
    mask, expected = MASKS[name]()

    def attend(q, k, v, mask):
        q, k, v = split_all(q, k, v)
        s = q @ k.mT / ROOT
        if activation is F.silu:
            return join(F.silu(s).masked_fill(mask == 0, 0.0) @ v)
        return join(s.masked_fill(mask == 0, -1e9).softmax(-1) @ v)

    run = Rewritten(attend, dynamic)
    run.check([*inputs(length=6)[:3], mask])
    site = only_site(run)
    if expected == "bias":
        assert site.details == {"mask": "none", "bias": True}
    else:
        assert expected in (site.reason, site.details.get("mask"))


def test_two_masks_of_different_kinds_hide_together() -> None:
    """An infinite causal mask under a finite padding mask: that a row sees a key is assumed."""

    def attend(q, k, v, lens):
        q, k, v = split_all(q, k, v)
        n = q.shape[2]
        s = (q @ k.mT / ROOT).masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        return join(s.masked_fill(~keys(lens, s), -1e9).softmax(-1) @ v)

    run = Rewritten(attend)
    run.check(inputs())
    site = only_site(run)
    assert site.details["mask"] == "keys, causal"
    assert site.reason == "assuming that every query sees a valid key"


def test_windows_are_a_batch_of_their_own() -> None:
    def attend(q, k, v, mask):
        s = (q @ k.mT / 2).masked_fill(mask[:, :, None, None], -1e9)
        return s.softmax(-1) @ v

    run = Rewritten(attend)
    run.check([*square(2, 3, 4, 5, 8), torch.rand(2, 3, 5) > 0.5])
    run.report.expect(attention=1)


# --- Types and regions. ------------------------------------------------------------------------


def in_bfloat16(q, k, v, lens):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return spellings.masked_fill_finite(q, k, v, lens).float()


def float32_logits_in_bfloat16(q, k, v, lens):
    q, k, v = split_all(*(x.bfloat16() for x in (q, k, v)))
    s = (q.float() @ k.float().mT / ROOT).masked_fill(~keys(lens, q.mT), -1e9)
    return join(s.softmax(-1).to(v.dtype) @ v).float()


@pytest.mark.parametrize("fn", [in_bfloat16, float32_logits_in_bfloat16])
def test_low_precision_is_kept_and_no_less_exact(fn: Any) -> None:
    args = inputs()
    run = Rewritten(fn)
    ours = results(run, args)
    run.report.expect(attention=1)
    (op,) = run.graph.graph.find_nodes(
        op="call_function", target=torch.ops.gem.padded_attention.default
    )
    assert {op.args[i].meta["val"].dtype for i in (0, 1, 2)} == {torch.bfloat16}
    truth = results(
        spellings.masked_fill_finite, [x.detach().requires_grad_() for x in args[:3]] + args[3:]
    )
    eager = results(fn, args)
    for a, e, t in zip(ours, eager, truth):
        assert (a - t).abs().max() <= 2 * (e - t).abs().max() + 1e-3


def test_float64_stays_float64() -> None:
    run = Rewritten(wider.hstu_one_mask_and_bias)
    q, k, v, lengths = inputs(dtype=torch.float64)
    run.check([q, k, v, lengths], tolerance=1e-6)
    run.report.expect(attention=1)


def autocast_ends_between(q, k, v, lens):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = split_all(q, k, v)
        s = q @ k.mT / ROOT
        with torch.autocast("cpu", enabled=False):
            p = s.float().masked_fill(~keys(lens, s), float("-inf")).softmax(-1)
        return join(p @ v).float()


def weights_without_gradient(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    with torch.no_grad():
        p = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), -1e9).softmax(-1)
    return join(p @ v)


def weights_detached(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    p = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), -1e9).softmax(-1)
    return join(p.detach() @ v)


def mask_changed_through_a_view(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    mask = valid(lens, q.shape[2])
    seen = mask[:, None, None]
    mask.logical_not_()
    return join((q @ k.mT / ROOT).masked_fill(seen, -1e9).softmax(-1) @ v)


def constant_changed_through_a_view(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    bias = torch.zeros(q.shape[2])
    bias[1:3] = -1e9
    s = (q @ k.mT / ROOT + bias).masked_fill(~keys(lens, q.mT), -1e9)
    return join(s.softmax(-1) @ v)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (autocast_ends_between, "autocast or grad mode changes between the scores and the output"),
        (weights_without_gradient, "autocast or grad mode changes between the scores"),
        (weights_detached, "aten.detach stands between the weights and the values"),
        (mask_changed_through_a_view, "a tensor that it reads is changed in place"),
        (constant_changed_through_a_view, "a tensor that it reads is changed in place"),
    ],
)
def test_what_cannot_be_moved_is_declined(fn: Any, reason: str) -> None:
    run = Rewritten(fn)
    run.check(inputs())
    assert only_site(run).status == "declined"
    assert only_site(run).reason.startswith(reason)


def test_checkpointed_attention_keeps_its_recompute_marks() -> None:
    def attend(*args):
        return checkpoint(spellings.masked_fill_finite, *args, use_reentrant=False)

    run = Rewritten(attend)
    run.check(inputs())
    run.report.expect(attention=1)
    (op,) = run.graph.graph.find_nodes(
        op="call_function", target=torch.ops.gem.padded_attention.default
    )
    assert op.meta["recompute"] and op.meta["ac_graph_id"]
