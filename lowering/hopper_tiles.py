"""What the Hopper kernels of jagged attention share: tiles, descriptors, rings, activations.

Tiles are 64 rows of one head, fetched and written by the tensor copy engine (TMA) through "ragged"
descriptors that stop at a sequence's end. Each kernel has one warp that issues copies and two or
three groups of four warps that compute; between them go rings of slots in shared memory. Programs
are persistent and walk a list of tiles, most work first (``tile_lists``).
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from gemcompile.ops import tiles

ROWS = 64  # of a tile of one consumer
MAX_ROWS = 2**30  # a tensor may have, for the descriptors
TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}

GROUP_ROWS = gl.constexpr(ROWS)
FAR = gl.constexpr(MAX_ROWS)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))

# Of a list of tiles (gemcompile.ops.tiles).
HEADER = gl.constexpr(tiles.HEADER)
RECORD = gl.constexpr(tiles.RECORD)


@lru_cache(maxsize=1024)
def _form(width: int, stride: int, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    """All of a descriptor but the tensor: rows of ``width`` elements, ``stride`` apart."""
    block = [1, 1, rows, columns]
    return {
        "shape": [0x7FFF0000, 0x7FFF0000, MAX_ROWS, width],
        "strides": [2**34 - stride, stride, stride, 1],
        "block_shape": block,
        "layout": gl.NVMMASharedLayout.get_default_for(block, TYPES[dtype]),
        "padding": "zero",
    }


def descriptor(x: Tensor, rows: int = ROWS, columns: int | None = None) -> TensorDescriptor:
    """Copies of ``rows`` rows of one head of x [T, H, D], heads side by side in a row.

    ``columns`` are a head's, or fewer: so many from the column on that a copy names.

    Rows past a sequence's end read as zero and are not written. The hardware checks bounds only at
    the end of a dimension, so two more dimensions are laid before the rows: addresses wrap around
    at 64 bits, and with coordinates (FAR, start + length, FAR - length + row, column) the end of
    the sequence falls on the end of the rows' dimension (as in ``triton.tools.ragged_tma``).
    """
    _, heads, dim = x.shape
    made = TensorDescriptor.__new__(TensorDescriptor)  # its checks take longer than all the rest
    vars(made).update(_form(heads * dim, x.stride(0), rows, columns or dim, x.dtype), base=x)
    return made


@aggregate
class Tile:
    """One tile of the list: its first row within its sequence, and both sides of the sequence."""

    first: gl.tensor
    start: gl.tensor
    length: gl.tensor
    other_start: gl.tensor
    other_length: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, start, length, other_start, other_length):
        self.first = first
        self.start = start
        self.length = length
        self.other_start = other_start
        self.other_length = other_length


@gluon.jit
def read_tile(TILES, i):
    p = TILES + HEADER + RECORD * i
    return Tile(gl.load(p), gl.load(p + 1), gl.load(p + 2), gl.load(p + 3), gl.load(p + 4))


@gluon.jit
def turns(TILES, H: gl.constexpr):
    """How many tiles this program takes, of all heads."""
    total = gl.load(TILES) * H
    rounds = total // gl.num_programs(0)
    return rounds + (place(rounds) < total - rounds * gl.num_programs(0)).to(gl.int32)


@gluon.jit
def place(turn):
    """Which tile of the ``turn``-th round this program takes: every other round is dealt backwards,
    so that nobody always gets the longest."""
    last = gl.num_programs(0) - 1
    return gl.program_id(0) + turn % 2 * (last - 2 * gl.program_id(0))


@gluon.jit
def dealt(turn):
    """The number of this program's ``turn``-th tile: heads change fastest."""
    return turn * gl.num_programs(0) + place(turn)


@gluon.jit
def blocks(length):
    return (length + GROUP_ROWS - 1) // GROUP_ROWS


@gluon.jit
def seen_by(queries, tile, CAUSAL: gl.constexpr):
    """How many keys (the first ones) the first ``queries`` of a sequence see; tile: of queries."""
    if CAUSAL:
        shift = tile.other_length - tile.length
        return gl.maximum(gl.minimum(queries, tile.length) + shift, 0)
    else:
        return tile.other_length


@gluon.jit
def seen_from(key, tile, CAUSAL: gl.constexpr):
    """The first block of queries that sees ``key`` or later ones; tile: of keys.

    A loop over blocks that need the mask comes before one over those that do not. Where it could be
    left out, ptxas of CUDA 12.8 reads descriptors in the second that it computes before the first
    only, so it is made to take one block at least.
    """
    if CAUSAL:
        shift = tile.length - tile.other_length
        return gl.maximum(key - shift, 0) // GROUP_ROWS
    else:
        return 0


