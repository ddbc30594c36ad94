"""Jagged attention with few queries a sequence, such as pooled queries: supports, launches.

Portable Triton; backward is one sweep over the keys, where others take two and read K and V twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from gemcompile.ops.attention_args import SHORT, AttentionArgs, AttentionRequest
from gemcompile.ops.kernels import Kernel, register
from gemcompile.target import Target

from .attention_triton_launch import (
    TAIL_PROGRAMS,
    by_tma,
    constants,
    multiprocessors,
    numbers,
    optional_inputs,
    ragged,
    refusal,
    shared_kib,
    strides,
    unit_stride,
)
from .attention_triton_short_kernels import (
    backward_kernel,
    combine_kernel,
    forward_kernel,
    order_kernel,
)
from .launch import launch
from .tuning import Tiling, padded_dim

SMALLEST_CHUNK = 512  # keys; less is not worth a program of its own
MOST_CHUNKS = 64
_WIDE_KIB = 208  # of shared memory, for head dimension 256
_REFUSED = ("bias", "window", "block", "history")


def supports(target: Target, request: AttentionRequest) -> str | None:
    if not request.short_queries:
        return f"a group of heads has more than {SHORT} queries in a sequence"
    if request.causal and request.positions:
        return "it has no causal masks by positions"
    present = [name for name in _REFUSED if getattr(request, name)]
    if present:
        return f"it has no {' and no '.join(present)}"
    dim = max(request.head_dim, request.value_dim)
    if 128 < dim <= 256 and shared_kib(target) < _WIDE_KIB and target.device == "cuda":
        return f"head dimension {dim} does not fit on chip on {target}"
    return refusal(target, request)


def tiling(kind: str, a: AttentionArgs, target: Target) -> Tiling:
    """For the "forward" or "backward" kernel, chosen by measurement on an H200.

    BM holds the queries of a whole group of heads.
    """
    group = a.q.shape[1] // a.k.shape[1]
    rows = max(16, int(triton.next_power_of_2(group * max(1, a.max_q))))
    width = padded_dim(a.q.shape[2]) + padded_dim(a.v.shape[2])
    if a.q.dtype is torch.float32:
        return Tiling(rows, 32, 4, 1)
    few = kind == "backward" and rows <= 32
    keys = 32 if few or width > 256 else 64
    stages = 1 if target.device == "hip" else 3 if few or kind == "forward" else 2
    # The tiles of queries and keys, and as much again as one of keys for results.
    while stages > 1 and 2 * width * (rows + keys * (stages + 1)) > 1024 * shared_kib(target):
        stages -= 1
    return Tiling(rows, keys, 4, stages)


def forward(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    q, k, v = (unit_stride(x) for x in (a.q, a.k, a.v))
    total, heads = q.shape[:2]
    out = q.new_empty(total, heads, v.shape[2])
    lse = q.new_empty((total, heads) if a.softmax else (0,), dtype=torch.float32)
    target = Target.of(q.device)
    tiles = tiling("forward", a, target)
    tma = a.key_mask is None and by_tma(target, k, v)
    chunk, chunks = chunking(a)
    sums, tops, totals = _sums(out, lse, chunks)
    with torch.cuda.device_of(q):
        launch(
            *(forward_kernel, _grid(a, chunks)),
            *(q, *(ragged(x, tiles.BN) if tma else x for x in (k, v))),
            *(out, lse, sums, tops, totals, longest_first(a.k_offsets)),
            *(a.q_offsets, a.k_offsets, *optional_inputs(a)),
            *strides(q, k, v),
            *numbers(a),
            *(_batch(a), chunk, TAIL_PROGRAMS, total),
            **_constants(a, tiles),
            TMA=tma,
        )
        if chunks > 1:
            _combine(out, lse, sums, tops, totals, a, chunk)
    return out, lse


def backward(
    dout: Tensor, a: AttentionArgs, out: Tensor, lse: Tensor, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, dout = (unit_stride(x) for x in (a.q, a.k, a.v, dout))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    target = Target.of(q.device)
    tiles = tiling("backward", a, target)
    tma = a.key_mask is None and by_tma(target, k, v)
    chunk, chunks = chunking(a)
    sums, nothing, _ = _sums(dq, lse[:0], chunks)
    with torch.cuda.device_of(q):
        launch(
            *(backward_kernel, _grid(a, chunks)),
            *(q, *(ragged(x, tiles.BN) if tma else x for x in (k, v))),
            *(out, dout, lse, dq, dk, dv, sums, longest_first(a.k_offsets)),
            *(a.q_offsets, a.k_offsets, *optional_inputs(a)),
            *strides(q, k, v, dout),
            *numbers(a),
            *(_batch(a), chunk, TAIL_PROGRAMS, q.shape[0], k.shape[0]),
            **_constants(a, tiles),
            TMA=tma,
        )
        if chunks > 1:
            _combine(dq, nothing, sums, nothing, nothing, a, chunk)
    return dq, dk, dv, q.new_empty(0)


def longest_first(offsets: Tensor) -> Tensor:
    """int32 [B]: the numbers of the sequences that ``offsets`` cuts, longest first."""
    batch, size = offsets.shape[0] - 1, 16
    order = offsets.new_empty(batch, dtype=torch.int32)
    if batch:
        launch(order_kernel, (triton.cdiv(batch, size),), order, offsets, batch, R=size, CHUNK=256)
    return order


def chunking(a: AttentionArgs) -> tuple[int, int]:
    """(keys a chunk, most chunks a sequence may have).

    A chunk is about what one of four programs on a multiprocessor has to do when all work is dealt
    evenly. The sums of chunks take at most as much memory as K.
    """
    keys, kv_heads = a.k.shape[:2]
    share = keys * kv_heads // (4 * multiprocessors(a.q.device))
    chunk = max(SMALLEST_CHUNK, int(triton.next_power_of_2(max(1, share))))
    room = a.k.numel() // max(1, 2 * a.q.numel())
    longest = max(1, min(a.max_k, keys)) if _batch(a) else 1
    most = max(1, min(MOST_CHUNKS, room))
    while triton.cdiv(longest, chunk) > most:
        chunk *= 2
    return chunk, int(triton.cdiv(longest, chunk))


def _sums(like: Tensor, lse: Tensor, chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for (sums, tops, totals) of every chunk; of size 0 where no sequence has two."""
    count = chunks if chunks > 1 else 0
    sums = like.new_empty((count, *like.shape), dtype=torch.float32)
    tops, totals = lse.new_empty((2, count, *lse.shape))
    return sums, tops, totals


