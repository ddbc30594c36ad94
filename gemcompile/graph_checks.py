"""What a pass must leave: a graph that runs, with the inputs and outputs that it was given."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from . import graph


class BrokenGraph(RuntimeError):
    """What is wrong with the graph, as a clause: "it removed the input x"."""


class Boundary:
    """The inputs and outputs of a graph, which a pass must keep: the caller relies on them."""

    def __init__(self, gm: GraphModule) -> None:
        self.inputs: list[Node] = list(gm.graph.find_nodes(op="placeholder"))
        self.outputs: list[Any] = _outputs(gm)

    def check(self, gm: GraphModule, added_inputs: int) -> None:
        """Compare with the graph as it is now; ``added_inputs`` stand in its prologue.

        Raises:
            BrokenGraph: an input is gone, or one was added that nobody supplies; the number of
                outputs, or an output's shape, dtype or device, differs.
        """
        found = list(gm.graph.find_nodes(op="placeholder"))
        kept = set(found)
        gone = [n.name for n in self.inputs if n not in kept]
        if gone:
            raise BrokenGraph(f"it removed the input {gone[0]}")
        if found[: len(self.inputs)] != self.inputs:
            raise BrokenGraph("it changed the order of the inputs")
        extra = found[len(self.inputs) + added_inputs :]
        if extra:
            raise BrokenGraph(f"it added the input {extra[0].name}, which nobody supplies")
        outputs = _outputs(gm)
        if len(outputs) != len(self.outputs):
            raise BrokenGraph(f"it left {len(outputs)} outputs instead of {len(self.outputs)}")
        for i, (now, before) in enumerate(zip(outputs, self.outputs)):
            if _differ(now, before):
                raise BrokenGraph(
                    f"it made output {i} {graph.describe(now)} instead of {graph.describe(before)}"
                )


def _outputs(gm: GraphModule) -> list[Any]:
    (output,) = gm.graph.find_nodes(op="output")
    return [graph.value(x) for x in pytree.tree_leaves(output.args[0])]


def _differ(a: Any, b: Any) -> bool:
    """Proven different; symbolic sizes that cannot be compared count as equal."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor)
    if a.dim() != b.dim() or a.dtype != b.dtype or a.device != b.device:
        return True
    return any(statically_known_true(m != n) for m, n in zip(a.shape, b.shape))


def check_metadata(gm: GraphModule, old: Collection[Node] = ()) -> None:
    """Every value is known, and new nodes are marked as what they stand among.

    Args:
        old: the nodes that were there before the pass.

    Raises:
        BrokenGraph: a node without a value, or one amid a checkpointed region that is not marked
            so (it would be saved instead of recomputed).
    """
    for n in gm.graph.nodes:
        call = f"{n.name} = {graph.target_name(n)}"
        if isinstance(n.target, torch._ops.OpOverload) and "val" not in n.meta:
            if n.target._schema.returns and n.users:
                raise BrokenGraph(f"{call} has no value; insert nodes with gemcompile.graph.Editor")
        if n.op == "call_function" and n not in old and n.all_input_nodes:
            around = {m.meta.get("ac_graph_id") for m in (*n.all_input_nodes, *n.users)}
            if len(around) == 1 and around != {n.meta.get("ac_graph_id")} and around != {None}:
                raise BrokenGraph(f"{call} lost its checkpoint mark; insert nodes with an Editor")
