"""In-place operators on fresh values, written out of place: ``x += y`` becomes ``x = x + y``.

Later passes then see one spelling. An operator is left alone where somebody could tell the
difference: an input or a view of it is changed, another view of the same memory is read
afterwards, or the gradient mode differs between the value's birth and its change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from gemcompile.graph import Editor

from .aliases import aliases, lineage, source


def functionalize(gm: GraphModule) -> int:
    """Replace what can be replaced; returns how many."""
    changes = 0
    for n in list(gm.graph.nodes):
        functional = _functional(n)
        if functional is None:
            continue
        order = {m: i for i, m in enumerate(gm.graph.nodes)}
        if _unobserved(n, order) and _replace(gm, n, functional, order):
            changes += 1
    return changes


def _functional(n: Node) -> Any | None:
    """aten.add.Tensor for aten.add_.Tensor."""
    t = n.target
    if n.op != "call_function" or not isinstance(t, torch._ops.OpOverload) or t.namespace != "aten":
        return None
    writes = [a for a in t._schema.arguments if a.is_write]
    if len(writes) != 1 or not t._opname.endswith("_") or writes[0] is not t._schema.arguments[0]:
        return None
    packet = getattr(torch.ops.aten, t._opname[:-1], None)
    overload = getattr(packet, t._overloadname, None) if packet is not None else None
    if overload is None or len(overload._schema.arguments) != len(t._schema.arguments):
        return None
    return overload


def _unobserved(n: Node, order: dict[Node, int]) -> bool:
    x = n.args[0]
    if not isinstance(x, Node):
        return False
    root = lineage(x)[-1]
    if root.op != "call_function" or _grad_state(root, order) != _grad_state(n, order):
        return False
    others = aliases(x) - {x} - _derived(n)
    return all(order[u] <= order[n] for a in others for u in a.users)


def _derived(n: Node) -> set[Node]:
    """n and the views taken of it, further in-place operators on it included."""
    found, stack = {n}, [n]
    while stack:
        for u in stack.pop().users:
            if source(u) in found:
                found.add(u)
                stack.append(u)
    return found


def _grad_state(n: Node, order: dict[Node, int]) -> int:
    switches = [
        m for m in order if m.op == "call_function" and m.target is torch._C._set_grad_enabled
    ]
    return sum(order[m] < order[n] for m in switches)


def _replace(gm: GraphModule, n: Node, functional: Any, order: dict[Node, int]) -> bool:
    x: Any = n.args[0]
    edit = Editor(gm, like=n)
    new = edit(functional, *n.args, **n.kwargs)
    before, after = x.meta["val"], new.meta["val"]
    if after.shape != before.shape or after.dtype != before.dtype:
        gm.graph.erase_node(new)  # e.g. float32 += float64 keeps float32 in place
        return False
    n.replace_all_uses_with(new)
    for u in [u for u in x.users if order.get(u, -1) > order[n]]:
        u.replace_input_with(x, new)
    gm.graph.erase_node(n)
    return True
