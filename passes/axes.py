"""Which axis is which: labels that follow a tensor's dimensions through views and permutes.

Equal sizes prove nothing (a batch may have as many rows as columns), so every dimension carries a
label: the axes it holds, from major to minor. A label travels backwards, from a value to the value
it was made from; a reshape regroups axes and splits one where it must. `()` marks a dimension of
size 1 along which the tensor is broadcast.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy.functions import FloorDiv

from gemcompile.graph import arguments, is_call, same_size, shape, value

aten = torch.ops.aten


class Axis:
    """One axis of the iteration space. A reshape may split it in two, for good."""

    def __init__(self, size: Any, parent: Axis | None = None) -> None:
        self.size = expression(size)
        self.parent = parent
        self.parts: tuple[Axis, Axis] | None = None

    def split(self, major: Any) -> tuple[Axis, Axis]:
        """Two axes, the major one of the given size."""
        minor = quotient(self.size, major)
        assert minor is not None, f"{major} does not divide {self.size}"
        self.parts = Axis(major, self), Axis(minor, self)
        return self.parts

    @property
    def unit(self) -> bool:
        """Statically of size 1."""
        return bool(self.size == 1)

    def __repr__(self) -> str:
        return f"<{self.size}>"


Label = tuple[Axis, ...]
Labels = tuple[Label, ...]


def expression(size: Any) -> Any:
    """A size as a sympy expression; reading it adds no guard."""
    if isinstance(size, torch.SymInt):
        return _undivided(size.node.expr)
    return sympy.sympify(size)


def _undivided(size: Any) -> Any:
    """L**2 // L as L: what ``view`` leaves behind where it works out a size."""

    def whole(a: Any, b: Any) -> Any:
        exact = quotient(a, b)
        return FloorDiv(a, b) if exact is None else exact

    return size.replace(FloorDiv, whole) if size.has(FloorDiv) else size


def same(a: Any, b: Any) -> bool:
    """Proven equal expressions."""
    return bool(a == b or (not (a.is_number and b.is_number) and sympy.expand(a - b) == 0))


def quotient(a: Any, b: Any) -> Any | None:
    """a / b where it is proven whole, else None."""
    if a.is_Integer and b.is_Integer:
        return a // b if b != 0 and a % b == 0 else None
    ratio = sympy.cancel(a / b)
    return ratio if sympy.fraction(ratio)[1] == 1 else None


def fresh(node: Node) -> Labels:
    """A new axis for every dimension of a value."""
    return tuple((Axis(s),) for s in shape(node))


def settle(label: Label) -> Label:
    """The label in terms of unsplit axes."""
    out: list[Axis] = []
    for axis in label:
        out += settle(axis.parts) if axis.parts else (axis,)
    return tuple(out)


def settle_all(labels: Iterable[Label]) -> Labels:
    """Labels in terms of unsplit axes."""
    return tuple(settle(label) for label in labels)


def axes_of(labels: Iterable[Label]) -> set[Axis]:
    """The axes that labels hold, those of size 1 left out: a tensor does not vary along them."""
    return {axis for label in labels for axis in settle(label) if not axis.unit}


def regroup(labels: Iterable[Label], sizes: Iterable[Any]) -> Labels | None:
    """The labels after a row-major reshape to ``sizes``; None where the split is not proven.

    Axes of size 1 go with a dimension of size 1 where there is one at their place, else vanish.
    """
    queue = deque(axis for label in labels for axis in settle(label))
    out = []
    for size in sizes:
        group = _take(queue, expression(size))
        if group is None:
            return None
        out.append(group)
    return tuple(out) if all(axis.unit for axis in queue) else None


def _take(queue: deque[Axis], size: Any) -> Label | None:
    """The next axes whose sizes multiply to ``size``."""
    if size == 1:
        return (queue.popleft(),) if queue and queue[0].unit else ()
    group = []
    while size != 1:
        if not queue:
            return None
        axis = queue.popleft()
        if axis.unit:
            continue
        rest = quotient(size, axis.size)
        if rest is None:
            if quotient(axis.size, size) is None:
                return None
            axis, minor = axis.split(size)
            queue.appendleft(minor)
            rest = sympy.Integer(1)
        group.append(axis)
        size = rest
    return tuple(group)


def aligned(node: Node, out_shape: Sequence[Any], labels: Labels) -> Labels | None:
    """Labels of an operand that broadcasts to a result of this shape with these labels.

    None where it does not, and for numbers.
    """
    if not isinstance(value(node), torch.Tensor):
        return None
    sizes = shape(node)
    skip = len(labels) - len(sizes)
    if skip < 0:
        return None
    out = []
    for size, full, label in zip(sizes, out_shape[skip:], labels[skip:]):
        if same_size(size, full):
            out.append(label)
        elif same_size(size, 1):
            out.append(())
        else:
            return None
    return tuple(out)


# --- Views: labels of the source from labels of the result. -------------------------------------


def through(node: Node, labels: Labels) -> tuple[Node, Labels] | None:
    """The value that ``node`` is a mere rearrangement of, and its labels; None where it is not one.

    Copies count as rearrangements, casts do not.
    """
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return _through_meshgrid(node, labels)
    rule = _VIEWS.get(node.target)
    source = node.args[0] if node.args else None
    if rule is None or not isinstance(source, Node):
        return None
    pulled = rule(node, source, labels)
    return None if pulled is None else (source, pulled)


