"""Exits: nodes whose result depends on some rows of an input only, though all of the result
is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from gemcompile.graph import Editor, arguments, is_call, same_size

from .layout import Layout, other, plain, reshaped
from .padding_masks import Atom, row_mask

aten = torch.ops.aten


@dataclass(frozen=True)
class Seen:
    """Rows of one input that a node observes: those of ``atom``, in an input of this layout."""

    atom: Atom
    layout: Layout


@dataclass(frozen=True)
class Exit:
    """What a node observes of the inputs that it does not observe whole.

    Attributes:
        seen: the inputs and the rows observed of each.
        emit: writes the node's (unpacked) result from packed inputs; None: the input is unpacked,
        with zeros
            in the rows that nobody observes, and the node stays.
    """

    seen: dict[Node, Seen]
    emit: Callable[[Editor, PackedRows], Node] | None = None


class PackedRows(Protocol):
    """What an emitter offers to an exit."""

    def get(self, x: Node, layout: Layout) -> Node:
        """The packed form of a padded value."""

    def index(self) -> Node:
        """int64 [T]: flat row number of every packed row, -1 where none."""

    def inverse(self) -> Node:
        """int64 [B * L]: packed row of every padded row, -1 where none."""


def exit_of(n: Node) -> Exit | None:
    """How a node ends a region of packed rows, or None where it observes all it takes."""
    found = _EXITS.get(n.target)
    return found(n) if found else None


def _over(x: Any, mask: Any, n: Node) -> tuple[Atom, Layout] | None:
    """The rows that ``mask`` selects in x, where both broadcast to n."""
    if not isinstance(x, Node) or not isinstance(x.meta.get("val"), torch.Tensor):
        return None
    found = row_mask(mask)
    if found is None:
        return None
    atom, layout = found
    sizes = x.meta["val"].shape
    if len(sizes) != n.meta["val"].dim():
        return None
    for _ in range(len(sizes) - layout.rank):
        layout = layout.inserted(0)
    if layout.rank != len(sizes):
        return None
    for i, s in enumerate(sizes):
        if layout.is_other(i):
            layout = layout.with_dim(i, (other(s),))
        elif not same_size(s, mask.meta["val"].shape[i - len(sizes)]):
            return None
    return atom, layout


def _multiply(n: Node) -> Exit | None:
    """x * mask: rows where the mask is 0 are not observed (0 * NaN counts as 0,
    docs/semantics.md).
    """
    for x, mask in (n.args[:2], n.args[1::-1]):
        if isinstance(x, Node) and x is not mask:
            found = _over(x, mask, n)
            if found and row_mask(x) is None:
                return Exit({x: Seen(*found)})
    return None


def _masked_fill(n: Node) -> Exit | None:
    x, mask = n.args[:2]
    found = _over(x, mask, n)
    return Exit({x: Seen(found[0].flipped(), found[1])}) if found else None  # type: ignore[dict-item]


def _where(n: Node) -> Exit | None:
    mask, a, b = n.args
    out: dict[Node, Seen] = {}
    for x, flip in ((a, False), (b, True)):
        found = _over(x, mask, n)
        if found and a is not b:
            atom = found[0].flipped() if flip else found[0]
            out[x] = Seen(atom, found[1])  # type: ignore[index]
    return Exit(out) if out else None


def _index(n: Node) -> Exit | None:
    """x[mask], and x[arange(B), position]: the last valid item."""
    x, indices = n.args[:2]
    assert isinstance(x, Node) and isinstance(indices, (list, tuple))
    shape = x.meta["val"].shape
    if len(indices) == 1:
        found = row_mask(indices[0])
        if found is None or found[1].rank != 2 or indices[0].meta["val"].dtype != torch.bool:  # type: ignore[union-attr]
            return None
        return Exit({x: Seen(found[0], plain(shape))})
    return None


def _cross_entropy(n: Node) -> Exit | None:
    """Rows whose target is ignored are not observed: the target is masked by filling in
    ignore_index.
    """
    given = arguments(n)
    logits, target = given["self"], given["target"]
    found = _ignored(target, given["ignore_index"])
    if found is None or target.meta["val"].is_floating_point():
        return None
    atom, layout = found
    classes = (other(logits.meta["val"].shape[1]),)
    if logits.meta["val"].dim() == 2 and layout.rank == 1:
        source = Layout((*layout.dims, classes))
    elif logits.meta["val"].dim() == 3 and layout.rank == 2:  # [B, C, L]
        source = Layout((layout.dims[0], classes, layout.dims[1]))
    else:
        return None

    def emit(edit: Editor, packed: PackedRows) -> Node:
        """The same mean or sum over packed rows; rows that only fill up are ignored."""
        live = edit(aten.ge.Scalar, packed.index(), 0)
        goal = edit(aten.where.ScalarOther, live, packed.get(target, layout), given["ignore_index"])
        rest = (
            given["weight"],
            given["reduction"],
            given["ignore_index"],
            given["label_smoothing"],
        )
        return edit(n.target, packed.get(logits, source), goal, *rest)

    seen = {logits: Seen(atom, source), target: Seen(atom, layout)}
    return Exit(seen, emit if given["reduction"] != 0 else None)


def _ignored(target: Any, ignore_index: int) -> tuple[Atom, Layout] | None:
    """The rows whose target may be something else than ignore_index, and the target's layout."""
    if is_call(target, aten.view.default, aten.reshape.default, aten.flatten.using_ints):
        below = _ignored(target.args[0], ignore_index)
        seen = below and reshaped(below[1], target.meta["val"].shape)
        return (below[0], seen) if below and seen else None
    if is_call(target, aten.contiguous.default, aten.clone.default, aten.to.dtype):
        return _ignored(target.args[0], ignore_index)
    if is_call(target, aten.masked_fill.Scalar) and target.args[2] == ignore_index:
        found = row_mask(target.args[1])
        return (found[0].flipped(), found[1]) if found else None
    if is_call(target, aten.where.ScalarOther) and target.args[2] == ignore_index:
        return row_mask(target.args[0])
    if is_call(target, aten.where.ScalarSelf) and target.args[1] == ignore_index:
        found = row_mask(target.args[0])
        return (found[0].flipped(), found[1]) if found else None
    return None


