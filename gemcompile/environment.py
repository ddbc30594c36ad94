"""What surrounds a compile: environment switches, and why values leave the graph."""

from __future__ import annotations

import os
import sys

from torch.fx import GraphModule

from .report import Report


def disabled() -> bool:
    """GEM_DISABLE=1 is plain Inductor."""
    return os.environ.get("GEM_DISABLE", "0") not in ("", "0")


def echo(report: Report) -> None:
    """GEM_LOGS=passes prints the report of each compile, GEM_LOGS=graphs the graphs too."""
    wanted = {w.strip() for w in os.environ.get("GEM_LOGS", "").split(",")} - {""}
    if "passes" in wanted:
        print(report, file=sys.stderr)
    if "graphs" in wanted:
        for p in report.passes:
            if p.changes:
                print(f"--- after {p.name}\n{p.after}", file=sys.stderr)


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
