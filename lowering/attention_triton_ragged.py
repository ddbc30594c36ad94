"""What the kernels for short queries and for blocks share: tiles by the copy engine or by pointers.

On sm_90 and later the copy engine (TMA) fetches a tile through a "ragged" descriptor, which reads
zeros past a sequence's end (``triton.tools.ragged_tma``); elsewhere, and for tensors that it cannot
address, the same tile is loaded through pointers.
"""

import triton
import triton.language as tl
from triton.tools.ragged_tma import load_ragged, store_ragged

from .attention_triton_tiles import activate, derivative, load_rows, store_head, store_rows


@triton.jit
def load_tile(
    X, start, length, row, head, stride, head_stride, live, D: tl.constexpr,
    BLOCK_D: tl.constexpr, R: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[R, BLOCK_D] of one head from ``row`` of the sequence on that starts at int64 ``start``.

    Rows that are not live read as zero; by TMA (X is a descriptor, D is BLOCK_D) those are exactly
    the rows at or past ``length``.
    """
    if TMA:
        return load_ragged(X, start.to(tl.int32), length, [row, head * D])
    else:
        P = X + head.to(tl.int64) * head_stride
        return load_rows(P, start + row, stride, live, D, BLOCK_D, R, False)


@triton.jit
def store_tile(
    X, start, length, row, head, live, x, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    R: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Writes the live rows of x [R, BLOCK_D] to contiguous X [rows, H, D], as ``load_tile``."""
    if TMA:
        x = x.to(X.dtype)
        store_ragged(X, start.to(tl.int32), length, [row, head * D], x)
    else:
        store_head(X, start + row, head, live, x, H, D, BLOCK_D, R)


@triton.jit
def sequence(OFFSETS, b):
    """(first row as int64, length as int32) of sequence b."""
    start = tl.load(OFFSETS + b).to(tl.int64)
    return start, (tl.load(OFFSETS + b + 1).to(tl.int64) - start).to(tl.int32)


@triton.jit
def tanh_fast(x):
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def activate_and_derive(x, ACT: tl.constexpr, FAST: tl.constexpr):
    """(f(x), f'(x)) of an element-wise activation.

    FAST takes NVIDIA's tanh instruction, for x (1 + tanh t) / 2 with t = x (A + B x^2): exactly so
    for gelu_tanh and silu; for gelu, A and B are fitted (attention_hopper has the same): within
    3.4e-4, its derivative within 6.8e-4, where rounding to bfloat16 errs by 2^-9.
    """
    if FAST and (ACT == "gelu" or ACT == "gelu_tanh" or ACT == "silu"):
        A: tl.constexpr = 0.5 if ACT == "silu" else 0.7978845608 if ACT == "gelu_tanh" else 0.7999
        B: tl.constexpr = 0.0 if ACT == "silu" else 0.0356774081 if ACT == "gelu_tanh" else 0.034975
        w = A + B * (x * x)
        h = 0.5 + 0.5 * tanh_fast(x * w)
        y = x * h
        return y, h + (y - y * h) * (6.0 * w - 4.0 * A)
    else:
        return activate(x, ACT), derivative(x, ACT)


@triton.jit
def zero_rest(
    X, end, part, parts, total, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Zeroes the ``part``-th share of the rows of contiguous X [total, H, D] from ``end`` on."""
    for row in range(end + part * R, total, parts * R):
        zeros = tl.zeros([R, BLOCK_D], tl.float32)
        live = row + tl.arange(0, R) < total
        for h in range(H):
            store_rows(X + h * D, row, H * D, live, zeros, D, BLOCK_D, R)


@triton.jit
def infinite_rest(LSE, end, part, parts, total, H: tl.constexpr, R: tl.constexpr):
    """Likewise makes the rows of LSE [total, H] from ``end`` on +inf, as where no key is seen."""
    for row in range(end + part * R, total, parts * R):
        r = row + tl.arange(0, R)
        for h in range(H):
            nothing = tl.full([R], float("inf"), tl.float32)
            tl.store(LSE + r.to(tl.int64) * H + h, nothing, mask=r < total)
