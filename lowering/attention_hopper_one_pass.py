"""Jagged attention on Hopper, backward in one pass: five products instead of the seven of
``attention_hopper_backward``, for sequences long enough to pay for the rest.

Two consumers own 64 keys each, and their dK and dV. dQ needs dS of all 128 keys: each consumer
writes its dS to shared memory and, once both have, computes half of the columns of dQ, which the
copy engine adds to a float32 buffer in global memory. Tiles of keys add in any order, so dQ may
differ in its last bits from run to run; dK and dV repeat.

A step begins with its scores at hand: their product is started at the end of the step before and
runs while dQ leaves the registers.
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
    skip,
    stream_queries,
    transposed_gradient,
    transposed_weights,
)
from .hopper_tiles import (
    FAR,
    GROUP_ROWS,
    accumulator,
    blocks,
    copy_and_add,
    dealt,
    left_operand,
    new_ring,
    put_tile,
    read_tile,
    seen_from,
    turns,
    zero_tail,
)


@gluon.jit
def copy_for_tiles(
    Q, K, V, DOUT, LSE, DELTA, OUT_SCALE, TILES, own, stream, lses, deltas, factors,
    H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    SOFTMAX: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """The copying warp: 128 rows of K and V, then the queries that see them."""
    step = 0
    for turn in range(turns(TILES, H)):
        i = dealt(turn)
        tile = read_tile(TILES, i // H)
        fetch_pair(own, turn, K, V, tile.start, tile.length, tile.first, i % H * D)
        step = stream_queries(
            Q, DOUT, LSE, DELTA, OUT_SCALE, tile, stream, lses, deltas, factors, step, i % H, H,
            SHARE, D, CAUSAL, SOFTMAX, FACTOR,
        )  # fmt: skip


@gluon.jit
def start_scores(k, stream, step):
    """Starts K Q^T of one use of the stream."""
    zeros = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, accumulator(GROUP_ROWS))
    q = stream.tile(step, 0).permute((1, 0))
    return warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)


@gluon.jit
def add_tile(DQ, sums, dq, end, below, column):
    """Adds dq [64, 64] to DQ by way of the buffer ``sums``."""
    tma.store_wait(0)
    gl.thread_barrier()
    sums.reshape([GROUP_ROWS, GROUP_ROWS]).store(dq)
    fence_async_shared()
    gl.thread_barrier()
    copy_and_add(DQ, [FAR, end, below, column], sums)


@gluon.jit
def exchange_gradient(ds, pairs, written, read, step, GROUP: gl.constexpr):
    """Writes a consumer's half of dS of 128 keys, once both have read what the slot held."""
    mbarrier.wait(read.index(step % 2), ((step // 2) & 1) ^ 1)
    both = pairs.index(step % 2)
    both.slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0).store(ds)
    fence_async_shared()
    mbarrier.arrive(written.index(step % 2))


@gluon.jit
def start_last_queries(pairs, k_columns, written, step):
    """Starts what the step before ``step`` adds to a block of dQ, once both halves of dS are in."""
    mbarrier.wait(written.index((step + 1) % 2), (((step + 1) // 2) & 1) ^ 1)
    zeros = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, accumulator(GROUP_ROWS))
    both = pairs.index((step + 1) % 2).permute((1, 0))
    return warpgroup_mma(both, k_columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def one_pass_step(
    s, dk, dv, own, use, DQ, stream, lses, deltas, factors, pairs, written, read, sums, step,
    again, more, end, last, column, row, reach, scale, GROUP: gl.constexpr, D: gl.constexpr,
    ACT: gl.constexpr, FACTOR: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """From the scores of a block of queries: what it adds to dK and dV, what the block before adds
    to DQ (``again``: there was one, from row ``last`` on), and the next scores (``more``: there are
    some)."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    P: gl.constexpr = left_operand(accumulator(D))
    slot = step % stream.size
    zeros = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, S)
    do = stream.tile(step, 1)
    v = own.tile_afresh(use, 1).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    p, slope = transposed_weights(
        s, lses, factors, slot, row, reach, scale, ACT, do.dtype, FACTOR, MASK
    )
    dv_token = warpgroup_mma(gl.convert_layout(p, P), do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp_token])
    ds = transposed_gradient(dp, slope, deltas, factors, slot, ACT, FACTOR).to(do.dtype)
    exchange_gradient(ds, pairs, written, read, step, GROUP)
    dk_token = warpgroup_mma(gl.convert_layout(ds, P), stream.tile(step, 0), dk, is_async=True)
    k_columns = own.tile_afresh(use, 0).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=1)
    dq_token = start_last_queries(pairs, k_columns, written, step)
    dv, dk = warpgroup_mma_wait(1, deps=[dv_token, dk_token])
    stream.release(step)
    if more:  # else the scores are of no use, and what the slot holds does not matter
        stream.wait(step + 1)
    k = own.tile_afresh(use, 0).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)
    scores = start_scores(k, stream, step + 1)
    dq = warpgroup_mma_wait(1, deps=[dq_token])
    if again:  # else it is of no use, and FAR keeps it out
        mbarrier.arrive(read.index((step + 1) % 2))
    add_tile(DQ, sums, dq, end, last, column)
    s = warpgroup_mma_wait(0, deps=[scores])
    return s, dk, dv


@gluon.jit
def one_pass_consumer(
    DQ, DK, DV, TILES, own, stream, lses, deltas, factors, pairs, written, read, sums, scale,
    GROUP: gl.constexpr, H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr,
    CAUSAL: gl.constexpr, ACT: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, and half of the columns of what 128 keys add to dQ."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    W: gl.constexpr = accumulator(D)
    step = 0
    for turn in range(turns(TILES, H)):
        i = dealt(turn)
        tile = read_tile(TILES, i // H)
        first = tile.first + GROUP * GROUP_ROWS
        # The loop over queries counts rows as the descriptors do, up to FAR.
        end = tile.other_start + tile.other_length
        zero = FAR - tile.other_length
        begin = zero + seen_from(tile.first, tile, CAUSAL) * GROUP_ROWS
        own.wait(turn)
        k = own.tile(turn, 0).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)
        dk = gl.zeros([GROUP_ROWS, D], gl.float32, W)
        dv = gl.zeros([GROUP_ROWS, D], gl.float32, W)
        if begin < FAR:
            stream.wait(step)
        s = warpgroup_mma_wait(0, deps=[start_scores(k, stream, step)])
        last = FAR + 0
        column = (i % H * SHARE) * D + GROUP * GROUP_ROWS
        for member in range(SHARE):
            clear = begin
            if CAUSAL:
                shift = tile.length - tile.other_length
                reach = first - shift + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, S))
                clear = zero + blocks(first - shift + (GROUP_ROWS - 1)) * GROUP_ROWS
                clear = gl.maximum(clear, begin + GROUP_ROWS)
                clear = gl.minimum(clear, zero + blocks(tile.other_length) * GROUP_ROWS)
                for below in range(begin, clear, GROUP_ROWS):
                    more = (below + GROUP_ROWS < FAR) | (member < SHARE - 1)
                    s, dk, dv = one_pass_step(
                        s, dk, dv, own, turn, DQ, stream, lses, deltas, factors, pairs,
                        written, read, sums, step, last < FAR, more, end, last, column,
                        below - zero, reach, scale, GROUP, D, ACT, FACTOR, True,
                    )  # fmt: skip
                    step += 1
                    last = below
                    column = (i % H * SHARE + member) * D + GROUP * GROUP_ROWS
            for below in range(clear, FAR, GROUP_ROWS):
                more = (below + GROUP_ROWS < FAR) | (member < SHARE - 1)
                s, dk, dv = one_pass_step(
                    s, dk, dv, own, turn, DQ, stream, lses, deltas, factors, pairs, written,
                    read, sums, step, last < FAR, more, end, last, column, 0, 0, scale, GROUP, D,
                    ACT, FACTOR, False,
                )  # fmt: skip
                step += 1
                last = below
                column = (i % H * SHARE + member) * D + GROUP * GROUP_ROWS
        if last < FAR:
            k_columns = own.tile(turn, 0).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=1)
            dq = warpgroup_mma_wait(0, deps=[start_last_queries(pairs, k_columns, written, step)])
            mbarrier.arrive(read.index((step + 1) % 2))
            add_tile(DQ, sums, dq, end, last, column)
        own.release(turn)
        if ACT != "softmax" and k.dtype != gl.float16:
            dv = dv * scale
        tile = read_tile(TILES, i // H)  # again: the loop has no registers to spare
        first = tile.first + GROUP * GROUP_ROWS
        column = i % H * D
        if first < tile.length:
            place = sums._reinterpret(DK.dtype, DK.block_shape, DK.layout)
            put_tile(DV, place, dv, tile.start, tile.length, first, column, D)
            put_tile(DK, place, dk * scale, tile.start, tile.length, first, column, D)
    tma.store_wait(0)


@gluon.jit
def narrow_half(
    HALF: gl.constexpr, dk, dv, own, use, stream, lses, deltas, factors, pairs, step, row, reach,
    scale, ACT: gl.constexpr, FACTOR: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """(dK's and dV's products, in flight) of 64 of the 128 keys; leaves their dS in ``pairs``."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    P: gl.constexpr = left_operand(S)
    slot = step % stream.size
    zeros = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, S)
    do = stream.tile(step, 1)
    k = own.tile_afresh(use, 0).slice(HALF * GROUP_ROWS, GROUP_ROWS, dim=0)
    v = own.tile_afresh(use, 1).slice(HALF * GROUP_ROWS, GROUP_ROWS, dim=0)
    scores = start_scores(k, stream, step)
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[scores])
    p, slope = transposed_weights(
        s, lses, factors, slot, row - HALF * GROUP_ROWS, reach, scale, ACT, do.dtype, FACTOR, MASK
    )
    dv_token = warpgroup_mma(gl.convert_layout(p, P), do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp_token])
    ds = transposed_gradient(dp, slope, deltas, factors, slot, ACT, FACTOR).to(do.dtype)
    pairs.slice(HALF * GROUP_ROWS, GROUP_ROWS, dim=0).store(ds)
    q = stream.tile(step, 0)
    return warpgroup_mma(gl.convert_layout(ds, P), q, dk, is_async=True), dv_token


@gluon.jit
def narrow_step(
    dk, dv, dk_2, dv_2, own, use, DQ, stream, lses, deltas, factors, pairs, sums, step, end, below,
    column, row, reach, scale, ACT: gl.constexpr, FACTOR: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """At head dimension 64 a consumer owns 128 keys, and all of the columns of what they add to dQ:
    it shares nothing with the other, so nothing has to be started early."""
    stream.wait(step)
    dk_token, dv_token = narrow_half(
        0, dk, dv, own, use, stream, lses, deltas, factors, pairs, step, row, reach, scale, ACT,
        FACTOR, MASK,
    )  # fmt: skip
    dv, dk = warpgroup_mma_wait(0, deps=[dv_token, dk_token])
    dk_token, dv_token = narrow_half(
        1, dk_2, dv_2, own, use, stream, lses, deltas, factors, pairs, step, row, reach, scale, ACT,
        FACTOR, MASK,
    )  # fmt: skip
    fence_async_shared()
    gl.thread_barrier()
    zeros = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, accumulator(GROUP_ROWS))
    k = own.tile_afresh(use, 0)
    dq_token = warpgroup_mma(pairs.permute((1, 0)), k, zeros, use_acc=False, is_async=True)
    dv_2, dk_2 = warpgroup_mma_wait(1, deps=[dv_token, dk_token])
    stream.release(step)
    dq = warpgroup_mma_wait(0, deps=[dq_token])
    add_tile(DQ, sums, dq, end, below, column)
    return dk, dv, dk_2, dv_2, step + 1


@gluon.jit
def narrow_consumer(
    DQ, DK, DV, TILES, own, stream, lses, deltas, factors, pairs, sums, scale,
    GROUP: gl.constexpr, H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr,
    CAUSAL: gl.constexpr, ACT: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """dK and dV of 128 keys, and what they add to dQ."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    step = 0
    use = GROUP
    for turn in range(turns(TILES, H)):
        i = dealt(turn)
        tile = read_tile(TILES, i // H)
        first = tile.first + GROUP * 2 * GROUP_ROWS
        end = tile.other_start + tile.other_length
        zero = FAR - tile.other_length
        begin = seen_from(tile.first, tile, CAUSAL)
        count = blocks(tile.other_length) - begin
        if first < tile.length:
            ahead = seen_from(first, tile, CAUSAL) - begin
            begin = zero + (begin + ahead) * GROUP_ROWS
            own.wait(use)
            dk = gl.zeros([GROUP_ROWS, D], gl.float32, S)
            dv = gl.zeros([GROUP_ROWS, D], gl.float32, S)
            dk_2 = gl.zeros([GROUP_ROWS, D], gl.float32, S)
            dv_2 = gl.zeros([GROUP_ROWS, D], gl.float32, S)
            for head in range(i % H * SHARE, i % H * SHARE + SHARE):
                step = skip(stream, step, ahead)
                clear = begin
                if CAUSAL:
                    shift = tile.length - tile.other_length
                    reach = first - shift + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, S))
                    clear = zero + blocks(first - shift + (2 * GROUP_ROWS - 1)) * GROUP_ROWS
                    clear = gl.maximum(clear, begin + GROUP_ROWS)
                    clear = gl.minimum(clear, zero + blocks(tile.other_length) * GROUP_ROWS)
                    for below in range(begin, clear, GROUP_ROWS):
                        dk, dv, dk_2, dv_2, step = narrow_step(
                            dk, dv, dk_2, dv_2, own, use, DQ, stream, lses, deltas, factors, pairs,
                            sums, step, end, below, head * D, below - zero, reach, scale, ACT,
                            FACTOR, True,
                        )  # fmt: skip
                for below in range(clear, FAR, GROUP_ROWS):
                    dk, dv, dk_2, dv_2, step = narrow_step(
                        dk, dv, dk_2, dv_2, own, use, DQ, stream, lses, deltas, factors, pairs,
                        sums, step, end, below, head * D, 0, 0, scale, ACT, FACTOR, False,
                    )  # fmt: skip
            own.release(use)
            use += 2
            if ACT != "softmax" and DK.dtype != gl.float16:
                dv = dv * scale
                dv_2 = dv_2 * scale
            tile = read_tile(TILES, i // H)  # again: the loop has no registers to spare
            first = tile.first + GROUP * 2 * GROUP_ROWS
            start = tile.start
            length = tile.length
            column = i % H * D
            place = sums._reinterpret(DK.dtype, [2] + DK.block_shape, DK.layout).index(0)
            put_tile(DV, place, dv, start, length, first, column, D)
            put_tile(DK, place, dk * scale, start, length, first, column, D)
            if first + GROUP_ROWS < length:
                put_tile(DV, place, dv_2, start, length, first + GROUP_ROWS, column, D)
                put_tile(DK, place, dk_2 * scale, start, length, first + GROUP_ROWS, column, D)
        else:
            step = skip(stream, step, count * SHARE)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["total"])
def one_pass_kernel(
    Q, K, V, DOUT, DQ, DK, DV, DK_ROWS, DV_ROWS, LSE, DELTA, OUT_SCALE, TILES, total, scale,
    H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    ACT: gl.constexpr, FACTOR: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """DK, DV [total, H, D] (descriptors, and pointers to the same), and adds to DQ (a descriptor of
    float32, half a head wide) what is still to be multiplied by scale.

    K and V are descriptors of 128 rows. TILES: keys over queries, in blocks of 128. DELTA as by
    ``prepare_kernel``. FACTOR: the stride of OUT_SCALE, or None.
    """
    SOFTMAX: gl.constexpr = ACT == "softmax"
    VECTORS: gl.constexpr = SOFTMAX or FACTOR is not None
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    zero_tail(DK_ROWS, TILES, total, H, D)
    zero_tail(DV_ROWS, TILES, total, H, D)
    stream = new_ring(Q, STAGES, 2, 2 if VECTORS else 1, 2)
    pairs = gl.allocate_shared_memory(Q.dtype, [2, 2 * GROUP_ROWS, GROUP_ROWS], PAIRS)
    written = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(written.index(i), count=2)
        mbarrier.init(read.index(i), count=2)
    sums = gl.allocate_shared_memory(gl.float32, [2] + DQ.block_shape, DQ.layout)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, GROUP_ROWS], VECTOR)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, GROUP_ROWS], VECTOR)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, GROUP_ROWS], VECTOR)
    if D == GROUP_ROWS:  # each consumer has keys of its own
        own = new_ring(K, 2, 2, 1, 1)
        fence_async_shared()
        gl.warp_specialize([
            (narrow_consumer, (DQ, DK, DV, TILES, own, stream, lses, deltas, factors,
                               pairs.index(0), sums.index(0), scale, 0, H, SHARE, D, CAUSAL, ACT,
                               FACTOR)),
            (narrow_consumer, (DQ, DK, DV, TILES, own, stream, lses, deltas, factors,
                               pairs.index(1), sums.index(1), scale, 1, H, SHARE, D, CAUSAL, ACT,
                               FACTOR)),
            (copy_for_keys, (Q, K, V, DOUT, LSE, DELTA, OUT_SCALE, TILES, own, stream, lses, deltas,
                             factors, H, SHARE, D, CAUSAL, SOFTMAX, FACTOR)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        own = new_ring(K, 1, 2, 1, 2)
        fence_async_shared()
        gl.warp_specialize([
            (one_pass_consumer, (DQ, DK, DV, TILES, own, stream, lses, deltas, factors, pairs,
                                 written, read, sums.index(0), scale, 0, H, SHARE, D, CAUSAL, ACT,
                                 FACTOR)),
            (one_pass_consumer, (DQ, DK, DV, TILES, own, stream, lses, deltas, factors, pairs,
                                 written, read, sums.index(1), scale, 1, H, SHARE, D, CAUSAL, ACT,
                                 FACTOR)),
            (copy_for_tiles, (Q, K, V, DOUT, LSE, DELTA, OUT_SCALE, TILES, own, stream, lses,
                              deltas, factors, H, SHARE, D, CAUSAL, SOFTMAX, FACTOR)),
        ], [4, 1], [240, 24])  # fmt: skip
