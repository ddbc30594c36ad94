"""The backward analysis: what is demanded of every value, and by whom."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from gemcompile.graph import Editor, arguments, is_call, same_size

from . import padding_rules_math  # noqa: F401  registers its rules
from .aliases import mutated
from .layout import Layout, other, plain
from .padding_exits import Exit, exit_of, gather_exit, gathered_row
from .padding_masks import Atom, Atoms, atom_of
from .padding_rules import RowWise, row_wise

aten = torch.ops.aten
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
        attention: attention nodes, and the atom of their key mask.
        open: attention whose queries stay padded while keys and values are packed.
        closed: attention that stays as it is.
    """

    gm: GraphModule
    demand: dict[Node, Demand] = field(default_factory=dict)
    row_wise: dict[Node, RowWise] = field(default_factory=dict)
    exits: dict[Node, Exit] = field(default_factory=dict)
    attention: dict[Node, Atom | None] = field(default_factory=dict)
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
        if n not in blocked and a.attention[n] is not None:  # type: ignore[operator]
            _attention(a, n, d)
        else:
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
    for x in n.all_input_nodes:
        if x in known:
            continue
        # the parts of a split are demanded one by one; the split itself is no observer
        if n.target is operator.getitem and n in a.row_wise:
            continue
        a.want(x, d)


def _attention(a: Analysis, n: Node, d: Demand) -> None:
    """Queries are demanded as the output is; keys and values by the rows of the key mask."""
    given = arguments(n)
    q, k, v = given["q"], given["k"], given["v"]
    mask = a.attention[n]
    assert mask is not None
    if isinstance(d, Rows) and d.layout == plain(n.meta["val"].shape):
        a.want(q, Rows(d.atoms, d.layout.with_dim(3, (other(q.meta["val"].shape[3]),))))
    elif given["empty"] == "mean" and given["activation"] == "softmax":
        # a row without a valid key would average the padded values too
        a.closed.add(n)
        _rest(a, n, set(), All(n))
        return
    else:
        a.open.add(n)
        a.want(q, All(n))
    for x in (k, v):
        a.want(x, Rows(frozenset({mask}), plain(x.meta["val"].shape)))
    _rest(a, n, {q, k, v}, All(n))


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


def is_split(n: Node) -> bool:
    """A node with several results that only getitem nodes use."""
    return is_call(
        n, aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int
    )