_EXITS: dict[Any, Callable[[Node], Exit | None]] = {
    aten.mul.Tensor: _multiply,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
    aten.index.Tensor: _index,
    aten.cross_entropy_loss.default: _cross_entropy,
}


def gather_exit(n: Node, x: Node, position: Node, observed: Node) -> Exit:
    """One row per sequence, read from the packed rows directly.

    Args:
        x: [B, L, ...].
        position: int [B], the row of each sequence; negative ones count from the end.
        observed: bool [B, L], true in those rows.
    """
    layout = plain(x.meta["val"].shape)

    def emit(edit: Editor, packed: PackedRows) -> Node:
        length = edit.symbol(x.meta["val"].shape[1])
        batch = edit.symbol(x.meta["val"].shape[0])
        device = x.meta["val"].device
        start = edit(aten.mul.Tensor, edit(aten.arange.default, batch, device=device), length)
        row = edit(aten.add.Tensor, start, edit(aten.remainder.Scalar, position, length))
        where = edit(aten.index.Tensor, packed.inverse(), [row])
        out = edit(aten.index.Tensor, packed.get(x, layout), [where])
        return edit(aten.unsqueeze.default, out, 1) if is_call(n, aten.gather.default) else out

    return Exit({x: Seen(Atom(observed), layout)}, emit)


def gathered_row(n: Node) -> tuple[Node, Node] | None:
    """(x, position [B]) where n is ``x[arange(B), position]`` or a gather of one row per
    sequence.
    """
    if is_call(n, aten.index.Tensor):
        x, indices = n.args[:2]
        if (
            isinstance(indices, (list, tuple))
            and len(indices) == 2
            and all(isinstance(i, Node) for i in indices)
        ):
            rows, position = indices
            if _is_row_number(rows, x) and position.meta["val"].dim() == 1:  # type: ignore[union-attr]
                return x, position  # type: ignore[return-value]
        return None
    if is_call(n, aten.gather.default) and n.args[1] == 1:
        x, index = n.args[0], n.args[2]
        position = _expanded_position(index)
        if position is not None and x.meta["val"].dim() == 3:  # type: ignore[union-attr]
            if same_size(n.meta["val"].shape[2], x.meta["val"].shape[2]):  # type: ignore[union-attr]
                return x, position  # type: ignore[return-value]
    return None


def _is_row_number(rows: Any, x: Any) -> bool:
    if is_call(rows, aten.arange.default):
        end = rows.args[0]
    elif is_call(rows, aten.arange.start) and rows.args[0] == 0:
        end = rows.args[1]
    else:
        return False
    size = end.meta["val"] if isinstance(end, Node) else end
    return same_size(size, x.meta["val"].shape[0])


def _expanded_position(index: Any) -> Node | None:
    """position [B] behind ``position.view(-1, 1, 1).expand(-1, 1, E)`` in any order of views."""
    sizes = index.meta["val"].shape
    if len(sizes) != 3 or not same_size(sizes[1], 1):
        return None
    while is_call(
        index,
        aten.expand.default,
        aten.view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.repeat.default,
    ):
        below = index.args[0]
        if is_call(index, aten.repeat.default) and not all(
            same_size(s, 1) for s in below.meta["val"].shape[1:]
        ):
            return None
        index = below
        if index.meta["val"].dim() == 1:
            return index if same_size(index.meta["val"].shape[0], sizes[0]) else None
    return None
