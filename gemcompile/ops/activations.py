"""The activations that may stand between QK^T and V, each with its derivative.

Softmax normalises over a row and is handled by the kernels themselves; everything here is
element-wise. ``backward(grad, x)`` gives ``grad * f'(x)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An element-wise function and its vector-Jacobian product."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _sigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    gradient: Tensor = aten.sigmoid_backward(grad, x.sigmoid())
    return gradient


ELEMENTWISE: dict[str, Activation] = {
    "gelu": Activation(F.gelu, aten.gelu_backward),
    "gelu_tanh": Activation(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
    ),
    "silu": Activation(F.silu, aten.silu_backward),
    "relu": Activation(F.relu, lambda grad, x: aten.threshold_backward(grad, x, 0)),
    "relu2": Activation(lambda x: F.relu(x).square(), lambda grad, x: grad * F.relu(x) * 2),
    "sigmoid": Activation(torch.sigmoid, _sigmoid_backward),
    "leaky_relu": Activation(
        lambda x: F.leaky_relu(x, 0.01),
        lambda grad, x: aten.leaky_relu_backward(grad, x, 0.01, False),
    ),
    "hardswish": Activation(F.hardswish, aten.hardswish_backward),
    "identity": Activation(lambda x: x, lambda grad, x: grad),
}

ACTIVATIONS: tuple[str, ...] = ("softmax", *ELEMENTWISE)
