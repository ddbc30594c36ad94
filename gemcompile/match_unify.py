"""Whether a node computes what a pattern's node computes: the search behind `gemcompile.match`."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from . import graph

_COMMUTATIVE = {
    *("add", "mul", "maximum", "minimum", "eq", "ne"),
    *("logical_and", "logical_or", "bitwise_and", "bitwise_or"),
}
# Same elements in the same order, in another shape or another memory.
_RESHAPE = {
    *("view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten"),
    *("squeeze", "unsqueeze", "alias", "contiguous", "clone"),
}
_PERMUTE = {"permute", "transpose", "t", "swapaxes", "mT", "matrix_H", "numpy_T"}
_EXPAND = {"expand", "expand_as", "broadcast_to"}
_DIMS = {"dim", "dims", "dim0", "dim1", "start_dim", "end_dim"}


@dataclass(frozen=True)
class Found:
    """What a search has established so far; never changed, so that it can go back.

    Attributes:
        nodes: pattern node -> graph node.
        numbers: parameter -> number.
        interior: graph nodes that the pattern covers.
        sizes: (pattern size, graph size) pairs that must be equal.
    """

    nodes: dict[Node, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    interior: frozenset[Node] = frozenset()
    sizes: tuple[tuple[Any, Any], ...] = ()


def unify(pattern: Node, node: Node, numbers: dict[float, str]) -> Found | None:
    """The first way in which ``node`` computes what ``pattern`` does, or None.

    Args:
        numbers: the values that stand for any number in the pattern, with their parameters' names.
    """
    search = _Search(numbers)
    return next((f for f in search.value(pattern, node, Found()) if _sizes_agree(f)), None)


class _Search:
    def __init__(self, numbers: dict[float, str]) -> None:
        self.numbers = numbers

    def argument(self, p: Any, g: Any, f: Found) -> Iterator[Found]:
        if isinstance(p, Node) and isinstance(graph.value(p), torch.SymInt):
            yield replace(f, sizes=(*f.sizes, (graph.value(p), graph.value(g))))
        elif isinstance(p, Node):
            if isinstance(g, Node):
                yield from self.value(p, g, f)
        elif isinstance(p, (list, tuple)):
            if isinstance(g, (list, tuple)) and len(p) == len(g):
                yield from self.all(list(zip(p, g)), f)
        elif isinstance(p, float) and p in self.numbers:
            yield from self.number(self.numbers[p], g, f)
        elif not isinstance(g, (Node, list, tuple)) and p == g:
            yield f

    def number(self, name: str, g: Any, f: Found) -> Iterator[Found]:
        if isinstance(g, (int, float)) and not isinstance(g, bool):
            if f.numbers.get(name, g) == g:
                yield replace(f, numbers={**f.numbers, name: g})

    def all(self, pairs: list[tuple[Any, Any]], f: Found) -> Iterator[Found]:
        if not pairs:
            yield f
            return
        for found in self.argument(*pairs[0], f):
            yield from self.all(pairs[1:], found)

    def value(self, p: Node, g: Node, f: Found) -> Iterator[Found]:
        if p in f.nodes:
            if f.nodes[p] is g:
                yield f
        elif p.op == "placeholder":
            if isinstance(graph.value(g), torch.Tensor):
                yield replace(f, nodes={**f.nodes, p: g})
        elif g.op == "call_function":
            seen = replace(f, nodes={**f.nodes, p: g}, interior=f.interior | {g})
            if _is_movement(p):
                yield from self.movement(p, g, seen)
                return
            yield from self.call(p, g, seen)
            below = _unchanged(g)
            if below:
                passed = replace(f, interior=f.interior | {g, *below[:-1]})
                yield from self.value(p, below[-1], passed)

    def call(self, p: Node, g: Node, f: Found) -> Iterator[Found]:
        if not isinstance(p.target, torch._ops.OpOverload):
            if p.target is g.target:
                yield from self.all([(p.args, g.args)], f)
            return
        if _name(p) != _name(g) or p.target._overloadpacket is not g.target._overloadpacket:  # type: ignore[union-attr]
            return
        a, b = graph.arguments(p), graph.arguments(g)
        pairs: list[tuple[Any, Any]] = []
        for name in {**a, **b}:
            x, y = a.get(name), b.get(name)
            pairs.append(_same_dimensions(x, y, p, g) if name in _DIMS else (x, y))
        yield from self.all(pairs, f)
        if _name(p) in _COMMUTATIVE and a.get("alpha", 1) == b.get("alpha", 1) == 1:
            a["self"], a["other"] = a["other"], a["self"]
            yield from self.all([(a.get(n), b.get(n)) for n in {**a, **b}], f)

    def movement(self, p: Node, g: Node, f: Found) -> Iterator[Found]:
        """Chains of one kind of view are equal where start and result are."""
        family = next(s for s in (_RESHAPE, _PERMUTE, _EXPAND) if _name(p) in s)
        start = _chain(p, family)[-1]
        above: list[Node] = []
        for root in [g, *_chain(g, family)[1:]]:
            moved = replace(f, interior=f.interior | set(above))
            if family is _PERMUTE:
                if _permutation(p, start) == _permutation(g, root):
                    yield from self.value(start, root, moved)
            else:
                pairs = tuple(zip_sizes(p, g))
                if pairs is not None:
                    yield from self.value(start, root, replace(moved, sizes=f.sizes + pairs))
            above.append(root)


def zip_sizes(p: Node, g: Node) -> list[tuple[Any, Any]]:
    """Pairs of sizes; of different ranks, a pair that is never equal."""
    a, b = graph.shape(p), graph.shape(g)
    return list(zip(a, b)) if len(a) == len(b) else [(0, 1)]


def _name(n: Node) -> str:
    return n.target._opname if isinstance(n.target, torch._ops.OpOverload) else ""


def _is_movement(n: Node) -> bool:
    return _name(n) in _RESHAPE | _PERMUTE | _EXPAND


def _chain(n: Node, family: set[str]) -> list[Node]:
    """n, and what it is a view of within the family, down to the first value that is no such."""
    found = [n]
    while _name(found[-1]) in family:
        below = found[-1].args[0]
        if not isinstance(below, Node):
            break
        found.append(below)
    return found


def _unchanged(g: Node) -> list[Node]:
    """The views below g down to the nearest with g's shape, which is the same value; or []."""
    chain = _chain(g, _RESHAPE)
    shape = graph.shape(g) if len(chain) > 1 else ()
    for i, below in enumerate(chain[1:], 1):
        other = graph.shape(below)
        if len(other) == len(shape) and all(map(graph.same_size, other, shape)):
            return chain[1 : i + 1]
    return []


