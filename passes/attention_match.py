"""What is proven about one attention: the operands, their axes, masks, biases, scales."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from gemcompile.graph import is_call, value

from .attention_additive import Addend
from .axes import Axis, Label, Labels, axes_of, settle, settle_all, through
from .masks import CASTS, Leaf, Literals

aten = torch.ops.aten

# The largest fill that counts as a mask.
MASK_FILL = -1e4

NO_PADDING = "there is no padding mask: torch's own kernel is as good"


class Declined(Exception):
    """Attention-shaped, but something is not proven; the text follows "declined because"."""


class NotAttention(Exception):
    """Some other use of these operators; nothing to report."""


@dataclass(frozen=True)
class Masking:
    """Keys hidden before the activation.

    Attributes:
        literals: a key is visible where all hold.
        fill: what stands in a hidden place, -inf or finite.
        uniform: a row hidden as a whole has equal scores, so that its softmax is the mean of v.
        replaced: the fill stands in place of the scores; a fill added to them lets gradients pass.
    """

    literals: Literals
    fill: float
    uniform: bool
    replaced: bool


def swallows(fill: float, dtype: torch.dtype) -> bool:
    """A finite fill so large that adding any score of usual size to it changes nothing."""
    return math.isfinite(fill) and -fill * torch.finfo(dtype).eps > 1e6


@dataclass(frozen=True)
class Factor:
    """Something to multiply with (or divide by): a tensor with labels, or a symbolic number."""

    node: Node
    labels: Labels
    divide: bool


@dataclass
class Operand:
    """q, k or v as the places along its chain of views, each with its labels; the first is used."""

    places: list[tuple[Node, Labels]]

    @property
    def dtype(self) -> torch.dtype:
        """Element type at the far end of the chain."""
        found: torch.dtype = value(self.places[-1][0]).dtype
        return found

    def axes(self) -> set[Axis]:
        """The axes it varies along."""
        return axes_of(self.places[-1][1])


@dataclass
class Match:
    """scale * q k^T + biases under masks, through the activation, times v.

    Attributes:
        node: the contraction with v (or the SDPA call).
        out: labels of the node's dimensions.
        batch: labels of the axes that q and k share, in the order of the scores.
        rows: axes of q that k does not have. keys, depth: the axes summed with v and in q k^T.
        score_dtype: type of q k^T.
        query_factors: multiplied onto q. row_factors: multiplied onto the output.
        hidden: masks before the activation. kept: literals multiplied onto its result.
        interior: every node between the inputs and ``node``; mask_nodes: where masks were read.
    """

    node: Node
    out: Labels
    activation: str = ""
    q: Operand = field(default_factory=lambda: Operand([]))
    k: Operand = field(default_factory=lambda: Operand([]))
    v: Operand = field(default_factory=lambda: Operand([]))
    batch: Label = ()
    rows: Label = ()
    keys: Label = ()
    depth: Label = ()
    score_dtype: torch.dtype = torch.float32
    scale: float = 1.0
    out_scale: float = 1.0
    query_factors: list[Factor] = field(default_factory=list)
    row_factors: list[Factor] = field(default_factory=list)
    hidden: list[Masking] = field(default_factory=list)
    kept: Literals = ()
    biases: list[Addend] = field(default_factory=list)
    dropout: Node | None = None
    dropout_p: float = 0.0
    interior: list[Node] = field(default_factory=list)
    mask_nodes: list[Node] = field(default_factory=list)
    fused: bool = False  # it is one kernel already

    @property
    def softmax(self) -> bool:
        """The activation normalises rows."""
        return self.activation == "softmax"

    def reads(self) -> set[Node]:
        """The values that the rewritten site reads."""
        literals = [x for m in self.hidden for x in m.literals] + list(self.kept)
        found = {x.node for x in literals if isinstance(x, Leaf)}
        found |= {n for operand in (self.q, self.k, self.v) for n, _ in operand.places}
        found |= {f.node for f in (*self.query_factors, *self.row_factors)}
        return found | {b.node for b in self.biases}


@dataclass(frozen=True)
class Groups:
    """The dimensions of the op's operands, each as a label: b, queries, keys, heads, depths."""

    b: Label
    q: Label
    k: Label
    h: Label
    kv_h: Label
    d: Label
    dv: Label


