"""One spelling and one node for each mask: later passes compare masks by identity."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from gemcompile.pass_manager import Context, Pass

from .aliases import mutated
from .functionalize import functionalize

_STATE = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    torch._C._set_grad_enabled,
)


class Canonicalize(Pass):
    """Write in-place operators out of place, and merge equal computations on integers, bools and
    constants.

    Merged are masks, positions, lengths and constants made from them: values that carry no
    gradient, none that is changed in place, and none across a change of autocast state or of
    checkpoint region.
    """

    def run(self, gm: GraphModule, context: Context) -> int:
        return functionalize(gm) + _merge(gm)


def _merge(gm: GraphModule) -> int:
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
        if first is not n and not any(u.op == "output" for u in n.users):
            n.replace_all_uses_with(first)
            gm.graph.erase_node(n)
            index_like.discard(n)
            changes += 1
    return changes


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
    return n.target.namespace == "aten" and not n.target._opname.startswith(
        ("rand", "empty", "new_empty")
    )


def _key(n: Node) -> Any:
    def freeze(a: Any) -> Any:
        return tuple(freeze(x) for x in a) if isinstance(a, (list, tuple)) else (type(a), a)

    kwargs = sorted(n.kwargs.items())
    return (n.target, freeze(map_aggregate(n.args, lambda a: a)), freeze(kwargs))
