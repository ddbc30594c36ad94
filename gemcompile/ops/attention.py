"""``gem.ops.jagged_attention``: the public face of the attention op, every argument checked."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

import gemcompile.ops.attention_op  # noqa: F401  (registers the ops)
import gemcompile.ops.flops  # noqa: F401
from gemcompile.ops import activations

MAX_HEAD_DIM = 256
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None = None,
    *,
    activation: str = "softmax",
    scale: float | None = None,
    out_scale: float | Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    block: int | None = None,
    num_targets: Tensor | None = None,
    num_contextual: Tensor | int | None = None,
    bias: Tensor | None = None,
    rotary: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Attention over sequences of different lengths, laid end to end without padding.

    Args:
        q: [Tq, H, D]; or [S, H, D] with ``q_offsets=None``: queries shared by the whole batch.
        k: [Tk, Hk, D]; v: [Tk, Hk, Dv]. Hk divides H: query head h reads key head h // (H // Hk).
            All three alike float16, bfloat16, float32 or float64; D, Dv at most 256; any strides.
        q_offsets, k_offsets: int32 or int64 [B + 1], where each sequence starts; from 0, not
            decreasing, ending within the rows. ``k_offsets=None``: the same as ``q_offsets``.
        activation: "softmax", "gelu" (erf), "gelu_tanh", "silu", "relu", "relu2", "sigmoid",
            "leaky_relu", "hardswish", "identity" or one of ``register_activation``.
        scale: multiplies q k^T before the activation. None: 1 / sqrt(D) for softmax, else 1.
        out_scale: multiplies after the activation: a number or a tensor [B] or [Tq]; no gradient.
        causal: query i of lq sees the keys j <= i + (lk - lq) of its sequence.
        window: (left, right): query i sees the keys i - left <= j <= i + right, with lk - lq added
            to i as for causal, which it does not imply. None or -1: no limit on that side.
        block: query i sees the keys j with i // block == j // block, both from their own start.
        num_targets: int32 or int64 [B]; implies causal. The last n rows of a sequence are targets:
            each sees the history and itself, and its window ends where the history does.
        num_contextual: int32 or int64 [B], or one number; implies causal. The first c rows see,
            besides, the whole history, without the targets. ``ops.attention_masks`` has the rule.
        bias: added before the activation, [H or 1, max_q, max_k] or [B, H or 1, max_q, max_k]; or
            a table [H or 1, 2 * m - 1] of relative places, read at column m - 1 + j - i with i as
            for causal, m at least max_q and max_k. All with gradient.
        dropout_p: probability with which an entry is dropped after the activation.
        dropout_seed: int64 [1] on the same device; the mask is a function of it alone.
        max_q, max_k: bounds on the lengths, never read from the device. None: the row count.
        deterministic: results repeat bit for bit, at the cost of a slower backward in places. None:
            as torch.use_deterministic_algorithms says.

    Returns:
        [Tq, H, Dv], or [B, S, H, Dv] for shared queries. A softmax row that sees no key gives 0;
        rows at or past the last offset belong to nobody: they give 0, their content is never used.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or device; it is named.
            Offsets are read on CPU, and on CUDA only under GEM_CHECK=1, as reading waits for it.
        NotImplementedError: rotary.
    """
    if rotary is not None:
        raise NotImplementedError("jagged_attention: rotary is not implemented yet")
    _check_inputs(q, k, v)
    if activation not in activations.names():
        known = ", ".join(activations.names())
        raise ValueError(
            f"activation must be one of {known}, or registered by register_activation; "
            f"got {activation!r}"
        )
    shared = q.shape[0] if q_offsets is None else None
    if q_offsets is None:
        if k_offsets is None:
            raise ValueError("shared queries (q_offsets=None) need k_offsets")
        _check_offsets("k_offsets", k_offsets, k)
        q, q_offsets = _repeat_shared(q, k_offsets.shape[0] - 1)
        max_q = shared
    k_offsets = q_offsets if k_offsets is None else k_offsets
    _check_offsets("q_offsets", q_offsets, q)
    _check_offsets("k_offsets", k_offsets, k)
    if q_offsets.shape != k_offsets.shape:
        raise ValueError(
            f"q_offsets has {q_offsets.shape[0]} entries and k_offsets {k_offsets.shape[0]}: "
            "they must describe the same batch"
        )
    batch = q_offsets.shape[0] - 1
    max_q = q.shape[0] if max_q is None else max_q
    max_k = k.shape[0] if max_k is None else max_k
    left, right = _check_window(window)
    if block is not None and block < 1:
        raise ValueError(f"block must be at least 1; got {block}")
    if isinstance(num_contextual, int):
        num_contextual = torch.full((batch,), num_contextual, device=q.device)
    for name, counts in (("num_targets", num_targets), ("num_contextual", num_contextual)):
        if counts is not None:
            _check_counts(name, counts, batch, q)
            causal = True
    if bias is not None:
        bias = _check_bias(bias, batch, q, max_q, max_k)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    _check_dropout(dropout_p, dropout_seed, q)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[2]) if activation == "softmax" else 1.0
    out: Tensor
    out, _ = torch.ops.gem.jagged_attention(
        q,
        k,
        v,
        q_offsets,
        k_offsets,
        None,
        None,
        None,
        bias,
        _row_scale(out_scale, q, q_offsets),
        dropout_seed if dropout_p > 0.0 else None,
        activation,
        float(scale),
        causal,
        float(dropout_p),
        max_q,
        max_k,
        left,
        right,
        block or 0,
        num_targets,
        num_contextual,
        None,
        deterministic,
    )
    return out if shared is None else out.unflatten(0, (batch, shared))


