"""Where the batch and the sequence axis of a row set stand in a tensor.

A layout gives for each dimension the factors it is made of, outermost first: "b" (batch), "l"
(position) or "o" (anything else). ``[B, L, H, D]`` is ``(b)(l)(oH)(oD)``; nn.MultiheadAttention's
``[L, B * H, D]`` is ``(l)(b oH)(oD)``. Reshapes regroup factors in order, so that equal sizes are
never mistaken for equal axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from gemcompile.graph import Editor

Size = int | torch.SymInt


@dataclass(frozen=True)
class Factor:
    """A part of a dimension: its axis ("b", "l" or "o") and its size."""

    axis: str
    size: sympy.Expr


Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class Layout:
    """The factors of every dimension of a tensor that has one "b" and one "l" factor."""

    dims: tuple[Dim, ...]

    def __str__(self) -> str:
        return "".join(
            "(" + " ".join(f.axis if f.axis != "o" else f"o{f.size}" for f in d) + ")"
            for d in self.dims
        )

    @property
    def rank(self) -> int:
        return len(self.dims)

    def is_other(self, dim: int) -> bool:
        """True where the dimension holds neither batch nor position."""
        return all(f.axis == "o" for f in self.dims[dim])

    def holds(self, dim: int) -> set[str]:
        """The axes among "b", "l" in a dimension."""
        return {f.axis for f in self.dims[dim]} - {"o"}

    def row_dims(self) -> list[int]:
        """Dimensions that hold batch or position."""
        return [i for i in range(self.rank) if not self.is_other(i)]

    def packed_dim(self, dim: int) -> int:
        """Which dimension of the packed tensor [T, ...] a dimension of this one becomes."""
        return 1 + sum(any(f.axis == "o" for f in d) for d in self.dims[:dim])

    def packed_sizes(self) -> list[sympy.Expr]:
        """Sizes of the packed tensor behind the rows."""
        return [
            sympy.prod([f.size for f in d if f.axis == "o"])
            for d in self.dims
            if any(f.axis == "o" for f in d)
        ]

    def permuted(self, order: Sequence[int]) -> Layout:
        """The layout of ``x.permute(order)`` for x of this layout."""
        return Layout(tuple(self.dims[i] for i in order))

    def with_dim(self, dim: int, factors: Dim) -> Layout:
        """The same with one dimension replaced."""
        return Layout((*self.dims[:dim], factors, *self.dims[dim + 1 :]))

    def inserted(self, dim: int) -> Layout:
        """The same with a dimension of size 1 at ``dim``."""
        return Layout((*self.dims[:dim], (other(1),), *self.dims[dim:]))

    def removed(self, dim: int) -> Layout:
        """The same without a dimension."""
        return Layout((*self.dims[:dim], *self.dims[dim + 1 :]))


def expr(size: Size) -> sympy.Expr:
    """A size as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def other(size: Size | sympy.Expr) -> Factor:
    """A factor that is neither batch nor position."""
    return Factor("o", size if isinstance(size, sympy.Expr) else expr(size))


def plain(shape: Sequence[Size], b: int = 0, l: int = 1) -> Layout:  # noqa: E741
    """The layout of a tensor with the batch in dimension b and the position in dimension l."""
    axes = {b: "b", l: "l"}
    return Layout(tuple((Factor(axes.get(i, "o"), expr(s)),) for i, s in enumerate(shape)))


def reshaped(layout: Layout, sizes: Sequence[Size]) -> Layout | None:
    """The layout of the same elements seen with other sizes; None where an axis would be cut."""
    queue = [f for d in layout.dims for f in d if f.size != 1 or f.axis != "o"]
    dims: list[Dim] = []
    for size in sizes:
        dim = _take(queue, expr(size))
        if dim is None:
            return None
        dims.append(dim)
    for f in queue:  # axes of size 1 that no dimension asked for
        if f.size != 1:
            return None
        if not dims:
            return None
        dims[-1] = (*dims[-1], f)
    return Layout(tuple(dims))


def _take(queue: list[Factor], need: sympy.Expr) -> Dim | None:
    """Remove factors worth ``need`` from the front, splitting one that is neither batch nor
    position.
    """
    taken: list[Factor] = []
    while need != 1 or (not taken and queue and queue[0].size == 1):
        if not queue:
            return None
        f = queue[0]
        rest = _quotient(need, f.size)
        if rest is not None:
            taken.append(queue.pop(0))
            need = rest
            continue
        part = _quotient(f.size, need)
        if part is None or f.axis != "o":
            return None
        taken.append(other(need))
        queue[0] = other(part)
        need = sympy.Integer(1)
    return _merged(taken) or (other(1),)


def _merged(factors: Sequence[Factor]) -> Dim:
    """Neighbours that are neither batch nor position as one: ``(o2 o16)`` is ``(o32)``."""
    out: list[Factor] = []
    for f in factors:
        if out and out[-1].axis == f.axis == "o":
            f = other(out.pop().size * f.size)
        out.append(f)
    return tuple(out)


def _quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """a / b where that is a whole number for all values of the symbols."""
    if a == b:
        return sympy.Integer(1)
    numerator, denominator = sympy.cancel(a / b).as_numer_denom()
    return numerator if denominator == 1 else None


def to_rows(edit: Editor, x: Node, layout: Layout) -> Node:
    """x as [B * L, others...]: a view where batch and position lead already."""
    aten = torch.ops.aten
    factors = [f for d in layout.dims for f in d]
    if len(factors) != layout.rank:
        x = edit(aten.reshape.default, x, [edit.symbol(f.size) for f in factors])
    axes = [f.axis for f in factors]
    order = [axes.index("b"), axes.index("l"), *(i for i, a in enumerate(axes) if a == "o")]
    if order != list(range(len(order))):
        x = edit(aten.permute.default, x, order)
    sizes = [edit.symbol(s) for s in layout.packed_sizes()]
    return edit(aten.reshape.default, x, [-1, *sizes])


def from_rows(edit: Editor, rows: Node, layout: Layout) -> Node:
    """The inverse of `to_rows`."""
    aten = torch.ops.aten
    factors = [f for d in layout.dims for f in d]
    axes = [f.axis for f in factors]
    order = [axes.index("b"), axes.index("l"), *(i for i, a in enumerate(axes) if a == "o")]
    x = edit(aten.reshape.default, rows, [edit.symbol(factors[i].size) for i in order])
    if order != list(range(len(order))):
        x = edit(aten.permute.default, x, [order.index(i) for i in range(len(order))])
    if len(factors) != layout.rank:
        sizes = [edit.symbol(sympy.prod([f.size for f in d])) for d in layout.dims]
        x = edit(aten.reshape.default, x, sizes)
    return x
