"""Jagged attention on Hopper, forward: copies, scores and outputs overlap within one program.

One warp copies; GROUPS consumers own 64 query rows each and share the keys and values that stream
through two rings. A consumer starts Q K^T of the next tile of keys beside P V of this one, and
works on the scores of the next while P V runs. Two consumers suit short sequences (less rounding
up), three long ones (fewer reads of K and V).

Keys come last block first, so what a mask can hide comes first, and under a causal mask the
consumers of the earlier rows begin a block or two later than the others.

Softmax takes a row's maximum over those first blocks only, and lets later scores exceed it:
float32, and bfloat16 alike, leave room for a factor 2^64. Finding maxima and shrinking sums in
every step would cost more than the exponentials. A tile with a row that grew further, which the
sums tell, is computed once more with a maximum over all keys.
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
    FAR,
    GROUP_ROWS,
    INF,
    LN2,
    LOG2E,
    accumulator,
    activate,
    blocks,
    dealt,
    left_operand,
    new_ring,
    put_tile,
    read_tile,
    seen_by,
    turns,
    zero_tail,
)


@gluon.jit
def copy_in(
    Q, K, V, TILES, queries, keys, values, H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr,
    CAUSAL: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """The copying warp: a tile's queries, then its keys and values 64 rows at a time."""
    step = 0
    for turn in range(turns(TILES, H)):
        i = dealt(turn)
        tile = read_tile(TILES, i // H)
        column = i % H * D
        kv_column = i % H // SHARE * D
        queries.acquire(turn)
        for group in gl.static_range(GROUPS):
            row = tile.first + group * GROUP_ROWS
            queries.fetch(turn, group, Q, tile.start, tile.length, row, column)
        start = tile.other_start
        length = tile.other_length
        count = blocks(seen_by(tile.first + GROUPS * GROUP_ROWS, tile, CAUSAL))
        for j in range(count):
            row = (count - 1 - j) * GROUP_ROWS
            keys.acquire(step)
            keys.fetch(step, 0, K, start, length, row, kv_column)
            values.acquire(step)
            values.fetch(step, 0, V, start, length, row, kv_column)
            step += 1


@gluon.jit
def weigh(
    s, key, limit, top, total, scale, ACT: gl.constexpr, TYPE: gl.constexpr, MASK: gl.constexpr,
    STEADY: gl.constexpr,
):  # fmt: skip
    """From scores of keys from ``key`` on: (P, shrink of what was summed before, top, total).

    With MASK a row sees the keys before its ``limit``, [64, 1] or a scalar. STEADY: ``top`` stays.
    """
    S: gl.constexpr = accumulator(GROUP_ROWS)
    if MASK:
        live = (key + gl.arange(0, GROUP_ROWS, gl.SliceLayout(0, S)))[None, :] < limit
        s = gl.where(live, s, -INF if ACT == "softmax" else 0.0)
    if ACT == "softmax":
        c = scale * LOG2E
        new = top
        if not STEADY:
            new = gl.maximum(top, gl.max(s, 1) * c)
        p = gl.exp2(s * c - new[:, None])
        shrink = gl.exp2(top - new)
        if not STEADY:
            total = total * shrink
        return p.to(TYPE), shrink, new, total + gl.sum(p, 1)
    else:
        p = activate(s, scale, ACT)
        if TYPE == gl.float16:
            p = p * (0.5 * scale)
        return p.to(TYPE), top, top, total


@gluon.jit
def attend(
    q, keys, values, p, out, top, total, step, key, limit, scale, D: gl.constexpr,
    ACT: gl.constexpr, MASK: gl.constexpr, STEADY: gl.constexpr,
):  # fmt: skip
    """P V of use ``step`` beside the scores of use ``step + 1``, whose keys start at ``key``."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    W: gl.constexpr = accumulator(D)
    keys.wait(step + 1)
    zeros = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, S)
    k = keys.tile(step + 1, 0).permute((1, 0))
    scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    values.wait(step)
    sums = warpgroup_mma(p, values.tile(step, 0), out, is_async=True)
    s = warpgroup_mma_wait(1, deps=[scores])
    keys.release(step + 1)
    p, shrink, top, total = weigh(s, key, limit, top, total, scale, ACT, q.dtype, MASK, STEADY)
    out = warpgroup_mma_wait(0, deps=[sums])
    values.release(step)
    if ACT == "softmax" and not STEADY:
        out = out * gl.convert_layout(shrink, gl.SliceLayout(1, W))[:, None]
    return gl.convert_layout(p, left_operand(W)), out, top, total


@gluon.jit
def attend_all(
    q, keys, values, step, count, clear, limit, scale, D: gl.constexpr, CAUSAL: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """(sums, top, total, next step) of 64 queries over ``count`` blocks of keys, of which every
    query sees the ``clear`` earliest."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    W: gl.constexpr = accumulator(D)
    top = gl.full([GROUP_ROWS], -1e30, gl.float32, gl.SliceLayout(1, S))
    total = gl.zeros([GROUP_ROWS], gl.float32, gl.SliceLayout(1, S))
    out = gl.zeros([GROUP_ROWS, D], gl.float32, W)
    if count > 0:
        keys.wait(step)
        zeros = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, S)
        s = warpgroup_mma(q, keys.tile(step, 0).permute((1, 0)), zeros, use_acc=False)
        keys.release(step)
        key = (count - 1) * GROUP_ROWS
        weights, _, top, total = weigh(
            s, key, limit, top, total, scale, ACT, q.dtype, CAUSAL or ACT == "softmax", False
        )
        p = gl.convert_layout(weights, left_operand(W))
        if CAUSAL:  # at most one more block, where lk - lq is no multiple of 64
            for _ in range(clear, count - 1):
                key -= GROUP_ROWS
                p, out, top, total = attend(
                    q, keys, values, p, out, top, total, step, key, limit, scale, D, ACT, True,
                    False,
                )  # fmt: skip
                step += 1
        for _ in range(0, key, GROUP_ROWS):
            p, out, top, total = attend(
                q, keys, values, p, out, top, total, step, 0, limit, scale, D, ACT, False, True
            )
            step += 1
        values.wait(step)
        out = warpgroup_mma(p, values.tile(step, 0), out)
        values.release(step)
        step += 1
    return out, top, total, step


