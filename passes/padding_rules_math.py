"""Row-wise rules of operators that compute over the features of a row: products, norms,
reductions, lookups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from gemcompile.graph import Editor, arguments

from .layout import Layout, other
from .padding_rules import Packed, RowWise, axes_of, operand_layout, rule

aten = torch.ops.aten


def _features(n: Node, x: Node, layout: Layout, emit_args: Any) -> RowWise | None:
    """The last dimension of x is contracted with something that holds no rows."""
    last = layout.rank - 1
    if not layout.is_other(last) or x.meta["val"].dim() != layout.rank:
        return None
    source = layout.with_dim(last, (other(x.meta["val"].shape[-1]),))

    def emit(edit: Editor, packed: Packed) -> Node:
        return edit(n.target, *emit_args(packed.get(x, source)), **n.kwargs)

    return RowWise({x: source}, emit)


@rule(aten.linear.default)
def _linear(n: Node, layout: Layout) -> RowWise | None:
    x, *rest = n.args
    assert isinstance(x, Node)
    return _features(n, x, layout, lambda y: (y, *rest))


@rule(aten.mm.default)
def _mm(n: Node, layout: Layout) -> RowWise | None:
    x, w = n.args
    assert isinstance(x, Node)
    return _features(n, x, layout, lambda y: (y, w))


@rule(aten.addmm.default)
def _addmm(n: Node, layout: Layout) -> RowWise | None:
    bias, x, w = n.args
    assert isinstance(bias, Node) and isinstance(x, Node)
    if bias.meta["val"].dim() > 1:
        return None
    return _features(n, x, layout, lambda y: (bias, y, w))


@rule(aten.matmul.default)
def _matmul(n: Node, layout: Layout) -> RowWise | None:
    x, y = n.args
    assert isinstance(x, Node) and isinstance(y, Node)
    if y.meta["val"].dim() == 2:
        return _features(n, x, layout, lambda p: (p, y))
    if y.meta["val"].dim() == 1:  # [.., K] @ [K]
        source = Layout((*layout.dims, (other(x.meta["val"].shape[-1]),)))
        return RowWise(
            {x: source}, lambda edit, packed: edit(aten.matmul.default, packed.get(x, source), y)
        )
    if not (layout.is_other(layout.rank - 1) and layout.is_other(layout.rank - 2)):
        return None
    rows: dict[Node, Layout] = {}
    for a in (x, y):  # the rows are batch dimensions of the product
        if a.meta["val"].dim() != layout.rank or axes_of(a, layout) != {"b", "l"} or a in rows:
            return None
        own = operand_layout(a, layout)
        for d in (-2, -1):
            own = own.with_dim(layout.rank + d, (other(a.meta["val"].shape[d]),))
        rows[a] = own

    def emit(edit: Editor, packed: Packed) -> Node:
        return edit(aten.matmul.default, packed.get(x, rows[x]), packed.get(y, rows[y]))

    return RowWise(rows, emit)


@rule(aten.layer_norm.default, aten.rms_norm.default)
def _norm(n: Node, layout: Layout) -> RowWise | None:
    x, shape, *rest = n.args
    assert isinstance(x, Node) and isinstance(shape, (list, tuple))
    if not all(layout.is_other(i) for i in range(layout.rank - len(shape), layout.rank)):
        return None

    def emit(edit: Editor, packed: Packed) -> Node:
        return edit(n.target, packed.get(x, layout), shape, *rest, **n.kwargs)

    return RowWise({x: layout}, emit)


@rule(aten.softmax.int, aten.log_softmax.int, aten.cumsum.default, aten.glu.default)
def _along(n: Node, layout: Layout) -> RowWise | None:
    """Works along one dimension, which is kept."""
    x: Any = n.args[0]
    dim = arguments(n)["dim"] % layout.rank
    if not layout.is_other(dim):
        return None
    source = layout.with_dim(dim, (other(x.meta["val"].shape[dim]),))

    def emit(edit: Editor, packed: Packed) -> Node:
        rest = n.args[2:]
        return edit(n.target, packed.get(x, source), layout.packed_dim(dim), *rest, **n.kwargs)

    return RowWise({x: source}, emit)


@rule(
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.any.dim,
    aten.all.dim, aten.linalg_vector_norm.default, aten.logsumexp.default,
    aten.argmax.default, aten.prod.dim_int, aten.norm.ScalarOpt_dim,
    aten.var.correction, aten.std.correction,
)  # fmt: skip
def _reduce(n: Node, layout: Layout) -> RowWise | None:
    """Sums over features; over rows it would mix them."""
    given = arguments(n)
    x, dims, keep = given["self"], given["dim"], bool(given["keepdim"])
    if dims is None or dims == []:
        return None
    rank = x.meta["val"].dim()
    positions = sorted(d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims]))
    source = layout
    for d in positions:
        size = (other(x.meta["val"].shape[d]),)
        if keep and not layout.is_other(d):
            return None
        source = source.with_dim(d, size) if keep else source.inserted(d).with_dim(d, size)

    def emit(edit: Editor, packed: Packed) -> Node:
        mapped = [source.packed_dim(d) for d in positions]
        replaced = {**given, "self": packed.get(x, source)}
        replaced["dim"] = mapped if isinstance(dims, (list, tuple)) else mapped[0]
        names = [a for a in n.target._schema.arguments]  # type: ignore[union-attr]
        args = [replaced[a.name] for a in names if not a.kwarg_only]
        return edit(n.target, *args, **{a.name: replaced[a.name] for a in names if a.kwarg_only})

    return RowWise({x: source}, emit)


@rule(aten.embedding.default)
def _embedding(n: Node, layout: Layout) -> RowWise | None:
    given = arguments(n)
    index, last = given["indices"], layout.rank - 1
    if given["scale_grad_by_freq"] or not layout.is_other(last):
        return None  # frequencies are counted over padded ids too
    source = layout.removed(last)

    def emit(edit: Editor, packed: Packed) -> Node:
        rest = n.args[2:]
        return edit(n.target, given["weight"], packed.get(index, source), *rest, **n.kwargs)

    return RowWise({index: source}, emit)


@rule(aten.gather.default)
def _gather(n: Node, layout: Layout) -> RowWise | None:
    args: Any = n.args
    x, dim, index = args[:3]
    d = dim % layout.rank
    if not layout.is_other(d) or x is index:
        return None
    sizes = x.meta["val"].shape
    if any(
        not layout.is_other(i) and str(sizes[i]) != str(index.meta["val"].shape[i])
        for i in range(layout.rank)
    ):
        return None
    source = layout
    for i in range(layout.rank):
        if layout.is_other(i):
            source = source.with_dim(i, (other(sizes[i]),))

    def emit(edit: Editor, packed: Packed) -> Node:
        return edit(
            n.target, packed.get(x, source), layout.packed_dim(d), packed.get(index, layout)
        )

    return RowWise({x: source, index: layout}, emit)


@rule(aten.einsum.default)
def _einsum(n: Node, layout: Layout) -> RowWise | None:
    """Operands hold both row axes under the output's letters, or neither."""
    args: Any = n.args
    equation, operands = args[0].replace(" ", ""), list(args[1])
    if "->" not in equation or "." in equation or any(len(d) != 1 for d in layout.dims):
        return None
    ins, out = equation.split("->")
    b, l = (next(i for i in range(layout.rank) if a in layout.holds(i)) for a in "bl")  # noqa: E741
    rows: dict[Node, Layout] = {}
    terms = []
    for x, letters in zip(operands, ins.split(",")):
        has = {out[b], out[l]} & set(letters)
        if len(has) == 1 or x in rows or len(set(letters)) != len(letters):
            return None
        if has:
            sizes = x.meta["val"].shape
            axis = {out[b]: layout.dims[b], out[l]: layout.dims[l]}
            rows[x] = Layout(tuple(axis.get(c, (other(s),)) for c, s in zip(letters, sizes)))
            letters = out[b] + "".join(c for c in letters if c not in axis)
        terms.append(letters)
    if not rows:
        return None
    packed_out = out[b] + "".join(c for i, c in enumerate(out) if i not in (b, l))

    def emit(edit: Editor, packed: Packed) -> Node:
        args = [packed.get(x, rows[x]) if x in rows else x for x in operands]
        return edit(aten.einsum.default, ",".join(terms) + "->" + packed_out, args)

    return RowWise(rows, emit)


@rule(aten.cross_entropy_loss.default)
def _cross_entropy(n: Node, layout: Layout) -> RowWise | None:
    """Unreduced, with class indices: logits [N, C] or [rows..., C] flattened by the user."""
    given = arguments(n)
    logits, target = given["self"], given["target"]
    if given["reduction"] != 0 or layout.rank != 1 or target.meta["val"].is_floating_point():
        return None
    source = Layout((*layout.dims, (other(logits.meta["val"].shape[-1]),)))

    def emit(edit: Editor, packed: Packed) -> Node:
        args = (given["weight"], 0, given["ignore_index"], given["label_smoothing"])
        return edit(n.target, packed.get(logits, source), packed.get(target, layout), *args)

    return RowWise({logits: source, target: layout}, emit)
