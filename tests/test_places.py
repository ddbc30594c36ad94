"""Masks of places are decided rightly: what is claimed is the mask itself, in whatever spelling.

A random mask is a tree of tuples that `mask_of` evaluates. The decision is made on its traced
graph. The op itself then shows what it sees: with scores of 0 and an identity matrix for v, a
row's output is positive just where the key is visible.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from gemcompile.passes.attention_places import Placed, Placer
from gemcompile.passes.axes import Labels, aligned, fresh, settle
from gemcompile.passes.masks import Band, conjuncts

LENGTH, BATCH = 7, 5  # of the traced example; claims hold at all lengths
LENGTHS = (1, 2, 5, 12)
Tree = tuple[Any, ...]

COMPARE = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
SWAPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


# --- Trees. ------------------------------------------------------------------------------------


def term_of(t: Tree, n: int, lens: Tensor) -> Any:
    """A number, or integers that broadcast to [B, n, n]."""
    name, *inner = t
    if name == "i":
        return torch.arange(n)[:, None]
    if name == "j":
        return torch.arange(n)[None, :]
    if name == "lens":
        return lens[:, None, None]
    if name == "number":
        return inner[0]
    if name == "where":
        yes, no = (term_of(x, n, lens) for x in inner[1:])
        return torch.where(mask_of(inner[0], n, lens), yes, no)
    args = [term_of(x, n, lens) for x in inner]
    if name == "+":
        return args[0] + args[1]
    if name == "-":
        return args[0] - args[1]
    if name == "neg":
        return -args[0]
    if name == "abs":
        return args[0].abs()
    if name == "at least":
        return args[0].clamp(min=args[1])
    assert name == "at most"
    return args[0].clamp(max=args[1])


def mask_of(t: Tree, n: int, lens: Tensor) -> Tensor:
    """bool, broadcastable to [B, n, n]."""
    name, *inner = t
    if name in COMPARE:
        return COMPARE[name](*(term_of(x, n, lens) for x in inner))
    if name == "block":
        i, j = (term_of((x,), n, lens) // inner[0] for x in "ij")
        return i == j
    if name == "eye":
        return torch.eye(n, dtype=torch.bool)
    if name in ("tril", "triu"):
        return getattr(torch.ones(n, n), name)(inner[0]).bool()
    args = [mask_of(x, n, lens) for x in inner]
    if name == "not":
        return ~args[0]
    if name == "times":
        return (args[0].float() * args[1].float()) > 0.5
    if name == "filled":
        shape = torch.broadcast_shapes(*(x.shape for x in args))
        return args[0].expand(shape).masked_fill(args[1], False)
    return args[0] & args[1] if name == "and" else args[0] | args[1]


small = st.integers(-3, 3).map(lambda n: ("number", n))
end = st.one_of(st.just(("lens",)), st.tuples(st.just("+"), st.just(("lens",)), small))


def places(name: str) -> st.SearchStrategy[Tree]:
    """i or j, shifted and clamped; at times picked by a comparison."""
    return st.recursive(
        st.just((name,)),
        lambda x: st.one_of(
            st.tuples(st.just("+"), x, small),
            st.tuples(st.sampled_from(["at least", "at most"]), x, st.one_of(small, end)),
            st.tuples(st.just("where"), st.tuples(st.just("<"), x, small), small, x),
        ),
        max_leaves=3,
    )


place = st.one_of(places("i"), places("j"))
apart = st.recursive(
    st.one_of(
        st.tuples(st.just("-"), places("i"), places("j")),
        st.tuples(st.just("-"), places("j"), places("i")),
    ),
    lambda x: st.one_of(
        st.tuples(st.sampled_from(["neg", "abs"]), x), st.tuples(st.just("+"), x, small)
    ),
    max_leaves=2,
)
comparison = st.one_of(
    st.tuples(st.sampled_from([*COMPARE]), apart, small),
    st.tuples(st.sampled_from([*COMPARE]), place, st.one_of(place, end, small)),
)
leaf = st.one_of(
    comparison,
    comparison,
    st.tuples(st.just("block"), st.integers(1, 4)),
    st.just(("eye",)),
    st.tuples(st.sampled_from(["tril", "triu"]), st.integers(-2, 2)),
)
masks = st.recursive(
    leaf,
    lambda x: st.one_of(
        st.tuples(st.just("not"), x),
        st.tuples(st.sampled_from(["and", "and", "or", "times", "filled"]), x, x),
    ),
    max_leaves=5,
)


# --- Decisions. --------------------------------------------------------------------------------


class Values(Interpreter):
    """Runs a graph and keeps every node's value."""

    def __init__(self, gm: GraphModule, *args: Tensor) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.run(*args)


