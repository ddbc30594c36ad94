"""One node for each mask: equal index arithmetic is merged, so that later passes compare masks by identity."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from gemcompile.pass_manager import Context, Pass

_STATE = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    torch._C._set_grad_enabled,
)


class Canonicalize(Pass):
    """Merge equal computations on integers and bools (masks, positions, lengths) and on constants made from them.

    Only values that carry no gradient are touched, none that is changed in place, and none across a change
    of autocast state or of checkpoint region.
    """

    def run(self, gm: GraphModule, context: Context) -> int:
        written = mutated(gm)
        index_like: set[Node] = set()
        seen: dict[Any, Node] = {}
        state = changes = 0
        for n in list(gm.graph.nodes):
            if n.op == "call_function" and n.target in _STATE:
                state += 1
            if not _is_index_like(n, index_like) or n in written:
                continue
            index_like.add(n)
            if n.op == "placeholder":
                continue
            key = (_key(n), state, n.meta.get("ac_graph_id"))
            first = seen.setdefault(key, n)
            if first is not n:
                n.replace_all_uses_with(first)
                gm.graph.erase_node(n)
                index_like.discard(n)
                changes += 1
        return changes


def mutated(gm: GraphModule) -> set[Node]:
    """Nodes that an in-place operator changes, and everything they may share memory with."""
    found: set[Node] = set()
    for n in gm.graph.nodes:
        if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
            continue
        for arg, spec in zip(n.args, n.target._schema.arguments):
            if spec.is_write and isinstance(arg, Node):
                found |= _aliases(arg)
                found.add(n)
    return found


def _aliases(n: Node) -> set[Node]:
    """``n``, what it is a view of, and the views of those."""
    root = n
    while _is_view(root):
        root = root.args[0]  # type: ignore[assignment]
    found, stack = {n, root}, [root]
    while stack:
        for user in stack.pop().users:
            if _is_view(user) and user not in found:
                found.add(user)
                stack.append(user)
    return found


def _is_view(n: Node) -> bool:
    if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
        return False
    if not (n.args and isinstance(n.args[0], Node)):
        return False
    # reshape, contiguous, to, ... return their input where nothing needs to be done
    may_alias = n.target._schema.arguments[0].alias_info is not None
    return may_alias or torch.Tag.nondeterministic_seeded not in n.target.tags and "aten" == n.target.namespace and (
        n.target._opname in ("reshape", "contiguous", "to", "flatten", "expand_as", "dropout", "type_as")
    )


def _is_index_like(n: Node, known: set[Node]) -> bool:
    value = n.meta.get("val")
    if n.op == "placeholder":
        if isinstance(value, torch.Tensor):
            return not value.is_floating_point() and not value.is_complex()
        return isinstance(value, (int, torch.SymInt))
    if n.op != "call_function" or not all(i in known for i in n.all_input_nodes):
        return False
    if isinstance(value, (int, torch.SymInt)):
        return True
    if not isinstance(n.target, torch._ops.OpOverload) or not isinstance(value, torch.Tensor):
        return False
    if n.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in n.target.tags:
        return False
    return n.target.namespace == "aten" and not n.target._opname.startswith(("rand", "empty", "new_empty"))


def _key(n: Node) -> Any:
    def freeze(a: Any) -> Any:
        return tuple(freeze(x) for x in a) if isinstance(a, (list, tuple)) else (type(a), a)

    kwargs = sorted(n.kwargs.items())
    return (n.target, freeze(map_aggregate(n.args, lambda a: a)), freeze(kwargs))
