"""What surrounds a compile: environment switches, logs, and why values leave the graph.

docs/logging.md says what is logged where, and how to turn it on.
"""

from __future__ import annotations

import logging
import os
import sys

from torch._logging._internal import trace_structured
from torch.fx import GraphModule

from .report import Report

log: logging.Logger = logging.getLogger("gemcompile")
graph_log: logging.Logger = logging.getLogger("gemcompile.graph")


def disabled() -> bool:
    """GEM_DISABLE=1 is plain Inductor."""
    return os.environ.get("GEM_DISABLE", "0") not in ("", "0")


def echo(report: Report) -> None:
    """Tell of a finished compile: to the loggers, to torch's trace, and as GEM_LOGS asks.

    GEM_LOGS=passes prints the report, GEM_LOGS=graphs the graphs too.
    """
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", report)
    elif log.isEnabledFor(logging.INFO):
        log.info("%s", str(report).partition("\n")[0])
    changed = [p for p in report.passes if p.changes]
    for p in changed:
        graph_log.debug("after %s\n%s", p.name, p.after)
        _trace(f"gem_after_{p.name}", p.after)
    _trace("gem_report", report)
    wanted = {w.strip() for w in os.environ.get("GEM_LOGS", "").split(",")} - {""}
    if "passes" in wanted:
        print(report, file=sys.stderr)
    if "graphs" in wanted:
        for p in changed:
            print(f"--- after {p.name}\n{p.after}", file=sys.stderr)


def _trace(name: str, content: object) -> None:
    """An artifact of TORCH_TRACE, which tlparse shows beside torch's own."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: str(content),
    )


def leaving_cause(gm: GraphModule) -> tuple[str, str]:
    """(cause, cure): why this graph ends before the model does, or ("", "") where nothing tells.

    A padded value that leaves a graph cannot be proven dead, and the user wants to know why it
    leaves.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return "", ""
    if "DDPOptimizer" in reason.reason:
        return (
            "DistributedDataParallel splits the graph into buckets",
            "set torch._dynamo.config.optimize_ddp = False (or 'python_reducer')",
        )
    frame = reason.user_stack[-1] if reason.user_stack else None
    place = f" at {frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" if frame else ""
    return f"the graph breaks{place}", "remove the graph break (fullgraph=True names it)"
