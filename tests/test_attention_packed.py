"""Windows, blocks, HSTU masks and relative biases on packed rows: right or left padding, holes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_spellings_places import apart, hstu_mask, ij, t5_bucket
from torch import Tensor, nn
from torch.fx import Node

from gemcompile import Options, gem, record
from gemcompile.graph import arguments, text
from gemcompile.passes import Canonicalize, EliminatePadding, FuseAttention
from gemcompile.testing import run_passes, trace

HEADS, DIM = 2, 8
WIDTH = HEADS * DIM
LENGTH = 11

Attend = Callable[["Layer", Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """One attention layer and an MLP, then the mean over the real rows."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(32, HEADS)

    def forward(self, x: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = self.attend(self, q, k, v, keep, lens)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return (F.gelu(x) * keep[..., None]).sum(1)


def window(m: Layer, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
    i, j = ij(q.shape[2])
    mask = (i >= j) & (i - j < 3) & keep[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def two_sided(m: Layer, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
    mask = (apart(q.shape[2]).abs() <= 2) & keep[:, None, None, :]
    return (q @ k.mT / 3).masked_fill(~mask, -1e9).softmax(-1) @ v


def blocks(m: Layer, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
    i, j = ij(q.shape[2])
    mask = (i // 4 == j // 4) & keep[:, None, None, :]
    return F.silu(q @ k.mT) * mask @ v


def relative(m: Layer, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
    bias = m.table(t5_bucket(apart(q.shape[2]))).permute(2, 0, 1)
    s = (q @ k.mT / 3 + bias).masked_fill(~keep[:, None, None, :], -1e9)
    return s.softmax(-1) @ v


def causal_window(m: Layer, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
    """No key mask: no query looks past itself."""
    mask = (apart(q.shape[2]) <= 0) & (apart(q.shape[2]) > -3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def targets(m: Layer, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
    mask = hstu_mask(q.shape[2], lens, lens // 3, window=4)
    return F.silu(q @ k.mT) / 8 * mask.unsqueeze(1) @ v


def contextual(m: Layer, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
    """The first rows look ahead, to the end of the history."""
    mask = hstu_mask(q.shape[2], lens, lens // 3, contextual=2)
    return F.silu(q @ k.mT) / 8 * mask.unsqueeze(1) @ v


def untargeted(m: Layer, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
    """Contextual rows without targets: they see all keys of the sequence."""
    n = q.shape[2]
    real = torch.arange(n) < lens[:, None]
    mask = hstu_mask(n, lens, None, contextual=2) & real[:, None]
    return F.silu(q @ k.mT) / 8 * mask.unsqueeze(1) @ v


def right_padded(lens: Tensor) -> Tensor:
    return torch.arange(LENGTH) < lens[:, None]


def left_padded(lens: Tensor) -> Tensor:
    return right_padded(lens).flip(1)


def with_holes(lens: Tensor) -> Tensor:
    rows = torch.rand(len(lens), LENGTH, generator=torch.Generator().manual_seed(1))
    return rows.argsort(1) < lens[:, None]


PADDINGS = {"right": right_padded, "left": left_padded, "holes": with_holes}


def batch(lens: list[int], padding: str) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.tensor(lens)
    x = torch.randn(len(lens), LENGTH, WIDTH, requires_grad=True)
    return x, PADDINGS[padding](lengths), lengths


def results(
    model: nn.Module, call: Callable[..., Tensor], args: tuple[Tensor, ...]
) -> list[Tensor]:
    out = call(*args)
    wanted = [args[0], *model.parameters()]
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape)
    grads = torch.autograd.grad(out, wanted, upstream, allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    "attend", [window, two_sided, blocks, relative, causal_window, targets, contextual, untargeted]
)
def test_packed_layer_equals_the_padded_one(attend: Attend, padding: str) -> None:
    model = Layer(attend)
    options = {"pack": True, "inner": "eager"}
    compiled = torch.compile(model, backend=gem, dynamic=True, options=options)
    with record() as report:
        for lens in ([5, 11, 2 if attend is untargeted else 1], [2, 7], [0, 3, 9]):
            args = batch(lens, padding)
            ours, theirs = results(model, compiled, args), results(model, model, args)
            assert len(ours) == len(theirs)
            for a, b in zip(ours, theirs):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    report.expect(attention=1, padding=1)
    assert not report.of("padding", "declined")


def as_in_bert(m: Layer, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
    bias = (1.0 - keep[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    return (q @ k.mT / 3 + bias).softmax(-1) @ v


def minus_one(m: Layer, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
    return (q @ k.mT / 3 + 1e9 * (keep - 1)[:, None, None, :]).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize("attend", [as_in_bert, minus_one])
def test_masks_of_numbers_are_packed_under_a_recorded_assumption(
    attend: Attend, dtype: torch.dtype
) -> None:
    model = Layer(attend)
    options = {"pack": True, "inner": "eager"}
    compiled = torch.compile(model, backend=gem, dynamic=True, options=options)
    with record() as report:
        for lens in ([5, 11, 1], [2, 7]):
            x, keep, lengths = batch(lens, "holes")
            args = x, keep.to(dtype), lengths
            for a, b in zip(results(model, compiled, args), results(model, model, args)):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    report.expect(attention=1, padding=1)
    (site,) = report.of("attention", "rewritten")
    assert site.details == {"mask": "keys"}
    assert site.reason.endswith("and the mask holds nothing but 0 and 1")


def test_strict_declines_masks_of_numbers() -> None:
    x, keep, lens = batch([5, 11, 1], "right")
    gm = trace(Layer(as_in_bert), x, keep.long(), lens)
    report = run_passes(gm, [Canonicalize(), FuseAttention()], Options(strict=True))
    (site,) = report.of("attention", "declined")
    assert "the mask holds nothing but 0 and 1, and strict=True" in site.reason


def test_a_mask_whose_gradient_is_asked_for_is_a_bias_and_packs_nothing() -> None:
    """Where it is 0 its gradient is what the row holds, which packing would not compute."""

    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
        return as_in_bert(m, q, k, v, keep != 0, lens)

    why = "it does not vary along both queries and keys"
    biased = {"mask": "none", "bias": True, "bias kept as a tensor": why}
    for by, details in ((as_in_bert, biased), (attend, {"mask": "keys"})):
        model = Layer(by)
        compiled = torch.compile(model, backend=gem, options={"pack": True, "inner": "eager"})
        x, keep, lens = batch([5, 11, 1], "right")
        keep = keep.float().requires_grad_()
        with record() as report:
            ours, theirs = (
                torch.autograd.grad(f(x, keep, lens).sum(), keep)[0] for f in (compiled, model)
            )
        assert (theirs[keep == 0] != 0).any()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        (site,) = report.of("attention")
        assert site.details == details


# --- What the packed call says. -----------------------------------------------------------------


class FromLengths(nn.Module):
    """The mask is made in the graph, so that it is known to be a prefix."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.layer = Layer(attend)

    def forward(self, x: Tensor, lens: Tensor) -> Tensor:
        return self.layer(x, torch.arange(x.shape[1]) < lens[:, None], lens)


def jagged_call(model: nn.Module, *args: Any) -> tuple[dict[str, Any], str]:
    gm = trace(model, *args)
    run_passes(gm, [Canonicalize(), FuseAttention(), EliminatePadding()], Options(pack=True))
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.gem.jagged_attention.default)
    return arguments(node), text(gm)


@pytest.mark.parametrize("attend", [window, blocks, relative, targets, contextual])
def test_rows_carry_their_places_only_where_ranks_do_not_tell_them(attend: Attend) -> None:
    x, keep, lens = batch([5, 11, 1], "right")
    known, _ = jagged_call(FromLengths(attend), x, lens)
    assert known["q_positions"] is None and known["k_positions"] is None
    unknown, _ = jagged_call(Layer(attend), x, keep, lens)
    assert isinstance(unknown["q_positions"], Node) and isinstance(unknown["k_positions"], Node)


@pytest.mark.parametrize(
    ("attend", "said"),
    [
        (window, dict(causal=True, window_left=2, window_right=-1, block=0)),
        (two_sided, dict(causal=False, window_left=2, window_right=2, block=0)),
        (blocks, dict(causal=False, window_left=-1, window_right=-1, block=4)),
        (targets, dict(causal=True, window_left=4, num_contextual=None)),
    ],
)
def test_arguments_of_the_packed_call(attend: Attend, said: dict[str, Any]) -> None:
    x, _, lens = batch([5, 11, 1], "right")
    given, _ = jagged_call(FromLengths(attend), x, lens)
    assert {name: given[name] for name in said} == said
    assert (given["num_targets"] is not None) == (attend is targets)
    assert given["key_mask"] is None


@pytest.mark.parametrize("attend", [relative, contextual])
def test_graph(attend: Attend, golden: Any) -> None:
    x, _, lens = batch([5, 11, 1], "right")
    golden(jagged_call(FromLengths(attend), x, lens)[1])
