"""The self-test: a small padded model compiled by gem, its loss and gradients against eager's.

The yardstick is the one of the tests: gem's distance from eager mode in float64 is at most twice
that of eager mode in the low precision, and a little.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gemcompile.backend
from gemcompile.report import record

from .sample import Encoder, Size, batch

SIZE = Size(batch=4, length=48, width=128, heads=2, layers=1)
SLACK = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Outcome:
    """Largest relative distances from float64 over the loss and all gradients.

    ``error`` is "" or what went wrong.
    """

    device: str
    dtype: str
    gem: float
    eager: float
    seconds: float
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"failed: {self.error}"
        return f"ok, gem {self.gem:.1e}, eager {self.eager:.1e}, {self.seconds:.1f} s"


def self_test(device: str) -> list[Outcome]:
    """float32, and on a GPU bfloat16, too, which other kernels compute."""
    dtypes = [torch.float32, torch.bfloat16] if device == "cuda" else [torch.float32]
    return [_outcome(device, dtype) for dtype in dtypes]


def _outcome(device: str, dtype: torch.dtype) -> Outcome:
    start = time.perf_counter()
    gap = eager_gap = float("nan")
    try:
        gap, eager_gap = _gaps(device, dtype)
        limit = 2 * eager_gap + SLACK[dtype]
        error = "" if gap <= limit else f"gem is {gap:.1e} from float64, eager {eager_gap:.1e}"
    except Exception as e:  # whatever a compiler or driver raises is the answer here
        error = f"{type(e).__name__}: {e}"
    seconds = time.perf_counter() - start
    return Outcome(device, str(dtype).removeprefix("torch."), gap, eager_gap, seconds, error)


def _gaps(device: str, dtype: torch.dtype) -> tuple[float, float]:
    with torch.random.fork_rng(enabled=device == "cpu"):
        torch.manual_seed(0)
        model = Encoder(SIZE).to(device, dtype)
        inputs = batch(SIZE, 0.5, device)
    truth = _step(copy.deepcopy(model).double(), model, inputs)
    eager = _step(model, model, inputs)
    torch.compiler.reset()
    with record() as report:
        compiled: Any = torch.compile(
            model, backend=gemcompile.backend.gem, options={"pack": True, "strict": True}
        )
        ours = _step(compiled, model, inputs)
    report.expect(attention=SIZE.layers, padding=1)
    return _distance(ours, truth), _distance(eager, truth)


def _step(call: Any, model: nn.Module, inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The loss and every gradient, of the parameters that ``call`` computes with."""
    owner = call if call is not model and not hasattr(call, "_orig_mod") else model
    owner.zero_grad(set_to_none=True)
    loss = call(*inputs).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in owner.parameters())]


def _distance(found: list[Tensor], truth: list[Tensor]) -> float:
    pairs = zip(found, truth, strict=True)
    return max(float((a.double() - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)
