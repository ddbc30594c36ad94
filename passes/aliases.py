"""Which nodes may share memory, and which memory is changed in place."""

from __future__ import annotations

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


def is_view(n: Node) -> bool:
    """n may share memory with its first argument."""
    t = n.target
    if n.op != "call_function" or not isinstance(t, torch._ops.OpOverload):
        return False
    if not (n.args and isinstance(n.args[0], Node) and t._schema.arguments):
        return False
    return t._schema.arguments[0].alias_info is not None or (
        t.namespace == "aten" and t._opname in _MAYBE_VIEWS
    )


def aliases(n: Node) -> set[Node]:
    """n, what it is a view of, and the views of those."""
    root = n
    while is_view(root):
        root = root.args[0]  # type: ignore[assignment]
    found, stack = {n, root}, [root]
    while stack:
        for user in stack.pop().users:
            if is_view(user) and user not in found:
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
