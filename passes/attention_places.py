"""Which masks over queries and keys the op has arguments for: causal, windows, blocks, HSTU's.

What is left over is kept as a mask tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import Argument

from gemcompile.graph import arguments, is_call, value

from .axes import Label, Labels, axes_of, same, settle, through
from .masks import CASTS, Band, Leaf, Literal
from .place_rules import Rule, both, rule_among, rule_of
from .place_terms import Unreadable, all_of
from .places import NUMBERS, Reader, operand_labels

aten = torch.ops.aten

_NO_RULE = "for some lengths it is no window and none of HSTU's masks"

_UNEQUAL = "queries and keys are not equally many"
_REACHES = "no sequence ends among its contextual rows"

_FLOORED = (aten.floor_divide.default, aten.floor_divide.Scalar)
_DIVIDED = (aten.div.Tensor_mode, aten.div.Scalar_mode)
_SHIFTED = (aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar)


@dataclass
class Placed:
    """Masks over places that the op has arguments for.

    Attributes:
        rule: causal, window, history.
        block: 0, or the length of the blocks within which queries see keys.
        data, data_labels: the integers that ``rule.history`` adds to.
        literals: what these stand for.
        rest: what the op has no argument for.
        why: for masks of places among the rest, why they are.
        assumed: what has to hold beyond what is proven, or "".
    """

    rule: Rule = Rule()
    block: int = 0
    data: Node | None = None
    data_labels: Labels = ()
    literals: list[Literal] = field(default_factory=list)
    rest: list[Literal] = field(default_factory=list)
    why: str = ""
    assumed: str = ""

    @property
    def some(self) -> bool:
        """A key may be hidden by its place."""
        return self.block > 0 or self.rule != Rule()


class Placer:
    """Sorts the masks of a graph's sites; what a mask means is found out once for all layers."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._known: dict[Any, Rule | None] = {}

    def __call__(
        self, literals: list[Literal], keys: Sequence[Literal], b: Label, q: Label, k: Label
    ) -> Placed:
        """The op's arguments for masks that vary along queries q and keys k, of sequences b.

        ``keys`` are the site's masks that hide keys from every query.
        """
        if not literals or not q:
            return Placed(rest=literals)
        if not same(_size(q), _size(k)):
            why = _UNEQUAL if any(_of_places(x, Reader(q, k)) for x in literals) else ""
            return Placed(rest=literals, why=why)
        found = Placed()
        for x in literals:
            block = _block(x, Reader(q, k))
            if block and not found.block:
                found.block = block
                found.literals.append(x)
            else:
                found.rest.append(x)
        rule, reader, _ = self._rule(found.rest, b, q, k)
        if rule is not None:
            found.rule, found.data, found.data_labels = rule, reader.data, reader.data_labels
            found.literals, found.rest = found.literals + found.rest, []
            return found
        self._windows(found, b, q, k)
        known = self._among(found, keys, b, q, k)
        if known is not None:
            found.rule, found.data, found.data_labels = known
            found.why, found.assumed = "", _REACHES
            found.literals, found.rest = found.literals + found.rest, []
        return found

    def _among(
        self, found: Placed, keys: Sequence[Literal], b: Label, q: Label, k: Label
    ) -> tuple[Rule, Node, Labels] | None:
        """The rule that the rest is among the keys that are not masked, and its integers."""
        if self.strict or not found.rest or not keys or found.rule != Rule():
            return None
        reader = Reader(q, k)
        try:
            rest, kept = (all_of(map(reader.literal, x)) for x in (found.rest, keys))
        except Unreadable:
            return None
        if reader.data is None or not axes_of(reader.data_labels) <= set(b):
            return None
        key = tuple(_key(x, q, k) for x in found.rest), tuple(_key(x, q, k) for x in keys)
        if key not in self._known:
            self._known[key] = rule_among(rest, kept)
        rule = self._known[key]
        return None if rule is None else (rule, reader.data, reader.data_labels)

    def _windows(self, found: Placed, b: Label, q: Label, k: Label) -> None:
        """Those of the rest that are windows one by one."""
        for x in list(found.rest):
            rule, reader, why = self._rule([x], b, q, k)
            if rule is not None and reader.data is None:
                found.rule = both(found.rule, rule)
                found.literals.append(x)
                found.rest.remove(x)
            elif reader.seen:
                found.why = why or _NO_RULE

    def _rule(
        self, literals: list[Literal], b: Label, q: Label, k: Label
    ) -> tuple[Rule | None, Reader, str]:
        """The rule that all the literals together are, who read them, and why there is none."""
        reader = Reader(q, k)
        try:
            formula = all_of([reader.literal(x) for x in literals])
        except Unreadable as why:
            return None, reader, str(why)
        if not axes_of(reader.data_labels) <= set(b):
            return (
                None,
                reader,
                "places are compared with a tensor of more than the batch",
            )
        key = tuple(_key(x, q, k) for x in literals)
        if key not in self._known:
            self._known[key] = rule_of(formula, reader.data is not None)
        return self._known[key], reader, ""


