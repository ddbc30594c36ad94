"""Block-aligned jagged attention: one program per tile of whole blocks, for some of the key heads.

Query i sees key j where i // block == j // block, both counted from the start of their sequence. So
a tile of whole blocks pairs with one tile of keys: each row is read once, everything between stays
on chip, and all results are plain stores. Tiles come from a list made on the device. Backward needs
neither the output nor a second kernel: a row's whole sum is at hand.
"""

import triton
import triton.language as tl

from .attention_triton_masks import hide
from .attention_triton_ragged import (
    activate_and_derive,
    infinite_rest,
    load_tile,
    store_tile,
    zero_rest,
)
from .attention_triton_tiles import (
    LN2,
    LOG2E,
    LOWEST,
    VARYING,
    keep_tile,
    list_tile,
    live_keys,
    store_head,
)

CHANGING = [*VARYING, "batch", "parts", "listed", "heads_each"]


@triton.jit(do_not_specialize=CHANGING)
def forward_kernel(
    Q, K, V, OUT, LSE, TILES, Q_OFFSETS, KEY_MASK, OUT_SCALE, SEED, q_st, q_sh, k_st, k_sh, v_st,
    v_sh, left, right, out_scale_st, scale, drop_below, keep_scale, batch, listed, heads_each,
    parts, total_q,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, R: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr, ACT: tl.constexpr, FAST: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_OUT_SCALE: tl.constexpr, DROPOUT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """OUT [Tq, H, DV] and, for softmax, LSE [Tq, H]. TILES: of SPAN queries."""
    kv_heads: tl.constexpr = H // GROUP
    pid = tl.program_id(0)
    if pid >= listed:
        if tl.program_id(1) == 0:
            end = tl.load(Q_OFFSETS + batch).to(tl.int64)
            zero_rest(OUT, end, pid - listed, parts, total_q, H, DV, BLOCK_DV, R)
            if ACT == "softmax":
                infinite_rest(LSE, end, pid - listed, parts, total_q, H, R)
    elif pid < tl.load(TILES):
        first, q_start, lq, k_start, lk, _ = list_tile(TILES, pid)
        shift = lk - lq
        lq = tl.minimum(lq, first + SPAN)
        lk = tl.minimum(lk, first + SPAN)
        ranks = first + tl.arange(0, R)
        q_live = ranks < lq
        rows = q_start + ranks
        live = live_keys(KEY_MASK, k_start, ranks, lk, HAS_KEY_MASK)
        visible = hide(
            live[None, :], ranks[:, None], (ranks + shift)[:, None], ranks[None, :], left, right,
            0, 0, CAUSAL, WINDOW, BLOCK, False,
        )  # fmt: skip
        factor = tl.full([R], keep_scale, tl.float32)  # 1 without dropout
        if HAS_OUT_SCALE:
            factor *= tl.load(OUT_SCALE + rows * out_scale_st, mask=q_live, other=0.0)
        unit: tl.constexpr = LOG2E if ACT == "softmax" else 1.0
        head = tl.program_id(1) * heads_each
        for i in tl.range(0, tl.minimum(heads_each, kv_heads - head), num_stages=STAGES):
            kv_head = head + i
            k = load_tile(K, k_start, lk, first, kv_head, k_st, k_sh, live, D, BLOCK_D, R, TMA)
            v = load_tile(V, k_start, lk, first, kv_head, v_st, v_sh, live, DV, BLOCK_DV, R, TMA)
            for member in range(GROUP):
                h = kv_head * GROUP + member
                q = load_tile(Q, q_start, lq, first, h, q_st, q_sh, q_live, D, BLOCK_D, R, TMA)
                s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * unit)
                if ACT == "softmax":
                    s = tl.where(visible, s, float("-inf"))
                    top = tl.maximum(tl.max(s, 1), LOWEST)
                    p = tl.exp2(s - top[:, None])
                    total = tl.sum(p, 1)
                    seen = total > 0
                    total = tl.where(seen, total, 1.0)
                    lse = tl.where(seen, (top + tl.log2(total)) * LN2, float("inf"))
                    tl.store(LSE + rows * H + h, lse, mask=q_live)
                    weight = factor / total
                else:
                    p, _slope = activate_and_derive(s, ACT, FAST)
                    p = tl.where(visible, p, 0.0)
                    weight = factor
                if DROPOUT:
                    keep = keep_tile(SEED, rows[:, None], h, ranks[None, :], drop_below)
                    p = tl.where(keep, p, 0.0)
                out = tl.dot(p.to(v.dtype), v, input_precision="ieee") * weight[:, None]
                store_head(OUT, q_start + first, h, q_live, out, H, DV, BLOCK_DV, R)


