"""Row-wise operators: which rows of its inputs a node needs, and the same node on packed rows.

A rule takes a node and the layout of its output and answers `RowWise`, or None where the operator
mixes rows. What has no rule mixes rows: that is the sound default.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from gemcompile.graph import Editor, arguments

from .layout import Factor, Layout, expr, other, reshaped

aten = torch.ops.aten


class Packed(Protocol):
    """What an emitter offers to a rule."""

    def get(self, x: Node, layout: Layout) -> Node:
        """The packed form of a padded value."""

    def gather(self, edit: Editor, x: Node, layout: Layout) -> Node:
        """Pack a value that was made on the spot."""


@dataclass(frozen=True)
class RowWise:
    """A node whose row r depends on row r of ``rows`` and on values that hold no rows.

    Attributes:
        rows: inputs that are packed, with their layouts.
        emit: writes the node on packed rows.
    """

    rows: dict[Node, Layout]
    emit: Callable[[Editor, Packed], Node]


Rule = Callable[[Node, Layout], RowWise | None]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule for operators."""

    def put(f: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, f))
        return f

    return put


def row_wise(n: Node, layout: Layout) -> RowWise | None:
    """The rule's answer for a node whose output has this layout."""
    found = RULES.get(n.target)
    if found is not None:
        return found(n, layout)
    return _pointwise(n, layout) if is_pointwise(n) else None


# --- element-wise operators
# -------------------------------------------------------------------------

_ALSO_POINTWISE = {
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.clone.default,
    aten.contiguous.default, aten.detach.default, aten.alias.default, aten.dropout.default,
    aten.type_as.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self,
    aten.where.ScalarOther, aten.where.ScalarSelf, aten.square.default, aten.lerp.Tensor,
    aten.rsub.Scalar, aten.rsub.Tensor, aten.__and__.Tensor, aten.__or__.Tensor,
    aten.binary_cross_entropy_with_logits.default, aten.log_sigmoid.default, aten.mse_loss.default,
    aten.selu.default, aten.relu6.default, aten.clamp.default, aten.true_divide.Tensor,
}  # fmt: skip


def is_pointwise(n: Node) -> bool:
    """Element-wise with broadcasting, one tensor out, nothing changed in place."""
    t = n.target
    if n.op != "call_function" or not isinstance(t, torch._ops.OpOverload) or t._schema.is_mutable:
        return False
    if t in (aten.binary_cross_entropy_with_logits.default, aten.mse_loss.default):
        return bool(arguments(n)["reduction"] == 0)
    if t in _ALSO_POINTWISE:
        return True
    random = torch.Tag.nondeterministic_seeded in t.tags
    return (
        torch.Tag.pointwise in t.tags and not random and isinstance(n.meta.get("val"), torch.Tensor)
    )


def axes_of(x: Node, layout: Layout) -> set[str]:
    """Which of "b", "l" a broadcast operand really has, for an output of this layout."""
    sizes = x.meta["val"].shape
    offset = layout.rank - len(sizes)
    found: set[str] = set()
    for i, s in enumerate(sizes):
        if not _broadcasts(s, layout, i + offset):
            found |= layout.holds(i + offset)
    return found


def _broadcasts(size: int | torch.SymInt, layout: Layout, dim: int) -> bool:
    return isinstance(size, int) and size == 1 and any(f.size != 1 for f in layout.dims[dim])


def operand_layout(x: Node, layout: Layout, *, expanded: bool = False) -> Layout:
    """The layout of an operand that broadcasts against ``layout``; ``expanded``: its rows too."""
    sizes = x.meta["val"].shape
    offset = 0 if expanded else layout.rank - len(sizes)
    dims = []
    for i, d in enumerate(layout.dims[offset:]):
        own = i - (layout.rank - len(sizes)) if expanded else i
        broadcast = own < 0 or _broadcasts(sizes[own], layout, i + offset)
        keep = not broadcast or (expanded and any(f.axis != "o" for f in d))
        dims.append(d if keep else (other(1),))
    return Layout(tuple(dims))


