"""Which nodes may share memory, and which memory is changed in place."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

# Return their input where nothing needs to be done, though their schemas declare no alias.
_MAYBE_VIEWS = (
    "reshape",
    "contiguous",
    "to",
    "flatten",
    "expand_as",
    "dropout",
    "type_as",
    "view_as",
)


def source(n: Node) -> Node | None:
    """The argument whose memory n may share, or have a part of; None where n has its own."""
    if n.op != "call_function" or not n.args or not isinstance(n.args[0], Node):
        return None
    if n.target is operator.getitem:  # one part of a chunk or split, if not of several results
        return n.args[0] if source(n.args[0]) else None
    t = n.target
    if not isinstance(t, torch._ops.OpOverload) or not t._schema.arguments:
        return None
    declared = t._schema.arguments[0].alias_info is not None
    return n.args[0] if declared or t.namespace == "aten" and t._opname in _MAYBE_VIEWS else None


def lineage(n: Node) -> list[Node]:
    """n, what it may be a view of, and so on."""
    found = [n]
    while (of := source(found[-1])) is not None:
        found.append(of)
    return found


def aliases(n: Node) -> set[Node]:
    """n, what it is a view of, and the views of those, but for other parts of the same split."""
    line = lineage(n)
    found, stack = set(line), line[-1:]
    while stack:
        node = stack.pop()
        for user in node.users:
            apart = user.target is operator.getitem and node in line and user not in line
            if source(user) is node and not apart:
                found.add(user)
                stack.append(user)
    return found


def mutated(gm: GraphModule) -> set[Node]:
    """Nodes that an in-place operator changes, and everything that may share memory with them."""
    found: set[Node] = set()
    for n in gm.graph.nodes:
        if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
            continue
        for arg, spec in zip(n.args, n.target._schema.arguments):
            if spec.is_write and isinstance(arg, Node):
                found |= aliases(arg)
                found.add(n)
    return found