def _through_meshgrid(node: Node, labels: Labels) -> tuple[Node, Labels] | None:
    """One of the tensors of a meshgrid is one of its vectors, repeated along the others."""
    whole, i = node.args
    if not is_call(whole, aten.meshgrid.indexing, aten.meshgrid.default):
        return None
    vectors, indexing = whole.args[0], arguments(whole).get("indexing", "ij")  # type: ignore
    order = list(range(len(vectors)))  # type: ignore[arg-type]
    if indexing == "xy":
        order[:2] = order[1::-1]
    source = vectors[i]  # type: ignore[index]
    return (source, (labels[order[i]],)) if len(shape(source)) == 1 else None  # type: ignore


_Rule = Callable[[Node, Node, Labels], "Labels | None"]


def _reshape(node: Node, source: Node, labels: Labels) -> Labels | None:
    return regroup(labels, shape(source))


def _identity(node: Node, source: Node, labels: Labels) -> Labels | None:
    return labels


def _permuted(order: Callable[[Node, int], list[int]]) -> _Rule:
    """A rule for an operator whose result dimension i is dimension order[i] of its source."""

    def rule(node: Node, source: Node, labels: Labels) -> Labels | None:
        rank = len(labels)
        out: list[Label] = [()] * rank
        for label, dim in zip(labels, order(node, rank)):
            out[dim % rank] = label
        return tuple(out)

    return rule


def _swap(node: Node, rank: int) -> list[int]:
    order = list(range(rank))
    a, b = (int(d) for d in node.args[1:3])  # type: ignore[arg-type]
    order[a], order[b] = order[b], order[a]
    return order


def _swap_last(node: Node, rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _reverse(node: Node, rank: int) -> list[int]:
    return list(range(rank))[::-1]


def _given(node: Node, rank: int) -> list[int]:
    return list(node.args[1])  # type: ignore[arg-type]


def _move(node: Node, rank: int) -> list[int]:
    source, target = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
    order = [d for d in range(rank) if d != source]
    order.insert(target, source)
    return order


def _unsqueeze(node: Node, source: Node, labels: Labels) -> Labels | None:
    dim = int(node.args[1]) % len(labels)  # type: ignore[arg-type]
    return labels[:dim] + labels[dim + 1 :]


def _squeeze(node: Node, source: Node, labels: Labels) -> Labels | None:
    sizes = shape(source)
    given: Any = node.args[1]
    dims = given if isinstance(given, (list, tuple)) else [given]
    gone = {d % len(sizes) for d in dims if same_size(sizes[d], 1)}
    rest = iter(labels)
    return tuple(() if d in gone else next(rest) for d in range(len(sizes)))


def _expand(node: Node, source: Node, labels: Labels) -> Labels | None:
    return aligned(source, shape(node), labels)


def _whole_slice(node: Node, source: Node, labels: Labels) -> Labels | None:
    whole = arguments(node)["step"] == 1
    dims = zip(shape(node), shape(source))
    return labels if whole and all(same_size(a, b) for a, b in dims) else None


def _repeat_interleave(node: Node, source: Node, labels: Labels) -> Labels | None:
    """Rows repeated next to each other: the minor part of the axis is the copy's number."""
    given = arguments(node)
    if given["dim"] is None or not isinstance(given["repeats"], int):
        return None
    dim = given["dim"] % len(labels)
    split = regroup((labels[dim],), (shape(source)[dim], given["repeats"]))
    return None if split is None else (*labels[:dim], split[0], *labels[dim + 1 :])


def _repeat(node: Node, source: Node, labels: Labels) -> Labels | None:
    """Only copies along dimensions of size 1: they are a broadcast."""
    return aligned(source, shape(node), labels)


_VIEWS: dict[Any, _Rule] = {
    **dict.fromkeys(
        [
            aten.view.default, aten.reshape.default, aten._unsafe_view.default,
            aten.flatten.using_ints, aten.unflatten.int, aten.squeeze.default,
            aten.reshape_as.default, aten.view_as.default,
        ],
        _reshape,
    ),
    **dict.fromkeys([aten.contiguous.default, aten.clone.default, aten.alias.default], _identity),
    **dict.fromkeys(
        [aten.transpose.int, aten.swapaxes.default, aten.swapdims.default], _permuted(_swap)
    ),
    **dict.fromkeys([aten.mT.default, aten.adjoint.default], _permuted(_swap_last)),
    **dict.fromkeys([aten.t.default, aten.numpy_T.default], _permuted(_reverse)),
    aten.permute.default: _permuted(_given),
    aten.movedim.int: _permuted(_move),
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys([aten.squeeze.dim, aten.squeeze.dims], _squeeze),
    **dict.fromkeys([aten.expand.default, aten.expand_as.default], _expand),
    aten.slice.Tensor: _whole_slice,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.repeat.default: _repeat,
}  # fmt: skip

VIEW_TARGETS = frozenset(_VIEWS)


def is_view(node: object) -> bool:
    """A call that only rearranges its first argument."""
    return is_call(node, *VIEW_TARGETS)
