"""Jagged attention on Hopper, backward: dK and dV by tiles of keys, dQ by tiles of queries.

Two kernels of one shape. Each of two consumers owns 64 rows (K and V, or Q and dO) and a stream of
pairs of tiles (Q and dO, or K and V) passes by. P and dS never leave the registers: as the left
operand of the next product they go straight back to the matrix units. That takes seven products
instead of five, but no atomics, so results repeat bit for bit. The formulas stand in
``attention_triton_backward``.
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

from .hopper_tiles import (
    GROUP_ROWS,
    INF,
    LOG2E,
    accumulator,
    activate_and_derive,
    left_operand,
    new_ring,
    put_tile,
    read_tile,
    zero_tail,
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
def copy_for_keys(
    Q, K, V, DOUT, LSE, DELTA, TILES, own, stream, lses, deltas, H: gl.constexpr,
    SHARE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SOFTMAX: gl.constexpr,
):  # fmt: skip
    """The copying warp: K and V of both consumers, then Q and dO of all SHARE heads that read them,
    for softmax with their LSE and delta."""
    step = 0
    turn = 0
    turn_2 = 1
    for i in range(gl.program_id(0), gl.load(TILES) * H, gl.num_programs(0)):
        tile = read_tile(TILES, i // H)
        column = i % H * D
        fetch_pair(own, turn, K, V, tile.start, tile.length, tile.first, column)
        turn += 2
        second = tile.first + GROUP_ROWS
        if second < tile.length:
            fetch_pair(own, turn_2, K, V, tile.start, tile.length, second, column)
            turn_2 += 2
        start = tile.other_start
        length = tile.other_length
        for head in range(i % H * SHARE, i % H * SHARE + SHARE):
            for row in range(0, length, GROUP_ROWS):
                fetch_pair(stream, step, Q, DOUT, start, length, row, head * D)
                if SOFTMAX:
                    lse = row_values(LSE, start, length, row, H * SHARE, head, INF)
                    delta = row_values(DELTA, start, length, row, H * SHARE, head, 0.0)
                    lses.index(step % STAGES).store(lse * LOG2E)
                    deltas.index(step % STAGES).store(delta)
                    mbarrier.arrive(stream.full.index(step % STAGES))
                step += 1


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
    D: gl.constexpr, SOFTMAX: gl.constexpr,
):  # fmt: skip
    """The copying warp: what both consumers keep, then keys and values."""
    step = 0
    turn = 0
    turn_2 = 1
    for i in range(gl.program_id(0), gl.load(TILES) * H, gl.num_programs(0)):
        tile = read_tile(TILES, i // H)
        head = i % H
        fetch_queries(Q, DOUT, OUT, LSE, tile, own, lses, turn, tile.first, head, 0, H, D, SOFTMAX)
        turn += 2
        second = tile.first + GROUP_ROWS
        if second < tile.length:
            fetch_queries(
                Q, DOUT, OUT, LSE, tile, own, lses, turn_2, second, head, 1, H, D, SOFTMAX
            )
            turn_2 += 2
        start = tile.other_start
        length = tile.other_length
        for row in range(0, length, GROUP_ROWS):
            fetch_pair(stream, step, K, V, start, length, row, head // SHARE * D)
            step += 1


@gluon.jit
def skip(stream, step, count):
    """A consumer without rows of its own lets the stream pass."""
    for _ in range(count):
        stream.wait(step)
        stream.release(step)
        step += 1
    return step


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
def key_consumer(
    DK, DV, TILES, own, stream, lses, deltas, buffer, scale, GROUP: gl.constexpr,
    H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys; scores are transposed, keys by queries."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    W: gl.constexpr = accumulator(D)
    P: gl.constexpr = left_operand(W)
    step = 0
    turn = GROUP
    for i in range(gl.program_id(0), gl.load(TILES) * H, gl.num_programs(0)):
        tile = read_tile(TILES, i // H)
        first = tile.first + GROUP * GROUP_ROWS
        count = (tile.other_length + GROUP_ROWS - 1) // GROUP_ROWS * SHARE
        if first < tile.length:
            own.wait(turn)
            k = own.tile(turn, 0)
            v = own.tile(turn, 1)
            dk = gl.zeros([GROUP_ROWS, D], gl.float32, W)
            dv = gl.zeros([GROUP_ROWS, D], gl.float32, W)
            for _ in range(count):
                stream.wait(step)
                scores, dp_token = two_products(k, v, stream, step)
                s = warpgroup_mma_wait(1, deps=[scores])
                if ACT == "softmax":
                    lse = lses.index(step % STAGES).load(gl.SliceLayout(0, S))
                    p = gl.exp2(gl.minimum(s * (scale * LOG2E) - lse[None, :], 0.0))
                else:
                    p, slope = activate_and_derive(s, scale, ACT)
                p16 = gl.convert_layout(p.to(gl.bfloat16), P)
                dv_token = warpgroup_mma(p16, stream.tile(step, 1), dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=[dp_token])
                if ACT == "softmax":
                    delta = deltas.index(step % STAGES).load(gl.SliceLayout(0, S))
                    ds = p * (dp - delta[None, :])
                else:
                    ds = dp * slope
                ds16 = gl.convert_layout(ds.to(gl.bfloat16), P)
                dk_token = warpgroup_mma(ds16, stream.tile(step, 0), dk, is_async=True)
                dv, dk = warpgroup_mma_wait(0, deps=[dv_token, dk_token])
                stream.release(step)
                step += 1
            own.release(turn)
            turn += 2
            if ACT != "softmax":
                dv = dv * scale
            tile = read_tile(TILES, i // H)  # again: the loop has no registers to spare
            first = tile.first + GROUP * GROUP_ROWS
            column = i % H * D
            dv_buffer = buffer.index(2 * GROUP)
            dk_buffer = buffer.index(2 * GROUP + 1)
            put_tile(DV, dv_buffer, dv, tile.start, tile.length, first, column, D, 1)
            put_tile(DK, dk_buffer, dk * scale, tile.start, tile.length, first, column, D, 1)
        else:
            step = skip(stream, step, count)
    tma.store_wait(0)


@gluon.jit
def query_consumer(
    DQ, DELTA, TILES, own, stream, lses, buffer, scale, GROUP: gl.constexpr, H: gl.constexpr,
    D: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """dQ of 64 queries, with Q and dO in registers: from shared memory they would be read again for
    every tile of keys, more than it can deliver. For softmax also their DELTA = rowsum(dO * O)."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    W: gl.constexpr = accumulator(D)
    A: gl.constexpr = left_operand(S)
    step = 0
    turn = GROUP
    for i in range(gl.program_id(0), gl.load(TILES) * H, gl.num_programs(0)):
        tile = read_tile(TILES, i // H)
        head = i % H
        first = tile.first + GROUP * GROUP_ROWS
        count = (tile.other_length + GROUP_ROWS - 1) // GROUP_ROWS
        if first < tile.length:
            own.wait(turn)
            q = own.tile(turn, 0).load(A)
            do = own.tile(turn, 1).load(A)
            if ACT == "softmax":
                out = own.tile(turn, 2).load(A)
                sums = gl.sum(out.to(gl.float32) * do.to(gl.float32), 1)
                delta = gl.convert_layout(sums, gl.SliceLayout(1, S))
                rows = first + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, S))
                gl.store(DELTA + (tile.start + rows) * H + head, delta, mask=rows < tile.length)
                lse = lses.index(GROUP).load(gl.SliceLayout(1, S))
            # Ordinary reads come before the copy engine's next write only by this fence: without
            # it results change from run to run, rarely and by little.
            fence_async_shared()
            own.release(turn)
            turn += 2
            dq = gl.zeros([GROUP_ROWS, D], gl.float32, W)
            for _ in range(count):
                stream.wait(step)
                scores, dp_token = two_products(q, do, stream, step)
                s = warpgroup_mma_wait(1, deps=[scores])
                if ACT == "softmax":
                    # At most 1 also for rows past the end, which must stay finite: there K is 0.
                    slope = gl.exp2(gl.minimum(s * (scale * LOG2E) - lse[:, None], 0.0))
                else:
                    _, slope = activate_and_derive(s, scale, ACT)
                dp = warpgroup_mma_wait(0, deps=[dp_token])
                if ACT == "softmax":
                    dp = dp - delta[:, None]
                ds16 = gl.convert_layout((dp * slope).to(gl.bfloat16), left_operand(W))
                # Waited for at once: taken a step later it was no faster, and wrong at D = 64.
                dq = warpgroup_mma(ds16, stream.tile(step, 0), dq)
                stream.release(step)
                step += 1
            put_tile(
                DQ, buffer.index(GROUP), dq * scale, tile.start, tile.length, first, head * D, D
            )
        else:
            step = skip(stream, step, count)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["total"])
