"""The float32 sums of dQ that Hopper's one-pass backward adds to: zeroed before it, cast after it.

Plain Triton, as memory bounds both kernels.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def prepare_kernel(
    OUT, DOUT, DELTA, SUMS, do_st, do_sh, rows, H: tl.constexpr, D: tl.constexpr,
    SOFTMAX: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Zeroes SUMS [rows, H, D], and for softmax DELTA [rows, H] = rowsum(dO * O)."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    row = r // H
    live = (row < rows)[:, None]
    columns = tl.arange(0, D)[None, :]
    place = r.to(tl.int64)[:, None] * D + columns
    tl.store(SUMS + place, tl.zeros([R, D], tl.float32), mask=live)
    if SOFTMAX:
        out = tl.load(OUT + place, mask=live, other=0.0).to(tl.float32)
        head = row.to(tl.int64)[:, None] * do_st + (r % H)[:, None] * do_sh
        dout = tl.load(DOUT + head + columns, mask=live, other=0.0).to(tl.float32)
        tl.store(DELTA + r, tl.sum(out * dout, 1), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def finish_kernel(SUMS, DQ, scale, rows, D: tl.constexpr, R: tl.constexpr):
    """DQ = SUMS * scale, both [rows, D]."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    place = r[:, None] * D + tl.arange(0, D)[None, :]
    live = (r < rows)[:, None]
    x = tl.load(SUMS + place, mask=live, other=0.0) * scale
    tl.store(DQ + place, x.to(DQ.dtype.element_ty), mask=live)
