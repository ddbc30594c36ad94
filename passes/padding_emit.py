"""Writes the regions on packed rows: one pack at each input, one unpack at each exit."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gemcompile.graph import Editor, arguments
from gemcompile.prologue import Prologue, RowSet

from .layout import Layout, from_rows, plain, to_rows
from .padding_demand import Analysis
from .padding_masks import is_prefix, materialize
from .padding_regions import Key, Region, needs_key_mask, region_of

aten = torch.ops.aten
JAGGED = torch.ops.gem.jagged_attention.default
GATHER = torch.ops.gem.gather_rows.default


@dataclass
class Result:
    """What was written: nodes, packs and unpacks of every region, by the region's id."""

    nodes: Counter[int] = field(default_factory=Counter)
    packs: Counter[int] = field(default_factory=Counter)
    unpacks: Counter[int] = field(default_factory=Counter)
    rowsets: dict[int, RowSet] = field(default_factory=dict)

    @property
    def changes(self) -> int:
        return sum(self.nodes.values()) + sum(self.packs.values())


def emit(gm: GraphModule, analysis: Analysis, found: list[Region], prologue: Prologue) -> Result:
    """Rewrite the graph in place.

    Raises:
        PrologueDeclined: a mask cannot be computed ahead of the graph, or the batch is too large.
    """
    result = Result()
    for r in found:
        result.rowsets[id(r)] = prologue.add(r.mask(gm), r.widest(analysis))
    prologue.seal()  # while the masks are still in the graph
    emitter = _Emitter(gm, analysis, region_of(found), result)
    emitter.run()
    return result


@dataclass
class _Rows:
    """The packed values of one region, as rules and exits see them."""

    owner: _Emitter
    region: Region

    @property
    def rowset(self) -> RowSet:
        return self.owner.result.rowsets[id(self.region)]

    def index(self) -> Node:
        return self.rowset.index

    def inverse(self) -> Node:
        return self.rowset.inverse

    def get(self, x: Node, layout: Layout) -> Node:
        """x on packed rows: written already, or packed here, at the region's edge."""
        if x in self.owner.packed:
            return self.owner.packed[x]
        key = (x, layout, id(self.region))
        if key not in self.owner.entries:
            self.owner.entries[key] = self.gather(self.owner.right_after(x), x, layout)
            self.owner.result.packs[id(self.region)] += 1
        return self.owner.entries[key]

    def gather(self, edit: Editor, x: Node, layout: Layout) -> Node:
        return edit(GATHER, to_rows(edit, x, layout), self.rowset.index, self.rowset.inverse)

    def unpack(self, edit: Editor, packed: Node, layout: Layout) -> Node:
        rows = edit(GATHER, packed, self.rowset.inverse, self.rowset.index)
        self.owner.result.unpacks[id(self.region)] += 1
        return from_rows(edit, rows, layout)


