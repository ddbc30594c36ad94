"""The backward analysis: what is demanded of every value, and by whom."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gemcompile.graph import Editor, arguments, same_size

from . import padding_rules_math  # noqa: F401  registers its rules
from .aliases import mutated
from .layout import Layout, other, plain
from .padding_exits import Exit, exit_of, gather_exit, gathered_row
from .padding_masks import Atom, Atoms, atom_of, earlier_rows, is_prefix, materialize, right_after
from .padding_rules import RowWise, row_wise

aten = torch.ops.aten
# Operators that ask an argument for its sizes alone, with the place of the first such argument.
_SHAPE_ONLY: dict[Any, int] = {
    aten.sym_size.int: 0, aten.sym_numel.default: 0, aten.zeros_like.default: 0,
    aten.ones_like.default: 0, aten.full_like.default: 0, aten.empty_like.default: 0,
    aten.new_zeros.default: 0, aten.new_ones.default: 0, aten.new_full.default: 0,
    aten.new_empty.default: 0, aten.view_as.default: 1, aten.reshape_as.default: 1,
    aten.expand_as.default: 1,
}  # fmt: skip
ATTENTION = torch.ops.gem.padded_attention.default


@dataclass(frozen=True)
class Rows:
    """Only the rows of ``atoms`` are observed, in a value of this layout."""

    atoms: Atoms
    layout: Layout


@dataclass(frozen=True)
class All:
    """The whole value is observed: by ``user``, as the first to do so."""

    user: Node


Demand = Rows | All


@dataclass
class Analysis:
    """The demands of a graph and the nodes that can work on packed rows.

    Attributes:
        demand: what is observed of each live value.
        row_wise: nodes demanded by rows whose operator works row by row.
        exits: nodes demanded whole that observe only rows of an input.
        attention: attention nodes, and the atom of their key mask, None without one.
        keys: the rows that attention reads of its keys and values.
        open: attention whose queries stay padded while keys and values are packed.
        closed: attention that stays as it is.
        zeroed: outputs whose rows outside the atom are to be 0 (padded_outputs="zero").
    """

    gm: GraphModule
    demand: dict[Node, Demand] = field(default_factory=dict)
    row_wise: dict[Node, RowWise] = field(default_factory=dict)
    exits: dict[Node, Exit] = field(default_factory=dict)
    attention: dict[Node, Atom | None] = field(default_factory=dict)
    keys: dict[Node, Atoms] = field(default_factory=dict)
    open: set[Node] = field(default_factory=set)
    closed: set[Node] = field(default_factory=set)
    zeroed: dict[Node, Atom] = field(default_factory=dict)

    def rows_of(self, n: Node) -> Rows | None:
        """The rows demanded of a value, None where it is observed whole or not at all."""
        d = self.demand.get(n)
        return d if isinstance(d, Rows) else None

    def want(self, x: Node, d: Demand) -> None:
        """Merge a demand into what is known."""
        old = self.demand.get(x)
        if old is None or isinstance(d, All) and isinstance(old, Rows):
            self.demand[x] = d
        elif isinstance(old, Rows) and isinstance(d, Rows):
            if old.layout != d.layout or not _one_space(old.atoms | d.atoms):
                self.demand[x] = All(x)
            else:
                self.demand[x] = Rows(old.atoms | d.atoms, old.layout)


def _one_space(atoms: Atoms) -> bool:
    return len({a.space() for a in atoms}) == 1


def analyse(gm: GraphModule, blocked: object, zero_outputs: bool) -> Analysis:
    """Demands of all values, from the outputs to the inputs.

    Args:
        blocked: attention nodes that must be treated as if they had no rule.
        zero_outputs: padded rows of outputs are not observed either (option padded_outputs="zero").
    """
    a = Analysis(gm)
    for n in gm.graph.find_nodes(op="call_function", target=ATTENTION):
        mask = arguments(n)["key_mask"]
        a.attention[n] = atom_of(mask) if isinstance(mask, Node) else None
    changed = mutated(gm)
    gathers = _gathers(gm)
    for n in reversed(list(gm.graph.nodes)):
        if n.op == "output":
            _outputs(a, n, zero_outputs)
        elif n.op not in ("placeholder", "get_attr"):
            _visit(a, n, gathers, changed, blocked)
    return a


def _visit(
    a: Analysis, n: Node, gathers: dict[Node, Exit], changed: set[Node], blocked: object
) -> None:
    d = a.demand.get(n)
    if d is None:
        if not n.is_impure():
            return
        d = All(n)
    if n in a.attention:
        if n in blocked or not _attention(a, n, d):  # type: ignore[operator]
            a.closed.add(n)
            _rest(a, n, set(), All(n))
        return
    if isinstance(d, Rows) and n not in changed:
        rule = row_wise(n, d.layout)
        if rule is not None and not set(rule.rows) & changed:
            a.row_wise[n] = rule
            for x, layout in rule.rows.items():
                a.want(x, Rows(d.atoms, layout))
            _rest(a, n, set(rule.rows), All(n))
            return
    found = gathers.get(n) or exit_of(n)
    if found is not None and isinstance(d, All) and not set(found.seen) & changed:
        a.exits[n] = found
        for x, seen in found.seen.items():
            a.want(x, Rows(frozenset({seen.atom}), seen.layout))
        _rest(a, n, set(found.seen), All(n))
        return
    _rest(a, n, set(), All(n))


def _rest(a: Analysis, n: Node, known: set[Node], d: All) -> None:
    shapes = n.args[_SHAPE_ONLY[n.target] :] if n.target in _SHAPE_ONLY else ()
    for x in n.all_input_nodes:
        if x in known or (x in shapes and x not in n.args[: _SHAPE_ONLY[n.target]]):
            continue
        # the parts of a split are demanded one by one; the split itself is no observer
        if n.target is operator.getitem and n in a.row_wise:
            continue
        a.want(x, d)


def _attention(a: Analysis, n: Node, d: Demand) -> bool:
    """Queries are demanded as the output is; keys and values by the rows that are seen.

    False where padded keys or values are observed.
    """
    given = arguments(n)
    q, k, v = given["q"], given["k"], given["v"]
    packs_queries = isinstance(d, Rows) and d.layout == plain(n.meta["val"].shape)
    seen = _seen_keys(a, n, d if packs_queries else None, given)
    if seen is None:
        return False
    if isinstance(d, Rows) and packs_queries:
        a.want(q, Rows(d.atoms, d.layout.with_dim(3, (other(q.meta["val"].shape[3]),))))
    else:
        a.open.add(n)
        a.want(q, All(n))
    a.keys[n] = seen
    for x in (k, v):
        a.want(x, Rows(seen, plain(x.meta["val"].shape)))
    _rest(a, n, {q, k, v}, All(n))
    return True


def _seen_keys(a: Analysis, n: Node, d: Demand | None, given: dict[str, Any]) -> Atoms | None:
    """The rows of keys and values that attention reads; None: padded ones too."""
    mask = a.attention[n]
    if mask is not None:
        # with a finite fill a row without a valid key averages all values
        averages = given["empty"] == "mean" and given["activation"] == "softmax"
        return None if averages and d is None else frozenset({mask})
    if not given["causal"] or not isinstance(d, Rows):
        return None
    if given["contextual"] and given["history"] is None:
        return None
    history = _history_rows(a, n, given)
    if all(map(is_prefix, d.atoms)):
        return d.atoms | history  # what precedes a row of a prefix lies in the prefix
    if "gem_earlier" not in n.meta:
        edit = right_after(a.gm, d.atoms)
        n.meta["gem_earlier"] = earlier_rows(edit, materialize(edit, d.atoms))
    return frozenset({Atom(n.meta["gem_earlier"])}) | history


def _history_rows(a: Analysis, n: Node, given: dict[str, Any]) -> Atoms:
    """The rows of the history, all of which contextual rows read."""
    if not given["contextual"]:
        return frozenset()
    if "gem_history" not in n.meta:
        edit = Editor(a.gm, like=n)
        length = edit.symbol(given["k"].meta["val"].shape[1])
        places = edit(aten.arange.default, length, device=given["k"].meta["val"].device)
        ends = edit(aten.unsqueeze.default, given["history"], 1)
        n.meta["gem_history"] = edit(aten.lt.Tensor, places, ends)
    return frozenset({Atom(n.meta["gem_history"])})


def _outputs(a: Analysis, n: Node, zero_outputs: bool) -> None:
    masks = {m for m in a.attention.values() if m is not None}
    for x in n.all_input_nodes:
        value = x.meta.get("val")
        if (
            zero_outputs
            and isinstance(value, torch.Tensor)
            and value.dim() >= 3
            and x.op != "placeholder"
        ):
            fits = [
                m for m in masks if all(map(same_size, m.node.meta["val"].shape, value.shape[:2]))
            ]
            if len(fits) == 1:
                a.want(x, Rows(frozenset(fits), plain(value.shape)))
                a.zeroed[x] = fits[0]
                continue
        a.want(x, All(n))


def _gathers(gm: GraphModule) -> dict[Node, Exit]:
    """Exits of the form x[arange(B), position], with the node that tells the observed rows."""
    out: dict[Node, Exit] = {}
    for n in list(gm.graph.nodes):
        found = gathered_row(n)
        if found is None:
            continue
        x, position = found
        if n.meta.get("gem_observed") is None:
            n.meta["gem_observed"] = _observed(gm, n, x, position)
        out[n] = gather_exit(n, x, position, n.meta["gem_observed"])
    return out


def _observed(gm: GraphModule, n: Node, x: Node, position: Node) -> Node:
    edit = Editor(gm, like=n)
    length = edit.symbol(x.meta["val"].shape[1])
    row = edit(aten.unsqueeze.default, edit(aten.remainder.Scalar, position, length), 1)
    return edit(aten.eq.Tensor, edit(aten.arange.default, length, device=x.meta["val"].device), row)
