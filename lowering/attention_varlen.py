"""Softmax attention on CUDA by the flash kernel that ships with PyTorch (its varlen form).

It takes offsets and strided inputs as they are, aligns causal masks at the end, and knows nothing
of rows past the last offset: those are filled in here. Backward sums dq by atomics unless torch is
set to deterministic algorithms, which is done here where the op is. Past 2^31 elements it reads
where it must not (seen with torch 2.11). At head dimensions that are a power of two up to 128 the
Triton kernels are left to do it: on an H200 a training step of theirs is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
from torch import Tensor

from gemcompile.ops.attention_args import AttentionArgs, AttentionRequest
from gemcompile.ops.kernels import Kernel, register
from gemcompile.target import Target

from .attention_triton_tiles import tail_kernel
from .launch import launch

_OLDEST = 80  # compute capability


def supports(target: Target, request: AttentionRequest) -> str | None:
    if target.device != "cuda" or int(target.arch) < _OLDEST:
        return f"it runs on cuda from sm_{_OLDEST} on, not on {target}"
    if request.activation != "softmax":
        return f"it computes softmax, not {request.activation}"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not {request.dtype}"
    dim = request.head_dim
    if dim != request.value_dim:
        return f"head dimension {dim} is not value dimension {request.value_dim}"
    if dim % 8 != 0 or dim > 256:
        return f"head dimension {dim} is not a multiple of 8 up to 256"
    if dim in (8, 16, 32, 64, 128):
        return f"at head dimension {dim} the Triton kernels are faster"
    if request.large:
        return "its offsets have 32 bits, and a tensor has 2^31 elements or more"
    extras = ("key_mask", "positions", "bias", "out_scale", "dropout", "window", "block", "history")
    present = [name for name in extras if getattr(request, name)]
    return f"it has no {' and no '.join(present)}" if present else None


def forward(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    total, heads = a.q.shape[:2]
    if _nothing_to_do(a):
        return a.q.new_zeros(a.q.shape), torch.full(
            (total, heads), torch.inf, dtype=torch.float32, device=a.q.device
        )
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(_aligned(x) for x in (a.q, a.k, a.v)),
        a.q_offsets.to(torch.int32),
        a.k_offsets.to(torch.int32),
        max(1, a.max_q),
        max(1, a.max_k),
        0.0,
        a.causal,
        False,
        scale=a.scale,
    )
    live = torch.arange(total, device=a.q.device) < a.q_offsets[-1]
    lse = torch.where(live[:, None], lse[:, :total].T, torch.inf).contiguous()
    return zero_dead_rows_(out, a.q_offsets), lse


def backward(
    dout: Tensor, a: AttentionArgs, out: Tensor, lse: Tensor, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if _nothing_to_do(a):
        dq, dk, dv = (x.new_zeros(x.shape) for x in (a.q, a.k, a.v))
        return dq, dk, dv, a.q.new_empty(0)
    unused = torch.empty(0, device=a.q.device)
    random_state = torch.empty(2, dtype=torch.uint64, device=a.q.device)
    with _deterministic(a.deterministic):
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(_aligned(x) for x in (dout, a.q, a.k, a.v)),
            out,
            lse.T.contiguous(),
            a.q_offsets.to(torch.int32),
            a.k_offsets.to(torch.int32),
            max(1, a.max_q),
            max(1, a.max_k),
            0.0,
            a.causal,
            random_state,
            unused,
            scale=a.scale,
        )
    dq = zero_dead_rows_(dq.contiguous(), a.q_offsets)
    dk = zero_dead_rows_(dk.contiguous(), a.k_offsets)
    dv = zero_dead_rows_(dv.contiguous(), a.k_offsets)
    return dq, dk, dv, a.q.new_empty(0)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """torch's switch, which its kernel asks, turned on for one call."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(wanted or before > 0, warn_only=before < 2)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _nothing_to_do(a: AttentionArgs) -> bool:
    """The kernel refuses empty tensors and batches."""
    return a.q.numel() == 0 or a.k.numel() == 0 or a.q_offsets.shape[0] == 1


def _aligned(x: Tensor) -> Tensor:
    """The kernel reads 16 bytes at a time along the head dimension."""
    unit = 16 // x.element_size()
    fits = x.stride(-1) == 1 and all(s % unit == 0 and s > 0 for s in x.stride()[:2])
    return x if fits and x.data_ptr() % 16 == 0 else x.contiguous()


def zero_dead_rows_(x: Tensor, offsets: Tensor) -> Tensor:
    """Makes the rows of contiguous x [rows, H, D] from offsets[-1] on 0."""
    rows, heads, dim = x.shape
    block = 128
    with torch.cuda.device_of(x):
        launch(
            *(tail_kernel, (triton.cdiv(rows, block),)),
            *(x, offsets, offsets.shape[0] - 1, rows),
            H=heads,
            D=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            R=block,
        )
    return x


register(Kernel("varlen", "jagged_attention", supports, forward))
register(Kernel("varlen", "jagged_attention_backward", supports, backward))