def decided(t: Tree, lens: Tensor) -> tuple[Placed, Labels, dict[Node, Any]]:
    """What is claimed of a mask, the axes of the scores, and the values of its graph."""
    shape = (len(lens), LENGTH, LENGTH)
    scores = torch.zeros(shape)
    gm = make_fx(
        lambda a, s: (mask_of(t, LENGTH, a), s + 1), tracing_mode="fake", pre_dispatch=True
    )(lens, scores)
    (out,) = gm.graph.find_nodes(op="output")
    mask, like = out.args[0]
    b, q, k = fresh(like)
    below = aligned(mask, shape, (b, q, k))
    assert below is not None
    placed = Placer()(list(conjuncts(mask, below, True)), [], b, q, k)
    return placed, (b, q, k), Values(gm, lens, scores).env


def rest_of(placed: Placed, scores: Labels, values: dict[Node, Any]) -> Tensor:
    """What stays a tensor."""
    out = torch.ones(BATCH, LENGTH, LENGTH, dtype=torch.bool)
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    for x in placed.rest:
        if isinstance(x, Band):
            row, column = (i if settle(y) == scores[1] else j for y in (x.row, x.column))
            out = out & (column <= row + x.offset)
        else:
            out = out & (values[x.node].bool() == x.want)
    return out


def seen_by_the_op(placed: Placed, n: int, lens: Tensor) -> Tensor:
    """bool [B, n, n]"""
    rule, batch = placed.rule, len(lens)
    flat = torch.zeros(batch, n, 1, 1)
    v = torch.eye(n).view(1, n, 1, n).expand(batch, -1, -1, -1)
    history = None if rule.history is None else lens + rule.history
    weights = torch.ops.gem.padded_attention(
        flat, flat, v, None, None, None, None, "softmax", 1.0, rule.causal, "zero", 0.0,
        rule.left, rule.right, placed.block, history, rule.contextual,
    )  # fmt: skip
    return weights[:, :, 0] > 0


def check(t: Tree, lens: Tensor) -> Placed:
    """The claim is the mask: with the rest at the traced length, without one at any."""
    placed, scores, values = decided(t, lens)
    claimed = seen_by_the_op(placed, LENGTH, lens) & rest_of(placed, scores, values)
    assert torch.equal(claimed, mask_of(t, LENGTH, lens).expand_as(claimed))
    for n in LENGTHS if not placed.rest else ():
        claimed = seen_by_the_op(placed, n, lens)
        assert torch.equal(claimed, mask_of(t, n, lens).expand_as(claimed))
    return placed


lengths = st.lists(st.integers(-2, LENGTH + 2), min_size=BATCH, max_size=BATCH).map(torch.tensor)


@settings(max_examples=50, deadline=None)
@given(masks, lengths)
def test_no_mask_is_taken_for_another(t: Tree, lens: Tensor) -> None:
    note(check(t, lens))


def note(placed: Placed) -> None:
    """For the statistics that pytest prints with --hypothesis-show-statistics."""
    event("all" if not placed.rest else "some" if placed.some else "none")


# --- Spellings. --------------------------------------------------------------------------------


@st.composite
def respelled(draw: st.DrawFn, t: Tree) -> Tree:
    """Another spelling of the same mask."""
    name, *inner = t
    if name in COMPARE and inner[0] != ("number", 0):
        a, b = inner
        way = draw(st.integers(0, 4))
        if way == 0:
            return ("not", (OPPOSITE[name], a, b))
        if way == 1:
            n = ("number", draw(st.integers(-5, 5)))
            return (name, ("+", a, n), ("+", b, n))
        if way == 2 and b[0] != "number":
            return (SWAPPED[name], b, a)
        if way == 3 and b[0] == "number" and a[0] == "-":
            return (SWAPPED[name], ("neg", a), ("number", -b[1]))
        if way == 4 and b[0] == "number" and name in ("<=", ">"):
            return ({"<=": "<", ">": ">="}[name], a, ("number", b[1] + 1))
        return t
    if name in ("and", "or"):
        a, b = (draw(respelled(x)) for x in inner)
        way = draw(st.integers(0, 3))
        if way == 0:
            return ("not", ({"and": "or", "or": "and"}[name], ("not", a), ("not", b)))
        if way == 1:
            return (name, b, (name, a, b))
        if way == 2 and name == "and":
            return draw(st.sampled_from([("times", a, b), ("filled", a, ("not", b))]))
        return (name, b, a)
    return t


