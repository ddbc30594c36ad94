"""Biases that depend on j - i alone, as a table of relative places [H or 1, 2 * L - 1].

``table[bucket(j - i)]`` in its many forms is L x L numbers for each head, of which only 2 L - 1
differ. The user's own arithmetic - buckets, clamps, logarithms, the gather from a parameter - is
written again over the vector j - i = -(L - 1) .. L - 1, so that gradients reach the parameter
through the same gather. Nothing has to be known of what the arithmetic is but that it is
element-wise.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from gemcompile.graph import Editor, is_call, shape, target_name, value

from .attention_additive import Addend
from .attention_arrange import Arranger
from .attention_match import Groups
from .axes import Axis, Labels, aligned, axes_of, same, settle_all, through
from .masks import constant
from .padding_rules import is_pointwise
from .places import Reader

aten = torch.ops.aten

# Would draw other numbers over another shape, or ask its second argument for its type alone.
_NOT_ELEMENTWISE = (aten.dropout.default, aten.type_as.default, aten.to.other)


@dataclass
class _Writer:
    """Where the vector of relative places and what is made of it are written."""

    edit: Editor
    arrange: Arranger
    places: Node
    made: dict[Any, Node] = field(default_factory=dict)


_Build = Callable[[_Writer], Node]


class RelativeTable:
    """Biases read as functions of j - i, and the way to write them as one table.

    ``why`` tells what stood in the way first, where one could not be read.
    """

    def __init__(self, biases: list[Addend], g: Groups) -> None:
        self.g = g
        self.axis = Axis(2 * g.k[0].size - 1)
        self.why = ""
        self._reader = Reader(g.q, g.k)
        self._biases = biases
        self._builds: dict[Any, _Build | None] = {}
        self._built = [self._read(b.node, b.labels) for b in biases]

    @property
    def found(self) -> bool:
        """All biases were read."""
        return all(x is not None for x in self._built)

    def write(self, edit: Editor, arrange: Arranger) -> Node:
        """The table, [H or 1, 2 * L - 1]."""
        length = arrange.size(self.g.k)
        far = length - 1 if isinstance(length, int) else edit(operator.sub, length, 1)
        width: int | Node = 2 * far + 1 if isinstance(far, int) else 0
        if isinstance(far, Node):
            width = edit(operator.add, edit(operator.mul, far, 2), 1)
        like = self._biases[0].node
        steps = edit(aten.arange.default, width, device=value(like).device)
        places = edit(aten.sub.Tensor, steps, far)
        writer = _Writer(edit, Arranger(edit, arrange.sizes, [*arrange.near, steps]), places)
        terms = [self._term(b, build, writer) for b, build in zip(self._biases, self._built)]
        out = terms[0]
        for x in terms[1:]:
            out = edit(aten.add.Tensor, out, x)
        return out

    def _term(self, bias: Addend, build: _Build | None, w: _Writer) -> Node:
        assert build is not None
        x = w.arrange(build(w), self._along(bias.labels), (self.g.h, (self.axis,)), expand=False)
        if not value(x).dtype.is_floating_point:
            x = w.edit(aten.to.dtype, x, torch.float32)
        return x if bias.factor == 1 else w.edit(aten.mul.Tensor, x, bias.factor)

    def _along(self, labels: Labels) -> Labels:
        """The labels with j - i in the place of j, and i left out."""
        out = []
        for label in settle_all(labels):
            kept = [a for a in label if a not in self.g.q]
            out.append(tuple(self.axis if a in self.g.k else a for a in kept))
        return tuple(out)

    # --- Reading. ---

    def _read(self, x: Node, labels: Labels) -> _Build | None:
        """How to write x over relative places, once; None where it is not a function of them.

        Every dimension stays, that of queries with size 1.
        """
        key = x, settle_all(labels)
        if key not in self._builds:
            self._builds[key] = self._reading(x, labels)
        build = self._builds[key]
        return None if build is None else lambda w: _once(w, key, build)

    def _reading(self, x: Node, labels: Labels) -> _Build | None:
        known, axes = constant(x), axes_of(labels)
        if known is not None:
            return self._constant(x, known)
        if not axes & {*self.g.q, *self.g.k}:
            return (lambda w: x) if axes <= set(self.g.h) else self._no("it varies along the batch")
        linear = self._reader.linear(x, labels)
        if linear is not None:
            if linear.column != -linear.row:
                return self._no("it depends on places otherwise than by their distance j - i")
            return self._vector(x, labels, linear.column, linear.shift)
        view = through(x, labels)
        if view is not None:
            return self._viewed(self._read(*view), view[1], labels)
        return self._gathered(x, labels) or self._elementwise(x, labels)

    def _no(self, why: str) -> _Build | None:
        """None; notes the reason, unless there was one before."""
        self.why = self.why or why
        return None

    def _constant(self, x: Node, number: float) -> _Build:
        dtype, device, rank = value(x).dtype, value(x).device, len(shape(x))
        fill = number if dtype.is_floating_point else int(number)
        return lambda w: w.edit(aten.full.default, [1] * rank, fill, dtype=dtype, device=device)

    def _vector(self, x: Node, labels: Labels, factor: int, shift: int) -> _Build:
        def build(w: _Writer) -> Node:
            out = w.places if factor == 1 else w.edit(aten.mul.Tensor, w.places, factor)
            out = out if shift == 0 else w.edit(aten.add.Tensor, out, shift)
            if value(x).dtype is not value(out).dtype:
                out = w.edit(aten.to.dtype, out, value(x).dtype)
            return w.arrange(out, ((self.axis,),), self._along(labels), expand=False)

        return build

    def _viewed(self, build: _Build | None, source: Labels, labels: Labels) -> _Build | None:
        if build is None:
            return None
        before, after = self._along(source), self._along(labels)
        return lambda w: w.arrange(build(w), before, after, expand=False)

    def _elementwise(self, x: Node, labels: Labels) -> _Build | None:
        if x.op != "call_function":
            return self._no("it is an input, not made of places")
        if not is_pointwise(x) or is_call(x, *_NOT_ELEMENTWISE):
            return self._no(f"{target_name(x)} is not element-wise")
        built: dict[Node, _Build] = {}
        for y in x.all_input_nodes:
            if not isinstance(value(y), torch.Tensor):
                continue
            below = aligned(y, shape(x), labels)
            build = None if below is None else self._read(y, below)
            if build is None:
                return self._no(f"an operand of {target_name(x)} is of another shape")
            built[y] = build
        return lambda w: w.edit(
            x.target, *map_arg(x.args, lambda y: _made(built, y, w)), **dict(x.kwargs)
        )

    def _gathered(self, x: Node, labels: Labels) -> _Build | None:
        """A table read at an index that is a function of j - i."""
        place = _index_of(x)
        if place is None:
            return None
        index, first, last = place
        rest = axes_of((*labels[:first], *labels[last:]))
        if not rest <= set(self.g.h):
            return self._no("what it is read from varies along more than the heads")
        build = self._read(index, labels[first:last])
        if build is None:
            return None

        def write(w: _Writer) -> Node:
            made = build(w)
            args = map_arg(x.args, lambda y: made if y is index else y)
            return w.edit(x.target, *args, **dict(x.kwargs))

        return write


def _once(w: _Writer, key: Any, build: _Build) -> Node:
    if key not in w.made:
        w.made[key] = build(w)
    return w.made[key]


def _made(built: dict[Node, _Build], y: Node, w: _Writer) -> Node:
    return built[y](w) if y in built else y


def _index_of(x: Node) -> tuple[Node, int, int] | None:
    """(index, first, last): which of x's dimensions are those of an index into a tensor."""
    rank = len(shape(x)) if isinstance(value(x), torch.Tensor) else 0
    args: Any = x.args
    if is_call(x, aten.embedding.default):
        return args[1], 0, rank - 1
    if is_call(x, aten.bucketize.Tensor):
        return args[0], 0, rank
    if is_call(x, aten.index_select.default):
        dim = args[1] % rank
        return args[2], dim, dim + 1
    if is_call(x, aten.index.Tensor):
        given = [(i, y) for i, y in enumerate(args[1]) if y is not None]
        if len(given) == 1 and value(given[0][1]).dtype in (torch.int32, torch.int64):
            i, index = given[0]
            return index, i, i + len(shape(index))
    return None


def relative_table(biases: list[Addend], g: Groups) -> RelativeTable | str:
    """The biases as one table, where each is a function of j - i (and of the head) alone.

    Else why they are not, fit to follow "because".
    """
    if len(g.q) != 1 or len(g.k) != 1 or not same(g.q[0].size, g.k[0].size):
        return "queries and keys are not equally many"
    ends = {*g.q, *g.k}
    if not all(ends & axes_of(b.labels) == ends for b in biases):
        return "it does not vary along both queries and keys"
    table = RelativeTable(biases, g)
    return table if table.found else table.why