@triton.jit
def block_gradient(
    s, dp, visible, rows, ranks, h, lse, factor, SEED, scale, drop_below, keep_scale,
    ACT: tl.constexpr, FAST: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """From k q^T and v dO^T [keys, queries]: (P after dropout and output scale, dS).

    All keys of a query are here, so delta = rowsum(dO * O) is the sum of P dP. Dead rows were read
    as zero and have lse = inf: without MASKED, ``visible`` [keys, 1] says which keys there are,
    which only matters where exp of a score would overflow.
    """
    dp = dp * factor[None, :]
    if DROPOUT:
        keep = keep_tile(SEED, rows[None, :], h, ranks[:, None], drop_below)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    if ACT == "softmax":
        p = tl.where(visible, tl.exp2(s * (scale * LOG2E) - (lse * LOG2E)[None, :]), 0.0)
        ds = p * dp
        ds -= p * tl.sum(ds, 0)[None, :]
    else:
        p, slope = activate_and_derive(s * scale, ACT, FAST)
        ds = dp * slope
        if MASKED:
            p = tl.where(visible, p, 0.0)
            ds = tl.where(visible, ds, 0.0)
    p = p * factor[None, :]
    if DROPOUT:
        p = tl.where(keep, p * keep_scale, 0.0)
    return p, ds


@triton.jit(do_not_specialize=[*CHANGING, "total_k"])
def backward_kernel(
    Q, K, V, DOUT, LSE, DQ, DK, DV_, DQ_TO, DK_TO, DV_TO, TILES, Q_OFFSETS, K_OFFSETS, KEY_MASK,
    OUT_SCALE, SEED, q_st, q_sh, k_st, k_sh, v_st, v_sh, do_st, do_sh, left, right, out_scale_st,
    scale, drop_below, keep_scale, batch, listed, heads_each, parts, total_q, total_k,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, R: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr, ACT: tl.constexpr, FAST: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_OUT_SCALE: tl.constexpr, DROPOUT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """DK [Tk, Hk, D], DV_ [Tk, Hk, DV], and DQ [Tq, H, D] of blocks with a key. TILES: of SPAN
    keys. By TMA tiles are written through DQ_TO, DK_TO, DV_TO, else those are the same tensors.
    Formulas: attention_triton_backward. Scores stand as S^T."""
    kv_heads: tl.constexpr = H // GROUP
    pid = tl.program_id(0)
    if pid >= listed:
        if tl.program_id(1) == 0:
            q_end = tl.load(Q_OFFSETS + batch).to(tl.int64)
            zero_rest(DQ, q_end, pid - listed, parts, total_q, H, D, BLOCK_D, R)
            k_end = tl.load(K_OFFSETS + batch).to(tl.int64)
            zero_rest(DK, k_end, pid - listed, parts, total_k, kv_heads, D, BLOCK_D, R)
            zero_rest(DV_, k_end, pid - listed, parts, total_k, kv_heads, DV, BLOCK_DV, R)
    elif pid < tl.load(TILES):
        first, k_start, lk, q_start, lq, _ = list_tile(TILES, pid)
        shift = lk - lq
        lq = tl.minimum(lq, first + SPAN)
        lk = tl.minimum(lk, first + SPAN)
        ranks = first + tl.arange(0, R)
        q_live = ranks < lq
        inside = ranks < lk
        rows = q_start + ranks
        live = live_keys(KEY_MASK, k_start, ranks, lk, HAS_KEY_MASK)
        masked: tl.constexpr = CAUSAL or WINDOW or BLOCK > 0 or HAS_KEY_MASK
        visible = hide(
            live[:, None], ranks[None, :], (ranks + shift)[None, :], ranks[:, None], left, right,
            0, 0, CAUSAL, WINDOW, BLOCK, False,
        )  # fmt: skip
        factor = tl.full([R], 1.0, tl.float32)
        if HAS_OUT_SCALE:
            factor = tl.load(OUT_SCALE + rows * out_scale_st, mask=q_live, other=0.0)
        head = tl.program_id(1) * heads_each
        for i in tl.range(0, tl.minimum(heads_each, kv_heads - head), num_stages=STAGES):
            kv_head = head + i
            k = load_tile(K, k_start, lk, first, kv_head, k_st, k_sh, live, D, BLOCK_D, R, TMA)
            v = load_tile(V, k_start, lk, first, kv_head, v_st, v_sh, live, DV, BLOCK_DV, R, TMA)
            dk = tl.zeros([R, BLOCK_D], tl.float32)
            dv = tl.zeros([R, BLOCK_DV], tl.float32)
            for member in range(GROUP):
                h = kv_head * GROUP + member
                q = load_tile(Q, q_start, lq, first, h, q_st, q_sh, q_live, D, BLOCK_D, R, TMA)
                do = load_tile(
                    DOUT, q_start, lq, first, h, do_st, do_sh, q_live, DV, BLOCK_DV, R, TMA
                )
                lse = tl.zeros([R], tl.float32)
                if ACT == "softmax":
                    lse = tl.load(LSE + rows * H + h, mask=q_live, other=float("inf"))
                s = tl.dot(k, tl.trans(q), input_precision="ieee")
                dp = tl.dot(v, tl.trans(do), input_precision="ieee")
                p, ds = block_gradient(
                    s, dp, visible, rows, ranks, h, lse, factor, SEED, scale, drop_below,
                    keep_scale, ACT, FAST, DROPOUT, masked,
                )  # fmt: skip
                # One product at a time in registers, where it needs not wait for other heads.
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
                if GROUP == 1:
                    store_tile(
                        DV_TO, k_start, lk, first, kv_head, inside, dv, kv_heads, DV, BLOCK_DV, R,
                        TMA,
                    )  # fmt: skip
                ds = (ds * scale).to(q.dtype)
                dk = tl.dot(ds, q, dk, input_precision="ieee")
                if GROUP == 1:
                    store_tile(
                        DK_TO, k_start, lk, first, kv_head, inside, dk, kv_heads, D, BLOCK_D, R, TMA
                    )
                dq = tl.dot(tl.trans(ds), k, input_precision="ieee")
                store_tile(DQ_TO, q_start, lq, first, h, q_live, dq, H, D, BLOCK_D, R, TMA)
            if GROUP > 1:
                store_tile(
                    DV_TO, k_start, lk, first, kv_head, inside, dv, kv_heads, DV, BLOCK_DV, R, TMA
                )
                store_tile(
                    DK_TO, k_start, lk, first, kv_head, inside, dk, kv_heads, D, BLOCK_D, R, TMA
                )
