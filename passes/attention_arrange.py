"""Bringing a tensor whose axes are known into another order of dimensions, with few views."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from gemcompile.graph import Editor, shape, value

from .attention_match import Declined
from .axes import Axis, Label, Labels, expression, fresh, is_view, regroup, settle_all, through

aten = torch.ops.aten

_RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int,
}  # fmt: skip


class Sizes:
    """Sizes as arguments of nodes: numbers, the graph's own size inputs, or sizes of a tensor."""

    def __init__(self, graph: Graph) -> None:
        self._known: dict[Any, Node] = {}
        for node in graph.find_nodes(op="placeholder"):
            if isinstance(value(node), torch.SymInt):
                self._known.setdefault(expression(value(node)), node)

    def of(self, edit: Editor, label: Label, near: Sequence[Node]) -> int | Node:
        """The product of the axes' sizes; ``near`` are tensors that may be asked for a size."""
        size = sympy.expand(sympy.Mul(*(a.size for a in label)))
        if size.is_Integer:
            return int(size)
        if size in self._known:
            return self._known[size]
        for node in near:
            for dim, s in enumerate(shape(node)):
                if expression(s) == size:
                    return edit(aten.sym_size.int, node, dim)
        if len(label) < 2:
            raise Declined(f"no value in the graph has the size {size}")
        first, rest = self.of(edit, label[:1], near), self.of(edit, label[1:], near)
        return edit(operator.mul, first, rest)


def plain(labels: Labels) -> Labels:
    """The labels in unsplit axes, those of size 1 left out."""
    return tuple(tuple(a for a in label if not a.unit) for label in settle_all(labels))


class Arranger:
    """Writes the views for one site: new nodes go where ``edit`` puts them."""

    def __init__(self, edit: Editor, sizes: Sizes, near: Sequence[Node]) -> None:
        self.edit = edit
        self.sizes = sizes
        self.near = list(near)

    def pick(self, places: Sequence[tuple[Node, Labels]], target: Labels) -> Node:
        """The operand in the target order: a value that stands there already, else new views."""
        wanted = plain(target)
        for node, labels in places:
            if plain(labels) == wanted:
                return node
        return self(*places[-1], target)

    def __call__(self, node: Node, labels: Labels, target: Labels, expand: bool = True) -> Node:
        """``node`` with its dimensions as in ``target``.

        Axes that the tensor does not vary along are expanded, or left at size 1 where a whole
        dimension is missing and ``expand`` is False.
        """
        wanted = plain(target)
        have = [a for label in plain(labels) for a in label]
        if not expand:
            wanted = tuple(label if set(label) & set(have) else () for label in wanted)
        if plain(labels) == wanted:
            return node
        node = self._split(node, plain(labels), have)
        order = [a for label in wanted for a in label]
        node = self._permute(node, [have.index(a) for a in order if a in have])
        node = self._broadcast(node, order, have)
        return self._merge(node, wanted)

    def _split(self, node: Node, labels: Labels, have: list[Axis]) -> Node:
        if all(len(label) == 1 for label in labels):
            return node
        return self.edit(aten.view.default, node, [self.size((a,)) for a in have])

    def _permute(self, node: Node, order: list[int]) -> Node:
        if order == sorted(order):
            return node
        return self.edit(aten.permute.default, node, order)

    def _broadcast(self, node: Node, order: list[Axis], have: list[Axis]) -> Node:
        missing = [i for i, a in enumerate(order) if a not in have]
        if not missing:
            return node
        for dim in missing:
            node = self.edit(aten.unsqueeze.default, node, dim)
        sizes = [self.size((a,)) if i in missing else -1 for i, a in enumerate(order)]
        return self.edit(aten.expand.default, node, sizes)

    def _merge(self, node: Node, wanted: Labels) -> Node:
        if all(len(label) == 1 for label in wanted):
            return node
        if all(len(label) <= 1 for label in wanted):
            for dim, label in enumerate(wanted):
                if not label:
                    node = self.edit(aten.unsqueeze.default, node, dim)
            return node
        return self.edit(aten.reshape.default, node, [self.size(label) for label in wanted])

    def size(self, label: Label) -> int | Node:
        return self.sizes.of(self.edit, label, self.near)


# --- Forwards: where the user's views lead after the site. ---------------------------------------


def push(user: Node, labels: Labels) -> Labels | None:
    """Labels of a view of a tensor with these labels; None where it is more than that."""
    if not is_view(user) or user.target is aten.clone.default:
        return None
    if user.target in _RESHAPES:
        return regroup(labels, shape(user))
    probe = fresh(user)
    step = through(user, probe)
    if step is None or any(len(label) > 1 for label in step[1]):
        return None
    came_from = {label[0]: mine for label, mine in zip(step[1], labels) if label}
    if len(came_from) != sum(1 for label in labels if label) and len(probe) < len(labels):
        return None
    return tuple(came_from.get(p[0], ()) for p in probe)


def destination(node: Node, labels: Labels, canonical: Labels) -> list[tuple[Node, Labels]]:
    """The views that follow a node, itself first; the last one is the value to replace.

    That is the user's own [B, L, H, D] where the views lead there, else the end of the chain.
    """
    chain = [(node, labels)]
    while plain(chain[-1][1]) != plain(canonical):
        users = list(chain[-1][0].users)
        pushed = push(users[0], chain[-1][1]) if len(users) == 1 else None
        if pushed is None:
            break
        chain.append((users[0], pushed))
    return chain
