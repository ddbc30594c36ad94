"""Helpers for tests of passes: what a pass makes of a function, and whether that is right.

def test_my_pass():
    done = gem.testing.rewrite(FuseGate(), gated, x, gate)
    gem.testing.assert_graph(done, '''
        %0 = input : f32[2, 4]
        ...''')
    gem.testing.assert_same(FuseGate(), gated, x, gate)
    gem.testing.assert_refused(FuseGate(), gated, x, odd, because="not a multiple of 8")
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule

from . import graph
from .capture import capture
from .options import Options
from .pass_manager import Context, Pass, PassManager
from .report import Report
from .target import Target
from .verify import difference, gradients

__all__ = [
    "Rewritten",
    "assert_graph",
    "assert_refused",
    "assert_same",
    "capture",
    "rewrite",
    "run_passes",
    "trace",
]

ACCEPT = "GEM_ACCEPT"  # set to 1, assert_graph writes golden files instead of comparing


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
    """Run passes on a traced graph in place, as the backend does, and return the report.

    Raises:
        PassError: a pass raised, or left a broken graph.
    """
    report = Report(graphs=1)
    inputs = gm.meta.get("example_inputs", ())
    context = Context(target or Target("cpu"), options or Options(), report, inputs)
    PassManager(passes).run(gm, context)
    gm.meta["gem_context"] = context
    return report


@dataclass(frozen=True)
class Rewritten:
    """What passes made of a function.

    Attributes:
        gm: the rewritten graph.
        report: its sites and pass records.
        before: the graph's text before the passes.
    """

    gm: GraphModule
    report: Report
    before: str

    @property
    def text(self) -> str:
        """The rewritten graph as text: values numbered in order, with dtype and shape."""
        return graph.text(self.gm)

    @property
    def changes(self) -> int:
        """How many changes the passes made in all."""
        return sum(p.changes for p in self.report.passes)

    @property
    def refusals(self) -> list[str]:
        """The reasons of the declined sites."""
        return [s.reason for s in self.report.sites if s.status == "declined"]


def rewrite(
    passes: Pass | Sequence[Pass],
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = False,
    options: Options | None = None,
    target: Target | None = None,
    **kwargs: Any,
) -> Rewritten:
    """Run one pass, or several, on the graph of ``fn(*args, **kwargs)``.

    Args:
        dynamic: as torch.compile takes it; False gives graphs with plain numbers as sizes.
        target: what to compile for; `Target("cuda", 90)` needs no such device.

    Raises:
        PassError: a pass raised, or left a broken graph.
        AssertionError: the function breaks into several graphs.
    """
    gm = trace(fn, *args, dynamic=dynamic, **kwargs)
    before = graph.text(gm)
    report = run_passes(gm, _several(passes), options, target)
    return Rewritten(gm, report, before)


def assert_graph(done: Rewritten, expected: str | Path) -> None:
    """Compare the rewritten graph with a golden text.

    Args:
        expected: the text, indented as you like; or the path of a file that holds it, which is
            written where the environment says GEM_ACCEPT=1 (read the difference before you commit).

    Raises:
        AssertionError: the text differs, or the file is missing.
    """
    if isinstance(expected, Path):
        if os.environ.get(ACCEPT) == "1":
            expected.parent.mkdir(parents=True, exist_ok=True)
            expected.write_text(done.text + "\n")
        if not expected.exists():
            raise AssertionError(f"{expected} is missing; write it with {ACCEPT}=1")
        expected = expected.read_text()
    wanted = textwrap.dedent(expected).strip()
    assert done.text.strip() == wanted, f"the graph is\n{done.text}\ninstead of\n{wanted}"


def assert_same(
    passes: Pass | Sequence[Pass],
    fn: Callable[..., Any],
    *args: Any,
    changes: int | None = None,
    tolerance: float | None = None,
    dynamic: bool | None = False,
    options: Options | None = None,
    **kwargs: Any,
) -> Rewritten:
    """Values and gradients of the rewritten function are those of eager mode.

    Gradients are those of the sum of squares of the outputs, for every parameter and input that
    requires one. Run it with random draws (dropout) switched off.

    Args:
        changes: how many changes the passes must make; by default at least one.
        tolerance: on the norm of the difference beside that of the original; by default 1e-4 for
            float32, 2e-2 and 4e-2 for float16 and bfloat16.

    Raises:
        AssertionError: a result differs, or nothing was rewritten.
    """
    done = rewrite(passes, fn, *args, dynamic=dynamic, options=options, **kwargs)
    made = done.changes
    wanted = "at least one" if changes is None else str(changes)
    why = "; ".join(done.refusals) or "nothing was declined"
    assert made == changes or (changes is None and made), f"{made} changes, not {wanted}: {why}"
    inputs = done.gm.meta["example_inputs"]
    prologue = done.gm.meta["gem_context"].prologue
    extra = prologue.extra_inputs(inputs)[0] if prologue else []
    leaves = [x for x in inputs if isinstance(x, torch.Tensor)]
    found = _results(done.gm(*inputs, *extra), leaves)
    expected = _results(fn(*args, **kwargs), leaves)
    assert len(found) == len(expected), f"{len(found)} results instead of {len(expected)}"
    for (name, a), (_, b) in zip(found, expected):
        problem = difference(a, b, tolerance)
        assert not problem, f"{name} differs: {problem}"
    return done


def assert_refused(
    passes: Pass | Sequence[Pass],
    fn: Callable[..., Any],
    *args: Any,
    because: str,
    dynamic: bool | None = False,
    options: Options | None = None,
    target: Target | None = None,
    **kwargs: Any,
) -> Rewritten:
    """The passes leave the graph as it is, and record a declined site whose reason has ``because``.

    Raises:
        AssertionError: something was rewritten, or no reason has this text.
    """
    how: dict[str, Any] = {"dynamic": dynamic, "options": options, "target": target}
    done = rewrite(passes, fn, *args, **how, **kwargs)
    assert done.changes == 0, f"{done.changes} changes; the graph is\n{done.text}"
    listed = "\n  ".join(done.refusals) or "nothing was declined"
    assert any(because in r for r in done.refusals), f"no reason has {because!r}:\n  {listed}"
    return done


def _several(passes: Pass | Sequence[Pass]) -> Sequence[Pass]:
    return [passes] if isinstance(passes, Pass) else passes


def _results(outputs: Any, leaves: list[torch.Tensor]) -> list[tuple[str, Any]]:
    tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
    values = [(f"output {i}", x.detach()) for i, x in enumerate(tensors)]
    named = [(f"the gradient of input {i}", g) for i, g in enumerate(gradients(tensors, leaves))]
    return values + named
