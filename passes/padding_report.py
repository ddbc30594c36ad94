"""What EliminatePadding tells the user: rows removed, or the first node that observes a
padded row.
"""

from __future__ import annotations

import sympy
import torch
from torch.fx import Node

from gemcompile.graph import arguments, target_name
from gemcompile.pass_manager import Context
from gemcompile.report import source_line

from .layout import expr
from .padding_demand import All, Analysis
from .padding_emit import Result
from .padding_regions import Region
from .padding_rules import RULES, is_pointwise


def report_rewritten(context: Context, result: Result, found: list[Region]) -> None:
    """One padding site for each region."""
    for region in found:
        key = id(region)
        rows = result.rowsets[key]
        details: dict[str, object] = {
            "nodes": result.nodes[key],
            "packs": result.packs[key],
            "unpacks": result.unpacks[key],
            "attention": len(region.sites),
        }
        if rows.rows is not None and rows.total:
            details["padding"] = (
                f"{rows.rows} of {rows.total} rows are real ({rows.rows / rows.total:.0%})"
            )
        context.report.add(
            "padding",
            "rewritten",
            "packed rows",
            "",
            source_line(rows.mask) or source_line(region.sites[0]),
            **details,
        )


def observer(a: Analysis, n: Node, context: Context) -> str:
    """Why the output of attention ``n`` is observed in padded rows."""
    given = arguments(n)
    if a.attention[n] is None and not given["causal"]:
        return "its keys have no padding mask"
    seen: set[Node] = set()
    at = n
    while True:
        d = a.demand.get(at)
        if not isinstance(d, All) or at in seen:
            return f"{target_name(at)} observes padded rows{_place(at)}"
        seen.add(at)
        user = d.user
        if user.op == "output":
            return _leaves(context)
        if user is at:
            return f"its padded rows are used in two ways{_place(at)}"
        if user in a.attention and user is not n:
            if given["empty"] == "mean" and user in a.closed:
                return f"the next attention needs padded rows{_place(user)}"
            at = user
            continue
        passes_on = user.target in RULES or is_pointwise(user)
        if passes_on and isinstance(a.demand.get(user), All) and _has_rows(user, n):
            at = user
            continue
        return f"{target_name(user)} observes padded rows{_place(user)}"


def _has_rows(n: Node, attention: Node) -> bool:
    """n still holds a value for every batch entry and position of the attention's output."""
    value = n.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return True  # a split
    size = sympy.prod([expr(s) for s in value.shape])
    rows = sympy.prod([expr(s) for s in attention.meta["val"].shape[:2]])
    return bool(sympy.cancel(size / rows).as_numer_denom()[1] == 1)


def _place(n: Node) -> str:
    line = source_line(n)
    return f" at {line}" if line else ""


def _leaves(context: Context) -> str:
    cause = context.cause or "the block may be compiled alone"
    cure = context.cure or "compile the whole model with its loss, or set padded_outputs='zero'"
    return f"its padded output leaves the graph ({cause}); {cure}"
