"""Formulas about places: comparisons of where a query and a key stand, and what is made of them.

Each knows the numbers that it compares with, up to sign, from which place_rules.py tells at which
points it has to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


class Unreadable(Exception):
    """Not a comparison of places; the text says why, in a few words."""


@dataclass(frozen=True)
class Points:
    """Where formulas are evaluated: int64 tensors of one shape.

    Attributes:
        row, column: the place of the query and of the key.
        data: the sequence's integer.
    """

    row: Tensor
    column: Tensor
    data: Tensor


@dataclass(frozen=True)
class Formula:
    """A bool function of the points.

    ``bounds`` are the numbers that it compares differences of places with, up to sign.
    """

    at: Callable[[Points], Tensor]
    bounds: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Term:
    """A place (one of row, column, data, 0) plus a number, or the difference of two such.

    Attributes:
        offsets: the numbers that may be added, up to sign.
        difference: it is the difference of two places.
        number: its value, where it is the same everywhere.
        bounds: of the conditions in it.
    """

    at: Callable[[Points], Tensor]
    offsets: frozenset[int]
    difference: bool = False
    number: int | None = None
    bounds: frozenset[int] = frozenset()

    def plus(self, n: int) -> Term:
        """The term and a number."""
        number = None if self.number is None else self.number + n
        moved = frozenset(x + n for x in self.offsets)
        return Term(lambda p: self.at(p) + n, moved, self.difference, number, self.bounds)


@dataclass(frozen=True)
class Linear:
    """row * place(query) + column * place(key) + shift."""

    row: int
    column: int
    shift: int


# --- Formulas. ----------------------------------------------------------------------------------


def always(truth: bool) -> Formula:
    """Holds everywhere, or nowhere."""
    return Formula(lambda p: torch.full_like(p.row, truth, dtype=torch.bool))


def negation(a: Formula) -> Formula:
    """not a."""
    return Formula(lambda p: ~a.at(p), a.bounds)


def conjunction(a: Formula, b: Formula) -> Formula:
    """a and b."""
    return Formula(lambda p: a.at(p) & b.at(p), a.bounds | b.bounds)


def disjunction(a: Formula, b: Formula) -> Formula:
    """a or b."""
    return Formula(lambda p: a.at(p) | b.at(p), a.bounds | b.bounds)


def all_of(formulas: Iterable[Formula]) -> Formula:
    """The conjunction."""
    out = always(True)
    for x in formulas:
        out = conjunction(out, x)
    return out


def number(x: float) -> Term:
    """A whole number."""
    if not float(x).is_integer():
        raise Unreadable(f"places are compared with {x:g}")
    n = int(x)
    return Term(lambda p: torch.tensor(n), frozenset([n]), number=n)


def from_linear(x: Linear) -> Term:
    """A linear form that is a place, a difference of places or a number."""
    if (x.row, x.column) not in ((0, 0), (1, 0), (0, 1), (1, -1), (-1, 1)):
        raise Unreadable("places are added or multiplied")
    if x.row == x.column == 0:
        return number(x.shift)
    return Term(
        lambda p: x.row * p.row + x.column * p.column + x.shift,
        frozenset([x.shift]),
        difference=x.row == -x.column,
    )


def total(a: Term, b: Term) -> Term:
    """a + b, one of which is a number."""
    if a.number is not None:
        return b.plus(a.number)
    if b.number is not None:
        return a.plus(b.number)
    raise Unreadable("places are added or multiplied")


def negative(a: Term) -> Term:
    """-a, of a difference."""
    if not a.difference:
        raise Unreadable("places are added or multiplied")
    return Term(lambda p: -a.at(p), frozenset(-x for x in a.offsets), True, None, a.bounds)


def difference(a: Term, b: Term) -> Term:
    """a - b."""
    if b.number is not None:
        return a.plus(-b.number)
    if a.number is not None and b.difference:
        return negative(b).plus(a.number)
    if a.difference or b.difference:
        raise Unreadable("more than two places are compared")
    offsets = frozenset(x - y for x in a.offsets for y in b.offsets)
    return Term(lambda p: a.at(p) - b.at(p), offsets, True, None, a.bounds | b.bounds)


def _merged(at: Callable[[Points], Tensor], terms: list[Term], bounds: frozenset[int]) -> Term:
    """One of the terms, whichever it is: numbers fit both places and differences of them."""
    kinds = {x.difference for x in terms if x.number is None}
    if len(kinds) > 1:
        raise Unreadable("more than two places are compared")
    offsets = frozenset().union(*(x.offsets for x in terms))
    bounds = bounds.union(*(x.bounds for x in terms))
    return Term(at, offsets, kinds == {True}, None, bounds)


def extreme(smallest: bool, terms: Iterable[Term]) -> Term:
    """The smaller or larger of two terms."""
    both = list(terms)
    choose = torch.minimum if smallest else torch.maximum
    return _merged(lambda p: choose(both[0].at(p), both[1].at(p)), both, frozenset())


def choice(test: Formula, a: Term, b: Term) -> Term:
    """a where the test holds, else b."""
    return _merged(lambda p: torch.where(test.at(p), a.at(p), b.at(p)), [a, b], test.bounds)


def bounds_between(a: Term, b: Term) -> set[int]:
    """What a comparison of two terms compares two places with, where one term is a difference."""
    if a.number is None:
        a, b = b, a
    if a.number is None:
        raise Unreadable("the distance of two places is not compared with a constant")
    return {a.number - x for x in b.offsets}
