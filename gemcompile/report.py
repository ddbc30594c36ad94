"""What was rewritten, what was not and why: collected while compiling, read by people, tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.fx import Node

from .graph_snapshot import Snapshot, SnapshotTable, source

KINDS = ("attention", "padding", "rotary", "linear", "collective", "graph")


@dataclass
class Site:
    """One place in the user's model that gem rewrote, or could have.

    Attributes:
        kind: "attention", "padding", "rotary", "linear", "collective", or "graph" for a whole
            graph.
        status: "rewritten" or "declined".
        op: what stands there now ("gem.padded_attention(softmax)"), or stood there.
        reason: for a declined site, a clause fit to follow "declined because"; for a rewritten one,
            the assumption it rests on, or "".
        where: the user's line, "file.py:41", or "".
        details: further facts, plain JSON values.
    """

    kind: str
    status: str
    op: str
    reason: str = ""
    where: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        tail = f" because {self.reason}" if self.status == "declined" else ""
        note = f" ({self.reason})" if self.reason and self.status != "declined" else ""
        return f"{self.kind} {self.status}{place}: {self.op}{tail}{note}"


@dataclass
class PassRecord:
    """One run of one pass: changes it made, seconds it took, the graph before and after.

    Attributes:
        before, after: the graph as text.
        nodes_before, nodes_after: its nodes as records, where they were kept; the same object where
            nothing changed, also from one pass to the next.
    """

    name: str
    changes: int
    seconds: float
    before: str
    after: str
    nodes_before: Snapshot | None = None
    nodes_after: Snapshot | None = None


@dataclass
class Report:
    """All sites and passes of the compiles it saw; ``str(report)`` is for people.

    Attributes:
        graphs: how many graphs were compiled.
        seconds: spent compiling them.
        padded_flops, useful_flops: of the packed graphs' forward on the first batch: matrix
            products and attention over all rows, and over the rows that are real.
        padded_bytes, packed_bytes: of the values that these forwards make, before anything is
            fused; with what fills the packed rows up to a group.
    """

    sites: list[Site] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    graphs: int = 0
    seconds: float = 0.0
    padded_flops: int = 0
    useful_flops: int = 0
    padded_bytes: int = 0
    packed_bytes: int = 0

    def add_work(self, padded: tuple[int | None, ...], packed: tuple[int | None, ...]) -> None:
        """Record a packed graph's forward on the first batch, padded and packed: (FLOPs, bytes)."""
        if None not in padded and None not in packed:
            self.padded_flops += padded[0] or 0
            self.useful_flops += packed[0] or 0
            self.padded_bytes += padded[1] or 0
            self.packed_bytes += packed[1] or 0

    def add(
        self,
        kind: str,
        status: str,
        op: str,
        reason: str = "",
        where: Node | str = "",
        **details: Any,
    ) -> Site:
        """Record a site; ``where`` is a node (its stack trace tells the user's line) or a text."""
        text = source_line(where) if isinstance(where, Node) else where
        site = Site(kind, status, op, reason, text, details)
        self.sites.append(site)
        return site

    def absorb(self, other: Report) -> None:
        """Add everything that ``other`` holds."""
        self.sites += other.sites
        self.passes += other.passes
        self.graphs += other.graphs
        self.seconds += other.seconds
        self.padded_flops += other.padded_flops
        self.useful_flops += other.useful_flops
        self.padded_bytes += other.padded_bytes
        self.packed_bytes += other.packed_bytes

    def of(self, kind: str, status: str = "rewritten") -> list[Site]:
        """The sites of one kind and status."""
        return [s for s in self.sites if s.kind == kind and s.status == status]

    def expect(self, **counts: int) -> None:
        """Check how many sites of each kind were rewritten: ``report.expect(attention=2)``.

        Raises:
            AssertionError: a count differs; the message lists the declined sites.
            ValueError: an unknown kind.
        """
        for kind, n in counts.items():
            if kind not in KINDS:
                raise ValueError(f"unknown kind of site {kind!r}; known: {', '.join(KINDS)}")
            found = len(self.of(kind))
            if found != n:
                rest = [str(s) for s in self.sites if s.status == "declined"] or [
                    "nothing was declined"
                ]
                listed = "\n  ".join(rest)
                raise AssertionError(
                    f"expected {n} rewritten {kind} sites, found {found}\n  {listed}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values.

        ``nodes`` lists every node record once, ``snapshots`` every recorded graph once, as places
        in ``nodes``; a pass names its two snapshots by ``snapshot_before`` and ``snapshot_after``
        (None where none was kept).
        """
        table = SnapshotTable()
        ran = []
        for p in self.passes:
            plain = {k: getattr(p, k) for k in ("name", "changes", "seconds", "before", "after")}
            plain["snapshot_before"] = table.add(p.nodes_before)
            plain["snapshot_after"] = table.add(p.nodes_after)
            ran.append(plain)
        work = ("padded_flops", "useful_flops", "padded_bytes", "packed_bytes")
        counts = ("graphs", "seconds", *work)
        return {
            "sites": [asdict(s) for s in self.sites],
            "passes": ran,
            **{k: getattr(self, k) for k in counts},
            "nodes": [record.to_dict() for record in table.nodes],
            "snapshots": table.snapshots,
        }

    def to_json(self) -> str:
        """The whole report as JSON text."""
        return json.dumps(self.to_dict(), indent=1, default=str)

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one page that needs no network and opens from disk.

        Returns:
            The path written.

        Raises:
            OSError: the file cannot be written.
        """
        from .report_html import page

        target = Path(path)
        target.write_text(page(self), encoding="utf-8")
        return target

    def _repr_html_(self) -> str:
        """What a notebook shows: summary and sites. The graphs are in the page of `to_html`."""
        from .report_summary import notebook

        return notebook(self)

    def __str__(self) -> str:
        from .report_text import render

        return render(self)


def source_line(node: Node) -> str:
    """The user's innermost line that made ``node``, as "file.py:41"; torch's frames are skipped."""
    return source(node.meta.get("stack_trace") or "")[0]


_active: list[Report] = []


@contextmanager
def record() -> Iterator[Report]:
    """Collect every compile that happens inside: ``with gem.record() as report: ...``."""
    report = Report()
    _active.append(report)
    try:
        yield report
    finally:
        _active.remove(report)


def publish(report: Report) -> None:
    """Hand a finished compile's report to all who record."""
    for r in _active:
        r.absorb(report)
