"""What the attention kernels compute of masks: which entries are visible, which tiles matter.

``gemcompile.ops.attention_masks`` has the rules. Here ``places`` of queries are already moved by
lk - lq; ``first`` and ``last`` are the places that contextual rows and targets fold to. A side of
the window without limit is given as a very large number.
"""

import triton
import triton.language as tl


@triton.jit
def history(TARGETS, CONTEXTUAL, b, lk, HAS: tl.constexpr):
    """(first, last) of sequence b."""
    if HAS:
        first = tl.load(CONTEXTUAL + b).to(tl.int32) - 1
        return first, lk - tl.load(TARGETS + b).to(tl.int32)
    return -1, lk


@triton.jit
def hide(
    visible, q_ranks, q_places, k_places, left, right, first, last,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """``visible`` where the mask lets the queries see the keys; they broadcast, either way round.

    ``q_ranks`` are the queries' places before they were moved, which blocks are counted by.
    """
    q = q_places
    k = k_places
    if HISTORY:
        q = tl.minimum(tl.maximum(q, first), last)
        k = tl.minimum(tl.maximum(k, first), last)
        tl.static_assert(CAUSAL, "targets and contextual rows need a causal mask")
        seen = (k < q) | (q_places == k_places)
        if WINDOW:
            seen = seen & (q - k <= left)
        seen = seen | ((q_places >= 0) & (q == first) & (k < last))
        visible = visible & seen
    else:
        if CAUSAL:
            visible = visible & (k <= q)
        if WINDOW:
            visible = visible & (q - k <= left) & (k - q <= right)
    if BLOCK > 0:
        visible = visible & (q_ranks // BLOCK == k_places // BLOCK)
    return visible


@triton.jit
def key_range(
    m0, lq, lk, left, right, first, last,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, HISTORY: tl.constexpr,
    PLACED: tl.constexpr, HAS_KEY_MASK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """(start, full, end, stop) for the tile of queries from rank m0 on.

    Every row of the tile sees all keys in [full, end), and none sees a key outside [start, stop).
    start and end are multiples of BN, and so is full unless it is stop. Nothing is known where rows
    have positions (PLACED), and [full, end) is left empty for blocks and masked keys.
    """
    masked: tl.constexpr = CAUSAL or WINDOW or BLOCK > 0
    start = 0
    full = 0
    end = lk
    stop = lk
    if masked and PLACED:
        end = 0
    if masked and not PLACED:
        low = m0 + lk - lq
        high = tl.minimum(m0 + BM, lq) - 1 + lk - lq
        if CAUSAL:
            stop = tl.minimum(stop, high + 1)
            end = tl.minimum(end, low + 1)
        elif WINDOW:
            stop = tl.minimum(stop, high + right + 1)
            end = tl.minimum(end, low + right + 1)
        if WINDOW:
            start = tl.maximum(tl.minimum(low, last) - left, 0)
            full = tl.maximum(tl.minimum(high, last) - left, 0)
        if HISTORY:
            # Contextual rows see everything up to the targets; where they reach into the targets
            # nothing but the diagonal is left.
            context = low <= first
            stop = tl.where(context, lk, stop)
            start = tl.where(context | (start <= first), 0, start)
            end = tl.where(context | (first >= last), 0, tl.minimum(end, last))
        if BLOCK > 0:
            start = tl.maximum(start, m0 // BLOCK * BLOCK)
            stop = tl.minimum(stop, ((tl.minimum(m0 + BM, lq) - 1) // BLOCK + 1) * BLOCK)
        start = start // BN * BN
        stop = tl.maximum(stop, 0)
        if WINDOW:
            full = tl.minimum((full + BN - 1) // BN * BN, stop)
    if HAS_KEY_MASK or BLOCK > 0:
        full = start
        end = start
    return start, full, tl.maximum(end, 0) // BN * BN, stop


@triton.jit
def row_range(
    n0, lq, lk, left, right, first, last,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, HISTORY: tl.constexpr,
    PLACED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """(head, start, stop) for the tile of keys from n0 on: no query outside the ranks [0, head)
    and [start, stop) sees one of them. head and start are multiples of BM."""
    masked: tl.constexpr = CAUSAL or WINDOW or BLOCK > 0
    head = 0
    start = 0
    stop = lq
    if masked and not PLACED:
        shift = lk - lq
        highest = tl.minimum(n0 + BN, lk) - 1
        if CAUSAL:
            start = tl.maximum(n0 - shift, 0)
        elif WINDOW:
            start = tl.maximum(n0 - right - shift, 0)
        if WINDOW:
            if HISTORY:  # all targets see what the end of the history sees
                reach = tl.maximum(highest, first) + left
                stop = tl.where(reach >= last, lq, tl.minimum(stop, reach - shift + 1))
            else:
                stop = tl.minimum(stop, highest + left - shift + 1)
        if BLOCK > 0:
            start = tl.maximum(start, n0 // BLOCK * BLOCK)
            stop = tl.minimum(stop, (highest // BLOCK + 1) * BLOCK)
        start = start // BM * BM
        if HISTORY:
            head = tl.maximum(first + 1 - shift, 0)
            head = tl.minimum((head + BM - 1) // BM * BM, start)
    return head, start, tl.maximum(stop, start)
