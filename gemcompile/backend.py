"""The backend "gem": capture, passes, hand-over to Inductor. Only this file knows all wings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch._dynamo.exc import RestartAnalysis
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

from . import lowering as _kernels  # noqa: F401  importing it registers the op set's kernels
from . import passes
from .capture import CaptureDeclined, capture
from .environment import disabled, echo, leaving_cause
from .identity import stamped
from .modes import asks_for_cuda_graphs, inductor_patches
from .options import Options
from .pass_manager import Context, PassError, PassManager
from .report import Report, publish
from .target import Target
from .verify import Verifier, VerifyError
from .work import forward_bytes, forward_flops

log: logging.Logger = logging.getLogger("gemcompile")
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
        ValueError: an unknown mode, option or value, or passes whose order contradicts itself.
        VerifyError: under ``verify=True``, a pass changed a result or gradient.
    """
    chosen = Options.parse(options)
    manager = pipeline(chosen)
    patches = inductor_patches(mode, chosen)
    if disabled():
        return _inductor(gm, example_inputs, patches)
    return compile_graph(gm, example_inputs, chosen, manager, patches)


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    chosen: Options,
    manager: PassManager,
    patches: dict[str, Any],
    run: Callable[[GraphModule], Compiled] = lambda gm: gm,
) -> Compiled:
    """Compile one graph with the passes of ``manager``, and publish its report.

    Args:
        run: what makes a rewritten graph callable where there is no code generation.
    """
    report = Report(graphs=1)
    context = Context(_target(example_inputs), chosen, report, example_inputs)
    context.cause, context.cure = leaving_cause(gm)
    start = time.perf_counter()
    try:
        rewritten = _rewrite(gm, manager, context)
        if chosen.inner == "eager":
            compiled = _with_prologue(run(rewritten), gm, context)
        else:
            compiled = _hand_over(gm, rewritten, patches, context)
        _note_bypass(chosen, report)
    except RestartAnalysis:
        raise
    except Exception as e:
        if chosen.strict or isinstance(e, VerifyError):
            raise
        compiled = _fall_back(gm, patches, context, e)
    report.seconds = time.perf_counter() - start
    publish(report)
    echo(report)
    return compiled


def _inductor(gm: GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> Compiled:
    compiled: Any = compile_fx(gm, list(inputs), config_patches=patches)
    return cast(Compiled, compiled)


def pipeline(options: Options) -> PassManager:
    """The forward passes, in order: gem's own and the user's."""
    own = [p for p in passes.forward() if p.numerics == "exact" or options.precision is not None]
    return PassManager([*own, *options.passes], options.disable)


def _rewrite(gm: GraphModule, manager: PassManager, context: Context) -> GraphModule:
    """Capture, and run the forward passes on the result.

    Unless ``strict``, a pass that fails is left out, and all begins again on a fresh graph.
    """
    failed: list[PassError] = []
    while True:
        aten = capture(gm, context.example_inputs)
        check = Verifier(gm, context) if context.options.verify else None
        if check:
            check.captured(aten)
        padded = forward_flops(aten), forward_bytes(aten)
        try:
            manager.run(aten, context, check)
        except PassError as e:
            if context.options.strict:
                raise
            log.warning("gem goes on without %s: %s", e.culprit, e)
            failed.append(e)
            manager = manager.without(e.culprit)
            context.start_over()
            continue
        for failure in failed:
            op = f"pass {failure.culprit}"
            context.report.add("graph", "declined", op, failure.reason)
        if context.prologue:
            packed = (count(aten, context.prologue) for count in (forward_flops, forward_bytes))
            context.report.add_work(padded, tuple(packed))
        return aten


def _target(example_inputs: Sequence[Any]) -> Target:
    for x in example_inputs:
        if isinstance(x, torch.Tensor) and x.device.type == "cuda":
            return Target.of(x.device)
    return Target("cpu")


def _hand_over(
    original: GraphModule, rewritten: GraphModule, patches: dict[str, Any], context: Context
) -> Compiled:
    """Compile the rewritten graph, and put the prologue in front of it where there is one."""
    prologue = context.prologue
    if prologue:
        if asks_for_cuda_graphs(patches):
            reason = "the number of packed rows changes at every step"
            context.report.add("graph", "declined", "CUDA graphs", reason)
        patches = {**patches, "triton.cudagraphs": False}
    inputs = [*context.example_inputs, *(prologue.fakes if prologue else ())]
    main = _inductor(rewritten, inputs, stamped(context.options, patches))
    return _with_prologue(main, _beyond(original), context)


def _with_prologue(main: Compiled, beyond: Compiled, context: Context) -> Compiled:
    return main if context.prologue is None else context.prologue.runner(main, beyond)


def _fall_back(
    gm: GraphModule, patches: dict[str, Any], context: Context, error: Exception
) -> Compiled:
    """Plain Inductor, with the reason in the report."""
    reason = str(error)
    if not isinstance(error, CaptureDeclined):
        reason = f"{type(error).__name__}: {error}"
    log.warning("gem compiles this graph with plain Inductor because %s", reason)
    context.report.sites.clear()
    context.report.add("graph", "declined", "the whole graph", reason)
    if context.prologue:
        context.prologue.take_guards()
    if context.options.inner == "eager":
        return gm
    return _inductor(gm, context.example_inputs, patches)


def _note_bypass(options: Options, report: Report) -> None:
    """Compiling anew in every process is slow, and the user should know which pass is the cause."""
    names = [p.name for p in options.passes if p.identity() is None]
    if names and options.inner != "eager":
        reason = f"{', '.join(names)} has no stable identity; give it an identity() method"
        report.add("graph", "declined", "the compile caches", reason)


def _beyond(original: GraphModule) -> Compiled:
    """The original graph, compiled on first need, for batches above the packed graph's bound."""
    compiled: list[Compiled] = []

    def call(*args: Any) -> Any:
        if not compiled:
            compiled.append(torch.compile(original, dynamic=True))
        return compiled[0](*args)

    return call
