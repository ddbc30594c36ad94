"""The algebra of masks: what a bool or 0/1 tensor says about which key each query sees.

A mask is taken apart into a conjunction of literals. A literal is a bool tensor whose elements
mean "visible" (`Leaf`), or a comparison of two positions (`Band`, the causal mask and its kin).
Negations, casts, comparisons with constants, products and De Morgan's laws are seen through;
whatever is not understood stays a leaf of its own: nothing is lost and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.node import Argument

from gemcompile.graph import arguments, is_call, shape, value

from .axes import Label, Labels, aligned, is_view, settle, settle_all, through

aten = torch.ops.aten


@dataclass(frozen=True)
class Leaf:
    """Visible where ``node`` (bool, or 0/1 numbers) is ``want``."""

    node: Node
    labels: Labels
    want: bool

    def key(self) -> tuple[object, ...]:
        """Equal for literals that say the same."""
        return self.node, settle_all(self.labels), self.want


@dataclass(frozen=True)
class Band:
    """Visible where position(column) <= position(row) + offset."""

    row: Label
    column: Label
    offset: int

    def key(self) -> tuple[object, ...]:
        """Equal for literals that say the same."""
        return settle(self.row), settle(self.column), self.offset

    def negated(self) -> Band:
        """column > row + offset, that is row <= column - offset - 1."""
        return Band(self.column, self.row, -self.offset - 1)


Literal = Leaf | Band
Literals = tuple[Literal, ...]

_NOT = (aten.bitwise_not.default, aten.logical_not.default)
AND = (
    aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor,
    aten.minimum.default,
)  # fmt: skip
OR = (
    aten.__or__.Tensor, aten.bitwise_or.Tensor, aten.logical_or.default, aten.maximum.default,
)  # fmt: skip
CASTS = (
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default,
    aten.type_as.default,
)  # fmt: skip
COMPARE = {
    aten.eq: lambda x, y: x == y,
    aten.ne: lambda x, y: x != y,
    aten.lt: lambda x, y: x < y,
    aten.le: lambda x, y: x <= y,
    aten.gt: lambda x, y: x > y,
    aten.ge: lambda x, y: x >= y,
}


# --- Bool and 0/1 masks. -----------------------------------------------------------------------


def conjuncts(node: Node, labels: Labels, want: bool) -> Literals:
    """Literals that hold together exactly where ``node``, a bool or 0/1 tensor, is ``want``."""
    found = _conjuncts(node, labels, want)
    return (Leaf(node, labels, want),) if found is None else found


def _conjuncts(node: Node, labels: Labels, want: bool) -> Literals | None:
    known = constant(node)
    if known is not None:
        return () if bool(known) == want else None
    view = through(node, labels)
    if view is not None:
        return conjuncts(*view, want)
    if is_call(node, *CASTS):
        return _operand(node, 0, labels, want)
    if is_negation(node):
        return _operand(node, 0, labels, not want)
    if want and is_call(node, *AND) or not want and is_call(node, *OR):
        both = [_operand(node, i, labels, want) for i in (0, 1)]
        return None if both[0] is None or both[1] is None else both[0] + both[1]
    if is_call(node, aten.masked_fill.Scalar):
        return _filled(node, labels, want)
    if is_call(node, aten.tril.default, aten.triu.default):
        return _triangle(node, labels, want)
    return _comparison(node, labels, want)


def _operand(node: Node, i: int, labels: Labels, want: bool) -> Literals | None:
    x = node.args[i]
    if not isinstance(x, Node) or not is_binary(x):
        return None
    below = aligned(x, shape(node), labels)
    return None if below is None else conjuncts(x, below, want)


def _filled(node: Node, labels: Labels, want: bool) -> Literals | None:
    """masked_fill(x, m, 0) is x and not m; masked_fill(x, m, 1) is x or m."""
    fill = bool(node.args[2])
    if fill == want:
        return None
    x, m = _operand(node, 0, labels, want), _operand(node, 1, labels, False)
    return None if x is None or m is None else x + m


def _triangle(node: Node, labels: Labels, want: bool) -> Literals | None:
    """tril(x, d) is x and column <= row + d; triu(x, d) is x and column >= row + d."""
    source = node.args[0]
    assert isinstance(source, Node)
    band = triangle_band(node, labels)
    if band is None or not is_binary(source):
        return None
    if want:
        return conjuncts(source, labels, True) + (band,)
    return (band.negated(),) if constant(source) else None


def triangle_band(node: Node, labels: Labels) -> Band | None:
    """Where tril or triu keeps its argument."""
    if not labels[-2] or not labels[-1]:
        return None
    offset = arguments(node)["diagonal"]
    if not isinstance(offset, int):
        return None
    row, column = labels[-2], labels[-1]
    if node.target is aten.tril.default:
        return Band(row, column, offset)
    return Band(row, column, offset - 1).negated()


def _comparison(node: Node, labels: Labels, want: bool) -> Literals | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    compare = COMPARE.get(node.target.overloadpacket)
    if compare is None:
        return None
    left, right = node.args[:2]
    if isinstance(right, (int, float)):
        return _against_number(left, right, labels, want, compare)
    return _positions(node, labels, want)


def _against_number(
    x: Argument, number: float, labels: Labels, want: bool, compare: Callable[[float, float], bool]
) -> Literals | None:
    """m == 0, m > 0.5 and the like, for m that is 0 or 1."""
    if not isinstance(x, Node) or not is_binary(x):
        return None
    zero, one = bool(compare(0, number)), bool(compare(1, number))
    if zero == one:
        return () if one == want else None
    return conjuncts(x, labels, one == want)


def _positions(node: Node, labels: Labels, want: bool) -> Literals | None:
    """A comparison of two ranges of positions, such as i[:, None] >= i[None, :]."""
    left, right = node.args[:2]
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    first = _position(left, aligned(left, shape(node), labels))
    second = _position(right, aligned(right, shape(node), labels))
    if first is None or second is None:
        return None
    (a, a_shift), (b, b_shift) = first, second
    name = node.target.overloadpacket  # type: ignore[union-attr]
    if name in (aten.ge, aten.gt):
        (a, a_shift), (b, b_shift) = (b, b_shift), (a, a_shift)
    elif name not in (aten.le, aten.lt):
        return None
    band = Band(b, a, b_shift - a_shift - (name in (aten.lt, aten.gt)))
    return (band if want else band.negated(),)


def _position(x: Argument, labels: Labels | None) -> tuple[Label, int] | None:
    """The axis that an ``arange`` from 0 counts, and what is added to it."""
    shift = 0
    while isinstance(x, Node) and labels is not None:
        view = through(x, labels)
        if view is not None:
            x, labels = view
        elif is_call(x, *CASTS):
            if value(x).dtype not in (torch.int64, torch.int32, torch.float32, torch.float64):
                return None
            x = x.args[0]
        elif is_call(x, aten.add.Tensor, aten.sub.Tensor) and isinstance(x.args[1], int):
            if x.kwargs:
                return None
            shift += x.args[1] if x.target is aten.add.Tensor else -x.args[1]
            x = x.args[0]
        elif is_call(x, aten.arange.default, aten.arange.start, aten.arange.start_step):
            given = arguments(x)
            starts_at_zero = given.get("start", 0) == 0 and given.get("step", 1) == 1
            return (labels[0], shift) if starts_at_zero and labels[0] else None
        else:
            return None
    return None


def is_binary(node: Node) -> bool:
    """Proven to hold nothing but 0 and 1 (or False and True)."""
    dtype = getattr(value(node), "dtype", None)
    if dtype is torch.bool:
        return True
    known = constant(node)
    if known is not None:
        return known in (0, 1)
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    kept = is_view(node) or is_call(node, *CASTS, aten.tril.default, aten.triu.default)
    if kept or _is_one_minus(node):
        return is_binary(node.args[0])
    if is_call(node, *AND, *OR):
        return all(isinstance(x, Node) and is_binary(x) for x in node.args[:2])
    if is_call(node, aten.masked_fill.Scalar):
        return node.args[2] in (0, 1) and is_binary(node.args[0])
    return False


def is_given(node: Node) -> bool:
    """An input whose gradient nobody asks for: tracing's own values no longer tell."""
    if node.op != "placeholder":
        return False
    return not getattr(node.meta.get("example_value", value(node)), "requires_grad", False)