def _permutation(n: Node, start: Node) -> tuple[int, ...] | None:
    """Which dimension of ``start`` each dimension of ``n`` is."""
    if n is start:
        return tuple(range(graph.shape(n).__len__()))
    below: Any = n.args[0]
    inner = _permutation(below, start)
    rank = len(graph.shape(n))
    a, order = graph.arguments(n), list(range(rank))
    if "dims" in a:
        order = [d % rank for d in a["dims"]]
    elif rank > 1:
        i, j = a.get("dim0", a.get("axis0", -2)) % rank, a.get("dim1", a.get("axis1", -1)) % rank
        order[i], order[j] = order[j], order[i]
    return None if inner is None else tuple(inner[i] for i in order)


def _same_dimensions(x: Any, y: Any, p: Node, g: Node) -> tuple[Any, Any]:
    """Dimensions of pattern and graph, both counted from the end that the pattern counts from."""
    numbers = [x] if isinstance(x, int) else x
    theirs = [y] if isinstance(y, int) else y
    if not isinstance(numbers, (list, tuple)) or not isinstance(theirs, (list, tuple)):
        return x, y
    if not all(isinstance(d, int) for d in (*numbers, *theirs)) or len(numbers) != len(theirs):
        return x, y
    rank = max(_rank(g), 1)
    moved = [d % rank - rank if mine < 0 else d % rank for mine, d in zip(numbers, theirs)]
    return list(numbers), moved


def _rank(n: Node) -> int:
    """Rank of the first tensor that an operator takes."""
    first = graph.value(n.args[0]) if n.args else None
    return first.dim() if isinstance(first, torch.Tensor) else 0


def _sizes_agree(f: Found) -> bool:
    """Whether the sizes in the pattern's symbols, read off its inputs, are those of the graph."""
    if not f.sizes:
        return True
    known: dict[sympy.Symbol, Any] = {}
    pairs = list(f.sizes)
    for p, g in f.nodes.items():
        if p.op == "placeholder":
            pairs = [*zip_sizes(p, g), *pairs]
    for mine, theirs in pairs:
        expr = _expression(mine)
        if isinstance(expr, sympy.Symbol) and expr not in known:
            known[expr] = theirs
            continue
        wanted = _substitute(expr, known)
        if wanted is None or not statically_known_true(wanted == theirs):
            return False
    return True


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _substitute(expr: sympy.Expr, known: dict[sympy.Symbol, Any]) -> Any:
    """The value of a pattern's size, with the graph's sizes for its symbols; None if unknown."""
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return known.get(expr)
    parts = [_substitute(a, known) for a in expr.args]
    if None in parts:
        return None
    combine = _OPERATORS.get(type(expr).__name__)
    if combine is None:
        return None
    out = parts[0]
    for x in parts[1:]:
        out = combine(out, x)
    return out


_OPERATORS: dict[str, Any] = {
    "Mul": operator.mul,
    "Add": operator.add,
    "Pow": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}
