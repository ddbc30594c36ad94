"""The function between QK^T and V: softmax in its spellings, and the element-wise ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from gemcompile.graph import arguments, is_call, shape

from .attention_mutation import functional

aten = torch.ops.aten


@dataclass
class Found:
    """An activation: what it is applied to, softmax's dimension, and every node it consists of."""

    name: str
    source: Node
    nodes: list[Node]
    dim: int | None = None
    # 0/1 tensors multiplied onto exp(scores) before it is normalised.
    kept: list[Node] = field(default_factory=list)


def activation(node: Node) -> Found | None:
    """The activation whose result is ``node``, or None."""
    return _softmax(node) or _elementwise(node)


# --- Softmax. ----------------------------------------------------------------------------------

_SOFTMAX = (
    aten.softmax.int, aten._softmax.default, aten._safe_softmax.default,
)  # fmt: skip
_LOG_SOFTMAX = (aten.log_softmax.int, aten._log_softmax.default)


def _softmax(node: Node) -> Found | None:
    if is_call(node, *_SOFTMAX):
        return Found("softmax", node.args[0], [node], arguments(node)["dim"])  # type: ignore
    if functional(node) is aten.exp.default:
        return _exp_of_log(node)
    op = functional(node)
    if op is aten.div.Tensor and len(node.args) == 2 and not node.kwargs:
        return _normalised(node, node.args[0], node.args[1])
    if op is aten.mul.Tensor and is_call(node.args[1], aten.reciprocal.default):
        inverse = node.args[1]
        assert isinstance(inverse, Node)
        found = _normalised(node, node.args[0], inverse.args[0])
        return found and Found(
            found.name, found.source, [*found.nodes, inverse], found.dim, found.kept
        )
    return None


def _exp_of_log(node: Node) -> Found | None:
    """exp(log_softmax(x)) and exp(x - logsumexp(x))."""
    x = node.args[0]
    if is_call(x, *_LOG_SOFTMAX):
        assert isinstance(x, Node)
        return Found("softmax", x.args[0], [node, x], arguments(x)["dim"])  # type: ignore
    if is_call(x, aten.sub.Tensor) and is_call(x.args[1], aten.logsumexp.default):  # type: ignore
        source, total = x.args[:2]  # type: ignore[union-attr]
        dim = _single_dim(total, source)
        if dim is not None:
            return Found("softmax", source, [node, x, total], dim)  # type: ignore[arg-type, list-item]
    return None


def _normalised(node: Node, weights: object, total: object) -> Found | None:
    """exp(x) / exp(x).sum(dim), x perhaps less its maximum, exp(x) perhaps times a mask."""
    if not isinstance(weights, Node) or not is_call(total, aten.sum.dim_IntList):
        return None
    dim = _single_dim(total, weights)
    if dim is None:
        return None
    nodes, kept = [node, weights, total], []
    e = weights
    while functional(e) is aten.mul.Tensor and isinstance(e.args[1], Node):
        first, mask = e.args
        if functional(first) is not aten.exp.default and functional(mask) is aten.exp.default:  # type: ignore
            first, mask = mask, first
        kept.append(mask)
        e = first  # type: ignore[assignment]
        nodes.append(e)
    if functional(e) is not aten.exp.default:
        return None
    source, shift = unshifted(e.args[0], dim)  # type: ignore[arg-type]
    return Found("softmax", source, nodes + shift, dim, kept)  # type: ignore[arg-type]


def unshifted(x: Node, dim: int) -> tuple[Node, list[Node]]:
    """x - max(x, dim) as x, for softmax does not change by it; and the nodes passed over."""
    if functional(x) is not aten.sub.Tensor or x.kwargs:
        return x, []
    source, top = x.args[:2]
    nodes = [x]
    if is_call(top, aten.detach.default):
        nodes.append(top)  # type: ignore[arg-type]
        top = top.args[0]  # type: ignore[union-attr]
    if is_call(top, aten.amax.default) and _single_dim(top, source) == dim:
        return source, [*nodes, top]  # type: ignore[list-item, return-value]
    pair = top.args[0] if isinstance(top, Node) and top.args else None
    is_first = isinstance(top, Node) and top.op == "call_function" and top.args[1:] == (0,)
    if is_first and is_call(pair, aten.max.dim):
        given = arguments(pair)  # type: ignore[arg-type]
        if given["self"] is source and given["dim"] % _rank(source) == dim and given["keepdim"]:
            return source, [*nodes, top, pair]  # type: ignore[list-item]
    return x, []


def _single_dim(reduction: object, source: object) -> int | None:
    """The one dimension that amax, sum or logsumexp reduces of ``source`` and keeps, else None."""
    assert isinstance(reduction, Node)
    given = arguments(reduction)
    dims = given["dim"]
    one = isinstance(dims, (list, tuple)) and len(dims) == 1
    same_source = reduction.args[0] is source
    return dims[0] % _rank(source) if one and same_source and given["keepdim"] else None


def _rank(x: object) -> int:
    assert isinstance(x, Node)
    return len(shape(x))


# --- Element-wise functions. -------------------------------------------------------------------

_PLAIN = {
    aten.silu.default: "silu",
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
    aten.hardswish.default: "hardswish",
}


def _elementwise(node: Node) -> Found | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    op, source = functional(node), node.args[0]
    if op is aten.gelu.default:
        kind = arguments(node)["approximate"]
        return Found("gelu" if kind == "none" else "gelu_tanh", source, [node])
    if op is aten.leaky_relu.default:
        slope = arguments(node)["negative_slope"]
        return Found("leaky_relu", source, [node]) if slope == 0.01 else None
    if op in _PLAIN:
        return Found(_PLAIN[op], source, [node])
    return _squared_relu(node) or _gated(node)


def _squared_relu(node: Node) -> Found | None:
    """relu(x) ** 2, relu(x).square(), relu(x) * relu(x)."""
    inner = node.args[0]
    if not isinstance(inner, Node) or functional(inner) is not aten.relu.default:
        return None
    op = functional(node)
    squares = (
        op is aten.square.default
        or (op is aten.pow.Tensor_Scalar and node.args[1] == 2)
        or (op is aten.mul.Tensor and node.args[1] is inner)
    )
    return Found("relu2", inner.args[0], [node, inner]) if squares else None  # type: ignore[arg-type]


def _gated(node: Node) -> Found | None:
    """x * sigmoid(x)."""
    if functional(node) is not aten.mul.Tensor:
        return None
    for x, gate in (node.args[:2], node.args[1::-1]):
        if is_call(gate, aten.sigmoid.default) and gate.args[0] is x:  # type: ignore[union-attr]
            return Found("silu", x, [node, gate])  # type: ignore[arg-type, list-item]
    return None
