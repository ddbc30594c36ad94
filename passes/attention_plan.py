"""Whether ``gem::padded_attention`` can say what a match says: decided before a node is written."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from gemcompile.graph import value

from .attention_match import NO_PADDING, Declined, Groups, Match, groups
from .attention_places import Placed, Placer
from .attention_relative import RelativeTable, relative_table
from .axes import Axis, axes_of, settle
from .masks import Band, Leaf, Literal, is_binary

LARGEST_HEAD = 256


@dataclass
class Masks:
    """The literals of a site, sorted by what they run along."""

    keys: list[Leaf] = field(default_factory=list)
    rows: list[Leaf] = field(default_factory=list)
    placed: Placed = field(default_factory=Placed)

    @property
    def dense(self) -> list[Literal]:
        """What runs along queries and keys, and the op has no argument for."""
        return self.placed.rest

    @property
    def wide(self) -> list[Literal]:
        """All that runs along queries and keys."""
        return self.placed.literals + self.placed.rest

    @property
    def some(self) -> bool:
        """There is a literal that may hide every key of a row."""
        return bool(self.keys or self.rows or self.dense)


@dataclass
class Plan:
    """A match for which everything is decided, before any node is written."""

    match: Match
    groups: Groups
    dtype: torch.dtype
    before: Masks
    after: Masks
    table: RelativeTable | None  # the biases, where they depend on j - i alone
    bias_kept: str  # why the biases are no table, or ""
    empty: str  # what a row without a visible key gives: "zero", "mean", "assume"
    assumed: str  # what has to hold beyond what is proven, or ""


def plan(match: Match, strict: bool, placer: Placer) -> Plan:
    """Check that the op can say what the match says.

    Raises:
        Declined: it cannot.
    """
    g = groups(match)
    depth, width = (math.prod(a.size for a in label) for label in (g.d, g.dv))
    for size in (depth, width):
        if size.is_number and size > LARGEST_HEAD:
            raise Declined(f"head dimension {size} is larger than {LARGEST_HEAD}")
    pre = {x.key(): x for m in match.hidden for x in m.literals}
    post = {x.key(): x for x in match.kept}
    if match.softmax:
        before, after = _sorted(pre, g, placer), _sorted(post, g, placer)
        if any(x.key() not in pre for x in (*after.keys, *after.wide)):
            raise Declined("keys are masked after the softmax but not before it")
        # A row that is zeroed in the end needs no other value.
        before.rows = [x for x in before.rows if x.key() not in post]
    else:
        before, after = _sorted(pre | post, g, placer), Masks()
    table, kept = _table(match, g, before)
    if match.fused and not before.keys and not before.placed.some and table is None:
        raise Declined(NO_PADDING)
    empty, sure = _empty(match, before, set(post) >= set(pre))
    if table is None:
        _check_biases(match, g, before)
    assumed = [] if sure else [_assumption(before)]
    if assumed and before.rows:
        raise Declined("the additive mask hides whole queries, where softmax then ignores it")
    if any(isinstance(x, Leaf) and not is_binary(x.node) for x in pre.values()):
        assumed += ["the mask holds nothing but 0 and 1"]
    if assumed and strict:
        raise Declined(f"it is not proven that {' and '.join(assumed)}, and strict=True")
    assumed += [before.placed.assumed] if before.placed.assumed else []
    return Plan(match, g, _dtype(match), before, after, table, kept, empty, " and ".join(assumed))


def _table(match: Match, g: Groups, before: Masks) -> tuple[RelativeTable | None, str]:
    if not match.biases:
        return None, ""
    if before.dense:
        return None, "a mask is added to it"
    found = relative_table(match.biases, g)
    return (None, found) if isinstance(found, str) else (found, "")


def _assumption(masks: Masks) -> str:
    narrow = masks.wide
    return "every query sees a valid key" if narrow else "every sequence has a valid key"


def _sorted(literals: dict[Any, Literal], g: Groups, placer: Placer) -> Masks:
    masks = Masks()
    wide: list[Literal] = []
    for x in literals.values():
        if isinstance(x, Band):
            if (settle(x.row), settle(x.column)) not in ((g.q, g.k), (g.k, g.q)):
                raise Declined("positions are compared along axes that are not queries and keys")
            wide.append(x)
            continue
        axes = axes_of(x.labels)
        if not axes <= {*g.b, *g.h, *g.q, *g.k}:
            raise Declined("the mask varies along an axis that the scores do not have")
        if not axes & set(g.k):
            masks.rows.append(x)
        elif axes & {*g.h, *g.q}:
            wide.append(x)
        else:
            masks.keys.append(x)
    masks.placed = placer(wide, masks.keys, g.b, g.q, g.k)
    if masks.dense and _is_full([axes_of(x.labels) for x in masks.dense if isinstance(x, Leaf)], g):
        raise Declined("the mask is as large as the scores")
    return masks


def _is_full(varying: list[set[Axis]], g: Groups) -> bool:
    """A sum of tensors that vary along these axes has as many elements as the scores."""
    union = {a for axes in varying for a in axes}
    return all(a in union or a.unit for a in (*g.b, *g.h, *g.q, *g.k))


def _check_biases(match: Match, g: Groups, before: Masks) -> None:
    varying = [axes_of(b.labels) for b in match.biases]
    for axes in varying:
        if not axes <= {*g.b, *g.h, *g.q, *g.k}:
            raise Declined("the bias varies along an axis that the scores do not have")
    bands = [{*g.q, *g.k} for x in before.dense if isinstance(x, Band)]
    leaves = [axes_of(x.labels) for x in before.dense if isinstance(x, Leaf)]
    if match.biases and _is_full(varying + leaves + bands, g):
        raise Declined("the bias is as large as the scores")
    if before.dense and match.activation in ("leaky_relu", "identity"):
        raise Declined(f"a mask over queries and keys cannot be a bias before {match.activation}")


def _empty(match: Match, before: Masks, zeroed: bool) -> tuple[str, bool]:
    """What rows without a visible key give, and whether that is sure, gradients included."""
    if not match.softmax or not before.some or zeroed:
        return "zero", True
    fills = {m.fill for m in match.hidden}
    if fills == {-math.inf}:
        return "zero", True
    if len(fills) == 1 and all(m.uniform for m in match.hidden):
        return "mean", all(m.replaced for m in match.hidden)
    return "assume", False


def _dtype(match: Match) -> torch.dtype:
    """The type to compute in: that of q k^T and of the output, the wider of the two.

    Where q and k are merely widened for the product, their own type serves: kernels sum in float32.
    """
    out: torch.dtype = value(match.node).dtype
    if match.q.dtype == match.k.dtype == out:
        return out
    return torch.promote_types(match.score_dtype, out)
