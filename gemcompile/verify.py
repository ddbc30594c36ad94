"""``verify=True``: the graph after each pass against the original, on the first batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from .fixed_draws import FixedDraws, draws, unfixable
from .pass_manager import Context


class VerifyError(AssertionError):
    """A pass changed what the model computes; the message names the pass and the result."""


# Tolerance on ||a - b|| / ||b|| by dtype.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 4e-2}


class Verifier:
    """Compares rewritten graphs with the original: outputs, gradients, and inputs changed in place.

    Where the graph draws random numbers, capture is compared from the same random state, and passes
    with every draw fixed (see `gemcompile.fixed_draws`). Elements that are not finite in the
    original count as equal. Where nothing can be compared, the report says why.
    """

    def __init__(self, original: GraphModule, context: Context) -> None:
        self.inputs: Sequence[Any] = context.example_inputs
        self.context: Context = context
        self.expected: list[tuple[str, Any]] | None = None
        self.fixed: bool = False
        why = ""
        if any(isinstance(x, FakeTensor) for x in self.inputs):
            why = "the first batch is not at hand"
        elif context.options.padded_outputs != "exact":
            why = "padded_outputs='zero' asks for other results"
        if why:
            self._decline(why)
        else:
            self.expected = self._run(original)

    def captured(self, aten: GraphModule) -> None:
        """Check the graph that capture made; it is what passes are then compared with.

        Raises:
            VerifyError: it computes something else than the original.
        """
        operator = unfixable(aten)
        if self.expected is None:
            return
        self("capture", aten)
        if operator:
            self.expected = None
            self._decline(f"the graph calls {operator}, whose random result cannot be fixed")
        elif draws(aten):
            self.fixed = True
            self.expected = self._run(aten)

    def _decline(self, why: str) -> None:
        reason = f"results cannot be compared: {why}"
        self.context.report.add("graph", "declined", "verify", reason)

    def __call__(self, culprit: str, rewritten: GraphModule) -> None:
        """Check a graph that ``culprit`` has just written.

        Raises:
            VerifyError: a difference beyond reordering of sums.
        """
        if self.expected is None:
            return
        try:
            found = self._run(rewritten)
        except Exception as e:
            raise VerifyError(f"{culprit} left a graph that fails: {type(e).__name__}: {e}") from e
        note = " (with random draws fixed)" if self.fixed else ""
        for (name, a), (_, b) in zip(found, self.expected):
            problem = difference(a, b)
            if problem:
                raise VerifyError(f"{culprit} changed {name}: {problem}{note}")

    def _run(self, gm: GraphModule) -> list[tuple[str, Any]]:
        """Results by name, on copies of the inputs; gradients are those of the sum of squares."""
        with torch._C._DisableTorchDispatch(), torch.random.fork_rng():
            args = [_copy(x) for x in self.inputs]
            prologue = self.context.prologue
            extra = prologue.extra_inputs(args)[0] if prologue else []
            run = FixedDraws(gm).run if self.fixed else gm
            result = run(*args, *extra)
            outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            grads = gradients(outputs, args)
        changed = [x.detach() for x in args if isinstance(x, torch.Tensor)]
        return [
            *((f"output {i}", t.detach()) for i, t in enumerate(outputs)),
            *((f"the gradient of input {i}", t) for i, t in enumerate(grads)),
            *((f"input {i} in place", t) for i, t in enumerate(changed)),
        ]


def gradients(outputs: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor | None]:
    """Gradients of the outputs' sum of squares for those arguments that are leaves with one."""
    leaves = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf]
    losses = [t.float().square().sum() for t in outputs if t.requires_grad]
    if not losses or not leaves:
        return [None] * len(leaves)
    return list(torch.autograd.grad(torch.stack(losses).sum(), leaves, allow_unused=True))


def _copy(x: Any) -> Any:
    if isinstance(x, torch.SymInt):
        return x.node.hint
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)


def difference(a: Any, b: Any, tolerance: float | None = None) -> str:
    """What differs between two tensors, or "" where nothing does.

    Args:
        tolerance: on the norm of the difference beside that of ``b``; by default by dtype.
    """
    if a is None and b is None:
        return ""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return f"{_describe(a)} instead of {_describe(b)}"
    if not b.is_floating_point():
        return "" if torch.equal(a, b) else "other values"
    if not b.numel() or torch.equal(a, b):
        return ""
    error, size = distance(a, b)
    if tolerance is None:
        tolerance = _TOLERANCE.get(b.dtype, 1e-4)
    return (
        "" if error <= tolerance * max(size, 1e-2) else f"{error:.1e} beside a norm of {size:.1e}"
    )


def distance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """(norm of a - b, norm of b) over the elements that are finite in ``b``."""
    finite = b.isfinite()
    x, y = a[finite].double(), b[finite].double()
    return float((x - y).norm()), float(y.norm())


def _describe(t: Any) -> str:
    return "nothing" if t is None else f"{t.dtype}{list(t.shape)}"
