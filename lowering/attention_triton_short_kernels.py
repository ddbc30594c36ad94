"""Jagged attention where a sequence has few queries: one program per sequence and key head.

All queries of the group of heads that share a key head stand in one tile and stay there while the
keys go by once. So backward is one sweep of five products: K and V are read once, dK and dV are
written once, dQ is summed in registers.

    tile rows   the queries of the group's first head, then those of its second, and so on
    order       sequences by falling number of keys, so that the longest start first
    chunks      a sequence of more than ``chunk`` keys is shared by several programs; their sums
                meet in ``combine_kernel``, always in the same order
"""

import triton
import triton.language as tl

from .attention_triton_backward import score_gradient
from .attention_triton_masks import hide
from .attention_triton_ragged import infinite_rest, load_tile, sequence, zero_rest
from .attention_triton_tiles import (
    LN2,
    LOG2E,
    LOWEST,
    VARYING,
    activate,
    keep_tile,
    live_keys,
    store_head,
)

CHANGING = [*VARYING, "batch", "chunk", "parts"]


@triton.jit(do_not_specialize=["batch"])
def order_kernel(ORDER, OFFSETS, batch, R: tl.constexpr, CHUNK: tl.constexpr):
    """ORDER int32 [B]: the sequences by falling length. A sort by counting: R sequences a program,
    each counting those before its own; quadratic, but microseconds for thousands."""
    b = tl.program_id(0) * R + tl.arange(0, R)
    live = b < batch
    start = tl.load(OFFSETS + b, mask=live, other=0)
    length = (tl.load(OFFSETS + b + 1, mask=live, other=0) - start).to(tl.int32)
    before = tl.zeros([R], tl.int32)
    for first in range(0, batch, CHUNK):
        c = first + tl.arange(0, CHUNK)
        other = tl.load(OFFSETS + c, mask=c < batch, other=0)
        theirs = (tl.load(OFFSETS + c + 1, mask=c < batch, other=0) - other).to(tl.int32)
        earlier = theirs[None, :] > length[:, None]
        earlier |= (theirs[None, :] == length[:, None]) & (c[None, :] < b[:, None])
        before += tl.sum(tl.where(earlier & (c < batch)[None, :], 1, 0), 1)
    tl.store(ORDER + before, b, mask=live)


