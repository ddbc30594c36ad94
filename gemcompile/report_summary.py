"""The part of a report that needs no script: what was done, what was declined and what to do.

The page of `Report.to_html` begins with it, and a notebook shows it alone. Every text that comes
from a model goes through `html.escape`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .advice import advise
from .report import Report, Site
from .report_text import KEPT, amount, flop, folded

ASSETS = Path(__file__).parent / "page"
DOCS = "docs/troubleshooting.md"
_ROWS = re.compile(r"(\d+) of (\d+) rows are real")
_MOST = 200  # folded sites listed in a notebook; the page lists all


@dataclass(frozen=True)
class Rows:
    """Real rows and all rows of the packed masks on the first batch."""

    real: int
    total: int

    @property
    def padding(self) -> float:
        """The share of rows that was padding."""
        return 1 - self.real / self.total if self.total else 0.0


def rows(report: Report) -> Rows | None:
    """Over all padding sites that were rewritten; None where no first batch was at hand."""
    texts = (str(s.details.get("padding", "")) for s in report.of("padding"))
    found = [Rows(int(m[1]), int(m[2])) for m in map(_ROWS.search, texts) if m]
    if not found:
        return None
    return Rows(sum(r.real for r in found), sum(r.total for r in found))


def notebook(report: Report) -> str:
    """Summary and sites as a fragment with its own style, of bounded size."""
    style = (ASSETS / "summary.css").read_text(encoding="utf-8")
    hint = "Graphs, pass by pass: <code>report.to_html('report.html')</code>"
    return (
        f"<div class='gem'><style>{style}</style>{summary(report, most=_MOST)}"
        f"<p class='gem-hint'>{hint}</p></div>"
    )


def summary(report: Report, most: int | None = None) -> str:
    """Figures, then rewritten sites, then declined ones; at most ``most`` rows of each."""
    return _figures(report) + "".join(
        _section(report, status, most) for status in ("rewritten", "declined")
    )


def _figures(report: Report) -> str:
    done = [s for s in report.sites if s.status == "rewritten"]
    declined = [s for s in report.sites if s.status == "declined"]
    tiles = [
        _tile(str(len(done)), _sites(len(done)) + " rewritten", _kinds(done) or "nothing matched"),
        _tile(
            str(len(declined)),
            _sites(len(declined)) + " declined",
            _kinds(declined) or "nothing was turned down",
        ),
    ]
    found = rows(report)
    if found:
        note = f"{found.real:,} of {found.total:,} rows are real"
        title = "of the rows were padding"
        tiles.append(_tile(f"{found.padding:.0%}", title, note, share=1 - found.padding))
    if report.padded_flops:
        useful, padded = report.useful_flops, report.padded_flops
        saved = 1 - useful / padded
        note = f"{flop(padded)} \u2192 {flop(useful)}, first batch"
        tiles.append(_tile(f"{saved:.0%}", "less forward work", note, share=1 - saved))
    if report.packed_bytes < report.padded_bytes:
        packed, padded = report.packed_bytes, report.padded_bytes
        saved = 1 - packed / padded
        note = f"{amount(padded, 'B')} \u2192 {amount(packed, 'B')} of values, before fusion"
        tiles.append(_tile(f"{saved:.0%}", "less memory", note, share=1 - saved))
    passes = sum(p.seconds for p in report.passes)
    graphs = f"{report.graphs} graph{'s' if report.graphs != 1 else ''}"
    tiles.append(
        _tile(f"{report.seconds:.1f} s", "to compile", f"{graphs}, gem's passes {passes:.2f} s")
    )
    return f"<div class='gem-tiles'>{''.join(tiles)}</div>"


def _sites(n: int) -> str:
    return "site" if n == 1 else "sites"


def _kinds(sites: list[Site]) -> str:
    kinds = dict.fromkeys(s.kind for s in sites)
    return ", ".join(f"{sum(s.kind == k for s in sites)} {escape(k)}" for k in kinds)


def _tile(figure: str, title: str, note: str, share: float | None = None) -> str:
    """``share``: how much of a bar is filled, the part that is real work."""
    bar = "" if share is None else f"<div class='gem-bar'><i style='width:{share:.1%}'></i></div>"
    return (
        f"<div class='gem-tile'><b>{figure}</b><span>{title}</span>{bar}<small>{note}</small></div>"
    )


def _section(report: Report, status: str, most: int | None) -> str:
    found = folded([s for s in report.sites if s.status == status])
    if not found:
        return ""
    shown = found[:most]
    rest = len(found) - len(shown)
    more = f"<p class='gem-hint'>and {rest:,} more</p>" if rest else ""
    listed = "".join(_row(site, n) for site, n in shown)
    return (
        f"<section class='gem-sites gem-{status}'><h2>{status.capitalize()}</h2>"
        f"<ul>{listed}</ul>{more}</section>"
    )


def _row(site: Site, n: int) -> str:
    times = f" <em>\u00d7{n}</em>" if n > 1 else ""
    where = f"<code class='gem-where'>{escape(site.where)}</code>" if site.where else ""
    head = f"<span class='gem-kind'>{escape(site.kind)}</span><code>{escape(site.op)}</code>"
    return f"<li><div class='gem-head'>{head}{times}{where}</div>{_body(site)}</li>"


def _body(site: Site) -> str:
    out = ""
    if site.reason:
        word = "because" if site.status == "declined" else "assuming"
        out += f"<p>{word} {escape(site.reason)}</p>"
    if site.status == "declined":
        out += _advice(site.reason)
    if site.details:
        facts = (
            f"{escape(k.replace('_', ' '))} <b>{escape(str(v))}</b>"
            for k, v in site.details.items()
        )
        listed = " \u00b7 ".join(facts)
        out += f"<p class='gem-facts'>{listed}</p>"
    out += "".join(_advice(v) for k, v in site.details.items() if k.endswith(KEPT))
    return out


def _advice(reason: str) -> str:
    found = advise(reason)
    if found is None:
        return ""
    lines = _prose(found.write)
    return (
        f"<div class='gem-advice'><b>What to write instead</b><p>{lines}</p>"
        f"<small>nearest known form: {_prose(found.pattern)}<br>"
        f"{DOCS}#{escape(found.anchor)}</small></div>"
    )


def _prose(text: str) -> str:
    """Escaped, with what stands in backquotes as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text)).replace("\n", "<br>")
