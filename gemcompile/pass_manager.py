"""Passes, their order, and the loop that runs them and checks the graph after each one."""

from __future__ import annotations

import hashlib
import inspect
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx
import torch
from torch._dynamo.exc import RestartAnalysis
from torch.fx import GraphModule

from . import graph
from .graph_checks import Boundary, BrokenGraph, check_metadata
from .graph_snapshot import snapshot
from .report import PassRecord, Report
from .target import Target

if TYPE_CHECKING:
    from .options import Options
    from .prologue import Prologue

log: logging.Logger = logging.getLogger("gemcompile.passes")


class PassError(RuntimeError):
    """A pass failed, or left the graph broken.

    The message names it and what ran before, and holds its traceback and the graph before it.

    Attributes:
        reason: the message's first line, a clause fit to follow "declined because".
        culprit: the pass's name.
        before: the text of the graph before the pass; the message shortens it.
    """

    def __init__(self, reason: str, culprit: str, before: str, story: str = "") -> None:
        super().__init__(f"{reason}\n{story}\nthe graph before {culprit}:\n{_shortened(before)}")
        self.reason: str = reason
        self.culprit: str = culprit
        self.before: str = before


def _what(error: Exception) -> str:
    first = (str(error) or "no message").splitlines()[0]
    return first if isinstance(error, BrokenGraph) else f"{type(error).__name__}: {first}"


def _traceback(error: Exception) -> str:
    """The error's traceback from the pass inwards; of a check, it would tell nothing."""
    if isinstance(error, BrokenGraph):
        return ""
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "\n" + "".join(traceback.format_exception(type(error), error, trace))


def _shortened(text: str, most: int = 200) -> str:
    lines = text.splitlines()
    rest = len(lines) - most
    if rest <= 0:
        return text
    return "\n".join([*lines[:most], f"... {rest} more lines; PassError.before holds all of them"])


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

    def start_over(self) -> None:
        """Forget what passes did to a graph that is thrown away."""
        if self.prologue:
            self.prologue.take_guards()
        self.prologue = None
        self.notes.clear()
        self.report.sites.clear()
        self.report.passes.clear()


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
        self.passes: list[Pass] = [p for p in ordered(passes) if p.name not in disable]

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
        boundary = Boundary(gm)
        before, nodes_before = graph.text(gm), snapshot(gm)
        for i, p in enumerate(self.passes):
            start = time.perf_counter()
            try:
                changes = _run(p, gm, context, boundary)
            except RestartAnalysis:  # Dynamo's own way to begin again
                raise
            except Exception as e:
                earlier = ", ".join(q.name for q in self.passes[:i]) or "no other pass"
                what, story = _what(e), _traceback(e)
                raise PassError(
                    f"pass {p.name} failed after {earlier}: {what}", p.name, before, story
                ) from e
            seconds = time.perf_counter() - start
            if changes and check:
                check(f"pass {p.name}", gm)
            after, nodes_after = before, nodes_before
            if changes:
                after, nodes_after = graph.text(gm), snapshot(gm, nodes_before)
            context.report.passes.append(
                PassRecord(p.name, changes, seconds, before, after, nodes_before, nodes_after)
            )
            log.debug("%s: %d changes in %.3f s", p.name, changes, seconds)
            total += changes
            before, nodes_before = after, nodes_after
        return total

    def without(self, name: str) -> PassManager:
        """The same passes but one."""
        return PassManager([p for p in self.passes if p.name != name])


def _run(p: Pass, gm: GraphModule, context: Context, boundary: Boundary) -> int:
    """Run one pass, clean up behind it, and check what it left."""
    old = set(gm.graph.nodes)
    changes = p.run(gm, context)
    if not isinstance(changes, int):
        raise BrokenGraph(
            f"its run() returned {changes!r} instead of the number of changes that it made"
        )
    if changes or set(gm.graph.nodes) != old:
        try:
            gm.graph.lint()
        except RuntimeError as e:
            raise BrokenGraph(f"it left the graph out of order: {str(e).splitlines()[0]}") from e
        gm.graph.eliminate_dead_code()
        check_metadata(gm, old)
        boundary.check(gm, len(context.prologue.fakes) if context.prologue else 0)
        gm.recompile()
    return changes
