"""The mask algebra against masks: literals, put together again, give the same tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from gemcompile.passes.attention_additive import additive, two_valued
from gemcompile.passes.axes import Labels, aligned, fresh, settle
from gemcompile.passes.masks import Band, Literals, conjuncts

SIZE = 4
SHAPE = (SIZE,) * 4  # [b, h, q, k], all alike

Mask = Callable[[Tensor, Tensor], Tensor]

LEAVES: list[Mask] = [
    lambda lens, pad: (torch.arange(SIZE)[None, :] < lens[:, None])[:, None, None, :],
    lambda lens, pad: (torch.arange(SIZE)[None, :] < lens[:, None])[:, None, :, None],
    lambda lens, pad: ~pad[:, None, None],
    lambda lens, pad: pad.view(SIZE, 1, 1, SIZE).expand(-1, SIZE, SIZE, -1),
    lambda lens, pad: torch.ones(SIZE, SIZE).tril().bool(),
    lambda lens, pad: torch.triu(torch.ones(SIZE, SIZE, dtype=torch.bool), diagonal=1),
    lambda lens, pad: torch.ones(SIZE, SIZE, dtype=torch.bool).tril(-1)[None, None],
    lambda lens, pad: torch.arange(SIZE)[:, None] >= torch.arange(SIZE)[None, :],
    lambda lens, pad: torch.arange(SIZE)[:, None] < torch.arange(SIZE) - 1,
    lambda lens, pad: pad[0],
    lambda lens, pad: (lens > 1)[:, None, None, None],
]
TWO: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a & b,
    lambda a, b: a | b,
    lambda a, b: torch.logical_and(a, b),
    lambda a, b: (a.float() * b.float()).bool(),
    lambda a, b: a.masked_fill(b, False),
    lambda a, b: a.masked_fill(b, True),
    lambda a, b: (a * b) == 1,
]
ONE: list[Callable[[Tensor], Tensor]] = [
    lambda a: ~a,
    lambda a: a.logical_not(),
    lambda a: a == 0,
    lambda a: (1.0 - a.to(torch.float32)) > 0.5,
    lambda a: a.int() != 0,
    lambda a: a.float() < 0.5,
    lambda a: a.unsqueeze(0).squeeze(0),
    lambda a: a.tril() if a.shape[-2:] == (SIZE, SIZE) else a,
    lambda a: a.triu(1) if a.shape[-2:] == (SIZE, SIZE) else a,
    lambda a: a.expand(SHAPE),
]

tree = st.recursive(
    st.integers(0, len(LEAVES) - 1).map(lambda i: ("leaf", i)),
    lambda inner: st.one_of(
        st.tuples(st.just("one"), st.integers(0, len(ONE) - 1), inner),
        st.tuples(st.just("two"), st.integers(0, len(TWO) - 1), inner, inner),
    ),
    max_leaves=5,
)


def build(t: Any, lens: Tensor, pad: Tensor) -> Tensor:
    if t[0] == "leaf":
        return LEAVES[t[1]](lens, pad)
    if t[0] == "one":
        return ONE[t[1]](build(t[2], lens, pad))
    a, b = build(t[2], lens, pad), build(t[3], lens, pad)
    return TWO[t[1]](*torch.broadcast_tensors(a, b) if a.dim() < b.dim() else (a, b))


class Values(Interpreter):
    """Runs a graph and keeps every node's value."""

    def __init__(self, gm: GraphModule, *args: Tensor) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.run(*args)


def spread(x: Tensor, labels: Labels, scores: Labels) -> Tensor:
    """A tensor with labels, broadcast to the scores."""
    axes = [settle(label) for label in labels]
    held = [a for label in axes for a in label]
    x = x.reshape([int(a.size) for a in held])
    order = [label[0] for label in scores]
    x = x.permute(sorted(range(len(held)), key=lambda i: order.index(held[i])))
    return x.reshape([int(a.size) if a in held else 1 for a in order]).expand(SHAPE)


def visible(literals: Literals, values: dict[Node, Any], scores: Labels) -> Tensor:
    """Where all literals hold, bool [b, h, q, k]."""
    out = torch.ones(SHAPE, dtype=torch.bool)
    for x in literals:
        if isinstance(x, Band):
            i = spread(torch.arange(SIZE), (x.row,), scores)
            j = spread(torch.arange(SIZE), (x.column,), scores)
            out = out & (j <= i + x.offset)
        else:
            out = out & (spread(values[x.node].bool(), x.labels, scores) == x.want)
    return out


def traced(fn: Mask, lens: Tensor, pad: Tensor) -> tuple[Node, Labels, Labels, dict[Node, Any]]:
    """(the result's node, its labels, those of the scores, every value)."""
    scores = torch.zeros(SHAPE)
    gm = make_fx(lambda a, b, s: (fn(a, b), s + 1), tracing_mode="fake", pre_dispatch=True)(
        lens, pad, scores
    )
    (out,) = gm.graph.find_nodes(op="output")
    mask, like = out.args[0]
    labels = fresh(like)
    below = aligned(mask, SHAPE, labels)
    assert below is not None
    return mask, below, labels, Values(gm, lens, pad, scores).env