ROW, COLUMN = ("i",), ("j",)


def window(causal: bool, left: int, right: int) -> Tree:
    sides: list[Tree] = [("<=", COLUMN, ROW)] if causal else []
    sides += [("<=", ("-", ROW, COLUMN), ("number", left))] if left >= 0 else []
    sides += [("<=", COLUMN, ("+", ROW, ("number", right)))] if right >= 0 else []
    out = sides[0]
    for x in sides[1:]:
        out = ("and", out, x)
    return out


@st.composite
def windows(draw: st.DrawFn) -> tuple[Tree, dict[str, Any]]:
    causal = draw(st.booleans())
    left, right = draw(st.integers(0, 4)), -1 if causal else draw(st.integers(1, 4))
    said = dict(causal=causal, left=left, right=right, history=None)
    return draw(respelled(window(causal, left, right))), said


@st.composite
def histories(draw: st.DrawFn) -> tuple[Tree, dict[str, Any]]:
    """HSTU's mask: the last rows are targets, the first ones contextual."""
    contextual, left = draw(st.integers(0, 3)), draw(st.sampled_from([-1, 1, 3]))
    history: Tree = ("+", ("lens",), ("number", draw(st.integers(-2, 2))))

    def folded(x: Tree) -> Tree:
        low: Tree = ("at least", x, ("number", contextual - 1)) if contextual > 1 else x
        return ("at most", low, history)

    i, j = folded(ROW), folded(COLUMN)
    seen: Tree = ("or", draw(respelled(("<", j, i))), ("eye",))
    if left >= 0:
        seen = ("and", seen, draw(respelled(("<=", ("-", i, j), ("number", left)))))
    if contextual:
        first: Tree = ("number", contextual - 1)
        sees_all = draw(respelled(("and", ("==", i, first), ("<", j, history))))
        seen = ("or", seen, sees_all)
    return seen, dict(causal=True, left=left, right=-1, history=history[2][1])


rules = st.one_of(windows(), histories())


@settings(max_examples=40, deadline=None)
@given(rules, lengths)
def test_any_spelling_is_recognised(drawn: tuple[Tree, dict[str, Any]], lens: Tensor) -> None:
    t, said = drawn
    placed = check(t, lens)
    assert not placed.rest
    assert {name: getattr(placed.rule, name) for name in said} == said


@st.composite
def spoilt(draw: st.DrawFn, t: Tree) -> Tree:
    """The mask with one number, comparison, place or connective changed."""
    name, *inner = t
    parts = [i for i, x in enumerate(inner) if isinstance(x, tuple)]
    if parts and draw(st.integers(0, 3)):
        i = draw(st.sampled_from(parts))
        inner[i] = draw(spoilt(inner[i]))
    elif name == "number":
        inner[0] += draw(st.sampled_from([-1, 1]))
    elif name in COMPARE:
        name = draw(st.sampled_from([*COMPARE]))
    elif name in ("i", "j"):
        name = "j" if name == "i" else "i"
    elif name in ("and", "or"):
        name = "or" if name == "and" else "and"
    return (name, *inner)


@settings(max_examples=40, deadline=None)
@given(rules.flatmap(lambda drawn: spoilt(drawn[0])), lengths)
def test_near_misses_are_not_taken_for_the_rule(t: Tree, lens: Tensor) -> None:
    note(check(t, lens))


@pytest.mark.parametrize("block", [2, 3])
def test_blocks_and_a_window_are_claimed_side_by_side(block: int) -> None:
    placed = check(("and", ("block", block), window(True, 1, -1)), torch.zeros(BATCH).long())
    assert not placed.rest
    assert (placed.block, placed.rule.causal, placed.rule.left) == (block, True, 1)