@gluon.jit
def afresh(i):
    """i, but no compiler knows."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1
    )


@aggregate
class Ring:
    """``size`` slots of ``parts`` tiles that the copying warp fills and consumers empty in turn.

    The i-th use of the ring has slot i % size. A barrier knows only the parity of its phase, so
    every consumer must wait for and release every use, also one that it has nothing to do with.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    size: gl.constexpr
    parts: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, size, parts):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.size = gl.constexpr(size)
        self.parts = gl.constexpr(parts)

    @gluon.jit
    def acquire(self, i):
        """Waits until the slot may be filled, and says that a tile for each part will come."""
        mbarrier.wait(self.empty.index(i % self.size), ((i // self.size) & 1) ^ 1)
        bytes: gl.constexpr = self.parts * self.tiles.shape[3] * self.tiles.shape[4] * 2
        mbarrier.expect(self.full.index(i % self.size), bytes)

    @gluon.jit
    def fetch(self, i, part, desc, start, length, row, column):
        """Starts copying rows from ``row`` on of a sequence into one part of an acquired slot."""
        tile = self.tiles.index(i % self.size * self.parts + part)
        coordinates = [FAR, start + length, FAR - length + row, column]
        tma.async_copy_global_to_shared(desc, coordinates, self.full.index(i % self.size), tile)

    @gluon.jit
    def wait(self, i):
        """Waits until the slot is full."""
        mbarrier.wait(self.full.index(i % self.size), (i // self.size) & 1)

    @gluon.jit
    def tile(self, i, part):
        """One part of the slot, [rows, D]."""
        rows: gl.constexpr = self.tiles.shape[3]
        dim: gl.constexpr = self.tiles.shape[4]
        return self.tiles.index(i % self.size * self.parts + part).reshape([rows, dim])

    @gluon.jit
    def tile_afresh(self, i, part):
        """The same, located anew: compilers keep the descriptors of a tile that a loop reads again
        and again in registers, sixteen for 128 columns, and spill where there are none left."""
        rows: gl.constexpr = self.tiles.shape[3]
        dim: gl.constexpr = self.tiles.shape[4]
        return self.tiles.index(afresh(i % self.size * self.parts + part)).reshape([rows, dim])

    @gluon.jit
    def release(self, i):
        """Gives the slot back; after ordinary reads of it, ``fence_async_shared`` comes first."""
        mbarrier.arrive(self.empty.index(i % self.size))


@gluon.jit
def new_ring(
    desc, SIZE: gl.constexpr, PARTS: gl.constexpr, FILLERS: gl.constexpr, CONSUMERS: gl.constexpr
):
    """A ring for tiles of ``desc``; FILLERS arrivals make a slot full, CONSUMERS empty."""
    tiles = gl.allocate_shared_memory(desc.dtype, [SIZE * PARTS] + desc.block_shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SIZE):
        mbarrier.init(full.index(i), count=FILLERS)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return Ring(tiles, full, empty, SIZE, PARTS)


@gluon.jit
def put_tile(
    desc, buffer, x, start, length, row, column, D: gl.constexpr, PENDING: gl.constexpr = 0
):
    """Writes x [64, D] to rows from ``row`` on; returns while the copy still reads the buffer.

    At first waits until at most PENDING earlier copies, from other buffers, do so.
    """
    tma.store_wait(PENDING)
    gl.thread_barrier()
    buffer.reshape([GROUP_ROWS, D]).store(x.to(buffer.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(desc, [FAR, start + length, FAR - length + row, column], buffer)


@builtin
def copy_and_add(desc, coordinates, source, _semantic=None):
    """Starts adding a tile to global memory by the copy engine; Gluon 3.6 has no name for it."""
    handles = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, handles, source.handle)


@gluon.jit
def zero_tail(X, TILES, total, H: gl.constexpr, D: gl.constexpr):
    """Zeroes the rows of contiguous X [total, H, D] that belong to no sequence."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    columns = gl.arange(0, D, L)
    zeros = gl.zeros([D], X.dtype.element_ty, L)
    for row in range(gl.load(TILES + 1) + gl.program_id(0), total, gl.num_programs(0)):
        for h in range(H):
            p = X + (row.to(gl.int64) * H + h) * D + columns  # type: ignore[attr-defined]
            gl.store(p, zeros)


@gluon.constexpr_function
def accumulator(columns):
    """Layout of a [64, columns] result of a product by one group of four warps."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def left_operand(parent):
    """Layout of a 16-bit left operand held in registers."""
    return gl.DotOperandLayout(operand_index=0, parent=parent, k_width=2)


# Each element-wise activation is x (1 + tanh t) / 2 with x = s * scale, t = x (A + B x^2): exactly
# so for gelu_tanh and silu. For gelu, A and B are fitted: within 3.4e-4, its derivative within
# 6.8e-4. The tanh instruction errs by 2^-11, the rounding to bfloat16 that follows by 2^-9.


@gluon.jit
def tanh_fast(x):
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def tanh_argument(s, scale, ACT: gl.constexpr):
    """(t, slope) with act(x) = x (1 + tanh t) / 2 for x = s * scale, and slope = 2 dt/ds."""
    if ACT == "silu":
        return s * (0.5 * scale), scale
    else:
        gl.static_assert(ACT == "gelu" or ACT == "gelu_tanh")
        A: gl.constexpr = 0.7978845608 if ACT == "gelu_tanh" else 0.7999
        B: gl.constexpr = 0.0356774081 if ACT == "gelu_tanh" else 0.034975
        w = A * scale + (B * scale * scale * scale) * (s * s)
        return s * w, 6.0 * w - (4.0 * A) * scale


@gluon.jit
def activate(s, scale, ACT: gl.constexpr):
    """act(s * scale) * 2 / scale; the factor is left to the end of a row."""
    t, _ = tanh_argument(s, scale, ACT)
    return s + s * tanh_fast(t)


@gluon.jit
def activate_and_derive(s, scale, ACT: gl.constexpr):
    """(act(s * scale) / scale, act'(s * scale))."""
    t, slope = tanh_argument(s, scale, ACT)
    h = 0.5 + 0.5 * tanh_fast(t)
    p = s * h
    return p, h + (p - p * h) * slope
