"""FLOPs and bytes of a captured graph's forward, padded and packed, at the first batch's sizes.

FLOPs: matrix products and attention only. A packed row count stands for the rows that are real, not
for the groups of 128 they fill, and jagged attention counts true lengths. As torch's own formulas
do, it ignores causality. Bytes: of the values that operators make, with the groups filled.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import prod
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from .graph import arguments
from .prologue import ROWS, Prologue, RowSet

Sizes = list[Fraction]


def forward_flops(gm: GraphModule, prologue: Prologue | None = None) -> int | None:
    """FLOPs (a multiply-add is two), or None where the first batch is not at hand.

    Args:
        gm: a graph of pre-dispatch ATen, before or after gem's passes.
        prologue: the row sets of the packed graph.
    """
    return _total(gm, prologue, False, _Counter.flops)


def forward_bytes(gm: GraphModule, prologue: Prologue | None = None) -> int | None:
    """Bytes of all values that operators make, without what may be a view: about what a step keeps
    for the backward at most, before anything is fused. None where the first batch is not at hand.
    """
    return _total(gm, prologue, True, _Counter.bytes)


def _total(
    gm: GraphModule,
    prologue: Prologue | None,
    filled: bool,
    count: Callable[[_Counter, Node], Fraction],
) -> int | None:
    sets = list(prologue.sets.values()) if prologue else []
    if any(s.lengths is None for s in sets):
        return None
    counter = _Counter(sets, filled)
    try:
        return round(sum((count(counter, n) for n in gm.graph.nodes), Fraction(0)))
    except LookupError:
        return None


class _Counter:
    """``filled``: packed rows count with what fills their last group."""

    def __init__(self, sets: list[RowSet], filled: bool) -> None:
        groups = {s.symbol: sympy.Rational(s.rows or 0, ROWS) for s in sets}
        self.rows = {k: sympy.Max(1, sympy.ceiling(g)) if filled else g for k, g in groups.items()}
        self.lengths = {s.offsets: s.lengths or [] for s in sets}

    def bytes(self, n: Node) -> Fraction:
        if not isinstance(n.target, torch._ops.OpOverload):
            return Fraction(0)
        first = n.args[0].meta.get("val") if n.args and isinstance(n.args[0], Node) else None
        value = n.meta.get("val")
        made = value if isinstance(value, (tuple, list)) else [value]
        total = Fraction(0)
        for x, returned in zip(made, n.target._schema.returns):
            if not isinstance(x, torch.Tensor):
                continue
            cast = isinstance(first, torch.Tensor) and first.dtype != x.dtype
            if returned.alias_info is None or cast:
                total += prod(map(self._size, x.shape), start=Fraction(x.element_size()))
        return total

    def flops(self, n: Node) -> Fraction:
        if not isinstance(n.target, torch._ops.OpOverload):
            return Fraction(0)
        rule = _RULES.get(f"{n.target.namespace}.{n.target._opname}")
        return Fraction(0) if rule is None else rule(self, n, arguments(n))

    def sizes(self, n: Node) -> Sizes:
        """Sizes of a tensor on the first batch, packed row counts being the real rows."""
        return [self._size(s) for s in n.meta["val"].shape]

    def _size(self, size: int | torch.SymInt) -> Fraction:
        if isinstance(size, int):
            return Fraction(size)
        env: Any = size.node.shape_env
        expr = size.node.expr.xreplace({**env.backed_var_to_val, **self.rows})
        if expr.free_symbols:
            raise LookupError(f"size {expr} is not known on the first batch")
        return Fraction(str(expr))


def _linear(c: _Counter, n: Node, a: dict[str, Any]) -> Fraction:
    return 2 * prod(c.sizes(n), start=Fraction(1)) * c.sizes(a["weight"])[-1]


def _product(name: str) -> Callable[[_Counter, Node, dict[str, Any]], Fraction]:
    def rule(c: _Counter, n: Node, a: dict[str, Any]) -> Fraction:
        return 2 * prod(c.sizes(n), start=Fraction(1)) * c.sizes(a[name])[-1]

    return rule


def _einsum(c: _Counter, n: Node, a: dict[str, Any]) -> Fraction:
    letters = a["equation"].replace(" ", "").split("->")[0].split(",")
    if "." in a["equation"] or len(letters) != 2:
        return Fraction(0)
    sizes: dict[str, Fraction] = {}
    for word, operand in zip(letters, a["tensors"]):
        sizes.update(zip(word, c.sizes(operand)))
    return prod(sizes.values(), start=Fraction(2))


def _sdpa(c: _Counter, n: Node, a: dict[str, Any]) -> Fraction:
    *outer, length, features = c.sizes(a["query"])
    keys, values = c.sizes(a["key"])[-2], c.sizes(a["value"])[-1]
    return 2 * prod(outer, start=Fraction(1)) * length * keys * (features + values)


def _padded_attention(c: _Counter, n: Node, a: dict[str, Any]) -> Fraction:
    batch, length, heads, features = c.sizes(a["q"])
    _, keys, _, values = c.sizes(a["v"])
    return 2 * batch * heads * length * keys * (features + values)


def _jagged_attention(c: _Counter, n: Node, a: dict[str, Any]) -> Fraction:
    rows, heads, features = c.sizes(a["q"])
    keys, _, values = c.sizes(a["v"])
    q_lengths, k_lengths = (c.lengths.get(a[x]) for x in ("q_offsets", "k_offsets"))
    if q_lengths is not None and k_lengths is not None:
        pairs = Fraction(sum(q * k for q, k in zip(q_lengths, k_lengths)))
    else:  # one side is padded: every sequence of it has the same length
        batch = c.sizes(a["q_offsets"])[0] - 1
        pairs = rows * keys / max(batch, Fraction(1))
    return 2 * heads * pairs * (features + values)


_RULES: dict[str, Callable[[_Counter, Node, dict[str, Any]], Fraction]] = {
    "aten.linear": _linear,
    "aten.matmul": _product("self"),
    "aten.mm": _product("self"),
    "aten.bmm": _product("self"),
    "aten.addmm": _product("mat1"),
    "aten.baddbmm": _product("batch1"),
    "aten.einsum": _einsum,
    "aten.scaled_dot_product_attention": _sdpa,
    "gem.padded_attention": _padded_attention,
    "gem.jagged_attention": _jagged_attention,
}
