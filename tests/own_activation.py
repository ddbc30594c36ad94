"""An activation as a user adds it: x * sigmoid(1.702 x), with a Triton function."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from gemcompile.ops import Activation, register_activation
from gemcompile.ops.activations import names

NAME = "quick_gelu"
kernel = None

if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x):
        s = tl.sigmoid(1.702 * x)
        return x * s, s * (1.0 + 1.702 * x * (1.0 - s))


def forward(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def backward(grad: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * x)
    return grad * s * (1 + 1.702 * x * (1 - s))


if NAME not in names():  # pytest imports this file a second time, to look for doctests
    register_activation(NAME, Activation(forward, backward, kernel=kernel))
