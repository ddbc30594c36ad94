"""Passes, their order, and the loop that runs them and checks the graph after each one."""

from __future__ import annotations

import hashlib
import inspect
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx
import torch
from torch.fx import GraphModule, Node

from . import graph
from .report import PassRecord, Report
from .target import Target

if TYPE_CHECKING:
    from .options import Options
    from .prologue import Prologue

log = logging.getLogger("gemcompile.passes")


class PassError(RuntimeError):
    """A pass failed, or left the graph broken; the message names it and what ran before."""


class OrderError(ValueError):
    """The passes' after/before constraints contradict each other."""


@dataclass
class Context:
    """What a pass may ask: the target, the user's options, the report, the real first batch.

    Attributes:
        example_inputs: the values of the graph's placeholders on the first call (tensors or
            numbers).
        prologue: row sets that the graph takes as trailing inputs (see `gemcompile.prologue`).
        cause: why an output leaves this graph ("the graph breaks at model.py:12"), or "".
        cure: what the user can do about it, or "".
    """

    target: Target
    options: Options
    report: Report
    example_inputs: Sequence[Any] = ()
    prologue: Prologue | None = None
    cause: str = ""
    cure: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


class Pass:
    """A rewrite of a whole graph. Subclass it, give `run`, and name the passes it must follow or
    precede.

    Attributes:
        after, before: names of passes that must run earlier or later; names that are not there are
            ignored.
        numerics: "exact" passes change results by no more than reordering of sums does; "reduced"
            ones run only when the user asks for a precision.
    """

    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    numerics: str = "exact"

    @property
    def name(self) -> str:
        """The class name."""
        return type(self).__name__

    def run(self, gm: GraphModule, context: Context) -> int:
        """Rewrite ``gm.graph`` in place and return how many changes were made."""
        raise NotImplementedError

    def identity(self) -> tuple[object, ...] | None:
        """Equal in every process for equal behaviour; None where that cannot be told.

        By default the text of the files that define the class and its bases, and the plain
        attributes of the object. Override it where other modules take part. A pass without an
        identity makes the compile caches step aside.
        """
        options = vars(self)
        if not all(_is_plain(v) for v in options.values()):
            return None
        digest = hashlib.sha256()
        try:
            for base in type(self).__mro__[: type(self).__mro__.index(Pass)]:
                digest.update(Path(inspect.getfile(base)).read_bytes())
        except (OSError, TypeError):  # typed into a prompt: there is no file
            return None
        options_text = repr(sorted(options.items()))
        return (type(self).__module__, type(self).__qualname__, digest.hexdigest(), options_text)


def _is_plain(v: object) -> bool:
    if isinstance(v, (tuple, list)):
        return all(map(_is_plain, v))
    if isinstance(v, dict):
        return all(_is_plain(k) and _is_plain(x) for k, x in v.items())
    return v is None or isinstance(v, (bool, int, float, str, bytes, torch.dtype))


def ordered(passes: Sequence[Pass]) -> list[Pass]:
    """The passes in a stable order that satisfies their constraints.

    Raises:
        OrderError: the constraints go round in a circle, or two passes share a name.
    """
    by_name: dict[str, Pass] = {}
    for p in passes:
        if p.name in by_name:
            raise OrderError(f"two passes are named {p.name}; give one of the classes another name")
        by_name[p.name] = p
    order = nx.DiGraph()
    order.add_nodes_from(by_name)
    for p in passes:
        order.add_edges_from((a, p.name) for a in p.after if a in by_name)
        order.add_edges_from((p.name, b) for b in p.before if b in by_name)
    try:
        rank = {name: i for i, name in enumerate(by_name)}
        names = list(nx.lexicographical_topological_sort(order, key=rank.__getitem__))
    except nx.NetworkXUnfeasible:
        circle = [a for a, _ in nx.find_cycle(order)]
        listed = " -> ".join([*circle, circle[0]])
        raise OrderError(f"passes constrain each other in a circle: {listed}") from None
    return [by_name[n] for n in names]


class PassManager:
    """Runs passes in order; after each one removes dead code, checks the graph, takes notes."""

    def __init__(self, passes: Sequence[Pass], disable: Sequence[str] = ()) -> None:
        known = [p.name for p in passes]
        for name in disable:
            if name not in known:
                raise ValueError(
                    f"option disable names {name!r}; the passes are {', '.join(known)}"
                )
        self.passes = [p for p in ordered(passes) if p.name not in disable]

    def run(
        self,
        gm: GraphModule,
        context: Context,
        check: Callable[[str, GraphModule], None] | None = None,
    ) -> int:
        """Run all passes; returns the number of changes.

        Args:
            check: called with the pass's name and the graph after each pass that changed something.

        Raises:
            PassError: a pass raised or left a broken graph.
        """
        total = 0
        before = graph.text(gm)
        for i, p in enumerate(self.passes):
            start = time.perf_counter()
            old = set(gm.graph.nodes)
            try:
                changes = p.run(gm, context)
                if changes:
                    gm.graph.eliminate_dead_code()
                    gm.graph.lint()
                    check_metadata(gm, old)
                    gm.recompile()
            except Exception as e:
                earlier = ", ".join(q.name for q in self.passes[:i]) or "no other pass"
                what = str(e) if isinstance(e, PassError) else f"{type(e).__name__}: {e}"
                raise PassError(f"pass {p.name} failed after {earlier}: {what}") from e
            seconds = time.perf_counter() - start
            if changes and check:
                check(f"pass {p.name}", gm)
            after = graph.text(gm) if changes else before
            context.report.passes.append(PassRecord(p.name, changes, seconds, before, after))
            log.debug("%s: %d changes in %.3f s", p.name, changes, seconds)
            total += changes
            before = after
        return total


def check_metadata(gm: GraphModule, old: Collection[Node] = ()) -> None:
    """What a pass must leave: every value known, and new nodes marked as what they stand among.

    Args:
        old: the nodes that were there before the pass.

    Raises:
        PassError: a node without a value, or one amid a checkpointed region that is not marked so
            (it would be saved instead of recomputed).
    """
    for n in gm.graph.nodes:
        call = f"{n.name} = {graph.target_name(n)}"
        if isinstance(n.target, torch._ops.OpOverload) and "val" not in n.meta:
            if n.target._schema.returns and n.users:
                raise PassError(f"{call} has no value; insert nodes with gemcompile.graph.Editor")
        if n.op == "call_function" and n not in old and n.all_input_nodes:
            around = {m.meta.get("ac_graph_id") for m in (*n.all_input_nodes, *n.users)}
            if len(around) == 1 and around != {n.meta.get("ac_graph_id")} and around != {None}:
                raise PassError(f"{call} lost its checkpoint mark; insert nodes with an Editor")
