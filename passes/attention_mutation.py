"""In-place operators: which tensors a matcher must not read as if they were values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from .aliases import lineage

aten = torch.ops.aten


def mutated_argument(node: Node) -> Node | None:
    """The tensor that an in-place operator (``masked_fill_``, ``add_``) changes, else None."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if not node.target._schema.is_mutable or node.target is aten.detach_.default:
        return None
    first = node.args[0] if node.args else None
    return first if isinstance(first, Node) else None


def functional(node: Node) -> object:
    """The operator of a call, an in-place one as its functional twin (``add_`` as ``add``)."""
    if mutated_argument(node) is None:
        return node.target
    assert isinstance(node.target, torch._ops.OpOverload)
    name, overload = node.target._schema.name.split("::")[1], node.target._overloadname
    twin = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(twin, overload, node.target)


def is_private(node: Node) -> bool:
    """A value made in this graph that only one node looks at, through whatever views."""
    line = lineage(node)
    return line[-1].op == "call_function" and all(len(n.users) <= 1 for n in line)


class Changes:
    """Where in a graph memory is changed in place while other nodes may still look at it.

    A change of a private value is as good as a new value: the tracer lets later nodes read the
    in-place operator's result.
    """

    def __init__(self, graph: Graph) -> None:
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.changed: dict[Node, list[int]] = {}
        for node in graph.nodes:
            x = mutated_argument(node)
            if x is not None and not is_private(x):
                self.changed.setdefault(lineage(x)[-1], []).append(self.place[node])

    def between(self, nodes: Iterable[Node], end: Node, *, ancestors: bool) -> bool:
        """True where one of the nodes, or of what they are made of, may hold something else at
        ``end`` than where it was made."""
        if not self.changed:
            return False
        last = self.place[end]
        seen: set[Node] = set()
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            made = self.place.get(node, last)
            if any(made < at <= last for at in self.changed.get(lineage(node)[-1], ())):
                return True
            if ancestors:
                stack += node.all_input_nodes
        return False


def erase_unread_mutations(graph: Graph) -> None:
    """Remove in-place operators on private values whose result nobody reads.

    Dead-code removal keeps them, as it must assume that somebody else sees the change.
    """
    for node in reversed(list(graph.nodes)):
        target = mutated_argument(node)
        if target is not None and not node.users and is_private(target):
            graph.erase_node(node)