def _tensors(n: Node) -> list[Node]:
    return [x for x in n.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]


def _pointwise(n: Node, layout: Layout) -> RowWise | None:
    rows: dict[Node, Layout] = {}
    for x in _tensors(n):
        if x.meta["val"].dim() > layout.rank:
            return None
        if axes_of(x, layout) == {"b", "l"}:
            rows[x] = operand_layout(x, layout)
    if not rows:
        return None

    def emit(edit: Editor, packed: Packed) -> Node:
        def operand(x: Node) -> Node:
            if not isinstance(x.meta.get("val"), torch.Tensor):
                return x
            return packed.get(x, rows[x]) if x in rows else aligned(edit, packed, x, layout)

        args, kwargs = map_arg((n.args, n.kwargs), operand)
        return edit(n.target, *args, **kwargs)

    return RowWise(rows, emit)


def aligned(edit: Editor, packed: Packed, x: Node, layout: Layout) -> Node:
    """An operand with no or one row axis, made to broadcast against packed rows."""
    sizes = list(x.meta["val"].shape)
    offset = layout.rank - len(sizes)
    if axes_of(x, layout):
        for _ in range(offset):
            x = edit(aten.unsqueeze.default, x, 0)
        full = operand_layout(x, layout, expanded=True)
        shape = [edit.symbol(_size(d)) for d in full.dims]
        return packed.gather(edit, edit(aten.expand.default, x, shape), full)
    drop = [i for i in range(len(sizes)) if all(f.axis != "o" for f in layout.dims[i + offset])]
    for i in reversed(drop):
        x = edit(aten.squeeze.dim, x, i)
    return x


def _size(dim: tuple[Factor, ...]) -> Any:
    out: Any = 1
    for f in dim:
        out = out * f.size
    return expr(out) if isinstance(out, int) else out


# --- views ------------------------------------------------------------------------------------


@rule(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims,
    aten.unsqueeze.default, aten.view_as.default, aten.reshape_as.default,
)  # fmt: skip
def _reshape(n: Node, layout: Layout) -> RowWise | None:
    x: Any = n.args[0]
    source = reshaped(layout, x.meta["val"].shape)
    if source is None:
        return None

    def emit(edit: Editor, packed: Packed) -> Node:
        sizes = [edit.symbol(s) for s in layout.packed_sizes()]
        return edit(aten.reshape.default, packed.get(x, source), [-1, *sizes])

    return RowWise({x: source}, emit)


@rule(
    aten.transpose.int,
    aten.permute.default,
    aten.t.default,
    aten.mT.default,
    aten.movedim.int,
    aten.swapaxes.default,
)
def _permute(n: Node, layout: Layout) -> RowWise | None:
    x: Any = n.args[0]
    order = permutation(n)
    if order is None:
        return None
    source = layout.permuted([order.index(i) for i in range(len(order))])

    def emit(edit: Editor, packed: Packed) -> Node:
        y = packed.get(x, source)
        keep = [
            0,
            *(source.packed_dim(i) for i in order if any(f.axis == "o" for f in source.dims[i])),
        ]
        return y if keep == list(range(len(keep))) else edit(aten.permute.default, y, keep)

    return RowWise({x: source}, emit)


def permutation(n: Node) -> list[int] | None:
    """order with output dimension i = input dimension order[i], for a transpose or permute."""
    rank = n.meta["val"].dim()
    order = list(range(rank))
    a: Any = n.args
    if n.target in (aten.transpose.int, aten.swapaxes.default):
        i, j = a[1] % rank, a[2] % rank
        order[i], order[j] = j, i
    elif n.target in (aten.t.default, aten.mT.default):
        if rank > 1:
            order[-1], order[-2] = order[-2], order[-1]
    elif n.target is aten.permute.default:
        order = [i % rank for i in a[1]]
    elif n.target is aten.movedim.int:
        src, dst = a[1] % rank, a[2] % rank
        order.remove(src)
        order.insert(dst, src)
    else:
        return None
    return order


