"""Runs one of the everyday models and keeps all that a caller can see of it, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.utils._pytree as pytree
from everyday_models import Everyday
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx

import gemcompile.backend

STEPS = 2  # the second one sees the buffers that the first one left


@dataclass
class Observation:
    """What one call (and its backward, in training) leaves behind."""

    outputs: list[Tensor]
    requires_grad: list[bool]
    strides: list[tuple[int, ...]]
    parameter_grads: list[Tensor | None]
    input_grads: list[Tensor | None]
    inputs: list[Tensor]
    buffers: list[Tensor]


_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "train": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def observe(
    build: Callable[[], Everyday],
    backend: Any = None,
    mode: str = "train",
    dynamic: bool | None = None,
    **how: Any,
) -> list[Observation]:
    """Build the model and call it twice, eagerly or compiled; ``how`` goes to torch.compile."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    case = build()
    case.model.train(mode == "train")
    call: Callable[..., Any] = case.model
    if backend is not None:
        call = torch.compile(case.model, backend=backend, dynamic=dynamic, **how)
    # So that dropout and the like draw the same numbers as they do in eager mode.
    with inductor_config.patch(fallback_random=True), _MODES[mode]():
        return [_step(case, call, seed) for seed in range(STEPS)]


def _step(case: Everyday, call: Callable[..., Any], seed: int) -> Observation:
    torch.manual_seed(seed)
    args = pytree.tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), case.args
    )
    case.model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.autocast):
        result = call(*args, **case.kwargs)
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
    losses = [t.float().square().sum() for t in outputs if t.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    tensors = [t for t in args if isinstance(t, Tensor)]
    return Observation(
        outputs=[t.detach().clone() for t in outputs],
        requires_grad=[t.requires_grad for t in outputs],
        strides=[t.stride() for t in outputs],
        parameter_grads=[_copy(p.grad) for p in case.model.parameters()],
        input_grads=[_copy(t.grad) for t in tensors],
        inputs=[t.detach().clone() for t in tensors],
        buffers=[b.clone() for b in case.model.buffers()],
    )


def _copy(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.clone()


def assert_equal(
    found: list[Observation],
    expected: list[Observation],
    low_precision: bool = False,
    strides: bool = True,
) -> None:
    """Everything equal, numbers up to reordering of sums (in bfloat16, where that is used)."""
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        for f in fields(Observation):
            if f.name == "strides" and not strides:
                continue
            ours, theirs = getattr(a, f.name), getattr(b, f.name)
            assert len(ours) == len(theirs), f"step {step}, {f.name}"
            for i, (x, y) in enumerate(zip(ours, theirs)):
                _assert_same(x, y, low_precision, f"step {step}, {f.name}[{i}]")


def _assert_same(x: Any, y: Any, low_precision: bool, where: str) -> None:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        assert x == y, f"{where}: {x} instead of {y}"
        return
    low = low_precision or y.dtype is torch.bfloat16
    assert_near(x, y, 2e-2 if low else 5e-5, where)


def assert_near(x: Tensor, y: Tensor, tolerance: float = 5e-5, where: str = "") -> None:
    """Equal dtype and shape, and ||x - y|| within ``tolerance`` of max(||y||, 1)."""
    assert (x.dtype, x.shape) == (y.dtype, y.shape), where
    error, size = float((x.double() - y.double()).norm()), float(y.double().norm())
    assert error <= tolerance * max(size, 1.0), f"{where}: differs by {error:.1e}, norm {size:.1e}"


@contextmanager
def without_code_generation(monkeypatch: Any) -> Iterator[Callable[..., Any]]:
    """Inductor up to the point where it would write code: AOTAutograd, its passes, its partitioner.

    Inside, gem hands its graphs to this too; yields the same thing as a backend of its own. A test
    whose point is not the generated code takes a tenth of the time.
    """

    def run_graph(gm: torch.fx.GraphModule, example_inputs: list[Any], **_: Any) -> Any:
        return make_boxed_func(gm.forward)

    def stock(gm: torch.fx.GraphModule, example_inputs: list[Any], **how: Any) -> Any:
        return compile_fx(gm, example_inputs, inner_compile=run_graph, **how)

    with monkeypatch.context() as patch:
        patch.setattr(gemcompile.backend, "compile_fx", stock)
        yield stock
