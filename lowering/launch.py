"""Launching a Triton or Gluon kernel again without asking again what to launch.

Triton finds the binary for a call from the type, alignment and value class of every argument, which
takes the host long where arguments are descriptors. What it looks at is told here by less, and the
binary of the first launch is kept under it (docs/performance.md, benchmarks/host_time.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

_binaries: dict[tuple[object, ...], tuple[CompiledKernel, tuple[object, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """``kernel[grid](*args, **constants)``.

    Args:
        args: tensors, descriptors and numbers, in the order of the kernel's parameters.
        constants: all further parameters, compile-time constants, and launch options.
    """
    if torch.version.hip:  # Triton asks for the sizes of tensors, too
        kernel[grid](*args, **constants)
        return
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    key = (kernel, device, *map(_class, args), *constants.items())
    found = _binaries.get(key)
    if found is not None:
        binary, values = found
        binary[(*grid, 1, 1)[:3]](*args, *values)
        return
    binary = kernel[grid](*args, **constants)
    if isinstance(binary, CompiledKernel) and device is not None:  # an interpreter has none
        names = kernel.arg_names[len(args) :]
        _binaries[key] = binary, tuple(constants[name] for name in names)


def _class(x: Any) -> object:
    """What of an argument a binary may depend on, or finer."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int):
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63
    if isinstance(x, float):
        return float
    return x.base.dtype, *x.block_shape  # a descriptor