def _combine(
    x: Tensor, lse: Tensor, sums: Tensor, tops: Tensor, totals: Tensor, a: AttentionArgs, chunk: int
) -> None:
    """Fills the rows of x, and of lse for a softmax, that belong to sequences in chunks."""
    total, heads, dim = x.shape
    launch(
        *(combine_kernel, (_batch(a) * a.k.shape[1],)),
        *(x, lse, sums, tops, totals, a.q_offsets, a.k_offsets, chunk, total),
        H=heads,
        GROUP=heads // a.k.shape[1],
        D=dim,
        BLOCK_D=padded_dim(dim),
        BM=tiling("forward", a, Target.of(x.device)).BM,
        SOFTMAX=lse.numel() > 0,
    )


def _grid(a: AttentionArgs, chunks: int) -> tuple[int, int]:
    return _batch(a) * a.k.shape[1] + TAIL_PROGRAMS, chunks


def _batch(a: AttentionArgs) -> int:
    return a.q_offsets.shape[0] - 1


def _constants(a: AttentionArgs, tiles: Tiling) -> dict[str, Any]:
    sizes = {"BM": tiles.BM, "BN": tiles.BN}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return constants(a) | sizes | options


register(Kernel("short", "jagged_attention", supports, forward))
register(Kernel("short", "jagged_attention_backward", supports, backward))
