"""Jagged attention, backward: dQ (and delta) by tiles of queries, then dK and dV by tiles of keys.

Each gradient row is written by one program, so the results repeat bit for bit. Only the gradient of
a bias is summed by atomics, in deterministic mode those of integers (``bias_gradient``).
P: after the activation; keep: the dropout factor; c: the output scale.

    dV = (P * keep)^T (c dO)        dP = keep * (c dO V^T)
    softmax    dS = P * (dP - delta), delta = rowsum(dO * O)
    otherwise  dS = f'(S) * dP
    dQ = scale * dS K               dK = scale * dS^T Q
"""

import triton
import triton.language as tl

from .attention_triton_masks import hide, history, key_range, row_range
from .attention_triton_tiles import (
    LOG2E,
    VARYING,
    activate,
    bias_tile,
    derivative,
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
def score_gradient(
    s, dp, q_ranks, q_places, k_places, q_live, k_live, rows, keys, head, lse, delta, factor,
    BIAS, SEED, b_sm, b_sn, left, right, oldest, newest, scale, drop_below, keep_scale,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    HISTORY: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """From q k^T and dO V^T: (P after dropout and output scale, dS), in either orientation."""
    unit: tl.constexpr = LOG2E if ACT == "softmax" else 1.0
    s = s * (scale * unit)
    if HAS_BIAS:
        s += bias_tile(BIAS, q_ranks, k_places, q_live & k_live, b_sm, b_sn) * unit
    dp = dp * factor
    if DROPOUT:
        keep = keep_tile(SEED, rows, head, keys, drop_below)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    if ACT == "softmax":
        p = tl.exp2(s - lse * LOG2E)
        ds = p * (dp - delta)
    else:
        p = activate(s, ACT)
        ds = dp * derivative(s, ACT)
    if MASKED:
        visible = hide(
            k_live & q_live, q_ranks, q_places, k_places, left, right, oldest, newest, CAUSAL,
            WINDOW, BLOCK, HISTORY,
        )  # fmt: skip
        p = tl.where(visible, p, 0.0)
        ds = tl.where(visible, ds, 0.0)
    p = p * factor
    if DROPOUT:
        p = tl.where(keep, p * keep_scale, 0.0)
    return p, ds


@triton.jit
def query_gradient(
    dq, q, do, K, V, KEY_MASK, K_POSITIONS, BIAS, DBIAS, SEED, k_start, lk, first, last, rows,
    q_ranks, q_places, q_live, head, lse, delta, factor, k_st, v_st, b_sm, b_sn, db_sm, db_sn,
    left, right, oldest, newest, scale, drop_below, keep_scale, per_unit,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BN: tl.constexpr, ACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, HISTORY: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_K_POSITIONS: tl.constexpr, HAS_BIAS: tl.constexpr, BIAS_GRAD: tl.constexpr,
    EXACT: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what the keys [first, last) give to dq (without the factor scale)."""
    for n0 in tl.range(first, last, BN):
        keys = n0 + tl.arange(0, BN)
        live = live_keys(KEY_MASK, k_start, keys, lk, HAS_KEY_MASK)
        k = load_rows(K, k_start + n0, k_st, live, D, BLOCK_D, BN, not MASKED)
        v = load_rows(V, k_start + n0, v_st, live, DV, BLOCK_DV, BN, not MASKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        k_places = keys
        if HAS_BIAS or MASKED:
            k_places = places(K_POSITIONS, k_start, keys, live, HAS_K_POSITIONS)
        p, ds = score_gradient(
            s, dp, q_ranks[:, None], q_places[:, None], k_places[None, :], q_live[:, None],
            live[None, :], rows[:, None], keys[None, :], head, lse[:, None], delta[:, None],
            factor[:, None], BIAS, SEED, b_sm, b_sn, left, right, oldest, newest, scale,
            drop_below, keep_scale, ACT, CAUSAL, WINDOW, BLOCK, HISTORY, HAS_BIAS, DROPOUT, MASKED,
        )  # fmt: skip
        if BIAS_GRAD:
            place = q_ranks[:, None].to(tl.int64) * db_sm + k_places[None, :].to(tl.int64) * db_sn
            if EXACT:
                ds_units = tl.floor(ds * per_unit + 0.5).to(tl.int64)
                tl.atomic_add(DBIAS + place, ds_units, q_live[:, None] & live[None, :], "relaxed")
            else:
                tl.atomic_add(DBIAS + place, ds, q_live[:, None] & live[None, :], "relaxed")
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=VARYING)
def query_kernel(
    Q, K, V, OUT, DOUT, LSE, DELTA, DQ, DBIAS, PER_UNIT, KEY_MASK, Q_POSITIONS,
    K_POSITIONS, BIAS, OUT_SCALE, SEED, TARGETS, CONTEXTUAL, q_st, q_sh, k_st, k_sh, v_st, v_sh,
    do_st, do_sh, b_sb, b_sh, b_sm, b_sn, db_sb, db_sh, db_sm, db_sn, out_scale_st, left, right,
    scale, drop_below, keep_scale, TILES, total_q,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    HISTORY: tl.constexpr, RELATIVE: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_Q_POSITIONS: tl.constexpr, HAS_K_POSITIONS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_OUT_SCALE: tl.constexpr, BIAS_GRAD: tl.constexpr, EXACT: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """DQ [Tq, H, D]; for softmax also DELTA [Tq, H], which ``key_kernel`` reads. DBIAS is float32,
    or int64 in units of which PER_UNIT [1] make 1 (EXACT)."""
    pid = tl.program_id(0)
    count, used = list_header(TILES)
    if pid >= count * H:
        zero_tail(DQ, used, pid - count * H, total_q, H * D, H, D, BLOCK_D, BM)
    else:
        h = pid % H
        m0, q_start, lq, k_start, lk, b = list_tile(TILES, pid // H)
        ranks = m0 + tl.arange(0, BM)
        q_live = ranks < lq
        rows = q_start + ranks
        head = h.to(tl.int64)
        q = load_rows(Q + head * q_sh, q_start + m0, q_st, q_live, D, BLOCK_D, BM, False)
        do = load_rows(DOUT + head * do_sh, q_start + m0, do_st, q_live, DV, BLOCK_DV, BM, False)
        lse = tl.zeros([BM], tl.float32)
        delta = tl.zeros([BM], tl.float32)
        if ACT == "softmax":
            out = load_rows(OUT + h * DV, q_start + m0, H * DV, q_live, DV, BLOCK_DV, BM, False)
            delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
            tl.store(DELTA + rows * H + h, delta, mask=q_live)
            lse = tl.load(LSE + rows * H + h, mask=q_live, other=float("inf"))
        factor = tl.full([BM], 1.0, tl.float32)
        if HAS_OUT_SCALE:
            factor = tl.load(OUT_SCALE + rows * out_scale_st, mask=q_live, other=0.0)
        q_ranks = places(Q_POSITIONS, q_start, ranks, q_live, HAS_Q_POSITIONS)
        placed: tl.constexpr = HAS_Q_POSITIONS or HAS_K_POSITIONS
        q_places = q_ranks if placed else ranks + (lk - lq)
        oldest, newest = history(TARGETS, CONTEXTUAL, b, lk, HISTORY)
        start, full, end, stop = key_range(
            m0, lq, lk, left, right, oldest, newest, CAUSAL, WINDOW, BLOCK, HISTORY, placed,
            HAS_KEY_MASK, BM, BN,
        )  # fmt: skip
        kv_head = (h // GROUP).to(tl.int64)
        if HAS_BIAS:
            BIAS += b.to(tl.int64) * b_sb + head * b_sh
            if RELATIVE and not placed:
                BIAS -= (lk - lq) * b_sn
        if BIAS_GRAD:
            DBIAS += b.to(tl.int64) * db_sb + head * db_sh
            if RELATIVE and not placed:
                DBIAS -= (lk - lq) * db_sn
        per_unit = 0.0
        if EXACT:
            per_unit = tl.load(PER_UNIT)
        dq = tl.zeros([BM, BLOCK_D], tl.float32)
        for part in tl.static_range(3):  # the window's far edge, what all rows see, the rest
            if part == 2 or not (HAS_KEY_MASK or BLOCK > 0) and (WINDOW or part == 1):
                first = start if part == 0 else full if part == 1 else tl.maximum(full, end)
                last = full if part == 0 else end if part == 1 else stop
                dq = query_gradient(
                    dq, q, do, K + kv_head * k_sh, V + kv_head * v_sh, KEY_MASK, K_POSITIONS,
                    BIAS, DBIAS, SEED, k_start, lk, first, last, rows, q_ranks, q_places,
                    q_live, h, lse, delta, factor, k_st, v_st, b_sm, b_sn, db_sm, db_sn, left,
                    right, oldest, newest, scale, drop_below, keep_scale, per_unit, D, DV, BLOCK_D,
                    BLOCK_DV, BN, ACT, CAUSAL, WINDOW, BLOCK, HISTORY, HAS_KEY_MASK,
                    HAS_K_POSITIONS, HAS_BIAS, BIAS_GRAD, EXACT, DROPOUT, part != 1,
                )  # fmt: skip
        store_head(DQ, q_start + m0, h, q_live, dq * scale, H, D, BLOCK_D, BM)


@triton.jit(do_not_specialize=VARYING)
def key_kernel(
    Q, K, V, DOUT, LSE, DELTA, DK, DV_, KEY_MASK, Q_POSITIONS, K_POSITIONS,
    BIAS, OUT_SCALE, SEED, TARGETS, CONTEXTUAL, q_st, q_sh, k_st, k_sh, v_st, v_sh, do_st, do_sh,
    b_sb, b_sh, b_sm, b_sn, out_scale_st, left, right,
    scale, drop_below, keep_scale, TILES, total_k,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    HISTORY: tl.constexpr, RELATIVE: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_Q_POSITIONS: tl.constexpr, HAS_K_POSITIONS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_OUT_SCALE: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """DK [Tk, Hk, D] and DV_ [Tk, Hk, DV]: the query heads of a key head in turn."""
    kv_heads: tl.constexpr = H // GROUP
    pid = tl.program_id(0)
    count, used = list_header(TILES)
    if pid >= count * kv_heads:
        block = pid - count * kv_heads
        zero_tail(DK, used, block, total_k, kv_heads * D, kv_heads, D, BLOCK_D, BN)
        zero_tail(DV_, used, block, total_k, kv_heads * DV, kv_heads, DV, BLOCK_DV, BN)
    else:
        kv_head = pid % kv_heads
        n0, k_start, lk, q_start, lq, b = list_tile(TILES, pid // kv_heads)
        keys = n0 + tl.arange(0, BN)
        live = live_keys(KEY_MASK, k_start, keys, lk, HAS_KEY_MASK)
        wide_head = kv_head.to(tl.int64)
        k = load_rows(K + wide_head * k_sh, k_start + n0, k_st, live, D, BLOCK_D, BN, False)
        v = load_rows(V + wide_head * v_sh, k_start + n0, v_st, live, DV, BLOCK_DV, BN, False)
        k_places = places(K_POSITIONS, k_start, keys, live, HAS_K_POSITIONS)
        placed: tl.constexpr = HAS_Q_POSITIONS or HAS_K_POSITIONS
        masked: tl.constexpr = CAUSAL or WINDOW or BLOCK > 0
        oldest, newest = history(TARGETS, CONTEXTUAL, b, lk, HISTORY)
        front, start, stop = row_range(
            n0, lq, lk, left, right, oldest, newest, CAUSAL, WINDOW, BLOCK, HISTORY, placed,
            BM, BN,
        )  # fmt: skip
        dk = tl.zeros([BN, BLOCK_D], tl.float32)
        dv = tl.zeros([BN, BLOCK_DV], tl.float32)
        for member in range(GROUP):
            h = kv_head * GROUP + member
            head = h.to(tl.int64)
            bias = BIAS
            if HAS_BIAS:
                bias = BIAS + b.to(tl.int64) * b_sb + head * b_sh
                if RELATIVE and not placed:
                    bias -= (lk - lq) * b_sn
            for step in tl.range(start - front, stop, BM):
                m0 = step
                if HISTORY:  # the rows [0, front) come first
                    m0 = tl.where(step < start, step - (start - front), step)
                ranks = m0 + tl.arange(0, BM)
                q_live = ranks < lq
                rows = q_start + ranks
                q = load_rows(Q + head * q_sh, q_start + m0, q_st, q_live, D, BLOCK_D, BM, False)
                do = load_rows(
                    DOUT + head * do_sh, q_start + m0, do_st, q_live, DV, BLOCK_DV, BM, False
                )
                lse = tl.zeros([BM], tl.float32)
                delta = tl.zeros([BM], tl.float32)
                if ACT == "softmax":
                    lse = tl.load(LSE + rows * H + h, mask=q_live, other=float("inf"))
                    delta = tl.load(DELTA + rows * H + h, mask=q_live, other=0.0)
                factor = tl.full([BM], 1.0, tl.float32)
                if HAS_OUT_SCALE:
                    factor = tl.load(OUT_SCALE + rows * out_scale_st, mask=q_live, other=0.0)
                q_ranks = places(Q_POSITIONS, q_start, ranks, q_live, HAS_Q_POSITIONS)
                q_places = q_ranks if placed else ranks + (lk - lq)
                s = tl.dot(k, tl.trans(q), input_precision="ieee")
                dp = tl.dot(v, tl.trans(do), input_precision="ieee")
                # Dead rows were read as zero and dead keys are not kept, so without a mask
                # nothing has to be hidden here.
                p, ds = score_gradient(
                    s, dp, q_ranks[None, :], q_places[None, :], k_places[:, None],
                    q_live[None, :], live[:, None], rows[None, :], keys[:, None], h,
                    lse[None, :], delta[None, :], factor[None, :], bias, SEED, b_sm, b_sn,
                    left, right, oldest, newest, scale, drop_below, keep_scale, ACT, CAUSAL,
                    WINDOW, BLOCK, HISTORY, HAS_BIAS, DROPOUT, masked,
                )  # fmt: skip
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
        if HAS_KEY_MASK:
            dk = tl.where(live[:, None], dk, 0.0)
            dv = tl.where(live[:, None], dv, 0.0)
        inside = keys < lk
        store_head(DK, k_start + n0, kv_head, inside, dk * scale, kv_heads, D, BLOCK_D, BN)
        store_head(DV_, k_start + n0, kv_head, inside, dv, kv_heads, DV, BLOCK_DV, BN)
