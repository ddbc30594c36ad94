"""A report as one page: the summary, and the graphs with the script that draws them.

The script and the styles in ``gemcompile/page/`` are built from ``page/`` (``make page``). A page
holds them and its data inline and forbids itself every connection.
"""

from __future__ import annotations

import json
from typing import Any

from .graph_snapshot import NodeRecord, SnapshotTable
from .report import PassRecord, Report
from .report_summary import ASSETS, summary

# Fields of a node in the page's data, in order; page/src/data.ts reads them.
NODE_FIELDS = (
    "name", "op", "target", "args", "inputs", "dtype", "shape", "where", "code", "module",
    "notes", "region", "origin",
)  # fmt: skip
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(report: Report) -> str:
    """The whole page."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="color-scheme" content="light dark">
<title>gem report</title>
<style>{_asset("summary.css")}{_asset("report.css")}</style>
</head>
<body>
<main class="gem">
<h1>gem report</h1>
{summary(report)}
<noscript><p class="gem-hint">The graphs are drawn by a script.</p></noscript>
<div id="graphs"></div>
</main>
<script type="application/json" id="data">{embedded(payload(report))}</script>
<script>{_asset("report.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    text = (ASSETS / name).read_text(encoding="utf-8")
    return text.replace("</script", "<\\/script").replace("</style", "<\\/style")


def embedded(data: Any) -> str:
    """JSON that is safe inside a script element: no character of it can end the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def payload(report: Report) -> dict[str, Any]:
    """What the script draws: passes of every graph, snapshots, node records once each."""
    table = SnapshotTable()
    graphs = [
        [
            {
                "name": p.name,
                "changes": p.changes,
                "seconds": p.seconds,
                "before": table.add(p.nodes_before),
                "after": table.add(p.nodes_after),
            }
            for p in passes
        ]
        for passes in runs(report.passes)
    ]
    collectives = [
        {"op": s.op, "status": s.status, "where": s.where}
        for s in report.sites
        if s.kind == "collective"
    ]
    return {
        "graphs": graphs,
        "snapshots": table.snapshots,
        "nodes": [_row(record) for record in table.nodes],
        "collectives": collectives,
    }


def runs(passes: list[PassRecord]) -> list[list[PassRecord]]:
    """The passes of each graph whose nodes were kept: each begins where the one before ended."""
    out: list[list[PassRecord]] = []
    last: object = None
    for p in passes:
        if p.nodes_before is None or p.nodes_after is None:
            continue
        if last is None or p.nodes_before is not last:
            out.append([])
        out[-1].append(p)
        last = p.nodes_after
    return out


def _row(record: NodeRecord) -> list[Any]:
    plain = record.to_dict()
    return [plain[name] for name in NODE_FIELDS]
