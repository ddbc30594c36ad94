"""What launching the portable Triton kernels of jagged attention has in common."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor

from gemcompile.ops.activations import BUILT_IN, ELEMENTWISE
from gemcompile.ops.attention_args import AttentionArgs, AttentionRequest
from gemcompile.ops.dropout import drop_threshold, keep_scale
from gemcompile.target import Target

from .tuning import padded_dim

MAX_ROWS = 2**30  # of a tensor, for a descriptor
TAIL_PROGRAMS = 64  # that zero the rows past the last offset
HALF = (torch.float16, torch.bfloat16)


def refusal(
    target: Target, request: AttentionRequest, dtypes: tuple[torch.dtype, ...] = HALF
) -> str | None:
    """Why a kernel of ``dtypes`` cannot run, whatever the masks; None where it may."""
    interpreted = bool(triton.knobs.runtime.interpret)
    if target.device == "cpu" and not interpreted:
        return "Triton runs on a CPU only under TRITON_INTERPRET=1"
    if request.dtype not in dtypes and not (interpreted and request.dtype is torch.float32):
        *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"it computes in {', '.join(names)} and {last}, not {request.dtype}"
    if request.activation not in BUILT_IN and ELEMENTWISE[request.activation].kernel is None:
        return f"activation {request.activation!r} was registered without a Triton function"
    if max(request.head_dim, request.value_dim) > 256:
        return f"head dimension {max(request.head_dim, request.value_dim)} is above 256"
    return None


def unit_stride(x: Tensor) -> Tensor:
    """The kernels take any strides but in the head dimension, where they want 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(*tensors: Tensor) -> list[int]:
    """(row, head) strides of each."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def by_tma(target: Target, *tensors: Tensor) -> bool:
    """Whether the copy engine can fetch tiles of all of ``tensors``, [rows, heads, dim]."""
    return target.device == "cuda" and int(target.arch) >= 90 and all(map(_addressable, tensors))


def _addressable(x: Tensor) -> bool:
    rows, heads, dim = x.shape
    unit = 16 // x.element_size()
    beside = x.stride(2) == 1 and (heads == 1 or x.stride(1) == dim)
    aligned = x.stride(0) > 0 and x.stride(0) % unit == 0 and x.data_ptr() % 16 == 0
    return 0 < rows < MAX_ROWS and dim == padded_dim(dim) and dim <= 256 and beside and aligned


def ragged(x: Tensor, rows: int) -> Any:
    """A descriptor for ``load_tile``: tiles of ``rows`` rows of one head."""
    flat = x.as_strided((x.shape[0], x.shape[1] * x.shape[2]), (x.stride(0), 1))
    return create_ragged_descriptor(flat, [rows, x.shape[2]])


def optional_inputs(a: AttentionArgs) -> tuple[Tensor, Tensor, Tensor]:
    """(key_mask, out_scale, dropout_seed); q stands in for those that are absent, never read."""
    mask = None if a.key_mask is None else a.key_mask.contiguous().view(torch.uint8)
    mask, scale, seed = (a.q if x is None else x for x in (mask, a.out_scale, a.dropout_seed))
    return mask, scale, seed


def window(a: AttentionArgs) -> tuple[int, int]:
    """(left, right); no place is as far as a side without limit reaches."""
    left, right = (2**30 if side < 0 else side for side in (a.window_left, a.window_right))
    return left, right


def numbers(a: AttentionArgs) -> tuple[int, float, int, float]:
    """(row stride of out_scale, scale, threshold of dropout, factor on what is kept)."""
    one = a.out_scale is None or a.out_scale.numel() == 1
    stride = 0 if one or a.out_scale is None else a.out_scale.stride(0)
    return stride, a.scale, drop_threshold(a.dropout_p), keep_scale(a.dropout_p)


def constants(a: AttentionArgs) -> dict[str, Any]:
    """Compile-time arguments that all of these kernels have."""
    return {
        "H": a.q.shape[1],
        "GROUP": a.q.shape[1] // a.k.shape[1],
        "D": a.q.shape[2],
        "DV": a.v.shape[2],
        "BLOCK_D": padded_dim(a.q.shape[2]),
        "BLOCK_DV": padded_dim(a.v.shape[2]),
        "ACT": a.activation if a.activation in BUILT_IN else ELEMENTWISE[a.activation].kernel,
        "CAUSAL": a.causal,
        "HAS_KEY_MASK": a.key_mask is not None,
        "HAS_OUT_SCALE": a.out_scale is not None,
        "DROPOUT": a.dropout_p > 0.0,
    }


def shared_kib(target: Target) -> int:
    """Shared memory that the tiles of one program may take."""
    if target.device == "cuda":
        return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(int(target.arch), 99)
    return 160  # gfx942 has 64, but its products read most operands from registers


def fast(target: Target, a: AttentionArgs) -> bool:
    """Whether activations may take NVIDIA's approximate instructions."""
    return target.device == "cuda" and a.q.dtype is not torch.float32


@lru_cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
