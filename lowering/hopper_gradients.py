"""What both backward passes of jagged attention on Hopper share: the stream of queries past a tile
of keys, and what scores turn into. The formulas stand in ``attention_triton_backward``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)

from .hopper_tiles import (
    GROUP_ROWS,
    INF,
    LOG2E,
    accumulator,
    activate_and_derive,
    dealt,
    read_tile,
    seen_from,
    turns,
)


@gluon.jit
def fetch_pair(ring, use, A, B, start, length, row, column):
    """Rows of two tensors into the slot of a ring."""
    ring.acquire(use)
    ring.fetch(use, 0, A, start, length, row, column)
    ring.fetch(use, 1, B, start, length, row, column)


@gluon.jit
def row_values(VALUES, start, length, row, heads, head, other):
    """VALUES [rows, heads] of 64 rows of a sequence, by one warp; ``other`` past its end."""
    rows = row + gl.arange(0, GROUP_ROWS, gl.BlockedLayout([2], [32], [1], [0]))
    return gl.load(VALUES + (start + rows) * heads + head, mask=rows < length, other=other)


@gluon.jit
def fetch_vectors(
    LSE, DELTA, OUT_SCALE, stream, lses, deltas, factors, step, start, length, row, heads, head,
    SOFTMAX: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """What a slot of the stream holds besides tiles of queries: one number a row."""
    slot = step % stream.size
    if SOFTMAX:
        lse = row_values(LSE, start, length, row, heads, head, INF)
        delta = row_values(DELTA, start, length, row, heads, head, 0.0)
        lses.index(slot).store(lse * LOG2E)
        deltas.index(slot).store(delta)
    if FACTOR is not None:
        factors.index(slot).store(row_values(OUT_SCALE, start, length, row, FACTOR, 0, 0.0))
    if SOFTMAX or FACTOR is not None:
        mbarrier.arrive(stream.full.index(slot))


@gluon.jit
def stream_queries(
    Q, DOUT, LSE, DELTA, OUT_SCALE, tile, stream, lses, deltas, factors, step, kv_head,
    H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    SOFTMAX: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """Q and dO of all SHARE heads that read a tile of keys, with what else a row of them needs."""
    start = tile.other_start
    length = tile.other_length
    begin = seen_from(tile.first, tile, CAUSAL) * GROUP_ROWS
    for head in range(kv_head * SHARE, kv_head * SHARE + SHARE):
        for row in range(begin, length, GROUP_ROWS):
            fetch_pair(stream, step, Q, DOUT, start, length, row, head * D)
            fetch_vectors(
                LSE, DELTA, OUT_SCALE, stream, lses, deltas, factors, step, start, length, row,
                H * SHARE, head, SOFTMAX, FACTOR,
            )  # fmt: skip
            step += 1
    return step


@gluon.jit
def copy_for_keys(
    Q, K, V, DOUT, LSE, DELTA, OUT_SCALE, TILES, own, stream, lses, deltas, factors,
    H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    SOFTMAX: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """The copying warp: K and V of both consumers, then the queries that see them."""
    step = 0
    use = 0
    use_2 = 1
    for turn in range(turns(TILES, H)):
        i = dealt(turn)
        tile = read_tile(TILES, i // H)
        column = i % H * D
        fetch_pair(own, use, K, V, tile.start, tile.length, tile.first, column)
        use += 2
        second = tile.first + K.block_shape[2]
        if second < tile.length:
            fetch_pair(own, use_2, K, V, tile.start, tile.length, second, column)
            use_2 += 2
        step = stream_queries(
            Q, DOUT, LSE, DELTA, OUT_SCALE, tile, stream, lses, deltas, factors, step, i % H, H,
            SHARE, D, CAUSAL, SOFTMAX, FACTOR,
        )  # fmt: skip


@gluon.jit
def skip(stream, step, count):
    """A consumer without rows of its own lets the stream pass."""
    for _ in range(count):
        stream.wait(step)
        stream.release(step)
        step += 1
    return step


@gluon.jit
def weights(s, lse, live, scale, ACT: gl.constexpr, TYPE: gl.constexpr, MASK: gl.constexpr):
    """(P, P's share in dS) of scores; ``lse`` broadcasts to them, in log2; ``live`` for MASK."""
    if ACT == "softmax":
        if MASK:
            s = gl.where(live, s, -INF)
        # At most 1 also for rows past the end, which must stay finite: there K is 0.
        p = gl.exp2(gl.minimum(s * (scale * LOG2E) - lse, 0.0))
        return p, p
    else:
        p, slope = activate_and_derive(s, scale, ACT)
        if MASK:
            p = gl.where(live, p, 0.0)
            slope = gl.where(live, slope, 0.0)
        if TYPE == gl.float16:
            p = p * scale
        return p, slope


@gluon.jit
def column_values(vectors, slot):
    """One number for each column of the transposed scores."""
    return vectors.index(slot).load(gl.SliceLayout(0, accumulator(GROUP_ROWS)))[None, :]


@gluon.jit
def transposed_weights(
    s, lses, factors, slot, row, reach, scale, ACT: gl.constexpr, TYPE: gl.constexpr,
    FACTOR: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """(P for dV, P's share in dS) of 64 keys by the 64 queries from ``row`` on. With MASK a key is
    seen by the queries from its ``reach`` [64] on."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    live = 0
    if MASK:
        queries = row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(0, S))
        live = queries[None, :] >= reach[:, None]
    lse = 0.0
    if ACT == "softmax":
        lse = column_values(lses, slot)
    p, slope = weights(s, lse, live, scale, ACT, TYPE, MASK)
    if FACTOR is not None:
        p = p * column_values(factors, slot)
    return p.to(TYPE), slope


@gluon.jit
def transposed_gradient(dp, slope, deltas, factors, slot, ACT: gl.constexpr, FACTOR: gl.constexpr):
    """dS."""
    if FACTOR is not None:
        dp = dp * column_values(factors, slot)
    if ACT == "softmax":
        dp = dp - column_values(deltas, slot)
    return slope * dp
