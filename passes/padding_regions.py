"""Regions: packed nodes that must share one set of rows, since they are connected row by row."""

from __future__ import annotations

from dataclasses import dataclass, field

import networkx as nx
from torch.fx import GraphModule, Node

from gemcompile.graph import arguments

from .padding_demand import Analysis
from .padding_masks import Atoms, materialize, right_after

Key = Node | tuple[str, Node]  # ("keys", n): the key and value side of attention n


@dataclass(eq=False)
class Region:
    """Connected packed nodes, the rows that they keep, and the attention that justifies packing
    them.

    Attributes:
        members: row-wise nodes, attention nodes (their query side) and ("keys", attention).
        atoms: the union of the rows observed anywhere in the region.
        sites: the attention nodes that touch it.
    """

    members: set[Key]
    atoms: Atoms
    sites: list[Node]
    _mask: Node | None = field(default=None, repr=False)

    def mask(self, analysis_graph: GraphModule) -> Node:
        """The bool [B, L] node of the region's rows."""
        if self._mask is None:
            self._mask = materialize(right_after(analysis_graph, self.atoms), self.atoms)
        return self._mask

    def unsound(self, analysis: Analysis) -> str:
        """Why packing would change results, or "".

        Where masked scores hold a finite fill, a query that sees no key averages all values,
        padded ones too. Rows of the key mask itself always see themselves; further rows may not.
        """
        for n in self.sites:
            if n not in self.members:
                continue
            given, mask = arguments(n), analysis.attention[n]
            rows = analysis.rows_of(n)
            averages = given["activation"] == "softmax" and given["empty"] == "mean"
            if averages and mask is not None and rows is not None:
                if rows.atoms != frozenset({mask}):
                    return (
                        "rows outside the key mask are observed, and with a finite fill a row "
                        "without a valid key averages padded values; fill with -inf instead"
                    )
        return ""

    def widest(self, analysis: Analysis) -> int:
        """The largest number of elements that a packed row has."""
        sizes = [1]
        for m in self.members:
            nodes = [m] if isinstance(m, Node) else [arguments(m[1])[x] for x in "kv"]
            for n in nodes:
                rows = analysis.rows_of(n)
                if rows is not None:
                    sizes.append(_hint(rows.layout.packed_sizes()))
        return max(sizes)


def _hint(sizes: list[object]) -> int:
    out = 1
    for s in sizes:
        out *= int(s) if getattr(s, "is_Integer", False) else 4096  # type: ignore[call-overload]
    return out


def regions(a: Analysis) -> list[Region]:
    """The regions that contain attention; what else is row-wise stays padded."""
    links = nx.Graph()
    atoms: dict[Key, Atoms] = {}

    def put(key: Key, own: Atoms, inputs: list[Node]) -> None:
        links.add_node(key)
        atoms[key] = own
        links.add_edges_from((key, x) for x in inputs if packable(x))

    def packable(x: Node) -> bool:
        return x in a.row_wise or (
            x in a.attention and x not in a.open and x not in a.closed and a.rows_of(x) is not None
        )

    for n, rule in a.row_wise.items():
        rows = a.rows_of(n)
        assert rows is not None
        put(n, rows.atoms, list(rule.rows))
    for n in a.attention:
        if n in a.closed or n not in a.keys:
            continue
        given = arguments(n)
        rows = a.rows_of(n)
        if rows is not None and n not in a.open:
            put(n, rows.atoms, [given["q"]])
        keys = [x for x in (given["k"], given["v"]) if a.rows_of(x) is not None]
        if len(keys) == 2 or given["k"] is given["v"]:
            put(("keys", n), a.keys[n], keys)
    return [r for part in nx.connected_components(links) if (r := _region(a, part, atoms)).sites]


def _region(a: Analysis, members: set[Key], atoms: dict[Key, Atoms]) -> Region:
    union: Atoms = frozenset().union(*(atoms[m] for m in members))
    sites = {
        m[1] if isinstance(m, tuple) else m
        for m in members
        if isinstance(m, tuple) or m in a.attention
    }
    order = [n for n in a.attention if n in sites]
    return Region(members, union, order)


def region_of(found: list[Region]) -> dict[Key, Region]:
    """Every member's region."""
    return {m: r for r in found for m in r.members}


def needs_key_mask(a: Analysis, n: Node, region: Region) -> bool:
    """More rows are packed than the keys that attention ``n`` may see."""
    atom = a.attention[n]
    return atom is not None and region.atoms != frozenset({atom})
