"""FuseAttention: the graphs it writes, the traps it avoids, and what it says about a site."""

from __future__ import annotations

import math
from typing import Any

import attention_spellings as spellings
import pytest
import torch
import torch.nn.attention.flex_attention  # noqa: F401 (makes its operator known)
import torch.nn.functional as F
from attention_helpers import Rewritten, Tensors, results
from attention_spellings import HEADS, ROOT, WIDTH, join, keys, split_all, valid
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemcompile.graph import text
from gemcompile.options import Options
from gemcompile.passes.attention import FuseAttention
from gemcompile.report import Site
from gemcompile.testing import run_passes

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def inputs(batch: int = 3, length: int = 16, dtype: torch.dtype = torch.float32) -> Tensors:
    q, k, v = (torch.randn(batch, length, WIDTH, dtype=dtype) for _ in range(3))
    lengths = torch.tensor([length, 5, 9, 2, 1, 7, 3, 4][:batch]).clamp(max=length)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), lengths]


def only_site(run: Rewritten) -> Site:
    (site,) = run.report.sites
    return site


# --- The graph. --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "masked_fill_inf",
        "bmm_heads_in_the_batch",
        "outer_product_mask",
        "grouped_queries_repeated",
        "hstu",
        "learned_bias",
        "mask_from_a_slice_of_a_table",
        "multihead_attention",
    ],
)
def test_graph(name: str, golden: Any) -> None:
    run = Rewritten(spellings.REWRITTEN[name], dynamic=False)
    run(*inputs())
    golden(text(run.graph))


def test_key_mask_is_the_models_own_and_made_once_for_all_layers() -> None:
    def two_layers(q, k, v, pad):
        for _ in range(2):
            a, b, c = split_all(q, k, v)
            s = (a @ b.mT / ROOT).masked_fill(pad[:, None, None, :], float("-inf"))
            q = q + join(s.softmax(-1) @ c)
        return q

    q, k, v, lengths = inputs()
    run = Rewritten(two_layers)
    run.check([q, k, v, ~valid(lengths, 16)])
    run.report.expect(attention=2)
    calls = run.graph.graph.find_nodes(
        op="call_function", target=torch.ops.gem.padded_attention.default
    )
    assert len({n.args[3] for n in calls}) == 1
    assert run.targets().count("aten.bitwise_not.default") == 1


def test_one_mask_serves_batches_of_two_sizes() -> None:
    def attend(q, k, v, mask):
        outs = []
        for n in (3, 2):
            a, b, c = split_all(q[:n], k[:n], v[:n])
            outs.append(join((a @ b.mT / ROOT).masked_fill(mask, -1e9).softmax(-1) @ c))
        return torch.cat(outs)

    run = Rewritten(attend, dynamic=False)
    run.check([*inputs(length=6)[:3], torch.tensor([1, 0, 1, 1, 0, 1]).bool()])
    run.report.expect(attention=2)


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
    run = Rewritten(spellings.hstu_one_mask_and_bias)
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


# --- Dropout. ----------------------------------------------------------------------------------


def dropped(p: float, train: bool) -> Any:
    def attend(q, k, v, lens):
        q, k, v = split_all(q, k, v)
        s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), float("-inf"))
        return join(F.dropout(s.softmax(-1), p, train) @ v)

    return attend


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.4, False)])
def test_dropout_that_does_nothing_leaves_no_trace(p: float, train: bool) -> None:
    run = Rewritten(dropped(p, train))
    run.check(inputs())
    run.report.expect(attention=1)
    assert not {"aten.dropout.default", "aten.randint.low"} & set(run.targets())


def test_dropout_moves_into_the_op_with_a_seed_from_the_graph() -> None:
    run = Rewritten(dropped(0.25, True))
    args = inputs()
    run(*args)
    assert only_site(run).details["dropout"] == 0.25
    assert run.targets().count("aten.randint.low") == 1
    assert "aten.dropout.default" not in run.targets()


