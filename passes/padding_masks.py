"""Which rows a node observes: atoms over [B, L], found behind the spellings of a mask."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from gemcompile.graph import Editor, arguments, is_call, same_size

from .layout import Layout, expr, plain, reshaped
from .masks import is_given
from .padding_rules import permutation

aten = torch.ops.aten


@dataclass(frozen=True)
class Atom:
    """The rows where a [B, L] node is not zero (true, for bools), or zero if not ``positive``."""

    node: Node
    positive: bool = True

    def flipped(self) -> Atom:
        return Atom(self.node, not self.positive)

    def space(self) -> tuple[str, str]:
        """The sizes of the row space, as text."""
        b, l = self.node.meta["val"].shape  # noqa: E741
        return str(b), str(l)


Atoms = frozenset[Atom]


def atom_of(n: Node) -> Atom | None:
    """The atom of a mask [B, L]."""
    found = row_mask(n)
    return found[0] if found is not None and found[1] == plain(n.meta["val"].shape) else None


def row_mask(n: Any) -> tuple[Atom, Layout] | None:
    """(atom, layout of n) where n is not zero in the rows of the atom and zero elsewhere.

    Follows negations, casts and views from n down to a [B, L] node: a bool, or an input.
    """
    if not isinstance(n, Node) or not isinstance(n.meta.get("val"), torch.Tensor):
        return None
    peeled = _peel(n)
    if peeled is not None:
        inner, flips = peeled
        below = row_mask(inner)
        if below is not None:
            return (below[0].flipped() if flips else below[0]), below[1]
    viewed = _through_view(n)
    if viewed is not None:
        return viewed
    value = n.meta["val"]
    known = value.dtype == torch.bool or is_given(n)
    return (Atom(n), plain(value.shape)) if value.dim() == 2 and known else None


def _peel(n: Node) -> tuple[Node, bool] | None:
    """(x, flips): n is not zero exactly where x is not zero, or where it is zero if ``flips``."""
    if n.op != "call_function" or not n.args or not isinstance(n.args[0], Node):
        return None
    x = n.args[0]
    dtype = x.meta["val"].dtype if isinstance(x.meta.get("val"), torch.Tensor) else None
    if is_call(n, aten.logical_not.default) or (
        is_call(n, aten.bitwise_not.default) and dtype == torch.bool
    ):
        return x, True
    if is_call(n, aten.eq.Scalar, aten.ne.Scalar) and n.args[1] == 0:
        return x, n.target is aten.eq.Scalar
    if is_call(n, aten.rsub.Scalar) and n.args[1] == 1 and _is_zero_one(x):
        return x, True
    if is_call(n, aten.clone.default, aten.contiguous.default, aten.to.device):
        return x, False
    if is_call(n, aten.to.dtype, aten._to_copy.default) and _keeps_zeros(dtype, n):
        return x, False
    return None


def _keeps_zeros(before: torch.dtype | None, cast: Node) -> bool:
    """No value but 0 becomes 0 in the cast, as 1e-9 does in float16."""
    after: torch.dtype = cast.meta["val"].dtype
    if before is None or after == torch.bool or before == torch.bool:
        return before is not None
    if after.is_floating_point and not before.is_floating_point:
        return True
    return after.is_floating_point == before.is_floating_point and after.itemsize >= before.itemsize


def _is_zero_one(n: Any) -> bool:
    """A bool, or a cast or view of one."""
    views = (aten.unsqueeze.default, aten.expand.default, aten.view.default)
    while is_call(n, aten.to.dtype, aten._to_copy.default, *views):
        n = n.args[0]
    if is_call(n, aten.rsub.Scalar):
        return n.args[1] == 1 and _is_zero_one(n.args[0])
    value = n.meta.get("val") if isinstance(n, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _through_view(n: Node) -> tuple[Atom, Layout] | None:
    if n.op != "call_function" or n.target not in _VIEWS:
        return None
    below = row_mask(n.args[0])
    if below is None:
        return None
    atom, layout = below
    sizes = n.meta["val"].shape
    if n.target is aten.unsqueeze.default:
        return atom, layout.inserted(int(n.args[1]) % len(sizes))  # type: ignore[arg-type]
    if n.target is aten.expand.default:
        for _ in range(len(sizes) - layout.rank):
            layout = layout.inserted(0)
        for i in layout.row_dims():
            if sympy.prod([f.size for f in layout.dims[i]]) != expr(sizes[i]):
                return None
        return atom, layout
    if n.target in (aten.transpose.int, aten.permute.default):
        order = permutation(n)
        return (atom, layout.permuted(order)) if order else None
    if n.target is aten.slice.Tensor:
        return (atom, layout) if is_whole(n) else None
    seen = reshaped(layout, sizes)
    return (atom, seen) if seen else None


_VIEWS = {
    aten.unsqueeze.default, aten.expand.default, aten.transpose.int, aten.permute.default,
    aten.slice.Tensor, aten.view.default, aten.reshape.default, aten.flatten.using_ints,
    aten.squeeze.dim,
}  # fmt: skip


def is_whole(n: Node) -> bool:
    """A slice that takes everything."""
    given = arguments(n)
    return given["start"] in (None, 0) and given["end"] in (None, 2**63 - 1) and given["step"] == 1


def is_prefix(atom: Atom) -> bool:
    """The rows of every sequence are its first ones: ``arange(L) < lens[:, None]`` and its kin."""
    n, below = atom.node, atom.positive
    if is_call(n, aten.gt.Tensor, aten.ge.Tensor):
        left, right = n.args[1], n.args[0]
        # lens > arange is a prefix; arange >= lens is the rest
        if _varies_along(left, "l") and _varies_along(right, "b"):
            return below
        left, right = right, left
        return not below and _varies_along(left, "l") and _varies_along(right, "b")
    if is_call(n, aten.lt.Tensor, aten.le.Tensor):
        left, right = n.args[:2]
        if _varies_along(left, "l") and _varies_along(right, "b"):
            return below
        return not below and _varies_along(right, "l") and _varies_along(left, "b")
    return False


def _varies_along(n: Any, axis: str) -> bool:
    """n is ``arange`` seen as [L] or [1, L] (axis "l"), or holds one number per sequence ("b")."""
    if not isinstance(n, Node) or not isinstance(n.meta.get("val"), torch.Tensor):
        return False
    sizes = n.meta["val"].shape
    if axis == "b":
        return len(sizes) == 2 and same_size(sizes[1], 1)
    if not (len(sizes) == 1 or len(sizes) == 2 and same_size(sizes[0], 1)):
        return False
    while n.op == "call_function" and n.target in _VIEWS | {aten.to.dtype, aten.clone.default}:
        if n.target is aten.slice.Tensor and not is_whole(n):
            return False
        n = n.args[0]
    return is_call(n, aten.arange.default, aten.arange.start)


def earlier_rows(edit: Editor, mask: Node) -> Node:
    """bool [B, L]: the rows of ``mask`` and all before them, which causal attention reads."""
    count = edit(aten.cumsum.default, mask, 1)
    total = edit(aten.sum.dim_IntList, mask, [1], True)
    # a row is needed while rows of the mask are still to come, or where it is one itself
    return edit(aten.bitwise_or.Tensor, mask, edit(aten.lt.Tensor, count, total))


def right_after(gm: GraphModule, atoms: Atoms) -> Editor:
    """An editor at the first place where all of the atoms are known."""
    nodes = {a.node for a in atoms}
    last: Node = next(iter(gm.graph.nodes))
    for n in gm.graph.nodes:
        if n in nodes or n.op == "placeholder":
            last = n
    return Editor(gm, like=next(iter(nodes)), before=last.next)


def materialize(edit: Editor, atoms: Iterable[Atom]) -> Node:
    """A bool [B, L] node that is true in the union of the atoms."""
    out: Node | None = None
    for a in sorted(atoms, key=lambda a: (a.node.name, a.positive)):
        n = a.node
        if n.meta["val"].dtype != torch.bool:
            n = edit(aten.ne.Scalar if a.positive else aten.eq.Scalar, n, 0)
        elif not a.positive:
            n = edit(aten.bitwise_not.default, n)
        out = n if out is None else edit(aten.bitwise_or.Tensor, out, n)
    assert out is not None
    return out
