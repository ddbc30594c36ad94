"""The backend "gem": capture, passes, hand-over to Inductor. The one file that knows all three wings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

from . import lowering as _kernels  # noqa: F401  importing it registers the op set's kernels
from . import passes
from .capture import CaptureDeclined, capture
from .environment import disabled, echo, leaving_cause
from .identity import stamped
from .options import Options
from .pass_manager import Context, PassManager
from .report import Report, publish
from .target import Target
from .verify import verify

log = logging.getLogger("gemcompile")
Compiled = Callable[..., Any]


def gem(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
) -> Compiled:
    """Compile Dynamo's graph: ``torch.compile(model, backend="gem", mode=..., options={...})``.

    Args:
        mode: one of torch.compile's modes, translated to Inductor's configuration.
        options: see `gemcompile.Options`.

    Raises:
        ValueError: an unknown option or value.
    """
    chosen = Options.parse(options)
    patches = _patches(mode, chosen)
    if disabled():
        return compile_fx(gm, list(example_inputs), config_patches=patches)  # type: ignore[no-any-return]
    report = Report(graphs=1)
    start = time.perf_counter()
    try:
        rewritten, context = _rewrite(gm, example_inputs, chosen, report)
        compiled = _hand_over(gm, rewritten, example_inputs, chosen, patches, context)
    except RestartAnalysis:
        raise
    except Exception as e:
        if chosen.strict or chosen.verify:
            raise
        report.sites.clear()
        report.add("graph", "declined", "the whole graph", _clause(e))
        log.warning("gem compiles this graph with plain Inductor because %s", _clause(e))
        compiled = gm if chosen.inner == "eager" else compile_fx(gm, list(example_inputs), config_patches=patches)
    report.seconds = time.perf_counter() - start
    publish(report)
    echo(report)
    return compiled


def _patches(mode: str | None, options: Options) -> dict[str, Any]:
    patches = dict(torch._inductor.list_mode_options(mode)) if mode not in (None, "default") else {}
    patches.update(options.inductor)
    return patches


def _clause(e: Exception) -> str:
    return str(e) if isinstance(e, CaptureDeclined) else f"{type(e).__name__}: {e}"


def pipeline(options: Options) -> PassManager:
    """The forward passes, in order: gem's own and the user's."""
    own = [p for p in passes.forward() if p.numerics == "exact" or options.precision is not None]
    return PassManager([*own, *options.passes], options.disable)


def _rewrite(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, report: Report
) -> tuple[GraphModule, Context]:
    """Capture and run the forward passes on the result."""
    aten = capture(gm, example_inputs)
    cause, cure = leaving_cause(gm)
    context = Context(_target(example_inputs), options, report, example_inputs, cause=cause, cure=cure)
    pipeline(options).run(aten, context)
    return aten, context


def _target(example_inputs: Sequence[Any]) -> Target:
    for x in example_inputs:
        if isinstance(x, torch.Tensor) and x.device.type == "cuda":
            return Target.of(x.device)
    return Target("cpu")


def _hand_over(
    original: GraphModule,
    rewritten: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    patches: dict[str, Any],
    context: Context,
) -> Compiled:
    """Compile the rewritten graph, and put the prologue in front of it where there is one."""
    prologue = context.prologue
    inputs = [*example_inputs, *(prologue.fakes if prologue else ())]
    if prologue:
        patches = {**patches, "triton.cudagraphs": False}
    if options.verify:
        verify(original, rewritten, example_inputs, prologue)
    if options.inner == "eager":
        main: Compiled = rewritten
    else:
        main = compile_fx(rewritten, inputs, config_patches=stamped(options, patches))
    if prologue is None:
        return main
    return prologue.runner(main, _beyond(original))


def _beyond(original: GraphModule) -> Compiled:
    """The original graph, compiled on first need, for batches above the packed graph's declared bound."""
    compiled: list[Compiled] = []

    def call(*args: Any) -> Any:
        if not compiled:
            compiled.append(torch.compile(original, dynamic=True))
        return compiled[0](*args)

    return call
