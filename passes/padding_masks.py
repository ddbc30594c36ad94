"""Which rows a node observes: atoms over [B, L], found behind the spellings of a mask."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gemcompile.graph import Editor, arguments, is_call, same_size

from .layout import Layout, plain, reshaped
from .padding_rules import permutation

aten = torch.ops.aten


@dataclass(frozen=True)
class Atom:
    """The rows where a bool [B, L] node is true, or false where not ``positive``."""

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
    """The atom of a bool [B, L] mask, negations stripped."""
    positive = True
    while True:
        inner = _negated(n)
        if inner is None:
            break
        n, positive = inner, not positive
    while _same_elements(n):
        n = n.args[0]  # type: ignore[assignment]
    value = n.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return None
    if value.dtype != torch.bool:
        return None
    inner = _negated(n)
    if inner is not None:
        deeper = atom_of(n)
        return deeper and (deeper if positive else deeper.flipped())
    return Atom(n, positive)


def _same_elements(n: Node) -> bool:
    """A cast, a copy, or a slice or expansion that takes everything."""
    if is_call(
        n, aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.contiguous.default
    ):
        return True
    if is_call(n, aten.slice.Tensor):
        return is_whole(n)
    if is_call(n, aten.expand.default, aten.view.default, aten.reshape.default):
        a, b = n.meta["val"].shape, n.args[0].meta["val"].shape  # type: ignore[union-attr]
        return len(a) == len(b) and all(map(same_size, a, b))
    return False


def is_whole(n: Node) -> bool:
    """A slice that takes everything."""
    given = arguments(n)
    return given["start"] in (None, 0) and given["end"] in (None, 2**63 - 1) and given["step"] == 1


def _negated(n: Node) -> Node | None:
    """x where n is "not x" for a mask x of bools or of 0 and 1."""
    if is_call(n, aten.bitwise_not.default, aten.logical_not.default):
        return n.args[0]  # type: ignore[return-value]
    if is_call(n, aten.eq.Scalar) and n.args[1] == 0 and _is_zero_one(n.args[0]):
        return n.args[0]  # type: ignore[return-value]
    if is_call(n, aten.rsub.Scalar) and n.args[1] == 1 and _is_zero_one(n.args[0]):
        return n.args[0]  # type: ignore[return-value]
    return None


def _is_zero_one(n: Any) -> bool:
    """A bool, or a cast of one."""
    while is_call(
        n, aten.to.dtype, aten._to_copy.default, aten.unsqueeze.default, aten.expand.default
    ):
        n = n.args[0]
    if is_call(n, aten.rsub.Scalar):
        return n.args[1] == 1 and _is_zero_one(n.args[0])
    return (
        isinstance(n, Node)
        and isinstance(n.meta.get("val"), torch.Tensor)
        and n.meta["val"].dtype == torch.bool
    )


def row_mask(n: Any) -> tuple[Atom, Layout] | None:
    """(atom, layout of n) where n is a mask over rows, broadcast over everything else.

    Follows views, casts and negations from n down to a bool [B, L] node.
    """
    if not isinstance(n, Node) or not isinstance(n.meta.get("val"), torch.Tensor):
        return None
    value = n.meta["val"]
    if value.dim() == 2 and _is_zero_one(n):
        found = atom_of(n)
        if found is not None:
            return found, plain(value.shape)
    inner = _negated(n)
    if inner is not None:
        below = row_mask(inner)
        return below and (below[0].flipped(), below[1])
    if is_call(
        n,
        aten.to.dtype,
        aten._to_copy.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.to.device,
    ):
        return row_mask(n.args[0])
    if is_call(n, aten.ne.Scalar) and n.args[1] == 0 and _is_zero_one(n.args[0]):
        return row_mask(n.args[0])
    return _through_view(n)


def _through_view(n: Node) -> tuple[Atom, Layout] | None:
    below = row_mask(n.args[0]) if n.args else None
    if below is None:
        return None
    atom, layout = below
    if is_call(n, aten.unsqueeze.default):
        return atom, layout.inserted(int(n.args[1]) % n.meta["val"].dim())  # type: ignore[arg-type]
    if is_call(
        n, aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.squeeze.dim
    ):
        seen = reshaped(layout, n.meta["val"].shape)
        return (atom, seen) if seen else None
    if is_call(n, aten.expand.default):
        extra = n.meta["val"].dim() - layout.rank
        for _ in range(extra):
            layout = layout.inserted(0)
        return atom, layout
    if is_call(n, aten.transpose.int, aten.permute.default):
        order = permutation(n)
        return (atom, layout.permuted(order)) if order else None
    if is_call(n, aten.slice.Tensor) and is_whole(n):
        return atom, layout
    return None


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
    views = (aten.unsqueeze.default, aten.view.default, aten.expand.default, aten.reshape.default)
    while (
        is_call(n, *views) or (is_call(n, aten.slice.Tensor) and is_whole(n)) or _same_elements(n)
    ):
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
        n = a.node if a.positive else edit(aten.bitwise_not.default, a.node)
        out = n if out is None else edit(aten.bitwise_or.Tensor, out, n)
    assert out is not None
    return out
