"""``gem.bisect``: which pass changes a model's result, and at which place.

The model is compiled with the first half of the passes, then with a quarter more or less, until one
is left. Then that pass is run again with part of the graph hidden from it: behind an operator that
it does not know it cannot rewrite, so that the first place is found at which the result goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule

from .explain import _copy, _twin
from .fixed_draws import FixedDraws, draws
from .hidden import Limited, Place
from .options import Options
from .pass_manager import Pass, PassManager
from .report import Report, Site, record
from .verify import difference, distance, gradients

_NO_LIMIT: dict[str, Any] = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20}


@dataclass(frozen=True)
class Bisection:
    """What `bisect` found; ``str()`` is for people.

    Attributes:
        guilty: the pass, "capture" where the graph is wrong before any pass, None where no result
            differs.
        op: what stood at the site in the graph: its last operator; "" where no site is known.
        where: the user's line that wrote it, "file.py:41", or "".
        site: what the pass reported there, or None.
        difference: the largest difference that the pass makes, in words.
        switch_off: what leaves the pass out.
        left_out: passes that failed in the full compile and were left out, with the reason.
        compiles: how often the model was compiled.
    """

    guilty: str | None
    op: str = ""
    where: str = ""
    site: Site | None = None
    difference: str = ""
    switch_off: str = ""
    left_out: tuple[str, ...] = ()
    compiles: int = 0

    def __str__(self) -> str:
        tail = [f"  left out  {x}" for x in self.left_out]
        tail.append(f"  found in {self.compiles} compiles")
        if self.guilty is None:
            return "\n".join(["no pass changes the result", *tail])
        subject = "capture" if self.guilty == "capture" else f"pass {self.guilty}"
        lines = [f"{subject} changes the result: {self.difference}"]
        if self.op:
            lines.append(f"  site      {self.op}" + (f" at {self.where}" if self.where else ""))
        if self.site:
            lines.append(f"  reported  {self.site}")
        return "\n".join([*lines, f"  leave it out with {self.switch_off}", *tail])


def bisect(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    tolerance: float | None = None,
    options: Mapping[str, Any] | Options | None = None,
) -> Bisection:
    """Find the pass that changes a model's outputs or gradients, and the place where it does.

    Runs on copies of model and arguments; rewritten graphs run without code generation. Where the
    model draws random numbers, every draw is fixed, and the graph without passes is the reference
    instead of eager mode.

    Args:
        model: a module or a function of tensors.
        args, kwargs: what it is called with.
        loss: of the model's output, a scalar whose gradients are compared, too; by default the sum
            of squares of all outputs.
        tolerance: on the norm of a difference beside that of the original; by default 1e-4 in
            float32, 2e-2 in float16, 4e-2 in bfloat16.
        options: as torch.compile takes them, the passes to be searched among them.

    Raises:
        ValueError: an unknown option.
    """
    from .backend import pipeline

    chosen = replace(Options.parse(options), inner="eager", verify=False)
    passes = pipeline(chosen).passes
    trial = _Trial(model, tuple(args), dict(kwargs or {}), loss, tolerance, chosen)
    with torch._dynamo.config.patch(**_NO_LIMIT):
        problem = trial.find_reference()
        if problem:
            return Bisection(
                "capture", difference=problem, switch_off="GEM_DISABLE=1", compiles=trial.compiles
            )
        problem = trial.problem(passes)
        left_out = tuple(s.reason for s in trial.report.sites if s.op.startswith("pass "))
        if not problem:
            return Bisection(None, left_out=left_out, compiles=trial.compiles)
        n = _first(len(passes), lambda k: bool(trial.problem(passes[:k])))
        guilty, before = passes[n - 1], passes[: n - 1]
        found = _find_site(trial, guilty, before)
    return replace(
        found,
        guilty=guilty.name,
        switch_off=f'options={{"disable": ["{guilty.name}"]}}',
        left_out=left_out,
        compiles=trial.compiles,
    )


def _first(n: int, wrong: Callable[[int], bool]) -> int:
    """The least k at which it is wrong, 0 being right and n wrong."""
    right = 0
    while n - right > 1:
        middle = (right + n) // 2
        if wrong(middle):
            n = middle
        else:
            right = middle
    return n


def _find_site(trial: _Trial, guilty: Pass, before: list[Pass]) -> Bisection:
    places: list[Place] = []
    whole = trial.problem([*before, Limited(guilty, None, places)])

    def run(k: int) -> tuple[str, list[Site]]:
        problem = trial.problem([*before, Limited(guilty, places[:k])])
        return problem, [s for s in trial.report.sites if s.status == "rewritten"]

    alone, _ = run(0)
    if not places or alone:
        return Bisection(guilty.name, difference=whole)
    k = _first(len(places), lambda k: bool(run(k)[0]))
    _, sites = run(k - 1)
    problem, more = run(k)
    new = [s for s in more if s not in sites]
    place = places[k - 1]
    site = new[0] if len(new) == 1 else None
    return Bisection(guilty.name, place.op, place.where, site, problem)


@dataclass
class _Trial:
    """Runs the model with some of the passes and compares it with the reference."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None
    tolerance: float | None
    options: Options

    def __post_init__(self) -> None:
        self.compiles = 0
        self.random = False
        self.report = Report()
        self.expected: list[tuple[str, Any]] = []

    def find_reference(self) -> str:
        """Run eager mode, or the graph without passes where random numbers are drawn.

        Returns:
            How the graph without passes differs from it, as `problem`.
        """
        without_passes = self._compiled([])
        self.expected = without_passes if self.random else self._results(lambda model: model)
        return self._compare(without_passes)

    def problem(self, passes: Sequence[Pass]) -> str:
        """The largest difference from the reference, in words, or ""."""
        try:
            found = self._compiled(passes)
        except Exception as e:
            if self.options.strict:
                raise
            return f"the compiled model raises {type(e).__name__}: {str(e).splitlines()[0]}"
        return self._compare(found)

    def _compare(self, found: list[tuple[str, Any]]) -> str:
        if len(found) != len(self.expected):
            return f"{len(found)} results instead of {len(self.expected)}"
        worst = (-1.0, "")
        for (name, a), (_, b) in zip(found, self.expected):
            text = difference(a, b, self.tolerance)
            if text:
                worst = max(worst, (_share(a, b), f"{name} differs, {text}"))
        return worst[1]

    def _compiled(self, passes: Sequence[Pass]) -> list[tuple[str, Any]]:
        from .backend import compile_graph

        self.compiles += 1
        manager = PassManager(passes)
        limited = [p for p in passes if isinstance(p, Limited)]
        for p in limited:
            p.start()

        def finish(gm: GraphModule) -> Callable[..., Any]:
            self.random = self.random or draws(gm)
            return FixedDraws(gm).run

        def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            for p in limited:
                p.next_graph()
            return compile_graph(gm, inputs, self.options, manager, {}, finish)

        with record() as self.report:
            return self._results(lambda twin: torch.compile(twin, backend=backend, dynamic=True))

    def _results(self, prepare: Callable[[Any], Any]) -> list[tuple[str, Any]]:
        twin: Any = _twin(self.model, {})
        args, kwargs = pytree.tree_map(_copy, (self.args, self.kwargs))
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        leaves = {f"input {i}": x for i, x in enumerate(inputs)}
        if isinstance(twin, torch.nn.Module):
            leaves |= dict(twin.named_parameters())
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            out = prepare(twin)(*args, **kwargs)
            tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
            leaves = {k: x for k, x in leaves.items() if x.requires_grad and x.is_leaf}
            slopes = self._gradients(out, tensors, list(leaves.values()))
        return [
            *((f"output {i}", x.detach()) for i, x in enumerate(tensors)),
            *((f"the gradient of {name}", g) for name, g in zip(leaves, slopes)),
        ]

    def _gradients(self, out: Any, tensors: list[torch.Tensor], leaves: list[Any]) -> list[Any]:
        if self.loss is None or not leaves:
            return list(gradients(tensors, leaves))
        return list(torch.autograd.grad(self.loss(out), leaves, allow_unused=True))


def _share(a: Any, b: Any) -> float:
    """The norm of the difference beside that of ``b``; infinite for other shapes or types."""
    if a is None or b is None or a.shape != b.shape or not b.is_floating_point():
        return float("inf")
    error, size = distance(a, b)
    return error / max(size, 1e-2)