def is_negation(node: Node) -> bool:
    """The node is 1 where its first argument is 0, and the other way round."""
    # On integers bitwise_not is another function.
    if is_call(node, *_NOT):
        return bool(value(node).dtype is torch.bool)
    return _is_one_minus(node)


def _is_one_minus(node: Node) -> bool:
    return is_call(node, aten.rsub.Scalar) and node.args[1:] == (1,)


_FILLED = {
    aten.zeros.default: 0, aten.zeros_like.default: 0, aten.new_zeros.default: 0,
    aten.ones.default: 1, aten.ones_like.default: 1, aten.new_ones.default: 1,
    aten.full.default: "fill_value", aten.full_like.default: "fill_value",
    aten.new_full.default: "fill_value", aten.scalar_tensor.default: "s",
}  # fmt: skip


def constant(x: Argument) -> float | None:
    """The number that a tensor holds everywhere, where that is known."""
    if isinstance(x, (bool, int, float)):
        return float(x)
    if not isinstance(x, Node):
        return None
    if x.op == "get_attr":
        return _attribute(x)
    if x.op != "call_function":
        return None
    how = _FILLED.get(x.target)  # type: ignore[call-overload]
    if how is not None:
        number = arguments(x)[how] if isinstance(how, str) else how
        return float(number) if isinstance(number, (bool, int, float)) else None
    if is_call(x, aten.mul.Tensor, aten.mul.Scalar):
        a, b = constant(x.args[0]), constant(x.args[1])
        return None if a is None or b is None else a * b
    if is_call(x, aten.neg.default):
        a = constant(x.args[0])
        return None if a is None else -a
    transparent = (*CASTS, aten.lift_fresh_copy.default, aten.detach_.default, aten.detach.default)
    if is_call(x, *transparent) or is_view(x):
        return constant(x.args[0])
    return None


def _attribute(node: Node) -> float | None:
    """A one-element tensor that tracing stored on the module (``torch.tensor(-1e9)``)."""
    if not str(node.target).startswith("_tensor_constant"):
        return None
    tensor = getattr(node.graph.owning_module, str(node.target), None)
    plain = type(tensor) is torch.Tensor and tensor.numel() == 1
    return float(tensor.item()) if plain and tensor is not None else None