class _Emitter:
    def __init__(
        self, gm: GraphModule, analysis: Analysis, members: dict[Key, Region], result: Result
    ) -> None:
        self.gm, self.analysis, self.members, self.result = gm, analysis, members, result
        self.packed: dict[Node, Node] = {}
        self.entries: dict[Any, Node] = {}
        self.unpacked: dict[Node, Node] = {}
        self.order = list(gm.graph.nodes)
        self.first = next(n for n in self.order if n.op != "placeholder")

    def right_after(self, x: Node) -> Editor:
        before = self.first if x.op == "placeholder" else x.next
        return Editor(self.gm, like=x, before=before)

    def run(self) -> None:
        for n in self.order:
            if n in self.analysis.row_wise and n in self.members:
                self._row_wise(n)
            elif n in self.analysis.attention and ("keys", n) in self.members:
                self._attention(n)
            elif n in self.analysis.exits:
                self._exit(n)
        for n in reversed(self.order):
            if n in self.packed:
                self._leave(n)
        self._zero_outputs()
        self._sweep()

    def _row_wise(self, n: Node) -> None:
        region = self.members[n]
        edit = Editor(self.gm, like=n)
        y = self.analysis.row_wise[n].emit(edit, _Rows(self, region))
        self.packed[n] = self._cast(edit, y, n)
        self.result.nodes[id(region)] += 1

    def _cast(self, edit: Editor, y: Node, n: Node) -> Node:
        """Under autocast the recorded dtype is the true one; the value computed here does not
        know it.
        """
        have, want = y.meta["val"], n.meta["val"]
        if have.dtype != want.dtype:
            with edit.fake_mode:
                y.meta["val"] = have.to(want.dtype)
        return y

    def _exit(self, n: Node) -> None:
        found = self.analysis.exits[n]
        if found.emit is None:
            return
        regions = {id(r): r for x in found.seen if (r := self._region_of(x)) is not None}
        if len(regions) != 1 or not any(x in self.packed for x in found.seen):
            return
        (region,) = regions.values()
        new = found.emit(Editor(self.gm, like=n), _Rows(self, region))
        n.replace_all_uses_with(new)
        self.gm.graph.erase_node(n)
        self.result.unpacks[id(region)] += 1

    def _region_of(self, x: Node) -> Region | None:
        return self.members.get(x) if x in self.packed else None

    # --- attention ------------------------------------------------------------------------------

    def _attention(self, n: Node) -> None:
        edit, given = Editor(self.gm, like=n), arguments(n)
        region = self.members["keys", n]
        keys = _Rows(self, region)
        queries = _Rows(self, self.members[n]) if n in self.members else None
        q, q_offsets, q_positions = self._queries(edit, given, queries)
        k, v = (keys.get(given[x], plain(given[x].meta["val"].shape)) for x in "kv")
        mask = None
        if needs_key_mask(self.analysis, n, region):
            mask = keys.gather(edit, given["key_mask"], plain(given["key_mask"].meta["val"].shape))
        same = queries is not None and queries.rowset is keys.rowset
        positional = self._positional(given, same, region)
        sizes = [edit.symbol(given[x].meta["val"].shape[1]) for x in "qk"]
        scale = self._row_scale(edit, given["out_scale"], queries)
        both = edit(
            JAGGED, q, k, v, q_offsets, keys.rowset.offsets, mask,
            q_positions if positional else None, keys.rowset.positions if positional else None,
            given["bias"], scale, given["dropout_seed"], given["activation"], given["scale"],
            given["causal"], given["dropout_p"], *sizes, *self._placed(edit, given, keys),
        )  # fmt: skip
        out = edit.item(both, 0)
        if queries is not None:
            self.packed[n] = out
            self.result.nodes[id(queries.region)] += 1
            return
        sizes = [edit.symbol(s) for s in n.meta["val"].shape]
        n.replace_all_uses_with(edit(aten.reshape.default, out, sizes))
        self.gm.graph.erase_node(n)

    def _positional(self, given: dict[str, Any], same: bool, region: Region) -> bool:
        """Whether rows must carry their places, as their ranks do not tell enough.

        Packed rows keep their order, which is all that causality asks for; where the rows of every
        sequence are its first ones, ranks are places.
        """
        bias = given["bias"]
        if bias is not None and bias.meta["val"].dim() == 4:
            return True
        if bias is not None or asks_for_places(given):
            return not (same and all(map(is_prefix, region.atoms)))
        return given["causal"] and not same

    def _placed(self, edit: Editor, given: dict[str, Any], keys: _Rows) -> list[Any]:
        """Window, block, number of targets and of contextual rows, as far as they are given."""
        out = [given["window_left"], given["window_right"], given["block"], None, None]
        batch, offsets = given["q"].meta["val"].shape[0], keys.rowset.offsets
        if given["history"] is not None:
            starts = edit(aten.slice.Tensor, offsets, 0, 0, -1)
            lengths = edit(aten.sub.Tensor, edit(aten.slice.Tensor, offsets, 0, 1), starts)
            out[3] = edit(aten.sub.Tensor, lengths, given["history"])
        if given["contextual"]:
            device = given["q"].meta["val"].device
            size = [edit.symbol(batch)]
            out[4] = edit(
                aten.full.default, size, given["contextual"], dtype=torch.int64, device=device
            )
        while out and out[-1] == (-1, -1, 0, None, None)[len(out) - 1]:
            out.pop()
        return out

    def _queries(
        self, edit: Editor, given: dict[str, Any], queries: _Rows | None
    ) -> tuple[Node, Node, Node | None]:
        """(q [T, H, D], offsets, positions): packed, or all rows of a padded q."""
        q = given["q"]
        shape = q.meta["val"].shape
        if queries is not None:
            return queries.get(q, plain(shape)), queries.rowset.offsets, queries.rowset.positions
        batch, length, heads, features = (edit.symbol(s) for s in shape)
        device = q.meta["val"].device
        flat = edit(aten.reshape.default, q, [-1, heads, features])
        ends = edit(aten.arange.default, _plus_one(edit, batch), device=device, dtype=torch.int32)
        positions = None
        if given["bias"] is not None or given["causal"] or asks_for_places(given):
            steps = edit(aten.arange.default, length, device=device, dtype=torch.int32)
            positions = edit(aten.repeat.default, steps, [batch])
        return flat, edit(aten.mul.Tensor, ends, length), positions

    def _row_scale(self, edit: Editor, scale: Node | None, queries: _Rows | None) -> Node | None:
        if scale is None or scale.meta["val"].dim() == 1:
            return scale
        if queries is None:
            return edit(aten.reshape.default, scale, [-1])
        return queries.gather(edit, scale, plain(scale.meta["val"].shape))

    # --- leaving the regions ----------------------------------------------------------------------

    def _leave(self, n: Node) -> None:
        """Unpack n for users that work on padded rows."""
        users = [u for u in n.users if not self._is_gone(u)]
        if not users:
            return
        rows = self.analysis.rows_of(n)
        assert rows is not None
        edit = Editor(self.gm, like=n, before=self.packed[n].next)
        padded = _Rows(self, self.members[n]).unpack(edit, self.packed[n], rows.layout)
        self.unpacked[n] = padded
        for u in users:
            u.replace_input_with(n, padded)

    def _is_gone(self, user: Node) -> bool:
        """The user was written on packed rows, or only feeds such nodes (a split and its parts)."""
        if user in self.packed:
            return True
        if user not in self.analysis.demand and user.op != "output" and not user.is_impure():
            return True  # dead, or a split all of whose parts are packed
        return False

    def _zero_outputs(self) -> None:
        """padded_outputs="zero": also where more rows than the mask's, or none, were packed."""
        output = self.gm.graph.find_nodes(op="output")[0]
        for x, atom in self.analysis.zeroed.items():
            region = self._region_of(x)
            if region is not None and region.atoms == frozenset({atom}):
                continue
            value = self.unpacked.get(x, x)
            edit = Editor(self.gm, like=x, before=output)
            mask = materialize(edit, {atom})
            for _ in range(x.meta["val"].dim() - 2):
                mask = edit(aten.unsqueeze.default, mask, -1)
            output.replace_input_with(value, edit(aten.where.ScalarOther, mask, value, 0))

    def _sweep(self) -> None:
        """Erase what was replaced; dead-code removal would keep random operators."""
        for n in reversed(self.order):
            replaced = n in self.packed or n not in self.analysis.demand
            if (
                replaced
                and not n.users
                and n.op == "call_function"
                and not n._erased
                and not _writes(n)
            ):
                self.gm.graph.erase_node(n)


def asks_for_places(given: dict[str, Any]) -> bool:
    """Which keys a query sees depends on how far apart they are, or from the start."""
    return (
        max(given["window_left"], given["window_right"]) >= 0
        or given["block"] > 0
        or given["history"] is not None
        or given["contextual"] > 0
    )


def _writes(n: Node) -> bool:
    return isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable


def _plus_one(edit: Editor, size: int | Node) -> int | Node:
    return size + 1 if isinstance(size, int) else edit(operator.add, size, 1)