def key_kernel(
    Q, K, V, DOUT, DK, DV, DK_ROWS, DV_ROWS, LSE, DELTA, TILES, total, scale, H: gl.constexpr,
    SHARE: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """DK, DV [total, H, D] (descriptors, and pointers to the same).

    TILES: keys over queries, in blocks of 128.
    """
    SOFTMAX: gl.constexpr = ACT == "softmax"
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    zero_tail(DK_ROWS, TILES, total, H, D)
    zero_tail(DV_ROWS, TILES, total, H, D)
    own = new_ring(K, 2, 2, D, 1, 1)
    stream = new_ring(K, STAGES, 2, D, 2 if SOFTMAX else 1, 2)
    buffer = gl.allocate_shared_memory(gl.bfloat16, [4, 1, 1, GROUP_ROWS, D], DK.layout)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, GROUP_ROWS], VECTOR)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, GROUP_ROWS], VECTOR)
    fence_async_shared()
    gl.warp_specialize([
        (key_consumer, (DK, DV, TILES, own, stream, lses, deltas, buffer, scale, 0, H, SHARE, D,
                        STAGES, ACT)),
        (key_consumer, (DK, DV, TILES, own, stream, lses, deltas, buffer, scale, 1, H, SHARE, D,
                        STAGES, ACT)),
        (copy_for_keys, (Q, K, V, DOUT, LSE, DELTA, TILES, own, stream, lses, deltas, H, SHARE, D,
                         STAGES, SOFTMAX)),
    ], [4, 1], [232 if SOFTMAX else 240, 40 if SOFTMAX else 24])  # fmt: skip


