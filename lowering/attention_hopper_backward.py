"""Jagged attention on Hopper, backward: dK and dV by tiles of keys, dQ by tiles of queries.

Two kernels of one shape. Each of two consumers owns 64 rows (K and V, or Q and dO) and a stream of
pairs of tiles (Q and dO, or K and V) passes by. P and dS never leave the registers: as the left
operand of the next product they go straight back to the matrix units. That takes seven products
instead of five, but no atomics, so results repeat bit for bit. The formulas stand in
``attention_triton_backward``. Under a causal mask a tile of keys begins at the first block of
queries that sees one of them, and a tile of queries at the last block of keys that one sees; of
those that follow, few need the mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_gradients import (
    copy_for_keys,
    fetch_pair,
    row_values,
    skip,
    transposed_gradient,
    transposed_weights,
    weights,
)
from .hopper_tiles import (
    GROUP_ROWS,
    INF,
    LOG2E,
    accumulator,
    blocks,
    dealt,
    left_operand,
    new_ring,
    put_tile,
    read_tile,
    seen_by,
    seen_from,
    turns,
    zero_tail,
)


@gluon.jit
def fetch_queries(
    Q, DOUT, OUT, LSE, tile, own, lses, use, row, head, GROUP: gl.constexpr, H: gl.constexpr,
    D: gl.constexpr, SOFTMAX: gl.constexpr,
):  # fmt: skip
    """What consumer GROUP keeps for a tile: Q and dO, for softmax also O and LSE."""
    fetch_pair(own, use, Q, DOUT, tile.start, tile.length, row, head * D)
    if SOFTMAX:
        own.fetch(use, 2, OUT, tile.start, tile.length, row, head * D)
        lse = row_values(LSE, tile.start, tile.length, row, H, head, INF)
        lses.index(GROUP).store(lse * LOG2E)
        mbarrier.arrive(own.full.index(GROUP))


@gluon.jit
def copy_for_queries(
    Q, K, V, DOUT, OUT, LSE, TILES, own, stream, lses, H: gl.constexpr, SHARE: gl.constexpr,
    D: gl.constexpr, CAUSAL: gl.constexpr, SOFTMAX: gl.constexpr,
):  # fmt: skip
    """The copying warp: what both consumers keep, then keys and values, last block first."""
    step = 0
    use = 0
    use_2 = 1
    for turn in range(turns(TILES, H)):
        i = dealt(turn)
        tile = read_tile(TILES, i // H)
        head = i % H
        fetch_queries(Q, DOUT, OUT, LSE, tile, own, lses, use, tile.first, head, 0, H, D, SOFTMAX)
        use += 2
        second = tile.first + GROUP_ROWS
        if second < tile.length:
            fetch_queries(Q, DOUT, OUT, LSE, tile, own, lses, use_2, second, head, 1, H, D, SOFTMAX)
            use_2 += 2
        start = tile.other_start
        length = tile.other_length
        count = blocks(seen_by(second + GROUP_ROWS, tile, CAUSAL))
        for j in range(count):
            row = (count - 1 - j) * GROUP_ROWS
            fetch_pair(stream, step, K, V, start, length, row, head // SHARE * D)
            step += 1


@gluon.jit
def two_products(a, b, stream, step):
    """Starts a X^T and b Y^T with the pair (X, Y) of the stream; both are in flight."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    zeros = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, S)
    x = stream.tile(step, 0).permute((1, 0))
    y = stream.tile(step, 1).permute((1, 0))
    first = warpgroup_mma(a, x, zeros, use_acc=False, is_async=True)
    return first, warpgroup_mma(b, y, zeros, use_acc=False, is_async=True)