@settings(max_examples=150, deadline=None)
@given(tree, st.booleans(), st.integers(0, 2**16))
def test_conjunction_of_literals_is_the_mask(t: Any, want: bool, seed: int) -> None:
    torch.manual_seed(seed)
    lens, pad = torch.randint(0, SIZE + 1, (SIZE,)), torch.rand(SIZE, SIZE) > 0.5
    mask, labels, scores, values = traced(lambda a, b: build(t, a, b), lens, pad)
    found = visible(conjuncts(mask, labels, want), values, scores)
    assert torch.equal(found, (build(t, lens, pad) == want).expand(SHAPE))


ADDITIVE: list[Callable[[Tensor], Tensor]] = [
    lambda m: (1.0 - m.float()) * -1e9,
    lambda m: (m.float() - 1) * 1e9,
    lambda m: torch.zeros(m.shape).masked_fill(~m, -math.inf),
    lambda m: torch.where(m, 0.0, torch.finfo(torch.float32).min),
    lambda m: m.float().log(),
    lambda m: -((~m).float() * 10000.0),
    lambda m: (~m).float() / -1e-5,
    lambda m: torch.full((SIZE, SIZE), -math.inf).triu(1) + (1 - m.float()) * -1e9,
]


@settings(max_examples=80, deadline=None)
@given(tree, st.integers(0, len(ADDITIVE) - 1), st.integers(0, 2**16))
def test_additive_masks_are_read_as_masks(t: Any, form: int, seed: int) -> None:
    torch.manual_seed(seed)
    lens, pad = torch.randint(0, SIZE + 1, (SIZE,)), torch.rand(SIZE, SIZE) > 0.5

    def fn(a: Tensor, b: Tensor) -> Tensor:
        return ADDITIVE[form](build(t, a, b))

    node, labels, scores, values = traced(fn, lens, pad)
    masks, biases = additive(node, labels, 1.0, -1e4)
    assert biases == []
    total = torch.zeros(SHAPE)
    for hidden in masks:
        total = total.masked_fill(~visible(hidden.literals, values, scores), -1)
    assert torch.equal(total < 0, (fn(lens, pad) < 0).expand(SHAPE))


def test_a_bias_is_not_a_mask() -> None:
    lens, pad = torch.ones(SIZE, dtype=torch.long), torch.ones(SIZE, SIZE, dtype=torch.bool)
    for fn in (lambda a, b: b.float(), lambda a, b: b.float() * -5, lambda a, b: a.float() * -1e9):
        node, labels, _, _ = traced(fn, lens, pad)
        masks, biases = additive(node, labels, 1.0, -1e4)
        assert masks == [] and len(biases) == 1


def test_inputs_of_numbers_are_masks_where_one_minus_them_is_huge() -> None:
    lens, numbers = torch.ones(SIZE, dtype=torch.long), torch.rand(SIZE, SIZE) > 0.5
    one_minus: list[Mask] = [
        lambda a, b: (1 - b[:, None, None]) * -1e9,
        lambda a, b: (1.0 - b.float().view(SIZE, 1, 1, SIZE)) * -1e9,
        lambda a, b: (b[:, None, None] - 1) * 1e9,
    ]
    for fn, dtype in itertools.product(one_minus, (torch.int64, torch.float32)):
        given = numbers.to(dtype)
        node, labels, scores, values = traced(fn, lens, given)
        (hidden,), biases = additive(node, labels, 1.0, -1e4)
        assert biases == [] and hidden.fill == -1e9
        found = visible(hidden.literals, values, scores)
        assert torch.equal(found, (fn(lens, given) == 0).expand(SHAPE))


def test_numbers_that_would_rather_be_a_bias_are_one() -> None:
    lens, numbers = torch.ones(SIZE, dtype=torch.long), torch.rand(SIZE, SIZE)
    others: list[Mask] = [
        lambda a, b: (1 - b) * -5,
        lambda a, b: (1 - b) * 1e9,
        lambda a, b: (b - 1) * -1e9,
        lambda a, b: (2 - b) * -1e9,
        lambda a, b: (b + 1) * 1e9,
        lambda a, b: b * -1e9,
        lambda a, b: (1 - b.sin()) * -1e9,
    ]
    for fn in others:
        node, labels, _, _ = traced(fn, lens, numbers)
        masks, biases = additive(node, labels, 1.0, -1e4)
        assert masks == [] and len(biases) == 1


def test_zero_times_infinity_is_not_followed() -> None:
    """(1 - m) * -inf is NaN where m is 1: no mask."""
    lens, pad = torch.ones(SIZE, dtype=torch.long), torch.ones(SIZE, SIZE, dtype=torch.bool)
    node, labels, _, _ = traced(lambda a, b: (1 - b.float()) * -math.inf, lens, pad)
    assert two_valued(node, labels) is None


def test_integers_are_not_taken_for_masks() -> None:
    """~ids inverts bits, ids == 0 compares numbers: leaves, not negations."""
    lens, pad = torch.tensor([0, 1, 2, 3]), torch.ones(SIZE, SIZE, dtype=torch.bool)
    for fn in (lambda a, b: (a == 0)[:, None, None, None], lambda a, b: (~a).bool()[:, None]):
        mask, labels, scores, values = traced(fn, lens, pad)
        found = visible(conjuncts(mask, labels, True), values, scores)
        assert torch.equal(found, fn(lens, pad).expand(SHAPE))