@gluon.jit(do_not_specialize=["total"])
def query_kernel(
    Q, K, V, DOUT, OUT, DQ, DQ_ROWS, LSE, DELTA, TILES, total, scale, H: gl.constexpr,
    SHARE: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """DQ [total, H, D] (a descriptor, and a pointer to the same); for softmax DELTA [total, H] too,
    which ``key_kernel`` reads.

    TILES: queries over keys, in blocks of 128.
    """
    SOFTMAX: gl.constexpr = ACT == "softmax"
    zero_tail(DQ_ROWS, TILES, total, H, D)
    own = new_ring(Q, 2, 3 if SOFTMAX else 2, D, 2 if SOFTMAX else 1, 1)
    stream = new_ring(Q, STAGES, 2, D, 1, 2)
    buffer = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, GROUP_ROWS, D], DQ.layout)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lses = gl.allocate_shared_memory(gl.float32, [2, GROUP_ROWS], VECTOR)
    fence_async_shared()
    gl.warp_specialize([
        (query_consumer, (DQ, DELTA, TILES, own, stream, lses, buffer, scale, 0, H, D, ACT)),
        (query_consumer, (DQ, DELTA, TILES, own, stream, lses, buffer, scale, 1, H, D, ACT)),
        (copy_for_queries, (Q, K, V, DOUT, OUT, LSE, TILES, own, stream, lses, H, SHARE, D,
                            SOFTMAX)),
    ], [4, 1], [232 if SOFTMAX else 240, 40 if SOFTMAX else 24])  # fmt: skip
