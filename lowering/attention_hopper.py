"""Jagged attention on Hopper (H100, H200) by Gluon kernels: what they support, how they launch.

bfloat16 and float16, head dimension 64 or 128, softmax, GELU or SiLU, causal or without a mask,
scaled outputs: the common cases, faster than by the portable kernels (docs/performance.md).
Everything else is left to those.
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from gemcompile.ops.attention_args import AttentionArgs, AttentionRequest
from gemcompile.ops.kernels import Kernel, named, register
from gemcompile.ops.tiles import KEYS, QUERIES
from gemcompile.target import Target

from .launch import launch
from .tile_lists import tiles_for

TRITON = "3.6"  # Gluon still changes from release to release
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
ACTIVATIONS = ("softmax", "gelu", "gelu_tanh", "silu")

if triton.__version__.startswith(TRITON + "."):
    from .attention_hopper_backward import key_kernel, query_kernel
    from .attention_hopper_forward import forward_kernel
    from .attention_hopper_one_pass import one_pass_kernel
    from .hopper_query_sums import finish_kernel, prepare_kernel
    from .hopper_tiles import MAX_ROWS, ROWS, descriptor

# Whatever else a request may ask for, now or in later releases, is refused.
KNOWN = (
    *("dtype", "heads", "kv_heads", "head_dim", "value_dim", "activation", "large", "causal"),
    *("out_scale", "deterministic", "short_queries"),
)
BACKWARD_ROWS = 128  # of a tile of both consumers
LONG = 400  # rows a sequence, on average, from which on three consumers beat two
ONE_PASS = {64: 400, 128: 700}  # and from which on one pass backward beats two, by head dimension


def supports(target: Target, request: AttentionRequest) -> str | None:
    if target.device != "cuda" or target.arch != 90:
        return f"it runs on cuda:90, not on {target}"
    if not triton.__version__.startswith(TRITON + "."):
        return f"it is written for triton {TRITON}, not {triton.__version__}"
    if request.dtype not in DTYPES:
        return f"it computes in bfloat16 or float16, not {request.dtype}"
    if request.activation not in ACTIVATIONS:
        return f"it computes {', '.join(ACTIVATIONS)}, not {request.activation}"
    if request.head_dim not in HEAD_DIMS:
        return f"head dimension {request.head_dim} is not {' or '.join(map(str, HEAD_DIMS))}"
    if request.head_dim != request.value_dim:
        return f"head dimension {request.head_dim} is not value dimension {request.value_dim}"
    present = [x.name for x in fields(request) if x.name not in KNOWN and getattr(request, x.name)]
    return f"it has no {' and no '.join(present)}" if present else None


def forward(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    if not _usual(a):
        return named("jagged_attention", "triton").run(a)  # type: ignore[no-any-return]
    total, heads, dim = a.q.shape
    groups, stages = forward_tiling(total, _batch(a))
    out = a.q.new_empty(total, heads, dim)
    lse = a.q.new_empty((total, heads) if a.softmax else (0,), dtype=torch.float32)
    with torch.cuda.device_of(a.q):
        tiles = tiles_for(a, QUERIES, groups * ROWS)
        launch(
            *(forward_kernel, (programs(a.q.device),)),
            *(descriptor(_aligned(x)) for x in (a.q, a.k, a.v)),
            *(descriptor(out), out, lse, _out_scale(a), tiles, total, a.scale),
            **_constants(a),
            GROUPS=groups,
            STAGES=stages,
        )
    return out, lse


def forward_tiling(rows: int, batch: int) -> tuple[int, int]:
    """(consumers, stages of the rings) for ``rows`` queries in ``batch`` sequences."""
    return (3, 2) if rows >= LONG * batch else (2, 3)


def backward(
    dout: Tensor, a: AttentionArgs, out: Tensor, lse: Tensor, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _usual(a):
        portable = named("jagged_attention_backward", "triton")
        return portable.run(dout, a, out, lse, bias_grad)  # type: ignore[no-any-return]
    gradients = tuple(x.new_empty(x.shape) for x in (a.q, a.k, a.v))
    run = _one_pass if one_pass_pays(a) else _two_passes
    with torch.cuda.device_of(a.q):
        run(_aligned(dout), a, out, lse, *gradients)
    dq, dk, dv = gradients
    return dq, dk, dv, a.q.new_empty(0)


def one_pass_pays(a: AttentionArgs) -> bool:
    """By the mean length, as measured; never where dQ must repeat bit for bit.

    Under a causal mask two passes were ahead at any length.
    """
    rows = min(a.q.shape[0], a.k.shape[0])
    long = rows >= ONE_PASS[a.q.shape[2]] * _batch(a)
    return long and not a.causal and not a.deterministic


def _two_passes(
    dout: Tensor, a: AttentionArgs, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    delta = torch.empty_like(lse)
    inputs = [descriptor(_aligned(x)) for x in (a.q, a.k, a.v, dout)]
    vectors = (lse, delta, _out_scale(a))
    grid = (programs(a.q.device),)
    launch(
        *(query_kernel, grid, *inputs, descriptor(out), descriptor(dq), dq, *vectors),
        *(tiles_for(a, QUERIES, BACKWARD_ROWS), a.q.shape[0], a.scale),
        **_constants(a),
        STAGES=3 if a.softmax and a.q.shape[2] == 128 else 4,  # O takes the place of one
    )
    launch(
        *(key_kernel, grid, *inputs, descriptor(dk), descriptor(dv), dk, dv, *vectors),
        *(tiles_for(a, KEYS, BACKWARD_ROWS), a.k.shape[0], a.scale),
        **_constants(a) | {"H": a.k.shape[1]},
        STAGES=3,
    )


def _one_pass(
    dout: Tensor, a: AttentionArgs, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    rows, heads, dim = a.q.shape
    block = BACKWARD_ROWS * 128 // dim
    sums = torch.empty(a.q.shape, dtype=torch.float32, device=a.q.device)
    delta = torch.empty_like(lse)
    launch(
        *(prepare_kernel, (triton.cdiv(rows * heads, 32),)),
        *(out, dout, delta, sums, dout.stride(0), dout.stride(1), rows),
        H=heads,
        D=dim,
        SOFTMAX=a.softmax,
        R=32,
        num_warps=4,
    )
    launch(
        *(one_pass_kernel, (programs(a.q.device),), descriptor(_aligned(a.q))),
        *(descriptor(_aligned(x), BACKWARD_ROWS) for x in (a.k, a.v)),
        *(descriptor(dout), descriptor(sums, columns=ROWS), descriptor(dk), descriptor(dv), dk, dv),
        *(lse, delta, _out_scale(a), tiles_for(a, KEYS, block), a.k.shape[0], a.scale),
        **_constants(a) | {"H": a.k.shape[1]},
        STAGES=3,
    )
    launch(
        *(finish_kernel, (triton.cdiv(rows * heads, 32),)),
        *(sums, dq, a.scale, rows * heads),
        D=dim,
        R=32,
        num_warps=4,
    )


def _usual(a: AttentionArgs) -> bool:
    """False for what the kernels have no words for: nothing to do, odd scales, too many rows."""
    some = a.q.shape[0] > 0 and a.k.shape[0] > 0 and _batch(a) > 0
    return some and 0.0 < a.scale < 1e6 and max(a.q.shape[0], a.k.shape[0]) < MAX_ROWS


def _batch(a: AttentionArgs) -> int:
    return a.q_offsets.shape[0] - 1


def _aligned(x: Tensor) -> Tensor:
    """The copy engine wants heads side by side and rows at multiples of 16 bytes."""
    heads, dim = x.shape[1:]
    beside = x.stride(2) == 1 and (heads == 1 or x.stride(1) == dim)
    fits = beside and x.stride(0) % 8 == 0 and x.stride(0) > 0 and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()


def _out_scale(a: AttentionArgs) -> Tensor:
    """float32, to be read if FACTOR says so."""
    return a.q if a.out_scale is None else a.out_scale.contiguous()


@lru_cache
def programs(device: torch.device) -> int:
    """One for each multiprocessor; each walks its share of the tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _constants(a: AttentionArgs) -> dict[str, Any]:
    return {
        "H": a.q.shape[1],
        "SHARE": a.q.shape[1] // a.k.shape[1],
        "D": a.q.shape[2],
        "CAUSAL": a.causal,
        "ACT": a.activation,
        "FACTOR": None if a.out_scale is None else min(a.out_scale.shape[0] - 1, 1),
        "num_warps": 4,
    }


register(Kernel("hopper", "jagged_attention", supports, forward))
register(Kernel("hopper", "jagged_attention_backward", supports, backward))
