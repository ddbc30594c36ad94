"""The activations that may stand between QK^T and V, each with its derivative.

Softmax normalises over a row and is handled by the kernels themselves; everything here is
element-wise. Users add their own:

    @triton.jit
    def quick_gelu_kernel(x):  # float32: (f(x), f'(x))
        s = tl.sigmoid(1.702 * x)
        return x * s, s * (1.0 + 1.702 * x * (1.0 - s))

    def quick_gelu_backward(grad, x):
        s = torch.sigmoid(1.702 * x)
        return grad * s * (1 + 1.702 * x * (1 - s))

    gem.ops.register_activation("quick_gelu", gem.ops.Activation(
        lambda x: x * torch.sigmoid(1.702 * x), quick_gelu_backward, kernel=quick_gelu_kernel))
    gem.ops.jagged_attention(q, k, v, offsets, activation="quick_gelu")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An element-wise function and its vector-Jacobian product.

    Attributes:
        forward: f on a tensor of any shape, float32 or float64.
        backward: ``backward(grad, x)`` gives ``grad * f'(x)``.
        zero_at_zero: f(0) = 0.
        kernel: a Triton function from x, float32, to the pair (f(x), f'(x)); None for those that
            the kernels know by name. Without one a user's activation runs on CPU and by the
            reference only.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    zero_at_zero: bool = True
    kernel: Any = None


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
    "sigmoid": Activation(torch.sigmoid, _sigmoid_backward, zero_at_zero=False),
    "leaky_relu": Activation(
        lambda x: F.leaky_relu(x, 0.01),
        lambda grad, x: aten.leaky_relu_backward(grad, x, 0.01, False),
    ),
    "hardswish": Activation(F.hardswish, aten.hardswish_backward),
    "identity": Activation(lambda x: x, lambda grad, x: grad),
}

BUILT_IN: tuple[str, ...] = ("softmax", *ELEMENTWISE)


def names() -> tuple[str, ...]:
    """Every activation that attention may be asked for."""
    return ("softmax", *ELEMENTWISE)


def register_activation(name: str, activation: Activation) -> None:
    """Adds an activation under a new name, for the rest of the process.

    Raises:
        ValueError: the name is taken; or forward and backward contradict each other, or
            ``zero_at_zero``, at some points in [-4, 4].
    """
    if name in names():
        raise ValueError(f"activation {name!r} is there already; choose another name")
    points = torch.linspace(-4.0, 4.0, 37, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        (expected,) = torch.autograd.grad(activation.forward(points).sum(), points)
    given = activation.backward(torch.ones_like(points), points.detach())
    points = points.detach()
    wrong = ~torch.isclose(given, expected, rtol=1e-3, atol=1e-4)
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"activation {name!r}: at x = {float(points[i]):.3f} backward gives a derivative of "
            f"{float(given[i]):.4f}, autograd of forward {float(expected[i]):.4f}"
        )
    at_zero = float(activation.forward(torch.zeros(1, dtype=torch.float64)))
    if (at_zero == 0.0) != activation.zero_at_zero:
        raise ValueError(
            f"activation {name!r}: f(0) is {at_zero:.4f}; set zero_at_zero accordingly"
        )
    ELEMENTWISE[name] = activation
