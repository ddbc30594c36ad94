"""Jagged attention on Hopper, forward: copies, scores and outputs overlap within one program.

One warp copies; GROUPS consumers own 64 query rows each and share the keys and values that stream
through two rings. A consumer starts Q K^T of the next tile of keys beside P V of this one, and
works on the scores of the next while P V runs. Two consumers suit short sequences (less rounding
up), three long ones (fewer reads of K and V).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_tiles import (
    GROUP_ROWS,
    INF,
    LN2,
    LOG2E,
    accumulator,
    activate,
    left_operand,
    new_ring,
    put_tile,
    read_tile,
    zero_tail,
)


@gluon.jit
def copy_in(
    Q, K, V, TILES, queries, keys, values, H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """The copying warp: a tile's queries, then its keys and values 64 rows at a time."""
    step = 0
    turn = 0
    for i in range(gl.program_id(0), gl.load(TILES) * H, gl.num_programs(0)):
        tile = read_tile(TILES, i // H)
        column = i % H * D
        kv_column = i % H // SHARE * D
        queries.acquire(turn)
        for group in gl.static_range(GROUPS):
            row = tile.first + group * GROUP_ROWS
            queries.fetch(turn, group, Q, tile.start, tile.length, row, column)
        turn += 1
        start = tile.other_start
        length = tile.other_length
        for row in range(0, length, GROUP_ROWS):
            keys.acquire(step)
            keys.fetch(step, 0, K, start, length, row, kv_column)
            values.acquire(step)
            values.fetch(step, 0, V, start, length, row, kv_column)
            step += 1


@gluon.jit
def weigh(s, first, length, top, total, scale, ACT: gl.constexpr, S: gl.constexpr):
    """From scores of keys from ``first`` on: (P, shrink of what was summed before, top, total)."""
    if ACT == "softmax":
        live = first + gl.arange(0, GROUP_ROWS, gl.SliceLayout(0, S)) < length
        s = gl.where(live[None, :], s, -INF)
        c = scale * LOG2E
        new = gl.maximum(top, gl.max(s, 1) * c)
        p = gl.exp2(s * c - new[:, None])
        shrink = gl.exp2(top - new)
        return p.to(gl.bfloat16), shrink, new, total * shrink + gl.sum(p, 1)
    else:  # act(0) = 0: no mask
        return activate(s, scale, ACT).to(gl.bfloat16), top, top, total


@gluon.jit
def attend(
    q, keys, values, p, out, top, total, step, first, length, scale, D: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """P V of use ``step`` beside the scores of use ``step + 1``, whose keys start at ``first``."""
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
    p, shrink, top, total = weigh(s, first, length, top, total, scale, ACT, S)
    out = warpgroup_mma_wait(0, deps=[sums])
    values.release(step)
    if ACT == "softmax":
        out = out * gl.convert_layout(shrink, gl.SliceLayout(1, W))[:, None]
    return gl.convert_layout(p, left_operand(W)), out, top, total


@gluon.jit
def attend_all(q, keys, values, step, length, scale, D: gl.constexpr, ACT: gl.constexpr):
    """(sums, top, total, next step) of 64 queries over ``length`` keys."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    W: gl.constexpr = accumulator(D)
    top = gl.full([GROUP_ROWS], -1e30, gl.float32, gl.SliceLayout(1, S))
    total = gl.zeros([GROUP_ROWS], gl.float32, gl.SliceLayout(1, S))
    out = gl.zeros([GROUP_ROWS, D], gl.float32, W)
    if length > 0:
        keys.wait(step)
        zeros = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, S)
        s = warpgroup_mma(q, keys.tile(step, 0).permute((1, 0)), zeros, use_acc=False)
        keys.release(step)
        weights, _, top, total = weigh(s, 0, length, top, total, scale, ACT, S)
        p = gl.convert_layout(weights, left_operand(W))
        for first in range(GROUP_ROWS, length, GROUP_ROWS):
            p, out, top, total = attend(
                q, keys, values, p, out, top, total, step, first, length, scale, D, ACT
            )
            step += 1
        values.wait(step)
        out = warpgroup_mma(p, values.tile(step, 0), out)
        values.release(step)
        step += 1
    return out, top, total, step


@gluon.jit
def consume(
    OUT, LSE, TILES, queries, keys, values, buffer, scale, GROUP: gl.constexpr, H: gl.constexpr,
    D: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Consumer GROUP: 64 rows of each tile."""
    S: gl.constexpr = accumulator(GROUP_ROWS)
    W: gl.constexpr = accumulator(D)
    step = 0
    turn = 0
    for i in range(gl.program_id(0), gl.load(TILES) * H, gl.num_programs(0)):
        tile = read_tile(TILES, i // H)
        first = tile.first + GROUP * GROUP_ROWS
        queries.wait(turn)
        if first < tile.length:
            q = queries.tile(turn, GROUP)
            out, top, total, step = attend_all(
                q, keys, values, step, tile.other_length, scale, D, ACT
            )
            queries.release(turn)
            if ACT == "softmax":
                seen = total > 0
                whole = gl.where(seen, total, 1.0)
                out = out / gl.convert_layout(whole, gl.SliceLayout(1, W))[:, None]
                rows = first + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, S))
                lse = gl.where(seen, (top + gl.log2(whole)) * LN2, INF)
                gl.store(LSE + (tile.start + rows) * H + i % H, lse, mask=rows < tile.length)
            else:
                out = out * (0.5 * scale)
            put_tile(OUT, buffer.index(GROUP), out, tile.start, tile.length, first, i % H * D, D)
        else:
            queries.release(turn)
            for _ in range(0, tile.other_length, GROUP_ROWS):
                keys.wait(step)
                keys.release(step)
                values.wait(step)
                values.release(step)
                step += 1
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["total"])
def forward_kernel(
    Q, K, V, OUT, OUT_ROWS, LSE, TILES, total, scale, H: gl.constexpr, SHARE: gl.constexpr,
    D: gl.constexpr, ACT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """OUT [total, H, D] and, for softmax, LSE [total, H]: natural log of the row's sum.

    Q, K, V, OUT are descriptors, OUT_ROWS points to the same output. TILES: queries over keys, in
    blocks of 64 * GROUPS. SHARE query heads have one head of keys and values.
    """
    zero_tail(OUT_ROWS, TILES, total, H, D)
    if ACT == "softmax":
        for row in range(gl.load(TILES + 1) + gl.program_id(0), total, gl.num_programs(0)):
            for h in range(H):
                gl.store(LSE + row * H + h, INF)
    queries = new_ring(Q, 2, GROUPS, D, 1, GROUPS)
    keys = new_ring(K, STAGES, 1, D, 1, GROUPS)
    values = new_ring(V, STAGES, 1, D, 1, GROUPS)
    buffer = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, GROUP_ROWS, D], OUT.layout)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (OUT, LSE, TILES, queries, keys, values, buffer, scale, 0, H, D, ACT)),
            (consume, (OUT, LSE, TILES, queries, keys, values, buffer, scale, 1, H, D, ACT)),
            (copy_in, (Q, K, V, TILES, queries, keys, values, H, SHARE, D, GROUPS)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (OUT, LSE, TILES, queries, keys, values, buffer, scale, 0, H, D, ACT)),
            (consume, (OUT, LSE, TILES, queries, keys, values, buffer, scale, 1, H, D, ACT)),
            (consume, (OUT, LSE, TILES, queries, keys, values, buffer, scale, 2, H, D, ACT)),
            (copy_in, (Q, K, V, TILES, queries, keys, values, H, SHARE, D, GROUPS)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
