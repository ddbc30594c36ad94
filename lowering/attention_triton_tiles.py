"""What the attention kernels share: loads of tiles, scores, activations, dropout.

Conventions. A tile of queries has BM rows, a tile of keys BN. Helpers that see both take their row
vectors already expanded, so that one body serves S [BM, BN] and S^T [BN, BM]. Softmax works in base
2: its scores come multiplied by log2(e). Dead rows (past a sequence's end, or masked keys) are read
as zero, never as what memory holds, so NaN there stays there.
"""

import triton
import triton.language as tl

from gemcompile.ops.tiles import HEADER, RECORD

# Numbers that change from call to call: no kernel is compiled for a value of theirs.
VARYING = ["total_q", "total_k", "drop_below", "keep_scale", "scale"]
VARYING += ["left", "right"]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # finite, so that LOWEST - LOWEST is 0

_HEADER: tl.constexpr = tl.constexpr(HEADER)
_RECORD: tl.constexpr = tl.constexpr(RECORD)

# gemcompile.ops.dropout computes the same hash with the same constants.
MIX_1: tl.constexpr = tl.constexpr(0x7FEB352D)
MIX_2: tl.constexpr = tl.constexpr(0x846CA68B - 2**32)
GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B9 - 2**32)
SALT: tl.constexpr = tl.constexpr(0x5BD1E995)


@triton.jit
def load_rows(
    P, row, stride, live, D: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr, ALL: tl.constexpr
):
    """[R, BLOCK_D] from int64 ``row`` on. Rows that are not live (none if ALL) and columns past D
    read as zero."""
    r = tl.arange(0, R)
    d = tl.arange(0, BLOCK_D)
    p = P + row * stride + (r[:, None] * stride + d[None, :])
    if ALL and D == BLOCK_D:
        return tl.load(p)
    if ALL:
        return tl.load(p, mask=(d < D)[None, :], other=0.0)
    if D == BLOCK_D:
        return tl.load(p, mask=live[:, None], other=0.0)
    return tl.load(p, mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_rows(P, row, stride, live, x, D: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr):
    """Writes the live rows of x [R, BLOCK_D] from int64 ``row`` on."""
    r = tl.arange(0, R)
    d = tl.arange(0, BLOCK_D)
    p = P + row * stride + (r[:, None] * stride + d[None, :])
    tl.store(p, x.to(P.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])


@triton.jit
def zero_tail(
    P, offsets_end, block, total, stride, heads, D: tl.constexpr, BLOCK_D: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Zeroes those rows of block ``block`` of P [total, heads, D] that belong to no sequence."""
    row = block.to(tl.int64) * R
    r = row + tl.arange(0, R)
    if row + R > offsets_end:
        live = (r >= offsets_end) & (r < total)
        zeros = tl.zeros([R, BLOCK_D], tl.float32)
        for h in range(heads):
            store_rows(P + h * D, row, stride, live, zeros, D, BLOCK_D, R)


@triton.jit
def list_header(TILES):
    """(number of tiles, rows in use as int64) of a list of tiles (``gemcompile.ops.tiles``)."""
    return tl.load(TILES), tl.load(TILES + 1).to(tl.int64)


@triton.jit
def list_tile(TILES, i):
    """Tile i: (first row within the sequence, start, length, other start, other length, sequence);
    starts as int64."""
    p = TILES + _HEADER + _RECORD * i.to(tl.int64)
    starts = tl.load(p + 1).to(tl.int64), tl.load(p + 3).to(tl.int64)
    return tl.load(p), starts[0], tl.load(p + 2), starts[1], tl.load(p + 4), tl.load(p + 5)


@triton.jit
def places(POSITIONS, start, ranks, live, HAS: tl.constexpr):
    """A row's place in its padded sequence: given, or its rank."""
    if HAS:
        return tl.load(POSITIONS + start + ranks, mask=live, other=0)
    return ranks


@triton.jit
def live_keys(KEY_MASK, start, ranks, length, HAS: tl.constexpr):
    live = ranks < length
    if HAS:
        live = live & (tl.load(KEY_MASK + start + ranks, mask=live, other=0) != 0)
    return live


@triton.jit
def bias_tile(BIAS, q_places, k_places, live, stride_m, stride_n):
    """float32 tile of a bias whose pointer stands at its batch and head.

    A table of relative places is a bias whose row stride is minus that of its columns, and whose
    pointer stands at place 0 (where a query's rank is not its place, moved by the difference).
    """
    p = BIAS + q_places.to(tl.int64) * stride_m + k_places.to(tl.int64) * stride_n
    return tl.load(p, mask=live, other=0.0).to(tl.float32)


@triton.jit
def mix(x):
    x = x ^ (x >> 15)
    x = x * MIX_1
    x = x ^ (x >> 15)
    return x * MIX_2


@triton.jit
def keep_tile(SEED, rows, head, keys, drop_below):
    """Which entries survive dropout; rows (packed) and keys (ranks) broadcast together."""
    seed = tl.load(SEED)
    low = seed.to(tl.int32)
    high = (seed >> 32).to(tl.int32)
    scrambled = mix(mix(low ^ SALT) ^ high)
    start = mix(mix(rows.to(tl.int32) + scrambled) ^ (head.to(tl.int32) * GOLDEN))
    step = mix(start ^ SALT) | 1
    return mix(keys.to(tl.int32) * step + start) >= drop_below


@triton.jit
def normal(x):
    """(cumulative distribution, density * sqrt(2 pi)) of the normal distribution.

    Abramowitz and Stegun 7.1.26, within 1.5e-7 of erf: one exponential serves both, at a fraction
    of what the library's erf costs.
    """
    density = tl.exp2(x * x * (-0.5 * LOG2E))
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))
    tail = -0.726576014 + t * 0.530702714
    tail = 0.127414796 + t * (-0.142248368 + t * (0.710706871 + t * tail))
    tail = t * tail * density
    return tl.where(x > 0, 1.0 - tail, tail), density