@rule(aten.expand.default, aten.expand_as.default)
def _expand(n: Node, layout: Layout) -> RowWise | None:
    x: Any = n.args[0]
    if axes_of(x, layout) != {"b", "l"}:
        return None
    source = operand_layout(x, layout)

    def emit(edit: Editor, packed: Packed) -> Node:
        sizes = [edit.symbol(s) for s in layout.packed_sizes()]
        y = packed.get(x, source)
        missing = len(sizes) + 1 - y.meta["val"].dim()
        for _ in range(missing):
            y = edit(aten.unsqueeze.default, y, 1)
        return edit(aten.expand.default, y, [-1, *sizes])

    return RowWise({x: source}, emit)


@rule(aten.select.int)
def _select(n: Node, layout: Layout) -> RowWise | None:
    args: Any = n.args
    x, dim, index = args[:3]
    rank = x.meta["val"].dim()
    dim = dim % rank
    source = layout.inserted(dim).with_dim(dim, (other(x.meta["val"].shape[dim]),))

    def emit(edit: Editor, packed: Packed) -> Node:
        return edit(aten.select.int, packed.get(x, source), source.packed_dim(dim), index)

    return RowWise({x: source}, emit)


@rule(aten.slice.Tensor)
def _slice(n: Node, layout: Layout) -> RowWise | None:
    given = arguments(n)
    x, dim = given["self"], given["dim"] % layout.rank
    whole = given["start"] in (None, 0) and given["step"] == 1 and given["end"] in (None, 2**63 - 1)
    if not layout.is_other(dim):
        if not whole:
            return None
        return RowWise({x: layout}, lambda edit, packed: packed.get(x, layout))
    source = layout.with_dim(dim, (other(x.meta["val"].shape[dim]),))

    def emit(edit: Editor, packed: Packed) -> Node:
        y = packed.get(x, source)
        return edit(
            aten.slice.Tensor,
            y,
            source.packed_dim(dim),
            given["start"],
            given["end"],
            given["step"],
        )

    return RowWise({x: source}, emit)


_SPLITS = (
    aten.chunk.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split.sizes,
    aten.unbind.int,
)


@rule(operator.getitem)
def _getitem(n: Node, layout: Layout) -> RowWise | None:
    """One part of a chunk, split or unbind; the splitting node itself is skipped over."""
    args: Any = n.args
    whole, part = args
    if whole.target not in _SPLITS:
        return None
    x: Any = whole.args[0]
    rank = x.meta["val"].dim()
    given = arguments(whole)
    dim = given["dim"] % rank
    size = (other(x.meta["val"].shape[dim]),)
    unbind = whole.target is aten.unbind.int
    source = layout.inserted(dim).with_dim(dim, size) if unbind else layout.with_dim(dim, size)
    if not unbind and not layout.is_other(dim):
        return None
    sizes: list[Any] = [1 if unbind else v.shape[dim] for v in whole.meta["val"]]
    if not all(isinstance(s, int) for s in sizes):
        return None

    def emit(edit: Editor, packed: Packed) -> Node:
        y, d = packed.get(x, source), source.packed_dim(dim)
        if unbind:
            return edit(aten.select.int, y, d, part)
        start = sum(sizes[:part])
        return edit(aten.slice.Tensor, y, d, start, start + sizes[part])

    return RowWise({x: source}, emit)


@rule(aten.cat.default, aten.stack.default)
def _cat(n: Node, layout: Layout) -> RowWise | None:
    tensors: Any = n.args[0]
    stack = n.target is aten.stack.default
    dim = arguments(n)["dim"] % layout.rank
    if not layout.is_other(dim):
        return None
    rows: dict[Node, Layout] = {}
    for x in tensors:
        source = (
            layout.removed(dim)
            if stack
            else layout.with_dim(dim, (other(x.meta["val"].shape[dim]),))
        )
        if rows.setdefault(x, source) != source:
            return None

    def emit(edit: Editor, packed: Packed) -> Node:
        parts = [packed.get(x, rows[x]) for x in tensors]
        return edit(n.target, parts, layout.packed_dim(dim))

    return RowWise(rows, emit)
