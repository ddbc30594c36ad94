"""FLOP formulas for ``torch.utils.flop_counter``.

A formula sees shapes and plain arguments, not offsets, so it counts every query row against the
declared bound on the keys: an upper bound of the true count. As
torch's own attention formulas do, it ignores causality.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula


def _products(q: Any, k: Any, v: Any, max_k: int) -> tuple[int, int]:
    """FLOPs of one product with head dimension D, and of one with Dv."""
    pairs = q[0] * q[1] * min(max_k, k[0])
    return 2 * pairs * q[2], 2 * pairs * v[2]


def attention_flops(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **_: Any) -> int:
    """QK^T and PV."""
    with_d, with_dv = _products(q, k, v, args[13])
    return with_d + with_dv


def attention_backward_flops(
    dout: Any, q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **_: Any
) -> int:
    """QK^T again, dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q."""
    with_d, with_dv = _products(q, k, v, args[13])
    return 3 * with_d + 2 * with_dv


for _op, _formula in (
    (torch.ops.gem.jagged_attention, attention_flops),
    (torch.ops.gem.jagged_attention_backward, attention_backward_flops),
):
    if _op not in flop_registry:
        register_flop_formula(_op)(_formula)