def test_dropout_drops_at_its_rate_and_afresh_each_time() -> None:
    run = Rewritten(dropped(0.25, True))
    q, k, _, lengths = inputs(batch=2, length=64)
    ones = torch.ones_like(q).detach()
    first, second = run(q, k, ones, lengths), run(q, k, ones, lengths)
    assert not torch.equal(first, second)
    # With v = 1 a row's output is the kept weight over 1 - p: its mean over many rows is 1.
    assert abs(first.mean().item() - 1) < 0.1
    torch.manual_seed(7)
    a = run(q, k, ones, lengths)
    torch.manual_seed(7)
    assert torch.equal(a, run(q, k, ones, lengths))


# --- Queries of their own length. --------------------------------------------------------------


def test_pooling_queries_shared_by_the_batch() -> None:
    def pool(seeds, x, lens):
        x = x.unflatten(-1, (HEADS, -1))
        s = torch.einsum("shd,blhd->bhsl", seeds.unflatten(-1, (HEADS, -1)), x) / ROOT
        s = s.masked_fill(~valid(lens, x.shape[1])[:, None, None], -1e9)
        return torch.einsum("bhsl,blhd->bshd", s.softmax(-1), x).flatten(2)

    seeds = nn.Parameter(torch.randn(2, WIDTH))
    run = Rewritten(pool)
    run.check([seeds, inputs()[1], torch.tensor([16, 0, 3])])
    run.report.expect(attention=1)


def test_one_query_without_a_query_dimension() -> None:
    def target_attention(candidate, history, lens):
        s = torch.einsum("be,ble->bl", candidate, history) / 3
        s = s.masked_fill(~valid(lens, history.shape[1]), -1e9)
        return torch.einsum("bl,ble->be", s.softmax(-1), history)

    run = Rewritten(target_attention)
    q, k, _, _ = inputs()
    run.check([q[:, 0].detach().requires_grad_(), k, torch.tensor([16, 5, 0])])
    run.report.expect(attention=1)


def test_cross_attention_masks_the_keys_of_the_other_sequence() -> None:
    def cross(q, k, v, lens):
        q, k, v = split_all(q, k, v)
        s = (q @ k.mT / ROOT).masked_fill(~keys(lens, k.mT), -1e9)
        return join(s.softmax(-1) @ v)

    q, _, _, _ = inputs(length=7)
    _, k, v, lengths = inputs(length=16)
    run = Rewritten(cross)
    run.check([q, k, v, lengths])
    run.report.expect(attention=1)


# --- Modules. ----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_transformer_encoder(train: bool, norm_first: bool) -> None:
    if not train and TORCH < (2, 13):
        pytest.skip("Dynamo of this torch cannot trace the encoder's inference operator")
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 64, 0.0, activation="gelu", batch_first=True, norm_first=norm_first
    ).train(train)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    run = Rewritten(lambda x, pad: encoder(x, src_key_padding_mask=pad))
    x, _, _, lengths = inputs()
    with torch.set_grad_enabled(train):
        run.check([x.detach().requires_grad_(train), ~valid(lengths, 16)])
    run.report.expect(attention=2)
    assert not [t for t in run.targets() if "encoder_layer" in t or "dot_product" in t]


def test_flex_attention_is_declined_with_its_reason() -> None:
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    graph.output(graph.call_function(torch.ops.higher_order.flex_attention, (q, q, q)))
    report = run_passes(torch.fx.GraphModule({}, graph), [FuseAttention()])
    (site,) = report.sites
    assert site.reason == (
        "flex_attention is a fused kernel already, with its mask in a program of its own"
    )


# --- What is said, and what is passed by. --------------------------------------------------------


def test_report_names_line_masks_and_assumption() -> None:
    run = Rewritten(spellings.additive_as_in_bert)
    run(*inputs())
    site = only_site(run)
    assert site.op == "gem.padded_attention(softmax)"
    assert site.where.startswith("attention_spellings.py:")
    assert site.details == {"mask": "keys"}
    assert site.reason == "assuming that every sequence has a valid key"