@gluon.jit
def load_block(desc, buffer, ready, start, length, row, column, PHASE: gl.constexpr):
    """A block of keys or values for one consumer alone, which waits for it."""
    gl.thread_barrier()
    bytes: gl.constexpr = GROUP_ROWS * buffer.shape[3] * 2
    mbarrier.expect(ready, bytes)
    coordinates = [FAR, start + length, FAR - length + row, column]
    tma.async_copy_global_to_shared(desc, coordinates, ready, buffer)
    mbarrier.wait(ready, PHASE)


@gluon.jit
def attend_alone(
    q, K, V, buffer, ready, start, length, column, count, limit, scale, D: gl.constexpr
):
    """(sums, top, total) of softmax with a maximum that follows the scores. Slow, seldom taken."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    W: gl.constexpr = accumulator(D)
    top = gl.full([GROUP_ROWS], -1e30, gl.float32, gl.SliceLayout(1, S))
    total = gl.zeros([GROUP_ROWS], gl.float32, gl.SliceLayout(1, S))
    out = gl.zeros([GROUP_ROWS, D], gl.float32, W)
    block = buffer.reshape([GROUP_ROWS, D])
    tma.store_wait(0)
    for j in range(count):
        key = j * GROUP_ROWS
        load_block(K, buffer, ready, start, length, key, column, 0)
        zeros = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, S)
        s = warpgroup_mma(q, block.permute((1, 0)), zeros, use_acc=False)
        p, shrink, top, total = weigh(
            s, key, limit, top, total, scale, "softmax", q.dtype, True, False
        )
        load_block(V, buffer, ready, start, length, key, column, 1)
        out = out * gl.convert_layout(shrink, gl.SliceLayout(1, W))[:, None]
        out = warpgroup_mma(gl.convert_layout(p, left_operand(W)), block, out)
    return out, top, total


@gluon.jit
def skip(keys, values, step, count):
    """A consumer that has nothing to do with the next ``count`` blocks lets them pass."""
    for _ in range(count):
        keys.wait(step)
        keys.release(step)
        values.wait(step)
        values.release(step)
        step += 1
    return step


@gluon.jit
def consume(
    K, V, OUT, LSE, OUT_SCALE, TILES, queries, keys, values, buffer, alone, scale,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, H: gl.constexpr, SHARE: gl.constexpr,
    D: gl.constexpr, CAUSAL: gl.constexpr, ACT: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """Consumer GROUP: 64 rows of each tile."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    W: gl.constexpr = accumulator(D)
    ROOM: gl.constexpr = 2.0**15 if OUT.dtype == gl.float16 else 2.0**64
    step = 0
    for turn in range(turns(TILES, H)):
        i = dealt(turn)
        tile = read_tile(TILES, i // H)
        first = tile.first + GROUP * GROUP_ROWS
        rows = first + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, S))
        every = blocks(seen_by(tile.first + GROUPS * GROUP_ROWS, tile, CAUSAL))
        queries.wait(turn)
        if first < tile.length:
            q = queries.tile(turn, GROUP)
            count = every
            clear = every
            limit = tile.other_length
            if CAUSAL:
                shift = tile.other_length - tile.length
                count = blocks(seen_by(first + GROUP_ROWS, tile, CAUSAL))
                clear = gl.maximum(first + shift, 0) // GROUP_ROWS
                limit = (rows + (shift + 1))[:, None]
                step = skip(keys, values, step, every - count)
            out, top, total, step = attend_all(
                q, keys, values, step, count, clear, limit, scale, D, CAUSAL, ACT
            )
            if ACT == "softmax":
                if gl.max(total, 0) > ROOM:
                    out, top, total = attend_alone(
                        q, K, V, buffer.index(GROUP), alone.index(GROUP), tile.other_start,
                        tile.other_length, i % H // SHARE * D, count, limit, scale, D,
                    )  # fmt: skip
            queries.release(turn)
            if ACT == "softmax":
                seen = total > 0
                whole = gl.where(seen, total, 1.0)
                out = out / gl.convert_layout(whole, gl.SliceLayout(1, W))[:, None]
                lse = gl.where(seen, (top + gl.log2(whole)) * LN2, INF)
                gl.store(LSE + (tile.start + rows) * H + i % H, lse, mask=rows < tile.length)
            elif OUT.dtype != gl.float16:
                out = out * (0.5 * scale)
            if FACTOR is not None:
                places = (tile.start + rows) * FACTOR
                factor = gl.load(OUT_SCALE + places, mask=rows < tile.length, other=0.0)
                out = out * gl.convert_layout(factor, gl.SliceLayout(1, W))[:, None]
            put_tile(OUT, buffer.index(GROUP), out, tile.start, tile.length, first, i % H * D, D)
        else:
            queries.release(turn)
            step = skip(keys, values, step, every)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["total"])
