"""Block-aligned jagged attention (``block``) in one kernel each way: supports, launches.

Portable Triton. Every row is read and written once, so memory bounds it. Blocks whose tiles do not
fit on chip fall to the next kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from gemcompile.ops.attention_args import AttentionArgs, AttentionRequest
from gemcompile.ops.kernels import Kernel, named, register
from gemcompile.ops.tiles import KEYS, QUERIES
from gemcompile.target import Target

from .attention_triton_blocks_kernels import backward_kernel, forward_kernel
from .attention_triton_launch import (
    TAIL_PROGRAMS,
    by_tma,
    constants,
    fast,
    multiprocessors,
    numbers,
    optional_inputs,
    ragged,
    refusal,
    shared_kib,
    strides,
    unit_stride,
    window,
)
from .launch import launch
from .tile_lists import tiles_for
from .tuning import padded_dim

SMALLEST_TILE = 64  # rows; smaller blocks share one
LARGEST_TILE = 128
_REFUSED = ("positions", "bias", "history")


@dataclass(frozen=True)
class Tiling:
    """Rows of a tile, of which ``span`` are used by ``span // block`` whole blocks."""

    rows: int
    span: int
    num_warps: int
    stages: int


def supports(target: Target, request: AttentionRequest) -> str | None:
    if not request.block:
        return "it is for block-aligned attention only"
    present = [name for name in _REFUSED if getattr(request, name)]
    if present:
        return f"it has no {' and no '.join(present)}"
    return refusal(target, request)


def tiling(kind: str, a: AttentionArgs, target: Target) -> Tiling | None:
    """For the "forward" or "backward" kernel; None where a tile does not fit on chip.

    Two stages fetch the next head's tiles while this one's are at work, by TMA only; chosen by
    measurement on an H200.
    """
    span = a.block * max(1, SMALLEST_TILE // a.block)
    rows = max(16, int(triton.next_power_of_2(span)))
    width = padded_dim(a.q.shape[2]) + padded_dim(a.v.shape[2])
    loaded = a.q.element_size() * rows * (2 * width if kind == "backward" else 1.5 * width)
    scores = a.q.element_size() * rows * rows * (2 if kind == "backward" else 1)
    room = 1024 * shared_kib(target)
    if rows > LARGEST_TILE or loaded + scores > room:
        return None
    two = target.device == "cuda" and int(target.arch) >= 90 and 2 * loaded + scores <= room
    return Tiling(rows, span, 4 if rows <= 64 else 8, 2 if two else 1)


def forward(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    target = Target.of(a.q.device)
    tiles = tiling("forward", a, target)
    if tiles is None or not _batch(a):
        return named("jagged_attention", "triton").run(a)  # type: ignore[no-any-return]
    q, k, v = (unit_stride(x) for x in (a.q, a.k, a.v))
    total, heads = q.shape[:2]
    out = q.new_empty(total, heads, v.shape[2])
    lse = q.new_empty((total, heads) if a.softmax else (0,), dtype=torch.float32)
    tma = a.key_mask is None and by_tma(target, q, k, v)
    listed, grid, heads_each = _grid(a, total, tiles)
    with torch.cuda.device_of(q):
        launch(
            *(forward_kernel, grid),
            *(ragged(x, tiles.rows) if tma else x for x in (q, k, v)),
            *(out, lse, tiles_for(a, QUERIES, tiles.span)),
            *(a.q_offsets, *optional_inputs(a)),
            *strides(q, k, v),
            *window(a),
            *numbers(a),
            *(_batch(a), listed, heads_each, TAIL_PROGRAMS, total),
            **_constants(a, tiles),
            TMA=tma,
        )
    return out, lse


def backward(
    dout: Tensor, a: AttentionArgs, out: Tensor, lse: Tensor, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    target = Target.of(a.q.device)
    tiles = tiling("backward", a, target)
    if tiles is None or not _batch(a):
        following = named("jagged_attention_backward", "triton")
        return following.run(dout, a, out, lse, bias_grad)  # type: ignore[no-any-return]
    q, k, v, dout = (unit_stride(x) for x in (a.q, a.k, a.v, dout))
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    # Tiles are of keys; where lengths differ, some queries may be in none.
    same = a.q_offsets.data_ptr() == a.k_offsets.data_ptr()
    dq = q.new_empty(q.shape) if same else q.new_zeros(q.shape)
    tma = a.key_mask is None and by_tma(target, q, k, v, dout)
    listed, grid, heads_each = _grid(a, k.shape[0], tiles)
    with torch.cuda.device_of(q):
        launch(
            *(backward_kernel, grid),
            *(ragged(x, tiles.rows) if tma else x for x in (q, k, v, dout)),
            *(lse, dq, dk, dv),
            *(ragged(x, tiles.rows) if tma else x for x in (dq, dk, dv)),
            tiles_for(a, KEYS, tiles.span),
            *(a.q_offsets, a.k_offsets, *optional_inputs(a)),
            *strides(q, k, v, dout),
            *window(a),
            *numbers(a),
            *(_batch(a), listed, heads_each, TAIL_PROGRAMS, q.shape[0], k.shape[0]),
            **_constants(a, tiles),
            TMA=tma,
        )
    return dq, dk, dv, q.new_empty(0)


def _batch(a: AttentionArgs) -> int:
    return a.q_offsets.shape[0] - 1


def _grid(a: AttentionArgs, rows: int, tiles: Tiling) -> tuple[int, tuple[int, int], int]:
    """(most tiles there can be, grid, key heads a program): one head where tiles are few."""
    listed = rows // tiles.span + _batch(a)
    kv_heads = a.k.shape[1]
    wanted = 16 * multiprocessors(a.q.device)
    heads_each = kv_heads if listed >= wanted else 1
    return listed, (listed + TAIL_PROGRAMS, triton.cdiv(kv_heads, heads_each)), heads_each


def _constants(a: AttentionArgs, tiles: Tiling) -> dict[str, Any]:
    several = tiles.span > a.block
    return constants(a) | {
        "R": tiles.rows,
        "SPAN": tiles.span,
        "STAGES": tiles.stages,
        "FAST": fast(Target.of(a.q.device), a),
        "WINDOW": a.window,
        "BLOCK": a.block if several else 0,
        "num_warps": tiles.num_warps,
    }


register(Kernel("blocks", "jagged_attention", supports, forward))
register(Kernel("blocks", "jagged_attention_backward", supports, backward))