def test_strict_declines_what_rests_on_an_assumption() -> None:
    run = Rewritten(spellings.additive_as_in_bert, options=Options(strict=True))
    run.check(inputs())
    reason = "it is not proven that every sequence has a valid key, and strict=True"
    assert only_site(run).reason == reason


def test_reader_of_the_weights_is_named() -> None:
    run = Rewritten(spellings.DECLINED["weights_also_returned"][0])
    run(*inputs())
    assert only_site(run).reason.startswith(
        "the attention weights are also used by aten.mean at attention_spellings.py:"
    )


def test_wide_heads_are_declined() -> None:
    run = Rewritten(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, dynamic=False)
    run(*(torch.randn(2, 4, 264) for _ in range(3)))
    assert only_site(run).reason == "head dimension 264 is larger than 256"


def test_scores_without_a_batch_are_declined() -> None:
    run = Rewritten(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    run(*(torch.randn(5, 8) for _ in range(3)))
    assert only_site(run).reason == "the scores have no batch dimension"


class Memory(nn.Module):
    """Attention over learned slots."""

    def __init__(self, softmax: bool) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(8, WIDTH))
        self.values = nn.Parameter(torch.randn(8, WIDTH))
        self.softmax = softmax

    def forward(self, x):
        s = x @ self.keys.mT
        return (s.softmax(-1) if self.softmax else s.relu()) @ self.values


def experts(x, first, second):
    """A feed-forward layer for each expert: two bmm with an activation between, not attention."""
    return torch.bmm(F.gelu(torch.bmm(x, first)), second)


def gates(x, router, expert):
    return torch.einsum("ble,lbd->bld", (x @ router).softmax(-1), expert)


def test_other_uses_of_the_same_operators_are_passed_by_in_silence() -> None:
    x = torch.randn(4, 6, WIDTH)
    mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    first, second = nn.Parameter(torch.randn(4, WIDTH, 12)), nn.Parameter(torch.randn(4, 12, WIDTH))
    chain = Rewritten(lambda q, k, v: (q @ k.mT) @ v)
    cases = [
        (chain, [x, x + 1, x + 2]),
        (Rewritten(Memory(softmax=False)), [x]),
        (Rewritten(mlp), [x]),
        (Rewritten(lambda x: experts(x, first, second)), [x]),
        (Rewritten(lambda x: (x @ mlp[0].weight.mT).softmax(-1) @ mlp[2].weight.mT), [x]),
    ]
    for run, args in cases:
        run(*args)
        assert run.report.sites == []


def test_learned_queries_may_pool_but_q_scaled_by_a_module_parameter_stays_exact() -> None:
    scale = nn.Parameter(torch.tensor(0.3))

    def attend(q, k, v, lens):
        q, k, v = split_all(q, k, v)
        s = (q @ k.mT * scale).masked_fill(~keys(lens, q.mT), -1e9)
        return join(s.softmax(-1) @ v)

    run = Rewritten(attend)
    args = inputs()
    run(*args).sum().backward()
    ours, scale.grad = scale.grad, None
    attend(*args).sum().backward()
    torch.testing.assert_close(ours, scale.grad, rtol=1e-4, atol=1e-4)
    run.report.expect(attention=1)


def test_symbolic_scale_by_the_length() -> None:
    def attend(q, k, v, lens):
        q, k, v = split_all(q, k, v)
        s = (q @ k.mT / q.shape[2] ** 0.5).masked_fill(~keys(lens, q.mT), -1e9)
        return join(s.softmax(-1) @ v)

    run = Rewritten(attend)
    run.check(inputs())
    run.check(inputs(length=9))
    run.report.expect(attention=1)
    assert run.graphs == 1


def test_scale_folds_into_the_op() -> None:
    run = Rewritten(spellings.where_after_scaled_queries)
    run(*inputs())
    (op,) = run.graph.graph.find_nodes(
        op="call_function", target=torch.ops.gem.padded_attention.default
    )
    assert math.isclose(op.args[8], 1 / ROOT)
    assert "aten.mul.Tensor" not in run.targets()