@triton.jit
def tile_rows(kv_head, lq, GROUP: tl.constexpr, BM: tl.constexpr):
    """(ranks, heads, live), each [BM], of the tile of queries."""
    r = tl.arange(0, BM)
    member = r // (BM // GROUP)
    ranks = r % (BM // GROUP)
    return ranks, kv_head * GROUP + member, (member < GROUP) & (ranks < lq)


@triton.jit
def load_queries(X, rows, heads, live, stride, head_stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    p = X + rows[:, None] * stride + heads[:, None].to(tl.int64) * head_stride + d[None, :]
    return tl.load(p, mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_queries(X, rows, heads, live, x, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes x [BM, BLOCK_D] to contiguous X [rows, H, D]."""
    d = tl.arange(0, BLOCK_D)
    p = X + rows[:, None] * (H * D) + heads[:, None] * D + d[None, :]
    tl.store(p, x.to(X.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=CHANGING)
def forward_kernel(
    Q, K, V, OUT, LSE, SUMS, TOPS, TOTALS, ORDER, Q_OFFSETS, K_OFFSETS, KEY_MASK, OUT_SCALE, SEED,
    q_st, q_sh, k_st, k_sh, v_st, v_sh, out_scale_st, scale, drop_below, keep_scale, batch, chunk,
    parts, total_q,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_OUT_SCALE: tl.constexpr, DROPOUT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """OUT [Tq, H, DV] and, for softmax, LSE [Tq, H]; of a sequence in chunks, each chunk's SUMS
    [chunks, Tq, H, DV] and, for softmax, their TOPS and TOTALS [chunks, Tq, H], in base 2."""
    kv_heads: tl.constexpr = H // GROUP
    pid = tl.program_id(0)
    part = tl.program_id(1)
    if pid >= batch * kv_heads:
        if part == 0:
            end = tl.load(Q_OFFSETS + batch).to(tl.int64)
            mine = pid - batch * kv_heads
            zero_rest(OUT, end, mine, parts, total_q, H, DV, BLOCK_DV, BM)
            if ACT == "softmax":
                infinite_rest(LSE, end, mine, parts, total_q, H, BM)
    else:
        b = tl.load(ORDER + pid // kv_heads)
        kv_head = pid % kv_heads
        q_start, lq = sequence(Q_OFFSETS, b)
        k_start, lk = sequence(K_OFFSETS, b)
        if (part == 0) | (part * chunk < lk):
            unit: tl.constexpr = LOG2E if ACT == "softmax" else 1.0
            ranks, heads, q_live = tile_rows(kv_head, lq, GROUP, BM)
            rows = q_start + ranks
            q = load_queries(Q, rows, heads, q_live, q_st, q_sh, D, BLOCK_D)
            acc = tl.zeros([BM, BLOCK_DV], tl.float32)
            m = tl.full([BM], LOWEST, tl.float32)
            total = tl.zeros([BM], tl.float32)
            for n0 in tl.range(part * chunk, tl.minimum(lk, part * chunk + chunk), BN):
                keys = n0 + tl.arange(0, BN)
                live = live_keys(KEY_MASK, k_start, keys, lk, HAS_KEY_MASK)
                k = load_tile(K, k_start, lk, n0, kv_head, k_st, k_sh, live, D, BLOCK_D, BN, TMA)
                v = load_tile(V, k_start, lk, n0, kv_head, v_st, v_sh, live, DV, BLOCK_DV, BN, TMA)
                s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * unit)
                places = (ranks + (lk - lq))[:, None]
                visible = hide(
                    live[None, :], ranks[:, None], places, keys[None, :], 0, 0, 0, 0, CAUSAL,
                    False, 0, False,
                )  # fmt: skip
                if ACT == "softmax":
                    s = tl.where(visible, s, float("-inf"))
                    top = tl.maximum(m, tl.max(s, 1))
                    p = tl.exp2(s - top[:, None])
                    shrink = tl.exp2(m - top)
                    total = total * shrink + tl.sum(p, 1)
                    acc = acc * shrink[:, None]
                    m = top
                else:
                    p = activate(s, ACT)
                    if CAUSAL:  # keys that are not live were read as zero
                        p = tl.where(visible, p, 0.0)
                if DROPOUT:
                    keep = keep_tile(SEED, rows[:, None], heads[:, None], keys[None, :], drop_below)
                    p = tl.where(keep, p, 0.0)
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
            if DROPOUT:
                acc = acc * keep_scale
            if HAS_OUT_SCALE:
                factor = tl.load(OUT_SCALE + rows * out_scale_st, mask=q_live, other=0.0)
                acc = acc * factor[:, None]
            if lk > chunk:
                away = (part * total_q).to(tl.int64)
                store_queries(SUMS, away + rows, heads, q_live, acc, H, DV, BLOCK_DV)
                if ACT == "softmax":
                    tl.store(TOPS + (away + rows) * H + heads, m, mask=q_live)
                    tl.store(TOTALS + (away + rows) * H + heads, total, mask=q_live)
            else:
                if ACT == "softmax":
                    seen = total > 0
                    total = tl.where(seen, total, 1.0)
                    acc = acc / total[:, None]
                    lse = tl.where(seen, (m + tl.log2(total)) * LN2, float("inf"))
                    tl.store(LSE + rows * H + heads, lse, mask=q_live)
                store_queries(OUT, rows, heads, q_live, acc, H, DV, BLOCK_DV)


@triton.jit(do_not_specialize=CHANGING)
def combine_kernel(
    OUT, LSE, SUMS, TOPS, TOTALS, Q_OFFSETS, K_OFFSETS, chunk, total_q,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BM: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """OUT [Tq, H, D] of the sequences in chunks: the sum of SUMS, for SOFTMAX a weighted mean."""
    kv_heads: tl.constexpr = H // GROUP
    b = tl.program_id(0) // kv_heads
    q_start, lq = sequence(Q_OFFSETS, b)
    _, lk = sequence(K_OFFSETS, b)
    if lk > chunk:
        ranks, heads, live = tile_rows(tl.program_id(0) % kv_heads, lq, GROUP, BM)
        rows = q_start + ranks
        acc = tl.zeros([BM, BLOCK_D], tl.float32)
        m = tl.full([BM], LOWEST, tl.float32)
        total = tl.zeros([BM], tl.float32)
        for part in range(0, (lk + chunk - 1) // chunk):
            there = (part * total_q).to(tl.int64) + rows
            x = load_queries(SUMS, there, heads, live, H * D, D, D, BLOCK_D)
            if SOFTMAX:
                top = tl.load(TOPS + there * H + heads, mask=live, other=LOWEST)
                new = tl.maximum(m, top)
                old = tl.exp2(m - new)
                weight = tl.exp2(top - new)
                count = tl.load(TOTALS + there * H + heads, mask=live, other=0.0)
                total = total * old + count * weight
                acc = acc * old[:, None] + x * weight[:, None]
                m = new
            else:
                acc += x
        if SOFTMAX:
            seen = total > 0
            total = tl.where(seen, total, 1.0)
            acc = acc / total[:, None]
            lse = tl.where(seen, (m + tl.log2(total)) * LN2, float("inf"))
            tl.store(LSE + rows * H + heads, lse, mask=live)
        store_queries(OUT, rows, heads, live, acc, H, D, BLOCK_D)


@triton.jit(do_not_specialize=[*CHANGING, "total_k"])
def backward_kernel(
    Q, K, V, OUT, DOUT, LSE, DQ, DK, DV_, SUMS, ORDER, Q_OFFSETS, K_OFFSETS, KEY_MASK, OUT_SCALE,
    SEED, q_st, q_sh, k_st, k_sh, v_st, v_sh, do_st, do_sh, out_scale_st, scale, drop_below,
    keep_scale, batch, chunk, parts, total_q, total_k,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_OUT_SCALE: tl.constexpr, DROPOUT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """DQ [Tq, H, D] (of a sequence in chunks SUMS [chunks, Tq, H, D]), DK [Tk, Hk, D] and
    DV_ [Tk, Hk, DV]. Formulas: attention_triton_backward. Scores stand as S^T [BN, BM]."""
    kv_heads: tl.constexpr = H // GROUP
    pid = tl.program_id(0)
    part = tl.program_id(1)
    if pid >= batch * kv_heads:
        if part == 0:
            mine = pid - batch * kv_heads
            q_end = tl.load(Q_OFFSETS + batch).to(tl.int64)
            zero_rest(DQ, q_end, mine, parts, total_q, H, D, BLOCK_D, BN)
            k_end = tl.load(K_OFFSETS + batch).to(tl.int64)
            zero_rest(DK, k_end, mine, parts, total_k, kv_heads, D, BLOCK_D, BN)
            zero_rest(DV_, k_end, mine, parts, total_k, kv_heads, DV, BLOCK_DV, BN)
    else:
        b = tl.load(ORDER + pid // kv_heads)
        kv_head = pid % kv_heads
        q_start, lq = sequence(Q_OFFSETS, b)
        k_start, lk = sequence(K_OFFSETS, b)
        if (part == 0) | (part * chunk < lk):
            ranks, heads, q_live = tile_rows(kv_head, lq, GROUP, BM)
            rows = q_start + ranks
            q = load_queries(Q, rows, heads, q_live, q_st, q_sh, D, BLOCK_D)
            do = load_queries(DOUT, rows, heads, q_live, do_st, do_sh, DV, BLOCK_DV)
            lse = tl.zeros([BM], tl.float32)
            delta = tl.zeros([BM], tl.float32)
            if ACT == "softmax":
                out = load_queries(OUT, rows, heads, q_live, H * DV, DV, DV, BLOCK_DV)
                delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
                lse = tl.load(LSE + rows * H + heads, mask=q_live, other=float("inf"))
            factor = tl.full([BM], 1.0, tl.float32)
            if HAS_OUT_SCALE:
                factor = tl.load(OUT_SCALE + rows * out_scale_st, mask=q_live, other=0.0)
            places = ranks + (lk - lq)
            dq = tl.zeros([BLOCK_D, BM], tl.float32)
            for n0 in tl.range(part * chunk, tl.minimum(lk, part * chunk + chunk), BN):
                keys = n0 + tl.arange(0, BN)
                live = live_keys(KEY_MASK, k_start, keys, lk, HAS_KEY_MASK)
                k = load_tile(K, k_start, lk, n0, kv_head, k_st, k_sh, live, D, BLOCK_D, BN, TMA)
                v = load_tile(V, k_start, lk, n0, kv_head, v_st, v_sh, live, DV, BLOCK_DV, BN, TMA)
                s = tl.dot(k, tl.trans(q), input_precision="ieee")
                dp = tl.dot(v, tl.trans(do), input_precision="ieee")
                p, ds = score_gradient(
                    s, dp, ranks[None, :], places[None, :], keys[:, None], q_live[None, :],
                    live[:, None], rows[None, :], keys[:, None], heads[None, :], lse[None, :],
                    delta[None, :], factor[None, :], Q, SEED, 0, 0, 0, 0, 0, 0, scale, drop_below,
                    keep_scale, ACT, CAUSAL, False, 0, False, False, DROPOUT, True,
                )  # fmt: skip
                p = p.to(do.dtype)
                ds = (ds * scale).to(q.dtype)
                inside = keys < lk
                dv = tl.dot(p, do, input_precision="ieee")
                store_head(DV_, k_start + n0, kv_head, inside, dv, kv_heads, DV, BLOCK_DV, BN)
                dk = tl.dot(ds, q, input_precision="ieee")
                store_head(DK, k_start + n0, kv_head, inside, dk, kv_heads, D, BLOCK_D, BN)
                dq = tl.dot(tl.trans(k), ds, dq, input_precision="ieee")
            if lk > chunk:
                away = (part * total_q).to(tl.int64) + rows
                store_queries(SUMS, away, heads, q_live, tl.trans(dq), H, D, BLOCK_D)
            else:
                store_queries(DQ, rows, heads, q_live, tl.trans(dq), H, D, BLOCK_D)
