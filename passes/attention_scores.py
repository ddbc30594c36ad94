"""Loose looks at a graph: where scores may come from, and the factors of a product."""

from __future__ import annotations

import torch
from torch.fx import Node

from gemcompile.graph import is_call, shape, value

from .attention_mutation import functional
from .axes import Labels, aligned, is_view, through
from .contractions import contraction
from .masks import CASTS

aten = torch.ops.aten

# What the loose search for scores looks through.
_BETWEEN = {
    *CASTS, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor,
    aten.div.Scalar, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self,
    aten.where.ScalarOther, aten.where.ScalarSelf, aten.softmax.int, aten.exp.default,
    aten.log_softmax.int, aten._safe_softmax.default, aten.dropout.default, aten.nan_to_num.default,
    aten.gelu.default, aten.silu.default, aten.relu.default, aten.sigmoid.default,
    aten.leaky_relu.default, aten.hardswish.default, aten.square.default, aten.tanh.default,
    aten.pow.Tensor_Scalar, aten.clamp.default, aten.neg.default, aten.clamp_min.default,
    aten._softmax.default, aten.detach.default,
}  # fmt: skip


class Scores:
    """Which values are made, however loosely, from a product of two activations."""

    def __init__(self, parameters: set[Node]) -> None:
        self._parameters = parameters
        self._known: dict[tuple[Node, bool], bool] = {}

    def leads(self, x: object, learned: bool = True) -> bool:
        """The node is q k^T of something, or made from it element by element.

        ``learned`` admits that one of the two is a parameter, such as a learned query.
        """
        if not isinstance(x, Node):
            return False
        if (x, learned) not in self._known:
            self._known[x, learned] = False
            self._known[x, learned] = self._search(x, learned)
        return self._known[x, learned]

    def _search(self, x: Node, learned: bool) -> bool:
        found = contraction(x)
        if found is not None:
            weights = self.is_weight(found.left) + self.is_weight(found.right)
            return weights <= learned
        if is_view(x) or functional(x) in _BETWEEN:
            return any(self.leads(y, learned) for y in x.all_input_nodes)
        return False

    def is_weight(self, x: Node) -> bool:
        """A parameter, or a view of one."""
        while is_view(x) or is_call(x, *CASTS):
            x = x.args[0]  # type: ignore[assignment]
        return x in self._parameters


Step = tuple[Node, Labels, bool]


def factors(node: Node, labels: Labels, divide: bool) -> list[Step]:
    """A product taken apart: (factor, its labels, whether it divides)."""
    view = through(node, labels)
    if view is not None:
        return factors(*view, divide)
    if not is_call(node, aten.mul.Tensor, aten.div.Tensor) or len(node.args) != 2 or node.kwargs:
        return [(node, labels, divide)]
    if not all(isinstance(x, Node) and isinstance(value(x), torch.Tensor) for x in node.args):
        return [(node, labels, divide)]
    out = []
    for i, x in enumerate(node.args):
        below = aligned(x, shape(node), labels)  # type: ignore[arg-type]
        if below is None:
            return [(node, labels, divide)]
        inverted = divide != (i == 1 and node.target is aten.div.Tensor)
        out += factors(x, below, inverted)  # type: ignore[arg-type]
    return out
