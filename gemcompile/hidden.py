"""A pass that is run with part of the graph hidden from it, so that it rewrites some places only.

A hidden node calls an operator that no pass knows. It works for every pass, whatever it looks for,
because what stays opaque cannot be rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from . import graph
from .pass_manager import Context, Pass
from .report import source_line


@dataclass(frozen=True)
class Place:
    """A node that a pass changes: the number of its graph, its position there, what it calls."""

    graph: int
    position: int
    op: str
    where: str


class Limited(Pass):
    """A pass under its own name that sees only some of the places where it changes the graph.

    Args:
        inner: the pass.
        visible: the places that it may see, or None for all.
        places: filled with all places, in order, where ``visible`` is None.
    """

    def __init__(
        self, inner: Pass, visible: Sequence[Place] | None, places: list[Place] | None = None
    ) -> None:
        self.inner, self.visible = inner, None if visible is None else set(visible)
        self.places = places if places is not None else []
        self.after, self.before, self.numerics = inner.after, inner.before, inner.numerics
        self.start()

    @property
    def name(self) -> str:
        """The inner pass's."""
        return self.inner.name

    def start(self) -> None:
        """Begin a compile: `next_graph` is called before each of its graphs."""
        self.graphs = -1

    def next_graph(self) -> None:
        """The graphs that the pass sees from now on are one and the same."""
        self.graphs += 1

    def run(self, gm: GraphModule, context: Context) -> int:
        """Run the inner pass on what is visible."""
        if self.visible is None:
            return self._noting_places(gm, context)
        seen = {p.position for p in self.visible if p.graph == self.graphs}
        veils: dict[Any, Any] = {}
        for i, n in enumerate(list(gm.graph.nodes)):
            if i not in seen and _may_hide(n):
                veil = _veil(n.target)
                veils[veil], n.target = n.target, veil
        try:
            return self.inner.run(gm, context)
        finally:
            for n in gm.graph.nodes:
                if n.op == "call_function":
                    n.target = veils.get(n.target, n.target)

    def _noting_places(self, gm: GraphModule, context: Context) -> int:
        before = [
            (i, n, n.target, n.args, n.kwargs, graph.target_name(n), source_line(n))
            for i, n in enumerate(gm.graph.nodes)
            if _may_hide(n)
        ]
        changes = self.inner.run(gm, context)
        left = set(gm.graph.nodes)
        self.places[:] = [p for p in self.places if p.graph != self.graphs]  # of a run thrown away
        for i, n, target, args, kwargs, op, where in before:
            same = n in left and n.target is target and n.args == args and n.kwargs == kwargs
            if not same:
                self.places.append(Place(self.graphs, i, op, where))
        return changes


def _may_hide(n: Node) -> bool:
    """Operators without side effects: others would be taken for dead code."""
    target = n.target
    known = n.op == "call_function" and isinstance(target, torch._ops.OpOverload)
    return known and not target._schema.is_mutable and bool(n.users)  # type: ignore[union-attr]


def _veil(target: Callable[..., Any]) -> Callable[..., Any]:
    def hidden(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return hidden
