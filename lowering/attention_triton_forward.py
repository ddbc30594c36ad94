"""Jagged attention, forward: one program per tile of queries of one sequence and head.

Grid: ``batch * H * tiles`` programs for the queries (those past a sequence's end leave at once),
then one per block of rows, which zeroes the rows past the last offset.
"""

import triton
import triton.language as tl

from .attention_triton_masks import hide, history, key_range
from .attention_triton_tiles import (
    LN2,
    LOG2E,
    LOWEST,
    VARYING,
    activate,
    bias_tile,
    keep_tile,
    list_header,
    list_tile,
    live_keys,
    load_rows,
    places,
    store_head,
    zero_tail,
)


@triton.jit
def attend_keys(
    acc, m, total, q, K, V, KEY_MASK, K_POSITIONS, BIAS, SEED, k_start, lk, first, last,
    rows, q_ranks, q_places, q_live, head, k_st, v_st, b_sm, b_sn, left, right, oldest, newest,
    scale, drop_below,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BN: tl.constexpr, ACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, HISTORY: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_K_POSITIONS: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds keys [first, last) to (acc, m, total); without MASKED, every row sees all of them."""
    unit: tl.constexpr = LOG2E if ACT == "softmax" else 1.0
    for n0 in tl.range(first, last, BN):
        keys = n0 + tl.arange(0, BN)
        live = live_keys(KEY_MASK, k_start, keys, lk, HAS_KEY_MASK)
        k = load_rows(K, k_start + n0, k_st, live, D, BLOCK_D, BN, not MASKED)
        v = load_rows(V, k_start + n0, v_st, live, DV, BLOCK_DV, BN, not MASKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * unit)
        k_places = keys
        if HAS_BIAS or MASKED:
            k_places = places(K_POSITIONS, k_start, keys, live, HAS_K_POSITIONS)
        if HAS_BIAS:
            inside = q_live[:, None] & live[None, :]
            bias = bias_tile(BIAS, q_ranks[:, None], k_places[None, :], inside, b_sm, b_sn)
            s += bias * unit
        visible = hide(
            live[None, :], q_ranks[:, None], q_places[:, None], k_places[None, :], left, right,
            oldest, newest, CAUSAL, WINDOW, BLOCK, HISTORY,
        )  # fmt: skip
        if ACT == "softmax":
            if MASKED:
                s = tl.where(visible, s, float("-inf"))
            top = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - top[:, None])
            shrink = tl.exp2(m - top)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None]
            m = top
        else:
            p = activate(s, ACT)
            if MASKED:
                p = tl.where(visible, p, 0.0)
        if DROPOUT:
            p = tl.where(keep_tile(SEED, rows[:, None], head, keys[None, :], drop_below), p, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, m, total


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    Q, K, V, OUT, LSE, KEY_MASK, Q_POSITIONS, K_POSITIONS, BIAS, OUT_SCALE,
    SEED, TARGETS, CONTEXTUAL, q_st, q_sh, k_st, k_sh, v_st, v_sh, b_sb, b_sh, b_sm, b_sn,
    out_scale_st, left, right, scale, drop_below, keep_scale, TILES, total_q,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    HISTORY: tl.constexpr, RELATIVE: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_Q_POSITIONS: tl.constexpr, HAS_K_POSITIONS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_OUT_SCALE: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """OUT [Tq, H, DV] and, for softmax, LSE [Tq, H] = natural log of the row's sum."""
    pid = tl.program_id(0)
    count, used = list_header(TILES)
    if pid >= count * H:
        block = pid - count * H
        zero_tail(OUT, used, block, total_q, H * DV, H, DV, BLOCK_DV, BM)
        if ACT == "softmax":
            r = block.to(tl.int64) * BM + tl.arange(0, BM)
            for i in range(H):
                nothing = tl.full([BM], float("inf"), tl.float32)
                tl.store(LSE + r * H + i, nothing, mask=(r >= used) & (r < total_q))
    else:
        h = pid % H
        m0, q_start, lq, k_start, lk, b = list_tile(TILES, pid // H)
        ranks = m0 + tl.arange(0, BM)
        q_live = ranks < lq
        q = load_rows(Q + h.to(tl.int64) * q_sh, q_start + m0, q_st, q_live, D, BLOCK_D, BM, False)
        q_ranks = places(Q_POSITIONS, q_start, ranks, q_live, HAS_Q_POSITIONS)
        placed: tl.constexpr = HAS_Q_POSITIONS or HAS_K_POSITIONS
        q_places = q_ranks if placed else ranks + (lk - lq)
        oldest, newest = history(TARGETS, CONTEXTUAL, b, lk, HISTORY)
        start, full, end, stop = key_range(
            m0, lq, lk, left, right, oldest, newest, CAUSAL, WINDOW, BLOCK, HISTORY, placed,
            HAS_KEY_MASK, BM, BN,
        )  # fmt: skip
        acc = tl.zeros([BM, BLOCK_DV], tl.float32)
        m = tl.full([BM], LOWEST, tl.float32)
        total = tl.zeros([BM], tl.float32)
        kv_head = (h // GROUP).to(tl.int64)
        rows = q_start + ranks
        if HAS_BIAS:
            BIAS += b.to(tl.int64) * b_sb + h.to(tl.int64) * b_sh
            if RELATIVE and not placed:
                BIAS -= (lk - lq) * b_sn
        for part in tl.static_range(3):  # the window's far edge, what all rows see, the rest
            if part == 2 or not (HAS_KEY_MASK or BLOCK > 0) and (WINDOW or part == 1):
                first = start if part == 0 else full if part == 1 else tl.maximum(full, end)
                last = full if part == 0 else end if part == 1 else stop
                acc, m, total = attend_keys(
                    acc, m, total, q, K + kv_head * k_sh, V + kv_head * v_sh, KEY_MASK,
                    K_POSITIONS, BIAS, SEED, k_start, lk, first, last, rows, q_ranks, q_places,
                    q_live, h, k_st, v_st, b_sm, b_sn, left, right, oldest, newest, scale,
                    drop_below, D, DV, BLOCK_D, BLOCK_DV, BN, ACT, CAUSAL, WINDOW, BLOCK,
                    HISTORY, HAS_KEY_MASK, HAS_K_POSITIONS, HAS_BIAS, DROPOUT, part != 1,
                )  # fmt: skip
        if ACT == "softmax":
            seen = total > 0
            total = tl.where(seen, total, 1.0)
            acc = acc / total[:, None]
            lse = tl.where(seen, (m + tl.log2(total)) * LN2, float("inf"))
            tl.store(LSE + rows * H + h, lse, mask=q_live)
        if DROPOUT:
            acc = acc * keep_scale
        if HAS_OUT_SCALE:
            factor = tl.load(OUT_SCALE + rows * out_scale_st, mask=q_live, other=0.0)
            acc = acc * factor[:, None]
        store_head(OUT, q_start + m0, h, q_live, acc, H, DV, BLOCK_DV, BM)
