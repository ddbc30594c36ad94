"""A report as text for people: what was rewritten, what was not and why, what padding costs."""

from __future__ import annotations

import textwrap
from collections import Counter

from .advice import advise
from .report import Report, Site


def render(report: Report) -> str:
    """The report in a terminal's width."""
    lines = [_headline(report), *_work(report)]
    for title, status in (("rewritten", "rewritten"), ("declined", "declined")):
        rows = folded([s for s in report.sites if s.status == status])
        if rows:
            lines += ["", f"{title}"]
            lines += [line for site, n in rows for line in _site(site, n)]
    ran = [p for p in report.passes if p.changes]
    if ran:
        lines += ["", "passes"]
        lines += [f"  {p.name:<20} {p.changes:>4} changes {p.seconds * 1e3:>8.1f} ms" for p in ran]
    return "\n".join(lines)


def _headline(report: Report) -> str:
    done = sum(s.status == "rewritten" for s in report.sites)
    kept = sum(s.status == "declined" for s in report.sites)
    graphs = f"{report.graphs} graph{'s' if report.graphs != 1 else ''}"
    sites = f"{done} sites rewritten, {kept} declined"
    return f"gem: {graphs}, {sites}, compiled in {report.seconds:.1f} s"


def _work(report: Report) -> list[str]:
    if not report.padded_flops:
        return []
    useful, padded = report.useful_flops, report.padded_flops
    share = f"{useful / padded:.0%} of the padded model's"
    values = f"{amount(report.packed_bytes, 'B')} instead of {amount(report.padded_bytes, 'B')}"
    return [
        f"     forward work on the first batch: {flop(useful)}, {share} {flop(padded)}",
        f"     values that it makes, before fusion: {values}",
    ]


def flop(n: int) -> str:
    """ "1.53 TFLOP"."""
    return amount(n, "FLOP")


def amount(n: int, what: str) -> str:
    """ "1.53 TB"."""
    unit, size = next((u, s) for u, s in _UNITS if n >= s or s == 1.0)
    return f"{n / size:.3g} {unit}{what}"


_UNITS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


def folded(sites: list[Site]) -> list[tuple[Site, int]]:
    """Equal sites of repeated layers and repeated compiles once, with their count."""
    count = Counter((s.kind, s.op, s.reason, s.where) for s in sites)
    first = {(s.kind, s.op, s.reason, s.where): s for s in reversed(sites)}
    return [(first[key], n) for key, n in count.items()]


KEPT = " kept as a tensor"  # ends the name of a detail that says why


def _advice(reason: str) -> list[str]:
    """What a site could be written as, in a terminal's width."""
    found = advise(reason)
    text = f"write instead: {found.write}" if found else ""
    return [f"  {'':<10}{line}" for line in textwrap.wrap(text, 86)]


def _site(site: Site, n: int) -> list[str]:
    times = f" x{n}" if n > 1 else ""
    where = f"  {site.where}" if site.where else ""
    out = [f"  {site.kind:<10}{site.op}{times}{where}"]
    if site.reason:
        word = "because" if site.status == "declined" else "assuming"
        out.append(f"  {'':<10}{word} {site.reason}")
        out += _advice(site.reason) if site.status == "declined" else []
    for key, value in site.details.items():
        out.append(f"  {'':<10}{key.replace('_', ' ')}: {value}")
        out += _advice(value) if key.endswith(KEPT) else []
    return out
