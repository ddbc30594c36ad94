"""Masks made of index arithmetic, read as formulas about places.

``(i - j).abs() <= w`` or HSTU's mask are bool tensors that depend on where a query and a key stand,
and perhaps on one integer of their sequence, such as its length. `Reader` turns such a tensor into
a `Formula`: comparisons of two places, or of a place and a number. Whatever else occurs - products,
remainders, a second tensor of integers - makes it `Unreadable`. What a formula means is found out
in place_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

from gemcompile.graph import arguments, is_call, shape, target_name, value

from .axes import Label, Labels, aligned, axes_of, settle, settle_all, through
from .masks import AND, CASTS, COMPARE, OR, Band, Literal, constant, is_binary, is_negation
from .place_terms import (
    Formula,
    Linear,
    Points,
    Term,
    Unreadable,
    always,
    bounds_between,
    choice,
    conjunction,
    difference,
    disjunction,
    extreme,
    from_linear,
    negation,
    negative,
    number,
    total,
)

aten = torch.ops.aten

NUMBERS = (torch.int32, torch.int64, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)
_ARANGE = (aten.arange.default, aten.arange.start, aten.arange.start_step)


class Reader:
    """Reads formulas over the places along two axes, all with the same integers of sequences.

    ``data`` and ``data_labels`` are that tensor of integers, once one was met; ``seen`` tells
    whether any place was.
    """

    def __init__(self, row: Label, column: Label) -> None:
        self.row, self.column = row, column
        self.data: Node | None = None
        self.data_labels: Labels = ()
        self.seen = False
        self._terms: dict[Any, Term] = {}

    def literal(self, x: Literal) -> Formula:
        """The formula of a literal.

        Raises:
            Unreadable: it is none.
        """
        if isinstance(x, Band):
            return self._band(x.row, x.column, x.offset)
        formula = self.formula(x.node, x.labels)
        return formula if x.want else negation(formula)

    # --- Bools. ---

    def formula(self, node: Argument, labels: Labels) -> Formula:
        """The formula of a bool or 0/1 tensor."""
        if is_call(node, aten.eye.default, aten.eye.m):
            row, column = labels[-2:]
            return conjunction(self._band(row, column, 0), self._band(column, row, 0))
        if not isinstance(node, Node) or not is_binary(node):
            raise Unreadable
        known = constant(node)
        if known is not None:
            return always(bool(known))
        view = through(node, labels)
        if view is not None:
            return self.formula(*view)
        if is_negation(node):
            return negation(self._below(node, 0, labels))
        if is_call(node, *CASTS):
            return self._below(node, 0, labels)
        if is_call(node, *AND):
            return conjunction(self._below(node, 0, labels), self._below(node, 1, labels))
        if is_call(node, *OR):
            return disjunction(self._below(node, 0, labels), self._below(node, 1, labels))
        if is_call(node, aten.masked_fill.Scalar):
            x, m = self._below(node, 0, labels), self._below(node, 1, labels)
            return disjunction(x, m) if node.args[2] else conjunction(x, negation(m))
        if is_call(node, aten.where.self):
            test, yes, no = (self._below(node, i, labels) for i in range(3))
            return disjunction(conjunction(test, yes), conjunction(negation(test), no))
        if is_call(node, aten.tril.default, aten.triu.default):
            return self._triangle(node, labels)
        return self._comparison(node, labels)

    def _below(self, node: Node, i: int, labels: Labels) -> Formula:
        x = node.args[i]
        return self.formula(x, _needed_labels(x, node, labels))

    def _triangle(self, node: Node, labels: Labels) -> Formula:
        row, column = labels[-2:]
        offset = arguments(node)["diagonal"]
        if not isinstance(offset, int):
            raise Unreadable
        lower = node.target is aten.tril.default
        band = self._band(row, column, offset) if lower else self._band(column, row, -offset)
        return conjunction(self._below(node, 0, labels), band)

    def _band(self, row: Label, column: Label, offset: int) -> Formula:
        """place(column) <= place(row) + offset."""
        a, b = self._place(column), self._place(row)
        return Formula(lambda p: a(p) <= b(p) + offset, frozenset([offset]))

    def _comparison(self, node: Node, labels: Labels) -> Formula:
        packet = getattr(node.target, "overloadpacket", None)
        if packet not in COMPARE:
            raise Unreadable
        compare: Callable[[Any, Any], Any] = COMPARE[packet]
        x, y = node.args[:2]
        if isinstance(x, Node) and is_binary(x) and isinstance(y, (int, float)):
            below = self.formula(x, _needed_labels(x, node, labels))
            truth = [bool(compare(i, y)) for i in (0, 1)]
            if truth[0] == truth[1]:
                return always(truth[0])
            return below if truth[1] else negation(below)
        a, b = self._term_below(x, node, labels), self._term_below(y, node, labels)
        if a.difference or b.difference:
            bounds = bounds_between(a, b)
        else:
            bounds = {n - m for n in b.offsets for m in a.offsets}
        return Formula(lambda p: compare(a.at(p), b.at(p)), a.bounds | b.bounds | bounds)

    # --- Integers. ---

    def _term_below(self, x: Argument, node: Node, labels: Labels) -> Term:
        tensor = isinstance(x, Node) and isinstance(value(x), Tensor)
        return self.term(x, _needed_labels(x, node, labels) if tensor else ())

    def term(self, x: Argument, labels: Labels) -> Term:
        """A number or a tensor of whole numbers, as a place or a difference of places."""
        known = constant(x)
        if known is not None:
            return number(known)
        if isinstance(x, Node) and isinstance(value(x), torch.SymInt):
            raise Unreadable("places are compared with a number that varies from call to call")
        if not isinstance(x, Node) or getattr(value(x), "dtype", None) not in NUMBERS:
            raise Unreadable
        key = x, settle_all(labels)
        if key not in self._terms:
            self._terms[key] = self._read(x, labels)
        return self._terms[key]

    def _read(self, x: Node, labels: Labels) -> Term:
        linear = self.linear(x, labels)
        if linear is not None:
            return from_linear(linear)
        if not axes_of(labels) & {*self.row, *self.column}:
            return self._data(x, labels)
        view = through(x, labels)
        if view is not None:
            return self.term(*view)
        if is_call(x, *CASTS):
            return self._term_below(x.args[0], x, labels)
        return self._arithmetic(x, labels)

    def _arithmetic(self, x: Node, labels: Labels) -> Term:
        def operand(y: Argument) -> Term:
            return self._term_below(y, x, labels)

        if is_call(x, aten.add.Tensor, aten.sub.Tensor) and arguments(x)["alpha"] == 1:
            a, b = operand(x.args[0]), operand(x.args[1])
            return total(a, b) if x.target is aten.add.Tensor else difference(a, b)
        if is_call(x, aten.rsub.Scalar) and arguments(x)["alpha"] == 1:
            return difference(operand(x.args[1]), operand(x.args[0]))
        if is_call(x, aten.neg.default):
            return negative(operand(x.args[0]))
        if is_call(x, aten.abs.default):
            a = operand(x.args[0])
            return extreme(False, [a, negative(a)])
        if is_call(x, aten.minimum.default, aten.maximum.default):
            return extreme(x.target is aten.minimum.default, map(operand, x.args[:2]))
        if is_call(x, *_CLAMPS):
            return self._clamped(x, operand)
        if is_call(x, aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
            test, a, b = self._below(x, 0, labels), operand(x.args[1]), operand(x.args[2])
            return choice(test, a, b)
        self.seen = self.seen or _counts(x)
        raise Unreadable(f"{target_name(x)} is taken of places")

    def _clamped(self, x: Node, operand: Callable[[Argument], Term]) -> Term:
        given = arguments(x)
        term = operand(given["self"])
        if given.get("min") is not None:
            term = extreme(False, [term, operand(given["min"])])
        if given.get("max") is not None:
            term = extreme(True, [term, operand(given["max"])])
        return term

    def linear(self, x: Argument, labels: Labels) -> Linear | None:
        """A sum of multiples of the two places and a number, where x is one."""
        known = constant(x)
        if known is not None:
            return Linear(0, 0, int(known)) if known.is_integer() else None
        if not isinstance(x, Node) or getattr(value(x), "dtype", None) not in NUMBERS:
            return None
        view = through(x, labels)
        if view is not None:
            return self.linear(*view)
        if is_call(x, *_ARANGE):
            return self._range(x, labels)
        parts = _linear_parts(x)
        if parts is None:
            return None
        total = Linear(0, 0, 0)
        for y, factor in parts:
            part = None
            if not isinstance(y, Node):
                part = self.linear(y, ())
            elif (below := operand_labels(y, x, labels)) is not None:
                part = self.linear(y, below)
            if part is None:
                return None
            total = Linear(
                total.row + factor * part.row,
                total.column + factor * part.column,
                total.shift + factor * part.shift,
            )
        return total

    def _range(self, x: Node, labels: Labels) -> Linear | None:
        given, axis = arguments(x), settle(labels[0])
        if given.get("start", 0) != 0 or given.get("step", 1) != 1:
            return None
        if axis not in (self.row, self.column) or not axis:
            return None
        self.seen = True
        return Linear(int(axis == self.row), int(axis == self.column), 0)

    def _place(self, axis: Label) -> Callable[[Points], Tensor]:
        if settle(axis) == self.row:
            return lambda p: p.row
        if settle(axis) == self.column:
            return lambda p: p.column
        raise Unreadable

    def _data(self, x: Node, labels: Labels) -> Term:
        """An integer of the sequence, the same tensor wherever one occurs, plus a number."""
        shift = 0
        while True:
            view = through(x, labels)
            if view is not None:
                x, labels = view
                continue
            number = x.args[1] if len(x.args) == 2 and not x.kwargs else None
            if not is_call(x, aten.add.Tensor, aten.sub.Tensor) or not isinstance(number, int):
                break
            shift += number if x.target is aten.add.Tensor else -number
            x = x.args[0]  # type: ignore[assignment]
        if value(x).dtype not in _INTEGERS:
            raise Unreadable("places are compared with a tensor of floats")
        if self.data is None:
            self.data, self.data_labels = x, settle_all(labels)
        elif (self.data, self.data_labels) != (x, settle_all(labels)):
            raise Unreadable("places are compared with more than one tensor")
        return Term(lambda p: p.data + shift, frozenset([shift]))


_CLAMPS = (
    aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_min.Tensor,
    aten.clamp_max.default, aten.clamp_max.Tensor,
)  # fmt: skip


def operand_labels(x: Argument, node: Node, labels: Labels) -> Labels | None:
    """Labels of an operand of ``node``; None where it does not broadcast to it, or is a number."""
    return aligned(x, shape(node), labels) if isinstance(x, Node) else None


def _needed_labels(x: Argument, node: Node, labels: Labels) -> Labels:
    below = operand_labels(x, node, labels)
    if below is None:
        raise Unreadable
    return below


def _counts(x: Node) -> bool:
    """Made from an arange."""
    seen, stack = {x}, [x]
    while stack and len(seen) < 50:
        node = stack.pop()
        if is_call(node, *_ARANGE):
            return True
        stack += [y for y in node.all_input_nodes if y not in seen]
        seen.update(stack)
    return False


def _linear_parts(x: Node) -> list[tuple[Argument, int]] | None:
    """The summands of x, each with a whole factor."""
    if is_call(x, *CASTS):
        return [(x.args[0], 1)]
    if is_call(x, aten.add.Tensor, aten.sub.Tensor):
        alpha = arguments(x)["alpha"]
        if not isinstance(alpha, int):
            return None
        return [(x.args[0], 1), (x.args[1], alpha if x.target is aten.add.Tensor else -alpha)]
    if is_call(x, aten.rsub.Scalar) and arguments(x)["alpha"] == 1:
        return [(x.args[1], 1), (x.args[0], -1)]
    if is_call(x, aten.neg.default):
        return [(x.args[0], -1)]
    if is_call(x, aten.mul.Tensor) and isinstance(x.args[1], int):
        return [(x.args[0], x.args[1])]
    return None
