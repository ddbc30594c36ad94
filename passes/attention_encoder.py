"""nn.TransformerEncoderLayer's inference operator, written out so that its attention can be seen.

In eval mode without gradients the layer is one opaque node, ``_transformer_encoder_layer_fwd``.
Where it has a mask, that node becomes linear, scaled_dot_product_attention, layer_norm and so on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from gemcompile.graph import Editor, arguments

aten = torch.ops.aten

# The operator's mask types: [L, L] for all sequences, and [B, L] for all queries.
_SOURCE_MASK, _PADDING_MASK = 0, 1


def write_out_encoder_layers(gm: GraphModule) -> int:
    """Replace the masked encoder layers of a graph; returns how many."""
    layers = gm.graph.find_nodes(
        op="call_function", target=aten._transformer_encoder_layer_fwd.default
    )
    changes = 0
    for node in layers:
        given = arguments(node)
        if given["mask"] is None or given["mask_type"] not in (_SOURCE_MASK, _PADDING_MASK):
            continue
        node.replace_all_uses_with(_Layer(Editor(gm, like=node), given).write())
        gm.graph.erase_node(node)
        changes += 1
    return changes


class _Layer:
    """One layer's nodes, from the operator's arguments."""

    def __init__(self, edit: Editor, given: dict[str, Any]) -> None:
        self.edit, self.given = edit, given

    def write(self) -> Node:
        x: Node = self.given["src"]
        if self.given["norm_first"]:
            x = self._add(x, self._attention(self._norm(x, 1)))
            return self._add(x, self._feed_forward(self._norm(x, 2)))
        x = self._norm(self._add(x, self._attention(x)), 1)
        return self._norm(self._add(x, self._feed_forward(x)), 2)

    def _add(self, x: Node, y: Node) -> Node:
        return self.edit(aten.add.Tensor, x, y)

    def _norm(self, x: Node, i: int) -> Node:
        g = self.given
        weight, bias = g[f"norm_weight_{i}"], g[f"norm_bias_{i}"]
        return self.edit(aten.layer_norm.default, x, [g["embed_dim"]], weight, bias, g["eps"])

    def _linear(self, x: Node, name: str) -> Node:
        weight, bias = (self.given[name.format(kind)] for kind in ("weight", "bias"))
        return self.edit(aten.linear.default, x, weight, bias)

    def _feed_forward(self, x: Node) -> Node:
        hidden = self._linear(x, "ffn_{}_1")
        act = aten.gelu.default if self.given["use_gelu"] else aten.relu.default
        return self._linear(self.edit(act, hidden), "ffn_{}_2")

    def _attention(self, x: Node) -> Node:
        edit, heads = self.edit, self.given["num_heads"]
        qkv = self._linear(x, "qkv_{}")
        qkv = edit(aten.unflatten.int, qkv, -1, [3, heads, self.given["embed_dim"] // heads])
        q, k, v = (
            edit(aten.transpose.int, edit(aten.select.int, qkv, 2, i), 1, 2) for i in range(3)
        )
        out = edit(aten.scaled_dot_product_attention.default, q, k, v, self._mask(x))
        out = edit(aten.transpose.int, out, 1, 2)
        return self._linear(edit(aten.flatten.using_ints, out, 2), "proj_{}")

    def _mask(self, x: Node) -> Node:
        """As SDPA takes it; the operator's bool masks mean "hidden"."""
        mask: Node = self.given["mask"]
        if mask.meta["val"].dtype is torch.bool:
            mask = self.edit(aten.bitwise_not.default, mask)
        if self.given["mask_type"] == _PADDING_MASK:
            mask = self.edit(aten.unsqueeze.default, self.edit(aten.unsqueeze.default, mask, 1), 1)
        return mask
