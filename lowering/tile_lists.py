"""The lists of tiles that jagged kernels walk (``gemcompile.ops.tiles``), made on the device.

Sorted without a sort: for each of its tiles a program counts, sequence by sequence, how many tiles
have more work. That is quadratic in the batch, but a comparison costs next to nothing:
microseconds for thousands of sequences.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemcompile.ops.attention_args import AttentionArgs
from gemcompile.ops.kernels import Kernel, register
from gemcompile.ops.tiles import HEADER, RECORD, SECTIONS, reach, room, section_ends
from gemcompile.target import Target

from .launch import launch

SEQUENCES = 16  # of one program
COMPARED = 256  # sequences at a time
SHARES = 16  # programs for the same sequences, where each of their tiles counts anew

_HEADER: tl.constexpr = tl.constexpr(HEADER)
_RECORD: tl.constexpr = tl.constexpr(RECORD)


def attention_tiles(
    q_offsets: Tensor,
    k_offsets: Tensor,
    q_rows: int,
    k_rows: int,
    causal: bool,
    window_left: int,
    window_right: int,
) -> Tensor:
    size = section_ends(q_rows, k_rows, q_offsets.shape[0] - 1)[-1]
    tiles = q_offsets.new_empty(size, dtype=torch.int32)
    right = reach(causal, window_left, window_right)
    _launch(tiles, q_offsets, k_offsets, q_rows, k_rows, right, SECTIONS)
    return tiles


def tiles_for(a: AttentionArgs, side: int, block: int) -> Tensor:
    """The list of tiles of ``block`` rows of one side: shared by all layers, or made now."""
    q_rows, k_rows, batch = a.q.shape[0], a.k.shape[0], a.q_offsets.shape[0] - 1
    if a.tiles is not None and (side, block) in SECTIONS:
        i = SECTIONS.index((side, block))
        starts = [0, *section_ends(q_rows, k_rows, batch)]
        return a.tiles[starts[i] : starts[i + 1]]
    rows = k_rows if side else q_rows
    tiles = a.q_offsets.new_empty(room(rows, block, batch), dtype=torch.int32)
    right = reach(a.causal, a.window_left, a.window_right)
    _launch(tiles, a.q_offsets, a.k_offsets, q_rows, k_rows, right, ((side, block),))
    return tiles


def _launch(
    tiles: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    q_rows: int,
    k_rows: int,
    right: int | None,
    sections: tuple[tuple[int, int], ...],
) -> None:
    batch = q_offsets.shape[0] - 1
    with torch.cuda.device_of(q_offsets):
        shares = 1 if right is None else SHARES
        launch(
            *(tile_list_kernel, (max(1, triton.cdiv(batch, SEQUENCES)), len(sections), shares)),
            *(tiles, q_offsets, k_offsets, q_rows, k_rows, batch, min(right or 0, 2**30)),
            SECTIONS=sections,
            LIMITED=right is not None,
            R=SEQUENCES,
            CHUNK=COMPARED,
        )


@triton.jit
def _lengths(OFFSETS, b, live):
    """(starts, lengths) of sequences b as int32, 0 where not live."""
    start = tl.load(OFFSETS + b, mask=live, other=0).to(tl.int32)
    return start, tl.load(OFFSETS + b + 1, mask=live, other=0).to(tl.int32) - start


@triton.jit
def _work(side, first, block, own, other, right, LIMITED: tl.constexpr):
    """Rows of the other side that a tile sees."""
    if LIMITED:
        of_queries = first + block + other - own + right
        of_keys = other - tl.maximum(0, first - (own - other) - right)
        work = tl.where(side == 0, of_queries, of_keys)
        return tl.minimum(other, tl.maximum(0, work))
    return other


@triton.jit
def _with_more(side, work, block, own, other, right, LIMITED: tl.constexpr):
    """How many tiles of a sequence have more than ``work`` rows to see."""
    count = (own + block - 1) // block
    some = count
    if LIMITED:
        few = tl.maximum(0, work - (other - own) - right) // block  # the first queries see less
        near = (tl.maximum(0, own + right - work) + block - 1) // block
        some = tl.where(side == 0, count - tl.minimum(count, few), tl.minimum(count, near))
        some = tl.where(work < 0, count, some)
    return tl.where(other > work, some, 0)


@triton.jit(do_not_specialize=["q_rows", "k_rows", "batch", "right"])
def tile_list_kernel(
    TILES, Q_OFFSETS, K_OFFSETS, q_rows, k_rows, batch, right, SECTIONS: tl.constexpr,
    LIMITED: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One section for each second grid index, R sequences a program, every so many-th tile of them
    for each third index, of which there is one unless LIMITED."""
    begin = 0
    side = 0
    block = 1
    size = 0
    for i in tl.static_range(len(SECTIONS)):
        if i <= tl.program_id(1):
            begin += size
            side = SECTIONS[i][0]
            block = SECTIONS[i][1]
            size = _HEADER + _RECORD * (tl.where(side == 0, q_rows, k_rows) // block + batch)
    b = tl.program_id(0) * R + tl.arange(0, R)
    q_start, lq = _lengths(Q_OFFSETS, b, b < batch)
    k_start, lk = _lengths(K_OFFSETS, b, b < batch)
    own, other = tl.where(side == 0, lq, lk), tl.where(side == 0, lk, lq)
    own_start, other_start = (
        tl.where(side == 0, q_start, k_start), tl.where(side == 0, k_start, q_start),
    )  # fmt: skip
    mine = (own + block - 1) // block
    total = 0
    before = tl.zeros([R], tl.int32)
    share = tl.program_id(2)
    for t in range(share, tl.maximum(1, tl.max(mine, 0)), tl.num_programs(2)):
        work = _work(side, t * block, block, own, other, right, LIMITED)
        if LIMITED or t == 0:
            before = tl.zeros([R], tl.int32)
            for first in range(0, batch, CHUNK):
                c = first + tl.arange(0, CHUNK)
                _, cq = _lengths(Q_OFFSETS, c, c < batch)
                _, ck = _lengths(K_OFFSETS, c, c < batch)
                theirs, across = tl.where(side == 0, cq, ck), tl.where(side == 0, ck, cq)
                # Of equal work, the tiles of earlier sequences come first.
                bar = work[:, None] - (c[None, :] < b[:, None])
                more = _with_more(
                    side, bar, block, theirs[None, :], across[None, :], right, LIMITED
                )
                before += tl.sum(tl.where(c[None, :] == b[:, None], 0, more), 1)
                if t == 0:
                    total += tl.sum((theirs + block - 1) // block, 0)
        rank = t
        if LIMITED:
            rank = tl.where(side == 0, mine - 1 - t, t)  # the last queries see most
        record = TILES + begin + _HEADER + _RECORD * (before + rank)
        keep = t < mine
        tl.store(record, tl.zeros([R], tl.int32) + t * block, mask=keep)
        tl.store(record + 1, own_start, mask=keep)
        tl.store(record + 2, own, mask=keep)
        tl.store(record + 3, other_start, mask=keep)
        tl.store(record + 4, other, mask=keep)
        tl.store(record + 5, b, mask=keep)
    if (tl.program_id(0) == 0) & (share == 0):
        in_use = tl.load(Q_OFFSETS + batch).to(tl.int32)
        if side == 1:
            in_use = tl.load(K_OFFSETS + batch).to(tl.int32)
        tl.store(TILES + begin, total)
        tl.store(TILES + begin + 1, in_use)


def _supports(target: Target, request: object) -> str | None:
    if target.device == "cpu" and not triton.knobs.runtime.interpret:
        return "Triton runs on a CPU only under TRITON_INTERPRET=1"
    return None


register(Kernel("triton", "attention_tiles", _supports, attention_tiles))