@triton.jit
def activate(x, ACT: tl.constexpr):
    """f(x) of an element-wise activation."""
    if ACT == "gelu":
        cdf, _ = normal(x)
        return x * cdf
    elif ACT == "gelu_tanh":
        u = x * (1.5957691216057308 + 0.07135481282636786 * x * x)
        return x * tl.sigmoid(u)
    elif ACT == "silu":
        return x * tl.sigmoid(x)
    elif ACT == "relu":
        return tl.maximum(x, 0.0)
    elif ACT == "relu2":
        y = tl.maximum(x, 0.0)
        return y * y
    elif ACT == "sigmoid":
        return tl.sigmoid(x)
    elif ACT == "leaky_relu":
        return tl.where(x > 0, x, 0.01 * x)
    elif ACT == "hardswish":
        return x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * 0.16666666666666666
    elif ACT == "identity":
        return x
    else:  # a user's function, of x to (f(x), f'(x))
        y, _ = ACT(x)
        return y


@triton.jit
def derivative(x, ACT: tl.constexpr):
    """f'(x) of an element-wise activation."""
    if ACT == "gelu":
        cdf, density = normal(x)
        return cdf + x * 0.3989422804014327 * density
    elif ACT == "gelu_tanh":
        u = x * (1.5957691216057308 + 0.07135481282636786 * x * x)
        s = tl.sigmoid(u)
        return s + x * s * (1.0 - s) * (1.5957691216057308 + 0.21406443847910357 * x * x)
    elif ACT == "silu":
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif ACT == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    elif ACT == "relu2":
        return 2.0 * tl.maximum(x, 0.0)
    elif ACT == "sigmoid":
        s = tl.sigmoid(x)
        return s * (1.0 - s)
    elif ACT == "leaky_relu":
        return tl.where(x > 0, 1.0, 0.01)
    elif ACT == "hardswish":
        inside = x * 0.3333333333333333 + 0.5
        return tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, 1.0, inside))
    elif ACT == "identity":
        return x * 0.0 + 1.0
    else:
        _, slope = ACT(x)
        return slope


@triton.jit
def store_head(
    P, row, head, live, x, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr
):
    """Writes one head's rows of a contiguous [rows, H, D]."""
    store_rows(P + head * D, row, H * D, live, x, D, BLOCK_D, R)


@triton.jit(do_not_specialize=["batch", "total"])
def tail_kernel(
    X, OFFSETS, batch, total, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Zeroes the rows of X [total, H, D] past the last offset; blocks before it leave at once."""
    end = tl.load(OFFSETS + batch).to(tl.int64)
    zero_tail(X, end, tl.program_id(0), total, H * D, H, D, BLOCK_D, R)
