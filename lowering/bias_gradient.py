"""The gradient of a bias, summed in an order that changes from run to run yet giving equal bits.

Many programs add to one element. Sums of integers do not depend on their order, so in deterministic
mode each addend becomes a whole multiple of a unit, a power of two so small that nothing of float32
is lost, and so large that no sum of all addends overflows 64 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemcompile.ops.attention_args import AttentionArgs
from gemcompile.ops.dropout import keep_scale

# Bounds on |f'|; softmax: |p (dp - delta)| is at most twice the largest |dp|.
STEEPEST = {
    "softmax": 2.0,
    "gelu": 1.13,
    "gelu_tanh": 1.13,
    "silu": 1.1,
    "relu": 1.0,
    "sigmoid": 0.25,
    "leaky_relu": 1.0,
    "hardswish": 1.5,
    "identity": 1.0,
}


def units_in_one(a: AttentionArgs, dout: Tensor) -> Tensor:
    """Units in 1, float32 [1]; read by nobody but the device.

    |dS| is at most |f'| * |dO| * |V| * c / (1 - p) by Cauchy and Schwarz, and each element has at
    most one addend for every query row and head.
    """
    most = _longest(dout, a.q_offsets, None) * _longest(a.v, a.k_offsets, a.key_mask)
    if a.out_scale is not None:
        most = most * _longest(a.out_scale[:, None, None], a.q_offsets, None)
    addends = a.q.shape[0] * a.q.shape[1]
    most = most * (STEEPEST[a.activation] * keep_scale(a.dropout_p) * addends)
    largest = torch.full_like(most, 2.0**61)  # one bit is left for rounding
    exponent = torch.log2(largest / most.clamp(min=2.0**-60)).floor()
    return torch.exp2(exponent).float().reshape(1)


def in_bias_type(sums: Tensor, units: Tensor, dtype: torch.dtype) -> Tensor:
    """From sums of units to the gradient; NaN where a value that went in was not finite."""
    return (sums.double() / units).to(dtype)


def _longest(x: Tensor, offsets: Tensor, keep: Tensor | None) -> Tensor:
    """Largest norm of the rows in use of x [T or 1, H, D], float64."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    if x.shape[0] > 1:
        live = torch.arange(x.shape[0], device=x.device) < offsets[-1]
        live = live if keep is None else live & keep
        norms = norms.where(live[:, None], 0.0)
    if norms.numel() == 0:
        return norms.new_zeros((), dtype=torch.float64)
    return norms.double().amax()