def _repeat_shared(q: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """q [S, H, D] once for every sequence, with its offsets."""
    offsets = torch.arange(batch + 1, device=q.device) * q.shape[0]
    return q.expand(batch, *q.shape).flatten(0, 1), offsets


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} must be [rows, heads, dim]; got {list(x.shape)}")
        if x.dtype not in _FLOATS or x.dtype != q.dtype:
            raise TypeError(f"q, k and v must share one floating type; {name} is {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"q, k and v must share a device; {name} is on {x.device}")
        if not 0 < x.shape[2] <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} has head dimension {x.shape[2]}; at most {MAX_HEAD_DIM} works"
            )
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"k {list(k.shape)} and v {list(v.shape)} must have the same rows and heads"
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has head dimension {q.shape[2]}, k has {k.shape[2]}: they must agree")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"the {k.shape[1]} key heads must divide the {q.shape[1]} query heads")


def _check_offsets(name: str, offsets: Tensor, rows: Tensor) -> None:
    if offsets.dim() != 1 or offsets.shape[0] == 0 or offsets.dtype not in _INTEGERS:
        raise TypeError(
            f"{name} must be int32 or int64 [B + 1]; got {offsets.dtype} {list(offsets.shape)}"
        )
    if offsets.device != rows.device:
        raise ValueError(f"{name} is on {offsets.device}, the rows are on {rows.device}")
    # Reading values waits for the device, and is impossible while tracing.
    checked = offsets.device.type == "cpu" or os.environ.get("GEM_CHECK") == "1"
    if checked and not torch.compiler.is_compiling():
        _check_offset_values(name, offsets.tolist(), rows.shape[0])


def _check_offset_values(name: str, values: list[int], rows: int) -> None:
    if values[0] != 0:
        raise ValueError(f"{name}[0] is {values[0]}: offsets must start at 0")
    for i in range(1, len(values)):
        if values[i] < values[i - 1]:
            raise ValueError(
                f"{name}[{i}] is {values[i]}, below {name}[{i - 1}] = {values[i - 1]}: "
                "offsets must not decrease"
            )
    if values[-1] > rows:
        raise ValueError(f"{name}[{len(values) - 1}] is {values[-1]}, past the {rows} rows")


def _check_window(window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """(left, right) with -1 for a side without limit."""
    if window is None:
        return -1, -1
    sides = [-1 if side is None else side for side in window]
    if len(sides) != 2 or min(sides) < -1:
        raise ValueError(
            f"window must be (left, right), each 0 or more, or None for no limit; got {window}"
        )
    return sides[0], sides[1]


def _check_counts(name: str, counts: Tensor, batch: int, q: Tensor) -> None:
    if counts.dtype not in _INTEGERS or counts.shape != (batch,):
        raise TypeError(
            f"{name} must be int32 or int64 [B] with B={batch}; "
            f"got {counts.dtype} {list(counts.shape)}"
        )
    if counts.device != q.device:
        raise ValueError(f"{name} is on {counts.device}, the rows are on {q.device}")


def _check_bias(bias: Tensor, batch: int, q: Tensor, max_q: int, max_k: int) -> Tensor:
    """The bias as [1 or B, 1 or H, max_q, max_k], or as the table that it is."""
    heads = q.shape[1]
    if not isinstance(bias, Tensor) or bias.device != q.device or bias.dtype not in _FLOATS:
        raise TypeError(f"bias must be a floating tensor on {q.device}")
    if bias.dim() == 2:
        least = max(max_q, max_k)
        if (
            bias.shape[0] not in (1, heads)
            or bias.shape[1] % 2 == 0
            or bias.shape[1] < 2 * least - 1
        ):
            raise ValueError(
                "a bias of relative places must be [H or 1, 2 * m - 1] with m at least max_q and "
                f"max_k, here H={heads} and m={least}; got {list(bias.shape)}"
            )
        return bias
    full = bias if bias.dim() == 4 else bias[None]
    fits = full.dim() == 4 and full.shape[0] in (1, batch) and full.shape[1] in (1, heads)
    if not fits or full.shape[2] < max_q or full.shape[3] < max_k:
        raise ValueError(
            f"bias must be [H or 1, max_q, max_k] or [B, H or 1, max_q, max_k] with B={batch}, "
            f"H={heads}, max_q={max_q}, max_k={max_k}; got {list(bias.shape)}"
        )
    return full


def _check_dropout(p: float, seed: Tensor | None, q: Tensor) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout_p must be at least 0 and below 1; got {p}")
    if p == 0.0:
        return
    if seed is None:
        raise ValueError("dropout_p > 0 needs a dropout_seed: an int64 tensor of shape [1]")
    if seed.dtype is not torch.int64 or seed.shape != (1,) or seed.device != q.device:
        raise ValueError(f"dropout_seed must be int64 [1] on {q.device}")


def _row_scale(out_scale: float | Tensor | None, q: Tensor, offsets: Tensor) -> Tensor | None:
    """out_scale as float32 [1] or [Tq]."""
    if out_scale is None:
        return None
    if not isinstance(out_scale, Tensor):
        return torch.full((1,), float(out_scale), dtype=torch.float32, device=q.device)
    scale = out_scale.detach().to(torch.float32).flatten()
    batch, rows = offsets.shape[0] - 1, q.shape[0]
    if scale.shape[0] in (1, rows):
        return scale
    if scale.shape[0] != batch:
        raise ValueError(
            f"out_scale must be a number or have B={batch} or Tq={rows} entries; "
            f"got {list(out_scale.shape)}"
        )
    row = torch.arange(rows, device=q.device)
    sequence = torch.bucketize(row, offsets[1:], right=True).clamp(max=batch - 1)
    return scale[sequence]