def _of_places(x: Literal, reader: Reader) -> bool:
    try:
        reader.literal(x)
    except Unreadable:
        pass
    return isinstance(x, Band) or reader.seen


def _key(x: Literal, q: Label, k: Label) -> Any:
    """Equal for literals that mean the same at two sites: axes are made anew for each."""

    def roles(label: Label) -> tuple[str, ...]:
        return tuple("q" if a in q else "k" if a in k else "" for a in settle(label))

    if isinstance(x, Band):
        return roles(x.row), roles(x.column), x.offset
    return x.node, tuple(map(roles, x.labels)), x.want


def _size(label: Label) -> Any:
    return math.prod(a.size for a in label)


# --- Blocks. -----------------------------------------------------------------------------------


def _block(x: Literal, reader: Reader) -> int:
    """c where a literal is i // c == j // c, else 0."""
    if not isinstance(x, Leaf):
        return 0
    equal = (aten.eq.Tensor,) if x.want else (aten.ne.Tensor,)
    if not is_call(x.node, *equal):
        return 0
    left, right = (
        _quotient(y, operand_labels(y, x.node, x.labels), reader) for y in x.node.args[:2]
    )
    if left is None or right is None or {left[0], right[0]} != {"q", "k"}:
        return 0
    return left[1] if left[1] == right[1] else 0


def _quotient(y: Argument, labels: Labels | None, reader: Reader) -> tuple[str, int] | None:
    """("q" or "k", c) for place // c along the axis of queries or keys."""
    while isinstance(y, Node) and labels is not None:
        view = through(y, labels)
        if view is not None:
            y, labels = view
        elif is_call(y, *CASTS) and value(y).dtype in NUMBERS:
            y = y.args[0]
        else:
            break
    if not isinstance(y, Node) or labels is None:
        return None
    number, dividend = _division(y)
    if number is None or not isinstance(dividend, Node):
        return None
    place = reader.linear(dividend, labels)
    if place is None or place.shift != 0 or {place.row, place.column} != {0, 1}:
        return None
    return ("q" if place.row else "k"), number


def _division(y: Node) -> tuple[int | None, Argument]:
    """(c, x) for x // c, where x is not negative."""
    by: Any = y.args[1] if len(y.args) > 1 else None
    if is_call(y, aten.floor.default) and is_call(y.args[0], aten.div.Tensor):
        inner: Any = y.args[0]
        return _whole(inner.args[1]), inner.args[0]
    if is_call(y, *_FLOORED):
        return _whole(by), y.args[0]
    if is_call(y, *_DIVIDED):
        rounds = arguments(y)["rounding_mode"] in ("floor", "trunc")
        return (_whole(by) if rounds else None), y.args[0]
    if is_call(y, *_SHIFTED) and isinstance(by, int) and 0 <= by < 31:
        return 1 << by, y.args[0]
    return None, None


def _whole(x: object) -> int | None:
    return int(x) if isinstance(x, (int, float)) and x >= 1 and float(x).is_integer() else None
