"""Patterns written as functions: what they match, what they refuse, and rewriting with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.fx import GraphModule

from gemcompile import Rewrite, match, testing
from gemcompile.match import Pattern, calls, find
from gemcompile.pass_manager import Context, PassError
from gemcompile.testing import run_passes, trace

aten = torch.ops.aten


def gated(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (x.shape[-1] // 8, 8)).transpose(1, 2).sigmoid()


def normed(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w)


def activated(x: Tensor, y: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    return act(x) * y


GATED, RMS, HEADS = Pattern(gated), Pattern(rms), Pattern(heads, x=torch.empty(3, 5, 16))
NORMED = Pattern(normed, w=torch.empty(7))
ACTIVATED = Pattern(activated, act=(F.gelu, F.silu, torch.tanh))
X, Y, W = torch.randn(2, 4, 16), torch.randn(2, 4, 16), torch.randn(16)

SPELLINGS: dict[str, tuple[Pattern, Callable[..., Any], tuple[Tensor, ...]]] = {
    "as written": (GATED, lambda x, y: x * torch.sigmoid(y), (X, Y)),
    "operands exchanged": (GATED, lambda x, y: y.sigmoid() * x, (X, Y)),
    "two dimensions": (GATED, lambda x, y: x * torch.sigmoid(y), (X[0], Y[0])),
    "a broadcast": (GATED, lambda x, y: x * torch.sigmoid(y[..., :1]), (X, Y)),
    "a view that changes nothing": (GATED, lambda x, y: x * y.sigmoid().view(2, 4, 16), (X, Y)),
    "there and back": (GATED, lambda x, y: x * y.sigmoid().flatten().view_as(x), (X, Y)),
    "a copy": (GATED, lambda x, y: x * y.sigmoid().contiguous(), (X, Y)),
    "a number": (RMS, lambda x, w: rms(x, w, 1e-6), (X, W)),
    "dimension from the front": (
        RMS,
        lambda x, w: w * (x * (1e-6 + x.pow(2).mean(dim=2, keepdim=True)).rsqrt()),
        (X, W),
    ),
    "four dimensions": (RMS, lambda x, w: rms(x, w, 1e-6), (X[None], W)),
    "heads by view": (HEADS, lambda x: x.view(2, 4, 2, 8).transpose(2, 1).sigmoid(), (X,)),
    "heads by permute": (
        HEADS,
        lambda x: x.reshape(2, 4, -1, 8).permute(0, 2, 1, 3).sigmoid(),
        (X,),
    ),
    "heads by two transposes": (
        HEADS,
        lambda x: x.view(2, 4, 2, 8).permute(1, 2, 0, 3).transpose(0, 2).transpose(1, 2)
        .transpose(1, 2).transpose(1, 2).transpose(1, 2).permute(0, 1, 2, 3).sigmoid(),
        (X,),
    ),
    "sizes of the input": (NORMED, lambda x, w: F.layer_norm(x, (16,), w), (X, W)),
    "one of several functions": (ACTIVATED, lambda x, y: y * F.silu(x), (X, Y)),
}  # fmt: skip

OTHERS: dict[str, tuple[Pattern, Callable[..., Any], tuple[Tensor, ...]]] = {
    "another operator": (GATED, lambda x, y: x * torch.tanh(y), (X, Y)),
    "not commutative": (Pattern(lambda x, y: x - y.exp()), lambda x, y: y.exp() - x, (X, Y)),
    "the same value asked, two given": (
        Pattern(lambda x: x * x.sigmoid()),
        lambda x, y: x * y.sigmoid(),
        (X, Y),
    ),
    "another dimension": (
        RMS,
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(1, True) + 1e-6) * w,
        (X, W),
    ),
    "another exponent": (
        RMS,
        lambda x, w: x * torch.rsqrt(x.pow(4).mean(-1, True) + 1e-6) * w,
        (X, W),
    ),
    "other heads": (HEADS, lambda x: x.view(2, 4, 4, 4).transpose(1, 2).sigmoid(), (X,)),
    "another permutation": (HEADS, lambda x: x.view(2, 4, 2, 8).transpose(1, 3).sigmoid(), (X,)),
    "regrouped by a view": (
        GATED,
        lambda x, y: x.view(4, 2, 16) * y.sigmoid().view(4, 2, 16)[..., :1].expand(4, 2, 16),
        (X, Y),
    ),
    "normalised over two dimensions": (NORMED, lambda x, w: F.layer_norm(x, (4, 16), w), (X, X[0])),
    "none of the functions": (ACTIVATED, lambda x, y: y * F.relu(x), (X, Y)),
    "alpha": (
        Pattern(lambda x, y: x + y.exp()),
        lambda x, y: torch.add(x, y.exp(), alpha=2),
        (X, Y),
    ),
}  # fmt: skip


def matches(pattern: Pattern, fn: Callable[..., Any], args: tuple[Tensor, ...]) -> list[Any]:
    return list(find(trace(fn, *args, dynamic=False), pattern))


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    (m,) = matches(*SPELLINGS[name])
    assert m.output.users


@pytest.mark.parametrize("name", OTHERS)
def test_near_misses(name: str) -> None:
    assert matches(*OTHERS[name]) == []


# --- what a pattern may say -----------------------------------------------------------------------


def test_what_is_bound() -> None:
    def two(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return rms(x, w, 1e-6) + rms(y, w, 0.5) * F.gelu(y) * 3.0

    gm = trace(two, X, W, Y)
    first, second = find(gm, RMS)
    assert (first["eps"], second["eps"]) == (1e-6, 0.5)
    assert first.value("w").shape == (16,) and first["w"] is second["w"]
    assert first["x"].op == "placeholder" and first["x"] is not second["x"]
    assert first.where.startswith("test_match.py:") and len(first.interior) == 5
    scaled = Pattern(lambda y, act: act(y) * 3.0, act=(F.silu, F.gelu))
    assert [m["act"] for m in find(gm, [GATED, scaled])] == []
    gm = trace(lambda y: F.gelu(y) * 3.0, Y)
    assert [m["act"] for m in find(gm, [GATED, scaled])] == [F.gelu]


def test_wrong_patterns() -> None:
    with pytest.raises(TypeError, match="pattern gated has no parameter 'z'"):
        Pattern(gated, z=W)
    gm = trace(gated, X, Y)

    def unused(x: Tensor, y: Tensor) -> Tensor:
        return x + 1

    def folded(x: Tensor, scale: float) -> Tensor:
        return x * (1 / scale)

    def identity(x: Tensor) -> Tensor:
        return x

    for fn, message in (
        (unused, "no operator of pattern unused takes 'y' as it is"),
        (folded, "no operator of pattern folded takes 'scale' as it is"),
        (identity, "pattern identity must return the result of an operator"),
    ):
        with pytest.raises(ValueError, match=message):
            next(find(gm, Pattern(fn)), None)


def test_calls() -> None:
    gm = trace(lambda x: (x + 1).add(x).sigmoid(), X, dynamic=False)
    assert len(calls(gm, aten.add)) == 2
    assert len(calls(gm, aten.add.Tensor, where=lambda n: n.args[1] == 1)) == 1
    assert calls(gm, aten.mul) == []


def test_surroundings() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.exp()
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False) + y.sin()

    gm = trace(fn, X.clone().requires_grad_())
    around = match.surroundings(gm)
    inner, outer = calls(gm, aten.sin)
    (exp,) = calls(gm, aten.exp)
    assert around[inner][0] == around[outer][0] != around[exp][0]
    assert around[inner] != around[outer]


# --- where a match may not be rewritten -----------------------------------------------------------


def read_twice(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(y)
    return x * s, s.exp()


def returned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(y)
    return x * s, s


def changed_between(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    s = torch.sigmoid(y)
    x.add_(1)
    return x * s


def two_modes(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        s = torch.sigmoid(y)
    return x * s


OBSTACLES = {
    read_twice: "an intermediate value is also used by aten.exp at test_match.py:",
    returned: "an intermediate value is also used by the caller",
    changed_between: "a tensor may be changed in place inside it",
    two_modes: "autocast or grad mode changes inside it",
}


class Gate(Rewrite):
    """x * sigmoid(gate), as torch.addcmul would never be written by hand."""

    kind = "linear"

    @staticmethod
    def pattern(x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.sigmoid(gate)

    @staticmethod
    def replacement(x: Tensor, gate: Tensor) -> Tensor:
        return torch.addcmul(torch.zeros_like(x), x, gate.sigmoid())

    def check(self, m: match.Match, context: Context) -> str | None:
        return None if m.value("x").shape == m.value("gate").shape else "the gate is broadcast"


@pytest.mark.parametrize("fn", OBSTACLES)
def test_obstacles(fn: Callable[..., Any]) -> None:
    done = testing.assert_refused(Gate(), fn, X, Y, because=OBSTACLES[fn])
    assert [(s.kind, s.op) for s in done.report.sites] == [("linear", "aten.mul.Tensor")]


def test_a_checkpoint_border() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        s: Tensor = torch.utils.checkpoint.checkpoint(torch.sigmoid, y, use_reentrant=False)
        return x * s

    y = Y.clone().requires_grad_()
    testing.assert_refused(
        Gate(), fn, X, y, because="across the border of an activation checkpoint"
    )


# --- rewriting ------------------------------------------------------------------------------------


def twice(x: Tensor, y: Tensor) -> Tensor:
    return gated(gated(x, y), x.exp()) + 1


@pytest.mark.parametrize("dynamic", [True, False])
def test_rewrite(dynamic: bool) -> None:
    args = [t.clone().requires_grad_() for t in (X, Y)]
    done = testing.assert_same(Gate(), twice, *args, changes=2, dynamic=dynamic)
    done.report.expect(linear=2)
    assert {s.op for s in done.report.sites} == {"aten.addcmul"}
    assert done.report.sites[0].where.startswith("test_match.py:")
    assert "aten.mul" in done.before and "aten.mul" not in done.text


def test_rewrite_under_autocast() -> None:
    """The replacement is traced in the autocast state of its place: the same types come out."""

    class Clamps(Rewrite):
        examples = {"w": torch.empty(11, 7), "b": torch.empty(11)}

        @staticmethod
        def pattern(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return F.relu(F.linear(x, w, b))

        @staticmethod
        def replacement(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return F.linear(x, w, b).clamp(min=0)

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.relu(F.linear(x, w, b))
        return F.relu(F.linear(y.float(), w, b))

    args = [t.requires_grad_() for t in (torch.randn(2, 16), torch.randn(16, 16), torch.randn(16))]
    done = testing.assert_same(Clamps(), fn, *args, changes=2)
    kinds = [n.meta["val"].dtype for n in calls(done.gm, aten.clamp)]
    assert kinds == [torch.bfloat16, torch.float32]


def test_golden() -> None:
    testing.assert_graph(
        testing.rewrite(Gate(), gated, X, Y),
        """
        %0 = input : f32[2, 4, 16]
        %1 = input : f32[2, 4, 16]
        %2 = aten.zeros_like(%1, pin_memory=False) : f32[2, 4, 16]
        %3 = aten.sigmoid(%0) : f32[2, 4, 16]
        %4 = aten.addcmul(%2, %1, %3) : f32[2, 4, 16]
        return [%4]
        """,
    )


def test_check_declines() -> None:
    testing.assert_refused(Gate(), gated, X, W, because="the gate is broadcast")


def test_spellings_of_a_rewrite() -> None:
    class Sigmoids(Gate):
        spellings = (lambda x, gate: x / (1 + torch.exp(-gate)),)

    testing.assert_same(Sigmoids(), lambda x, y: x / (1 + torch.exp(-y)), X, Y, changes=1)
    testing.assert_same(Sigmoids(), gated, X, Y, changes=1)


def test_wrong_replacements() -> None:
    class OtherShape(Gate):
        @staticmethod
        def replacement(x: Tensor, gate: Tensor) -> Tensor:
            return (x * gate).sum(-1)

    class Constant(Gate):
        @staticmethod
        def replacement(x: Tensor, gate: Tensor) -> Tensor:
            return x * torch.tensor([1.0])

    for wrong, message in (
        (OtherShape, r"replacement gives f32\[2, 4\] instead of f32\[2, 4, 16\]"),
        (Constant, "makes a constant tensor; use numbers or torch.full"),
    ):
        gm = trace(gated, X, Y, dynamic=False)
        with pytest.raises(PassError, match=f"{wrong.__name__} failed .*{message}"):
            run_passes(gm, [wrong()])


def test_replaced_nodes_keep_their_origin() -> None:
    gm: GraphModule = testing.rewrite(Gate(), gated, X, Y).gm
    (node,) = calls(gm, aten.addcmul)
    assert "test_match.py" in node.meta["stack_trace"]


# --- the helpers fail where they must -------------------------------------------------------------


class Wrong(Gate):
    @staticmethod
    def replacement(x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.tanh(gate)


class WrongGradient(Gate):
    @staticmethod
    def replacement(x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.sigmoid(gate.detach())


def test_helpers_fail(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    with pytest.raises(AssertionError, match="output 0 differs: .* beside a norm"):
        testing.assert_same(Wrong(), gated, x, y)
    with pytest.raises(AssertionError, match="the gradient of input 0 differs: nothing instead"):
        testing.assert_same(WrongGradient(), gated, x, y)
    with pytest.raises(AssertionError, match="0 changes, not at least one: the gate is broadcast"):
        testing.assert_same(Gate(), gated, X, W)
    with pytest.raises(AssertionError, match="1 changes; the graph is"):
        testing.assert_refused(Gate(), gated, X, Y, because="the gate")
    with pytest.raises(AssertionError, match="no reason has 'odd':\n  the gate is broadcast"):
        testing.assert_refused(Gate(), gated, X, W, because="odd")
    done, path = testing.rewrite(Gate(), gated, X, Y), tmp_path / "golden" / "gate.txt"
    with pytest.raises(AssertionError, match="is missing; write it with GEM_ACCEPT=1"):
        testing.assert_graph(done, path)
    monkeypatch.setenv("GEM_ACCEPT", "1")
    testing.assert_graph(done, path)
    monkeypatch.delenv("GEM_ACCEPT")
    testing.assert_graph(done, path)
    path.write_text("other")
    with pytest.raises(AssertionError, match="instead of\nother"):
        testing.assert_graph(done, path)
