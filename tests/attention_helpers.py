"""What the attention tests share: rewrite a function's graph, run it, compare it with eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from attention_spellings import WIDTH
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gemcompile.capture import capture
from gemcompile.options import Options
from gemcompile.passes.attention import FuseAttention
from gemcompile.passes.canonicalize import Canonicalize
from gemcompile.report import Report, Site
from gemcompile.testing import run_passes

Tensors = list[torch.Tensor]


@dataclass
class Rewritten:
    """A function compiled with FuseAttention alone: call it, or look at what was done."""

    fn: Callable[..., Any]
    dynamic: bool | None = True
    options: Options = field(default_factory=Options)
    graph: GraphModule = field(init=False)
    report: Report = field(init=False)
    graphs: int = 0
    new_guards: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch._dynamo.reset()
        self.run = torch.compile(
            self.fn, backend=self._backend, dynamic=self.dynamic, fullgraph=True
        )

    def _backend(self, gm: GraphModule, example_inputs: list[Any]) -> Any:
        aten = capture(gm, example_inputs)
        aten.meta["example_inputs"] = list(example_inputs)
        shapes = shape_env(aten)
        before = len(shapes.guards) if shapes else 0
        self.report = run_passes(aten, [Canonicalize(), FuseAttention()], self.options)
        self.new_guards = [str(g.expr) for g in shapes.guards[before:]] if shapes else []
        self.graph = aten
        self.graphs += 1
        return aten

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def check(self, args: Tensors, tolerance: float = 2e-5) -> None:
        """Equal to eager in value and in the gradients of all inputs that want one."""
        for ours, theirs in zip(results(self, args), results(self.fn, args)):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)

    def targets(self) -> list[str]:
        """The operators of the rewritten graph."""
        return [str(n.target) for n in self.graph.graph.nodes if n.op == "call_function"]


def results(fn: Callable[..., Any], args: Tensors) -> Tensors:
    """The output, and gradients under one fixed upstream gradient."""
    out = fn(*args)
    wanted = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
    if not wanted:
        return [out]
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    grads = torch.autograd.grad(out, wanted, upstream.view(out.shape), allow_unused=True)
    return [out, *(torch.zeros(()) if g is None else g for g in grads)]


def shape_env(gm: GraphModule) -> ShapeEnv | None:
    """The shape environment of a graph's values."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.fake_mode.shape_env  # type: ignore[attr-defined]
    return None


def inputs(batch: int = 3, length: int = 16, dtype: torch.dtype = torch.float32) -> Tensors:
    q, k, v = (torch.randn(batch, length, WIDTH, dtype=dtype) for _ in range(3))
    lengths = torch.tensor([length, 5, 9, 2, 1, 7, 3, 4][:batch]).clamp(max=length)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), lengths]


def only_site(run: Rewritten) -> Site:
    (site,) = run.report.sites
    return site
