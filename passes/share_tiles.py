"""ShareTiles: one list of tiles a step for all attention layers with the same offsets and mask.

Without it every kernel makes its own, forward and backward. CPU kernels take offsets as they are.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from gemcompile.graph import Editor, arguments
from gemcompile.ops import tiles  # noqa: F401  (registers the op)
from gemcompile.pass_manager import Context, Pass

ATTENTION = torch.ops.gem.jagged_attention.default
TILES = torch.ops.gem.attention_tiles.default


class ShareTiles(Pass):
    """Give jagged attention its list of tiles, as a value of the graph."""

    after = ("EliminatePadding",)

    def run(self, gm: GraphModule, context: Context) -> int:
        if context.target.device == "cpu":
            return 0
        lists: dict[Any, Node] = {}
        changes = 0
        for n in list(gm.graph.nodes):
            if n.op != "call_function" or n.target is not ATTENTION:
                continue
            given = arguments(n)
            if given["tiles"] is not None:
                continue
            try:
                given["tiles"] = _list_of(gm, given, lists)
            except LookupError:  # a row count that is computed in the graph
                continue
            n.args, n.kwargs = tuple(given.values()), {}
            changes += 1
        return changes


def _list_of(gm: GraphModule, given: dict[str, Any], lists: dict[Any, Node]) -> Node:
    ends = given["q_offsets"], given["k_offsets"]
    mask = given["causal"], given["window_left"], given["window_right"]
    rows = [given[name].meta["val"].shape[0] for name in ("q", "k")]
    key = (*ends, *map(str, rows), *mask)
    if key not in lists:
        edit = Editor(gm, like=ends[0], before=_after(gm, *ends))
        lists[key] = edit(TILES, *ends, *map(edit.symbol, rows), *mask)
    return lists[key]


def _after(gm: GraphModule, *nodes: Node) -> Node:
    """The first node behind all of them and behind the inputs."""
    waiting = set(nodes)
    for n in gm.graph.nodes:
        if not waiting and n.op != "placeholder":
            return cast(Node, n)
        waiting.discard(n)
    raise AssertionError("the nodes are not in the graph")