def groups(match: Match) -> Groups:
    """Sort the axes into the op's dimensions.

    Raises:
        Declined: an axis is where the op has no place for it.
        NotAttention: k and v are weights rather than a batch of keys.
    """
    keys, depth = settle(match.keys), settle(match.depth)
    rows, batch = settle(match.rows), settle(match.batch)
    query = _query_axis(rows, keys)
    shared = tuple(a for a in batch + rows if a not in query)
    # The scores' own order, so that the first axis is the batch where nothing else decides.
    in_k, in_v = match.k.axes(), match.v.axes()
    lacking = {a for a in shared if not a.unit and (a not in in_k or a not in in_v)}
    b, h = _batch_and_heads(shared, lacking, _masked_axes(match, shared))
    if all(a.unit or a not in in_k and a not in in_v for a in b):
        _no_batch(match, b)
    score_axes = axes_of((batch, rows, keys))
    widths = [tuple(a for a in w if a not in (*shared, *query)) for w in settle_all(match.out)]
    dv = tuple(a for label in widths for a in label)
    if sum(any(not a.unit for a in label) for label in widths) > 1:
        raise Declined("the weights are shared along an axis of the values")
    if set(dv) & score_axes or not _within(in_v, b, keys, h, dv):
        raise Declined("the values vary along an axis that is neither batch, key nor head")
    if not _within(in_k, b, keys, h, depth) or not _within(match.q.axes(), b, query, h, depth):
        raise Declined(
            "queries and keys are contracted over something else than the head dimension"
        )
    return Groups(b, query, keys, h, _kv_heads(h, in_k, in_v), depth, dv)


def _query_axis(rows: Label, keys: Label) -> Label:
    """Which of the axes that only q has counts queries; the others are heads."""
    if len(rows) <= 1:
        return rows
    size = math.prod(a.size for a in keys)
    as_many = [a for a in rows if a.size == size]
    return (as_many[0] if len(as_many) == 1 else rows[-1],)


def _masked_axes(match: Match, shared: Label) -> set[Axis]:
    """Shared axes along which a key mask varies."""
    literals = [x for m in match.hidden for x in m.literals] + list(match.kept)
    leaves = [axes_of(x.labels) for x in literals if isinstance(x, Leaf)]
    keys = axes_of([match.keys])
    return {a for axes in leaves if axes & keys for a in axes if a in shared}


def _batch_and_heads(shared: Label, lacking: set[Axis], masked: set[Axis]) -> tuple[Label, Label]:
    if len(shared) < 2:
        return shared, ()
    if masked and len(masked) < len(shared):
        b = tuple(a for a in shared if a in masked)
    elif lacking and len(lacking) < len(shared):
        b = (next(a for a in shared if a not in lacking),)
    else:
        b = shared[:-1]
    return b, tuple(a for a in shared if a not in b)


def _no_batch(match: Match, b: Label) -> None:
    if not b:
        raise Declined("the scores have no batch dimension")
    if all(a.unit for a in b):
        return
    if match.softmax:
        raise Declined("the whole batch shares its keys and values")
    raise NotAttention


def _within(axes: set[Axis], *labels: Label) -> bool:
    return axes <= {a for label in labels for a in label}


def _kv_heads(h: Label, in_k: set[Axis], in_v: set[Axis]) -> Label:
    """The heads of k and v: a leading part of the query heads, else all of them."""
    for n in range(len(h)):
        head = {a for a in h[:n] if not a.unit}
        tail = {a for a in h[n:] if not a.unit}
        if head <= in_k and head <= in_v and not tail & in_k and not tail & in_v:
            return h[:n]
    return h


# --- Operands. ---------------------------------------------------------------------------------


def operand(node: Node, labels: Labels) -> Operand:
    """The chain of views behind an operand."""
    places = [(node, labels)]
    while (step := through(*places[-1])) is not None:
        places.append(step)
    return Operand(places)


def scaled_operand(node: Node, labels: Labels) -> tuple[Operand, float]:
    """The operand without scalar factors and widening casts, and the product of the factors."""
    scale = 1.0
    found = operand(node, labels)
    while True:
        end, end_labels = found.places[-1]
        factor = 1.0 if _widens(end) else _scalar_factor(end)
        if factor is None:
            return found, scale
        scale *= factor
        found = operand(end.args[0], end_labels)  # type: ignore[arg-type]


def _scalar_factor(node: Node) -> float | None:
    """c where the node is x * c or x / c for a floating x."""
    if not is_call(node, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        return None
    if len(node.args) != 2 or node.kwargs or not isinstance(node.args[0], Node):
        return None
    number = node.args[1]
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    if not value(node.args[0]).dtype.is_floating_point:
        return None
    if is_call(node, aten.mul.Tensor, aten.mul.Scalar):
        return float(number)
    if is_call(node, aten.div.Tensor, aten.div.Scalar) and number != 0:
        return 1.0 / number
    return None


def _widens(node: Node) -> bool:
    if not is_call(node, *CASTS) or not isinstance(node.args[0], Node):
        return False
    before, after = value(node.args[0]).dtype, value(node).dtype
    floats = before.is_floating_point and after.is_floating_point
    return bool(floats and torch.promote_types(before, after) == after)
