"""``gem::attention_tiles``: the tiles of a jagged batch, most work first, made on the device.

Attention kernels walk tiles of rows. Which there are depends on the offsets alone, so every layer
with the same offsets and mask shares one list, forward and backward; no value is read back.

A list is int32: a header of 8 numbers, of which [0] is the number of tiles and [1] the rows in use,
then 8 numbers a tile: its first row within its sequence; the sequence's first row and length; the
same two of the other side; the sequence's number; two unused. There is one list for each size of
tile that a kernel may have and each side that may own the tiles (``SECTIONS``), one behind the
other in one tensor.

A tile's work is the number of rows of the other side that it sees; of tiles with equal work those
of earlier sequences come first. Windows that are closed on the left make tiles of about equal work,
which count by the length of the other side.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gemcompile.ops import kernels
from gemcompile.target import Target

QUERIES, KEYS = 0, 1
SECTIONS = (
    *((QUERIES, block) for block in (32, 64, 128, 192)),
    *((KEYS, block) for block in (32, 64, 128)),
)
HEADER = RECORD = 8

_library = torch.library.Library("gem", "FRAGMENT")
_library.define(
    "attention_tiles(Tensor q_offsets, Tensor k_offsets, SymInt q_rows, SymInt k_rows, "
    "bool causal, int window_left, int window_right) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def room(rows: int, block: int, batch: int) -> int:
    """Numbers in a list; there cannot be more than rows // block + batch tiles."""
    return HEADER + RECORD * (rows // block + batch)


def section_ends(q_rows: int, k_rows: int, batch: int) -> list[int]:
    """Where each section of the tensor ends."""
    sizes = [room(k_rows if side else q_rows, block, batch) for side, block in SECTIONS]
    return list(accumulate(sizes))


def reach(causal: bool, window_left: int, window_right: int) -> int | None:
    """How far right of its own place a query sees, where that limits the work of a tile."""
    if window_left >= 0:
        return None
    return 0 if causal else window_right if window_right >= 0 else None


def _reference(
    q_offsets: Tensor,
    k_offsets: Tensor,
    q_rows: int,
    k_rows: int,
    causal: bool,
    window_left: int,
    window_right: int,
) -> Tensor:
    ends = [q_offsets.tolist(), k_offsets.tolist()]
    batch = len(ends[0]) - 1
    right = reach(causal, window_left, window_right)
    pieces = []
    for side, block in SECTIONS:
        own, other = ends[side], ends[1 - side]
        tiles = []
        for b in range(batch):
            n, m = own[b + 1] - own[b], other[b + 1] - other[b]
            for first in range(0, n, block):
                work = _work(side, first, block, n, m, right)
                at = first if side or right is None else -first  # the last queries see most
                tiles.append((-work, b, at, [first, own[b], n, other[b], m, b, 0, 0]))
        numbers = [len(tiles), own[-1], *[0] * 6]
        for *_, record in sorted(tiles):
            numbers += record
        piece = torch.zeros(room(k_rows if side else q_rows, block, batch), dtype=torch.int32)
        piece[: len(numbers)] = torch.tensor(numbers)
        pieces.append(piece)
    return torch.cat(pieces).to(q_offsets.device)


def _work(side: int, first: int, block: int, own: int, other: int, right: int | None) -> int:
    """Rows of the other side that the tile sees; all of them where ``right`` is None."""
    if right is None:
        return other
    if side == QUERIES:  # the keys up to the last query's place
        return min(other, max(0, first + block + other - own + right))
    return min(other, max(0, other - max(0, first - (own - other) - right)))


def _attention_tiles(q_offsets: Tensor, *rest: Any) -> Tensor:
    kernel = kernels.choose("attention_tiles", Target.of(q_offsets.device), None)
    tiles: Tensor = kernel.run(q_offsets, *rest)
    return tiles


def _fake(q_offsets: Tensor, k_offsets: Tensor, q_rows: int, k_rows: int, *_: Any) -> Tensor:
    size = section_ends(q_rows, k_rows, q_offsets.shape[0] - 1)[-1]
    return q_offsets.new_empty(size, dtype=torch.int32)


_library.impl("attention_tiles", _attention_tiles, "CompositeExplicitAutograd")
torch.library.register_fake("gem::attention_tiles", _fake, lib=_library)
kernels.register(
    kernels.Kernel("reference", "attention_tiles", lambda target, _: None, _reference, True)
)
