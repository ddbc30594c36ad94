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

from gemcompile.ops.attention_args import AttentionArgs, AttentionRequest
from gemcompile.ops.kernels import Kernel, register
from gemcompile.ops.tiles import KEYS, QUERIES
from gemcompile.target import Target

from .attention_triton_backward import key_kernel, query_kernel
from .attention_triton_forward import forward_kernel
from .attention_triton_launch import (
    HALF,
    constants,
    numbers,
    optional_inputs,
    refusal,
    strides,
    unit_stride,
    window,
)
from .bias_gradient import STEEPEST, in_bias_type, units_in_one
from .launch import launch
from .tile_lists import tiles_for
from .tuning import Tiling, tiling

DTYPES = (*HALF, torch.float32)


def supports(target: Target, request: AttentionRequest) -> str | None:
    if request.deterministic and request.bias_grad and request.activation not in STEEPEST:
        return f"the slope of {request.activation} has no bound, which the gradient of a bias needs"
    return refusal(target, request, DTYPES)


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
    dout = unit_stride(dout)
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
    launch(
        *(forward_kernel, grid, a.q, a.k, a.v, out, lse),
        *_inputs(a),
        *strides(a.q, a.k, a.v),
        *_bias_strides(a.bias),
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
    launch(
        *(query_kernel, grid, a.q, a.k, a.v, out, dout, lse, delta, dq),
        *(_bias_start(dbias) if wants else dbias, per_unit),
        *_inputs(a),
        *strides(a.q, a.k, a.v, dout),
        *_bias_strides(a.bias),
        *_bias_strides(dbias if wants else None),
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
    launch(
        *(key_kernel, grid, a.q, a.k, a.v, dout, lse, delta, dk, dv),
        *_inputs(a),
        *strides(a.q, a.k, a.v, dout),
        *_bias_strides(a.bias),
        *_numbers(a),
        *(work, a.k.shape[0]),
        **_constants(a, tiles),
    )


def _unit_strides(a: AttentionArgs) -> AttentionArgs:
    if all(x.stride(-1) == 1 for x in (a.q, a.k, a.v)):
        return a
    q, k, v = (unit_stride(x) for x in (a.q, a.k, a.v))
    return replace(a, q=q, k=k, v=v)


def _work(a: AttentionArgs, side: int, block: int) -> tuple[Tensor, tuple[int]]:
    """(list of tiles, grid): every tile that there may be, then the blocks of rows to be zeroed."""
    rows, heads = (a.k if side else a.q).shape[:2]
    most = rows // block + a.q_offsets.shape[0] - 1
    return tiles_for(a, side, block), (max(1, most * heads + triton.cdiv(rows, block)),)


def _inputs(a: AttentionArgs) -> tuple[Tensor, ...]:
    """The optional inputs; q stands in for those that are absent and never read."""
    mask, scale, seed = optional_inputs(a)
    bias = None if a.bias is None else _bias_start(a.bias)
    placed = (a.q if x is None else x for x in (a.q_positions, a.k_positions, bias))
    return mask, *placed, scale, seed, *_history(a)


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


def _numbers(a: AttentionArgs) -> tuple[float, ...]:
    """``numbers`` with (left, right) behind the stride, as these kernels take them."""
    stride, *rest = numbers(a)
    return stride, *window(a), *rest


def _constants(a: AttentionArgs, tiles: Tiling) -> dict[str, Any]:
    """The compile-time arguments and launch options."""
    return constants(a) | dict(
        BM=tiles.BM,
        BN=tiles.BN,
        WINDOW=a.window,
        BLOCK=a.block,
        HISTORY=a.history,
        RELATIVE=a.relative,
        HAS_Q_POSITIONS=a.q_positions is not None,
        HAS_K_POSITIONS=a.k_positions is not None,
        HAS_BIAS=a.bias is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


register(Kernel("triton", "jagged_attention", supports, forward))
register(Kernel("triton", "jagged_attention_backward", supports, backward))