@gluon.jit
def key_step(
    own, use, dk, dv, stream, lses, deltas, factors, step, row, reach, scale, D: gl.constexpr,
    ACT: gl.constexpr, FACTOR: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """dK and dV with what one block of queries adds."""
    P: gl.constexpr = left_operand(accumulator(D))
    stream.wait(step)
    slot = step % stream.size
    k = own.tile_afresh(use, 0)
    scores, dp_token = two_products(k, own.tile_afresh(use, 1), stream, step)
    s = warpgroup_mma_wait(1, deps=[scores])
    p, slope = transposed_weights(
        s, lses, factors, slot, row, reach, scale, ACT, k.dtype, FACTOR, MASK
    )
    dv_token = warpgroup_mma(gl.convert_layout(p, P), stream.tile(step, 1), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp_token])
    ds = transposed_gradient(dp, slope, deltas, factors, slot, ACT, FACTOR).to(k.dtype)
    dk_token = warpgroup_mma(gl.convert_layout(ds, P), stream.tile(step, 0), dk, is_async=True)
    dv, dk = warpgroup_mma_wait(0, deps=[dv_token, dk_token])
    stream.release(step)
    return dk, dv, step + 1


@gluon.jit
def key_consumer(
    DK, DV, TILES, own, stream, lses, deltas, factors, buffer, scale, GROUP: gl.constexpr,
    H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    ACT: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys; scores are transposed, keys by queries."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    W: gl.constexpr = accumulator(D)
    step = 0
    use = GROUP
    for turn in range(turns(TILES, H)):
        i = dealt(turn)
        tile = read_tile(TILES, i // H)
        first = tile.first + GROUP * GROUP_ROWS
        begin = seen_from(tile.first, tile, CAUSAL)
        count = blocks(tile.other_length) - begin
        if first < tile.length:
            own.wait(use)
            dk = gl.zeros([GROUP_ROWS, D], gl.float32, W)
            dv = gl.zeros([GROUP_ROWS, D], gl.float32, W)
            if CAUSAL:
                ahead = seen_from(first, tile, CAUSAL) - begin
                shift = tile.length - tile.other_length
                reach = first - shift + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, S))
                clear = blocks(gl.maximum(first - shift + (GROUP_ROWS - 1), 0)) - begin
                # One block at least, see ``seen_from``.
                clear = gl.minimum(gl.maximum(clear, ahead + 1), count)
                for _ in range(SHARE):
                    step = skip(stream, step, ahead)
                    for j in range(ahead, clear):
                        row = (begin + j) * GROUP_ROWS
                        dk, dv, step = key_step(
                            own, use, dk, dv, stream, lses, deltas, factors, step, row, reach,
                            scale, D, ACT, FACTOR, True,
                        )  # fmt: skip
                    for _ in range(clear, count):
                        dk, dv, step = key_step(
                            own, use, dk, dv, stream, lses, deltas, factors, step, 0, 0, scale, D,
                            ACT, FACTOR, False,
                        )  # fmt: skip
            else:
                for _ in range(count * SHARE):
                    dk, dv, step = key_step(
                        own, use, dk, dv, stream, lses, deltas, factors, step, 0, 0, scale, D, ACT,
                        FACTOR, False,
                    )  # fmt: skip
            own.release(use)
            use += 2
            if ACT != "softmax" and DK.dtype != gl.float16:
                dv = dv * scale
            tile = read_tile(TILES, i // H)  # again: the loop has no registers to spare
            first = tile.first + GROUP * GROUP_ROWS
            column = i % H * D
            dv_buffer = buffer.index(2 * GROUP)
            dk_buffer = buffer.index(2 * GROUP + 1)
            put_tile(DV, dv_buffer, dv, tile.start, tile.length, first, column, D, 1)
            put_tile(DK, dk_buffer, dk * scale, tile.start, tile.length, first, column, D, 1)
        else:
            step = skip(stream, step, count * SHARE)
    tma.store_wait(0)


@gluon.jit
def query_step(
    q, do, dq, lse, delta, factor, stream, step, key, limit, scale, D: gl.constexpr,
    ACT: gl.constexpr, FACTOR: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """dQ with what one block of keys adds; with MASK a row sees the keys before its ``limit``."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    P: gl.constexpr = left_operand(accumulator(D))
    stream.wait(step)
    scores, dp_token = two_products(q, do, stream, step)
    s = warpgroup_mma_wait(1, deps=[scores])
    live = 0
    if MASK:
        live = (key + gl.arange(0, GROUP_ROWS, gl.SliceLayout(0, S)))[None, :] < limit
    _, slope = weights(s, lse, live, scale, ACT, gl.float32, MASK)
    dp = warpgroup_mma_wait(0, deps=[dp_token])
    if ACT == "softmax":
        if FACTOR is not None:
            dp = dp * factor
        dp = dp - delta
    ds = gl.convert_layout((dp * slope).to(q.dtype), P)
    # Waited for at once: taken a step later it was no faster, and wrong at D = 64.
    dq = warpgroup_mma(ds, stream.tile(step, 0), dq)
    stream.release(step)
    return dq, step + 1


@gluon.jit
def query_consumer(
    DQ, DELTA, OUT_SCALE, TILES, own, stream, lses, buffer, scale, GROUP: gl.constexpr,
    H: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, ACT: gl.constexpr,
    FACTOR: gl.constexpr,
):  # fmt: skip
    """dQ of 64 queries, with Q and dO in registers: from shared memory they would be read again for
    every tile of keys, more than it can deliver. For softmax also their DELTA = rowsum(dO * O)."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    W: gl.constexpr = accumulator(D)
    A: gl.constexpr = left_operand(S)
    step = 0
    use = GROUP
    for turn in range(turns(TILES, H)):
        i = dealt(turn)
        tile = read_tile(TILES, i // H)
        head = i % H
        first = tile.first + GROUP * GROUP_ROWS
        every = blocks(seen_by(tile.first + 2 * GROUP_ROWS, tile, CAUSAL))
        if first < tile.length:
            rows = first + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, S))
            lse = 0.0
            delta = 0.0
            factor = 1.0
            if FACTOR is not None:
                places = (tile.start + rows) * FACTOR
                factor = gl.load(OUT_SCALE + places, mask=rows < tile.length, other=0.0)[:, None]
            own.wait(use)
            q = own.tile(use, 0).load(A)
            do = own.tile(use, 1).load(A)
            if ACT == "softmax":
                out = own.tile(use, 2).load(A)
                sums = gl.sum(out.to(gl.float32) * do.to(gl.float32), 1)
                sums = gl.convert_layout(sums, gl.SliceLayout(1, S))
                gl.store(DELTA + (tile.start + rows) * H + head, sums, mask=rows < tile.length)
                delta = sums[:, None]
                lse = lses.index(GROUP).load(gl.SliceLayout(1, S))[:, None]
            # Ordinary reads come before the copy engine's next write only by this fence: without
            # it results change from run to run, rarely and by little.
            fence_async_shared()
            own.release(use)
            use += 2
            dq = gl.zeros([GROUP_ROWS, D], gl.float32, W)
            count = every
            clear = every
            limit = 0
            if CAUSAL:
                shift = tile.other_length - tile.length
                count = blocks(seen_by(first + GROUP_ROWS, tile, CAUSAL))
                # One block at least is masked, see ``seen_from``.
                clear = gl.maximum(gl.minimum((first + shift + 1) // GROUP_ROWS, count - 1), 0)
                limit = (rows + (shift + 1))[:, None]
                step = skip(stream, step, every - count)
                for j in range(clear, count):
                    key = (count - 1 + clear - j) * GROUP_ROWS
                    dq, step = query_step(
                        q, do, dq, lse, delta, factor, stream, step, key, limit, scale, D, ACT,
                        FACTOR, True,
                    )  # fmt: skip
            for _ in range(clear):
                dq, step = query_step(
                    q, do, dq, lse, delta, factor, stream, step, 0, limit, scale, D, ACT, FACTOR,
                    False,
                )  # fmt: skip
            dq = dq * scale
            if ACT != "softmax" and FACTOR is not None:
                dq = dq * gl.convert_layout(factor, W)
            put_tile(DQ, buffer.index(GROUP), dq, tile.start, tile.length, first, head * D, D)
        else:
            step = skip(stream, step, every)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["total"])
def key_kernel(
    Q, K, V, DOUT, DK, DV, DK_ROWS, DV_ROWS, LSE, DELTA, OUT_SCALE, TILES, total, scale,
    H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    ACT: gl.constexpr, FACTOR: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """DK, DV [total, H, D] (descriptors, and pointers to the same).

    TILES: keys over queries, in blocks of 128. FACTOR: the stride of OUT_SCALE, or None.
    """
    SOFTMAX: gl.constexpr = ACT == "softmax"
    VECTORS: gl.constexpr = SOFTMAX or FACTOR is not None
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    zero_tail(DK_ROWS, TILES, total, H, D)
    zero_tail(DV_ROWS, TILES, total, H, D)
    own = new_ring(K, 2, 2, 1, 1)
    stream = new_ring(K, STAGES, 2, 2 if VECTORS else 1, 2)
    buffer = gl.allocate_shared_memory(DK.dtype, [4] + DK.block_shape, DK.layout)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, GROUP_ROWS], VECTOR)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, GROUP_ROWS], VECTOR)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, GROUP_ROWS], VECTOR)
    fence_async_shared()
    gl.warp_specialize([
        (key_consumer, (DK, DV, TILES, own, stream, lses, deltas, factors, buffer, scale, 0, H,
                        SHARE, D, CAUSAL, ACT, FACTOR)),
        (key_consumer, (DK, DV, TILES, own, stream, lses, deltas, factors, buffer, scale, 1, H,
                        SHARE, D, CAUSAL, ACT, FACTOR)),
        (copy_for_keys, (Q, K, V, DOUT, LSE, DELTA, OUT_SCALE, TILES, own, stream, lses, deltas,
                         factors, H, SHARE, D, CAUSAL, SOFTMAX, FACTOR)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit(do_not_specialize=["total"])
def query_kernel(
    Q, K, V, DOUT, OUT, DQ, DQ_ROWS, LSE, DELTA, OUT_SCALE, TILES, total, scale, H: gl.constexpr,
    SHARE: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, ACT: gl.constexpr,
    FACTOR: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """DQ [total, H, D] (a descriptor, and a pointer to the same); for softmax DELTA [total, H] too,
    which ``key_kernel`` reads.

    TILES: queries over keys, in blocks of 128.
    """
    SOFTMAX: gl.constexpr = ACT == "softmax"
    zero_tail(DQ_ROWS, TILES, total, H, D)
    own = new_ring(Q, 2, 3 if SOFTMAX else 2, 2 if SOFTMAX else 1, 1)
    stream = new_ring(Q, STAGES, 2, 1, 2)
    buffer = gl.allocate_shared_memory(DQ.dtype, [2] + DQ.block_shape, DQ.layout)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lses = gl.allocate_shared_memory(gl.float32, [2, GROUP_ROWS], VECTOR)
    fence_async_shared()
    gl.warp_specialize([
        (query_consumer, (DQ, DELTA, OUT_SCALE, TILES, own, stream, lses, buffer, scale, 0, H, D,
                          CAUSAL, ACT, FACTOR)),
        (query_consumer, (DQ, DELTA, OUT_SCALE, TILES, own, stream, lses, buffer, scale, 1, H, D,
                          CAUSAL, ACT, FACTOR)),
        (copy_for_queries, (Q, K, V, DOUT, OUT, LSE, TILES, own, stream, lses, H, SHARE, D, CAUSAL,
                            SOFTMAX)),
    ], [4, 1], [240, 24])  # fmt: skip
