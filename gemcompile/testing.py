"""Helpers for tests of passes: capture a function's graph, run passes on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from .capture import capture
from .options import Options
from .pass_manager import Context, Pass, PassManager
from .report import Report
from .target import Target

__all__ = ["capture", "run_passes", "trace"]


def trace(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = True,
    grad: bool = True,
    **kwargs: Any,
) -> GraphModule:
    """The pre-dispatch ATen graph that gem's passes see for ``fn(*args, **kwargs)``.

    Inputs of the graph are in Dynamo's order (first use), parameters and buffers included; the
    first batch is kept as ``gm.meta["example_inputs"]``.

    Raises:
        AssertionError: the function breaks into several graphs.
    """
    graphs: list[GraphModule] = []

    def collect(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        aten = capture(gm, example_inputs)
        aten.meta["example_inputs"] = list(example_inputs)
        graphs.append(aten)
        return gm.forward

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        torch.compile(fn, backend=collect, dynamic=dynamic, fullgraph=True)(*args, **kwargs)
    assert len(graphs) == 1, f"{len(graphs)} graphs instead of one"
    return graphs[0]


def run_passes(
    gm: GraphModule,
    passes: Sequence[Pass],
    options: Options | None = None,
    target: Target | None = None,
) -> Report:
    """Run passes on a traced graph in place, as the backend does, and return the report."""
    report = Report(graphs=1)
    inputs = gm.meta.get("example_inputs", ())
    context = Context(target or Target("cpu"), options or Options(), report, inputs)
    PassManager(passes).run(gm, context)
    gm.meta["gem_context"] = context
    return report