def forward_kernel(
    Q, K, V, OUT, OUT_ROWS, LSE, OUT_SCALE, TILES, total, scale, H: gl.constexpr,
    SHARE: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, ACT: gl.constexpr,
    FACTOR: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """OUT [total, H, D] and, for softmax, LSE [total, H]: natural log of the row's sum.

    Q, K, V, OUT are descriptors, OUT_ROWS points to the same output. TILES: queries over keys, in
    blocks of 64 * GROUPS. SHARE query heads have one head of keys and values. FACTOR: the stride of
    OUT_SCALE, or None.
    """
    zero_tail(OUT_ROWS, TILES, total, H, D)
    if ACT == "softmax":
        for row in range(gl.load(TILES + 1) + gl.program_id(0), total, gl.num_programs(0)):
            for h in range(H):
                gl.store(LSE + row * H + h, INF)
    queries = new_ring(Q, 2, GROUPS, 1, GROUPS)
    keys = new_ring(K, STAGES, 1, 1, GROUPS)
    values = new_ring(V, STAGES, 1, 1, GROUPS)
    buffer = gl.allocate_shared_memory(OUT.dtype, [GROUPS] + OUT.block_shape, OUT.layout)
    alone = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GROUPS):
        mbarrier.init(alone.index(i), count=1)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (K, V, OUT, LSE, OUT_SCALE, TILES, queries, keys, values, buffer, alone,
                       scale, 0, GROUPS, H, SHARE, D, CAUSAL, ACT, FACTOR)),
            (consume, (K, V, OUT, LSE, OUT_SCALE, TILES, queries, keys, values, buffer, alone,
                       scale, 1, GROUPS, H, SHARE, D, CAUSAL, ACT, FACTOR)),
            (copy_in, (Q, K, V, TILES, queries, keys, values, H, SHARE, D, CAUSAL, GROUPS)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (K, V, OUT, LSE, OUT_SCALE, TILES, queries, keys, values, buffer, alone,
                       scale, 0, GROUPS, H, SHARE, D, CAUSAL, ACT, FACTOR)),
            (consume, (K, V, OUT, LSE, OUT_SCALE, TILES, queries, keys, values, buffer, alone,
                       scale, 1, GROUPS, H, SHARE, D, CAUSAL, ACT, FACTOR)),
            (consume, (K, V, OUT, LSE, OUT_SCALE, TILES, queries, keys, values, buffer, alone,
                       scale, 2, GROUPS, H, SHARE, D, CAUSAL, ACT, FACTOR)),
            (copy_in, (Q, K, V, TILES, queries, keys, values, H, SHARE, D, CAUSAL, GROUPS)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
