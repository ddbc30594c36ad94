"""Tensors added to the scores: additive masks (0 or a huge negative number), and biases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.node import Argument

from gemcompile.graph import arguments, is_call, shape, value

from .axes import Labels, aligned, through
from .masks import CASTS, Leaf, Literals, conjuncts, constant, is_binary, is_given, triangle_band

aten = torch.ops.aten

_WHERE = (
    aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar,
)  # fmt: skip


@dataclass(frozen=True)
class Addend:
    """A tensor that is added to the scores, times ``factor``."""

    node: Node
    labels: Labels
    factor: float


@dataclass(frozen=True)
class Hidden:
    """``fill`` is added to (or put in place of) the scores where the literals do not all hold."""

    literals: Literals
    fill: float


def additive(
    node: Node, labels: Labels, factor: float, limit: float
) -> tuple[list[Hidden], list[Addend]]:
    """A tensor added to the scores, as masks (fills of at most ``limit``) and biases."""
    two = two_valued(node, labels)
    if two is not None:
        high, low = two.high * factor, two.low * factor
        if high == 0 and low <= limit:
            return [Hidden(two.where(True), low)], []
        if low == 0 and high <= limit:
            return [Hidden(two.where(False), high)], []
        if high == low == 0:
            return [], []
        return [], [Addend(node, labels, factor)]
    inverted = _inverted_input(node, labels)
    if inverted is not None and inverted.factor * factor <= limit:
        visible = Leaf(inverted.node, inverted.labels, True)
        return [Hidden((visible,), inverted.factor * factor)], []
    parts = _terms(node, labels, factor)
    if parts is None:
        return [], [Addend(node, labels, factor)]
    masks, biases = [], []
    for x, below, times in parts:
        more = additive(x, below, times, limit)
        masks += more[0]
        biases += more[1]
    return masks, biases


def _inverted_input(node: Node, labels: Labels) -> Addend | None:
    """m, 1 of 1 - m or m, -1 of m - 1, where m is an input that holds numbers.

    Times a huge number that is a mask as models make it of a tokenizer's 0 and 1. Other numbers
    would be a bias; that there are none is an assumption, which the plan records.
    """
    if is_call(node, aten.rsub.Scalar) and node.args[1:] == (1,):
        sign = 1.0
    elif is_call(node, aten.sub.Tensor, aten.add.Tensor) and not node.kwargs:
        sign = -1.0
        if node.args[1] != (1 if node.target is aten.sub.Tensor else -1):
            return None
    else:
        return None
    x = node.args[0]
    while isinstance(x, Node):
        view = through(x, labels)
        if view is not None:
            x, labels = view
        elif is_call(x, *CASTS) and value(x.args[0]).dtype not in (torch.bool, torch.complex64):
            x = x.args[0]
        else:
            break
    return Addend(x, labels, sign) if isinstance(x, Node) and is_given(x) else None


def _terms(node: Node, labels: Labels, factor: float) -> list[tuple[Node, Labels, float]] | None:
    """The sum that a node is, where it is one."""
    view = through(node, labels)
    if view is not None:
        return [(*view, factor)]
    if is_call(node, *CASTS) and value(node).dtype.is_floating_point:
        return [(node.args[0], labels, factor)]  # type: ignore[list-item]
    if is_call(node, aten.add.Tensor, aten.sub.Tensor):
        a, b = node.args[:2]
        if not isinstance(a, Node) or not isinstance(b, Node):
            return None
        alpha = arguments(node)["alpha"]
        if not isinstance(alpha, (int, float)):
            return None
        alpha = alpha if node.target is aten.add.Tensor else -alpha
        sides = [(x, aligned(x, shape(node), labels)) for x in (a, b)]
        (a, a_labels), (b, b_labels) = sides
        if a_labels is None or b_labels is None:
            return None
        return [(a, a_labels, factor), (b, b_labels, factor * alpha)]
    if is_call(node, aten.mul.Tensor) and isinstance(node.args[1], (int, float)):
        return [(node.args[0], labels, factor * node.args[1])]  # type: ignore[list-item]
    return None


@dataclass(frozen=True)
class TwoValued:
    """A tensor that is ``high`` where a condition holds and ``low`` elsewhere."""

    where: Callable[[bool], Literals]
    high: float
    low: float

    def scaled(self, by: float) -> TwoValued | None:
        """The tensor times a number; None where that makes NaN (0 * inf)."""
        high, low = self.high * by, self.low * by
        return None if math.isnan(high) or math.isnan(low) else TwoValued(self.where, high, low)

    def shifted(self, by: float) -> TwoValued:
        """The tensor plus a number."""
        return TwoValued(self.where, self.high + by, self.low + by)


def two_valued(node: Node, labels: Labels) -> TwoValued | None:
    """A mask times a number, a constant filled under a mask, and so on."""
    known = constant(node)
    if known is not None:
        return TwoValued(lambda want: (), known, known)
    view = through(node, labels)
    if view is not None:
        return two_valued(*view)
    if is_binary(node):
        return TwoValued(lambda want: conjuncts(node, labels, want), 1.0, 0.0)
    if not node.args or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    if is_call(node, *CASTS):
        return two_valued(source, labels) if value(node).dtype.is_floating_point else None
    if is_call(node, aten.triu.default, aten.tril.default):
        return _filled_triangle(node, source, labels)
    if is_call(node, aten.masked_fill.Scalar, aten.masked_fill_.Scalar, aten.masked_fill.Tensor):
        return _choice(node, node.args[1], node.args[2], source, labels)
    if is_call(node, *_WHERE):
        return _choice(node, source, node.args[1], node.args[2], labels)
    return _affine(node, source, labels)


def _filled_triangle(node: Node, source: Node, labels: Labels) -> TwoValued | None:
    fill, band = constant(source), triangle_band(node, labels)
    if fill is None or band is None:
        return None
    return TwoValued(lambda want: (band if want else band.negated(),), fill, 0.0)


def _choice(
    node: Node, mask: Argument, yes: Argument, no: Argument, labels: Labels
) -> TwoValued | None:
    """where(mask, yes, no) of two constants."""
    high, low = constant(yes), constant(no)
    if high is None or low is None or not isinstance(mask, Node):
        return None
    below = aligned(mask, shape(node), labels)
    if below is None:
        return None
    return TwoValued(lambda want: conjuncts(mask, below, want), high, low)


def _affine(node: Node, source: Node, labels: Labels) -> TwoValued | None:
    """m * c, m / c, m + c, m - c, c - m, -m, log(m)."""
    inner = two_valued(source, labels)
    if inner is None:
        return None
    number = constant(node.args[1]) if len(node.args) > 1 else None
    plain = len(node.args) <= 2 and not node.kwargs
    if is_call(node, aten.neg.default):
        return inner.scaled(-1)
    if is_call(node, aten.log.default) and (inner.high, inner.low) == (1, 0):
        return TwoValued(inner.where, 0.0, -math.inf)
    if number is None or not plain:
        return None
    if is_call(node, aten.mul.Tensor, aten.mul.Scalar):
        return inner.scaled(number)
    if is_call(node, aten.div.Tensor) and number != 0:
        return inner.scaled(1 / number)
    if is_call(node, aten.add.Tensor):
        return inner.shifted(number)
    if is_call(node, aten.sub.Tensor):
        return inner.shifted(-number)
    if is_call(node, aten.rsub.Scalar):
        negative = inner.scaled(-1)
        return None if negative is None else negative.shifted(number)
    return None
