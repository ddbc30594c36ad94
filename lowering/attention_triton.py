"""Jagged attention by plain Triton kernels, on CUDA and ROCm: what they support, how they launch.

Pointer loads only, strides as arguments, no size that changes from batch to batch is a constant, so
nothing recompiles between batches. Under TRITON_INTERPRET=1 the same kernels run on CPU tensors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from gemcompile.ops.activations import BUILT_IN, ELEMENTWISE
from gemcompile.ops.attention_args import AttentionArgs, AttentionRequest
from gemcompile.ops.dropout import drop_threshold, keep_scale
from gemcompile.ops.kernels import Kernel, register
from gemcompile.ops.tiles import KEYS, QUERIES
from gemcompile.target import Target

from .attention_triton_backward import key_kernel, query_kernel
from .attention_triton_forward import forward_kernel
from .bias_gradient import STEEPEST, in_bias_type, units_in_one
from .tile_lists import tiles_for
from .tuning import Tiling, padded_dim, tiling

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supports(target: Target, request: AttentionRequest) -> str | None:
    if target.device == "cpu" and not triton.knobs.runtime.interpret:
        return "Triton runs on a CPU only under TRITON_INTERPRET=1"
    if request.dtype not in _DTYPES:
        return f"it computes in float16, bfloat16 and float32, not {request.dtype}"
    if request.activation not in BUILT_IN and ELEMENTWISE[request.activation].kernel is None:
        return f"activation {request.activation!r} was registered without a Triton function"
    if request.deterministic and request.bias_grad and request.activation not in STEEPEST:
        return f"the slope of {request.activation} has no bound, which the gradient of a bias needs"
    if max(request.head_dim, request.value_dim) > 256:
        return f"head dimension {max(request.head_dim, request.value_dim)} is above 256"
    return None


def forward(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    a = _unit_strides(a)
    total, heads = a.q.shape[:2]
    out = a.q.new_empty(total, heads, a.v.shape[2])
    lse = a.q.new_empty((total, heads) if a.softmax else (0,), dtype=torch.float32)
    with torch.cuda.device_of(a.q):
        launch = partial(_launch_forward, a, out, lse)
        launch(tiling("forward", a, launch))
    return out, lse


def backward(
    dout: Tensor, a: AttentionArgs, out: Tensor, lse: Tensor, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = _unit_strides(a)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dq, dk, dv = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (a.q, a.k, a.v)
    )
    delta = torch.empty_like(lse)
    wants = bias_grad and a.bias is not None
    like = a.q if a.bias is None else a.bias
    exact = wants and a.deterministic
    units = torch.int64 if exact else torch.float32
    dbias = torch.zeros(like.shape if wants else (0,), dtype=units, device=a.q.device)
    per_unit = units_in_one(a, dout) if exact else dout
    with torch.cuda.device_of(a.q):
        query = partial(_launch_query, dout, a, out, lse, delta, dq, dbias, per_unit)
        query(tiling("query", a, None if wants else query))  # dbias must be added to once
        key = partial(_launch_key, dout, a, lse, delta, dk, dv)
        key(tiling("key", a, key))
    if exact:
        return dq, dk, dv, in_bias_type(dbias, per_unit, like.dtype)
    return dq, dk, dv, dbias.to(like.dtype)


def _launch_forward(a: AttentionArgs, out: Tensor, lse: Tensor, tiles: Tiling) -> None:
    work, grid = _work(a, QUERIES, tiles.BM)
    forward_kernel[grid](
        *(a.q, a.k, a.v, out, lse),
        *_inputs(a),
        *_strides(a.q, a.k, a.v),
        *_bias_strides(a.bias),
        *(_row_stride(a.out_scale), *_window(a)),
        *_numbers(a),
        *(work, a.q.shape[0]),
        **_constants(a, tiles),
    )


def _launch_query(
    dout: Tensor,
    a: AttentionArgs,
    out: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dbias: Tensor,
    per_unit: Tensor,
    tiles: Tiling,
) -> None:
    """Fills dq and delta, and adds to dbias unless its size is [0]."""
    wants = dbias.numel() > 0
    work, grid = _work(a, QUERIES, tiles.BM)
    query_kernel[grid](
        *(a.q, a.k, a.v, out, dout, lse, delta, dq),
        *(_bias_start(dbias) if wants else dbias, per_unit),
        *_inputs(a),
        *_strides(a.q, a.k, a.v, dout),
        *_bias_strides(a.bias),
        *_bias_strides(dbias if wants else None),
        *(_row_stride(a.out_scale), *_window(a)),
        *_numbers(a),
        *(work, a.q.shape[0]),
        **_constants(a, tiles),
        BIAS_GRAD=wants,
        EXACT=dbias.dtype is torch.int64,
    )


def _launch_key(
    dout: Tensor,
    a: AttentionArgs,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    tiles: Tiling,
) -> None:
    work, grid = _work(a, KEYS, tiles.BN)
    key_kernel[grid](
        *(a.q, a.k, a.v, dout, lse, delta, dk, dv),
        *_inputs(a),
        *_strides(a.q, a.k, a.v, dout),
        *_bias_strides(a.bias),
        *(_row_stride(a.out_scale), *_window(a)),
        *_numbers(a),
        *(work, a.k.shape[0]),
        **_constants(a, tiles),
    )


def _unit_strides(a: AttentionArgs) -> AttentionArgs:
    """The kernels take any strides but in the head dimension, where they want 1."""
    if all(x.stride(-1) == 1 for x in (a.q, a.k, a.v)):
        return a
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (a.q, a.k, a.v))
    return replace(a, q=q, k=k, v=v)


def _work(a: AttentionArgs, side: int, block: int) -> tuple[Tensor, tuple[int]]:
    """(list of tiles, grid): every tile that there may be, then the blocks of rows to be zeroed."""
    rows, heads = (a.k if side else a.q).shape[:2]
    most = rows // block + a.q_offsets.shape[0] - 1
    return tiles_for(a, side, block), (max(1, most * heads + triton.cdiv(rows, block)),)


def _inputs(a: AttentionArgs) -> tuple[Tensor, ...]:
    """The optional inputs; q stands in for those that are absent and never read."""
    mask = None if a.key_mask is None else a.key_mask.contiguous().view(torch.uint8)
    bias = None if a.bias is None else _bias_start(a.bias)
    optional = (mask, a.q_positions, a.k_positions, bias, a.out_scale, a.dropout_seed)
    present = (a.q if x is None else x for x in optional)
    return *present, *_history(a)


def _history(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    """(num_targets, num_contextual), with zeros for the one that is absent."""
    counts = [x.contiguous() for x in (a.num_targets, a.num_contextual) if x is not None]
    if not counts:
        return a.q, a.q
    nothing = torch.zeros_like(counts[0])
    return (
        nothing if a.num_targets is None else counts[0],
        nothing if a.num_contextual is None else counts[-1],
    )


def _window(a: AttentionArgs) -> tuple[int, int]:
    """(left, right); no place is as far as a side without limit reaches."""
    left, right = (2**30 if side < 0 else side for side in (a.window_left, a.window_right))
    return left, right


def _strides(*tensors: Tensor) -> list[int]:
    """(row, head) strides of each."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def _bias_start(bias: Tensor) -> Tensor:
    """A bias from its element for query and key 0 on: the middle of a table of relative places."""
    return bias[:, bias.shape[1] // 2 :] if bias.dim() == 2 else bias


def _bias_strides(bias: Tensor | None) -> tuple[int, ...]:
    """Batch, head, query and key strides, 0 where one batch entry or head serves all."""
    if bias is None:
        return 0, 0, 0, 0
    if bias.dim() == 2:
        return 0, bias.stride(0) if bias.shape[0] > 1 else 0, -bias.stride(1), bias.stride(1)
    shared = [bias.stride(i) if bias.shape[i] > 1 else 0 for i in (0, 1)]
    return *shared, bias.stride(2), bias.stride(3)


def _row_stride(out_scale: Tensor | None) -> int:
    return 0 if out_scale is None or out_scale.numel() == 1 else out_scale.stride(0)


def _numbers(a: AttentionArgs) -> tuple[float, int, float]:
    return a.scale, drop_threshold(a.dropout_p), keep_scale(a.dropout_p)


def activation_constant(name: str) -> Any:
    """What a kernel is told: a name that it knows, or a user's Triton function."""
    return name if name in BUILT_IN else ELEMENTWISE[name].kernel


def _constants(a: AttentionArgs, tiles: Tiling) -> dict[str, Any]:
    """The compile-time arguments and launch options."""
    heads, dim, value_dim = a.q.shape[1], a.q.shape[2], a.v.shape[2]
    return dict(
        H=heads,
        GROUP=heads // a.k.shape[1],
        D=dim,
        DV=value_dim,
        BLOCK_D=padded_dim(dim),
        BLOCK_DV=padded_dim(value_dim),
        BM=tiles.BM,
        BN=tiles.BN,
        ACT=activation_constant(a.activation),
        CAUSAL=a.causal,
        WINDOW=a.window,
        BLOCK=a.block,
        HISTORY=a.history,
        RELATIVE=a.relative,
        HAS_KEY_MASK=a.key_mask is not None,
        HAS_Q_POSITIONS=a.q_positions is not None,
        HAS_K_POSITIONS=a.k_positions is not None,
        HAS_BIAS=a.bias is not None,
        HAS_OUT_SCALE=a.out_scale is not None,
        DROPOUT=a.dropout_p > 0.0,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


register(Kernel("triton", "jagged_attention", supports, forward))
register(Kernel("triton", "jagged_attention_backward", supports, backward))
