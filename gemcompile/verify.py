"""``options={"verify": True}``: the rewritten graph against the original on the real first batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from .ops.packing import pack_index
from .prologue import ROWS, Prologue


class VerifyError(AssertionError):
    """The rewritten graph differs from the original; the message names the output or gradient."""


# Relative tolerance on ||a - b|| / ||b|| by the lowest precision among the two results.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 4e-2}


def verify(original: GraphModule, rewritten: GraphModule, inputs: Sequence[Any], prologue: Prologue | None) -> None:
    """Compare outputs and gradients; does nothing where the batch is not at hand or the graph draws random numbers.

    Raises:
        VerifyError: a difference beyond reordering of sums.
    """
    if any(isinstance(x, FakeTensor) for x in inputs) or _draws(original):
        return
    with torch._C._DisableTorchDispatch(), torch.random.fork_rng():
        expected = _run(original, inputs, None)
        found = _run(rewritten, inputs, prologue)
    for name, a, b in zip(_names(expected), found, expected):
        _compare(name, a, b)


def _draws(gm: GraphModule) -> bool:
    words = ("dropout", "rand", "bernoulli", "multinomial")
    return any(n.op == "call_function" and any(w in str(n.target) for w in words) for n in gm.graph.nodes)


def _run(gm: GraphModule, inputs: Sequence[Any], prologue: Prologue | None) -> list[Any]:
    """Outputs, then gradients of their sum of squares in the float inputs, on copies of the inputs."""
    args = [_copy(x) for x in inputs]
    extra: list[Any] = []
    if prologue is not None:
        for mask in prologue.masks(args):
            p = pack_index(mask, ROWS)
            extra += [p.index.shape[0] // ROWS, p.index, p.inverse, p.offsets, p.positions]
    outputs = [t for t in pytree.tree_leaves(gm(*args, *extra)) if isinstance(t, torch.Tensor)]
    leaves = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf]
    loss = [t.float().square().sum() for t in outputs if t.requires_grad]
    grads = torch.autograd.grad(sum(loss), leaves, allow_unused=True) if loss and leaves else []  # type: ignore[arg-type]
    return [*[t.detach() for t in outputs], *grads]


def _copy(x: Any) -> Any:
    if isinstance(x, torch.SymInt):
        return x.node.hint
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)


def _names(results: Sequence[Any]) -> list[str]:
    return [f"result {i} (outputs, then gradients of the inputs)" for i in range(len(results))]


def _compare(name: str, a: Any, b: Any) -> None:
    if a is None and b is None:
        return
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        raise VerifyError(f"{name}: {_describe(a)} instead of {_describe(b)}")
    if not b.is_floating_point():
        if not torch.equal(a, b):
            raise VerifyError(f"{name} differs")
        return
    x, y = a.double(), b.double()
    error = float((x - y).norm() / y.norm().clamp(min=1e-30)) if y.numel() else 0.0
    if not error <= _TOLERANCE.get(b.dtype, 1e-4) and float((x - y).abs().max()) > 1e-6:
        raise VerifyError(f"{name} differs by {error:.2e} of its norm")


def _describe(t: Any) -> str:
    return "nothing" if t is None else f"{t.dtype}{list(t.shape)}"
