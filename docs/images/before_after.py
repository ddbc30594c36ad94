"""Draws before_after.svg: a padded batch and its graph, and what gem makes of both.

python docs/images/before_after.py
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

LENGTHS = (24, 9, 15, 4, 7, 2, 11, 5)
LONGEST, TOTAL, PADDED = max(LENGTHS), sum(LENGTHS), max(LENGTHS) * len(LENGTHS)
PAIRS, PADDED_PAIRS = sum(n * n for n in LENGTHS), len(LENGTHS) * LONGEST**2

# A colour for each sequence; ink, grey and frame for the rest.
COLOURS = ("#4c6ef5", "#0ca678", "#e8590c", "#ae3ec9", "#1098ad", "#d6336c", "#74b816", "#f08c00")
INK, GREY, LINE, PALE, WORK = "#212529", "#868e96", "#ced4da", "#f1f3f5", "#bac8ff"
CELL, GAP = 15, 3
PANEL = LONGEST * (CELL + GAP) - GAP
LEFT, RIGHT, TOP = 36, 36 + PANEL + 92, 104
GRAPH = TOP + len(LENGTHS) * (CELL + GAP) + 34
BOX, STEP = 34, 50

# (what the graph does, rows or pairs of it, the share of the padded work)
BEFORE = (
    ("embedding, norm, linear", f"{PADDED} rows", 1.0),
    ("q @ k.T", f"{PADDED_PAIRS:,} pairs", 1.0),
    ("masked_fill, softmax", f"{PADDED_PAIRS:,} pairs", 1.0),
    ("weights @ v", f"{PADDED_PAIRS:,} pairs", 1.0),
    ("linear, MLP, masked loss", f"{PADDED} rows", 1.0),
)
AFTER = (
    ("gather the real rows", f"{TOTAL} rows", TOTAL / PADDED),
    ("embedding, norm, linear", f"{TOTAL} rows", TOTAL / PADDED),
    ("gem.jagged_attention", f"{PAIRS:,} pairs, none stored", PAIRS / PADDED_PAIRS),
    ("linear, MLP, loss", f"{TOTAL} rows", TOTAL / PADDED),
)


def text(x: float, y: float, content: str, size: int = 14, **style: str) -> str:
    """A line of text; style gives fill, weight, anchor."""
    fill, weight = style.get("fill", INK), style.get("weight", "400")
    anchor = style.get("anchor", "start")
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{content}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, **more: str) -> str:
    """A rectangle with round corners."""
    extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in more.items())
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{extra}/>'


def cell(x: int, column: int, line: int, fill: str) -> str:
    left, top = x + column * (CELL + GAP), TOP + line * (CELL + GAP)
    return box(left, top, CELL, CELL, fill, rx="3")


def padded() -> list[str]:
    """The batch [B, L]: a line for each sequence."""
    return [
        cell(LEFT, i, line, COLOURS[line] if i < n else "url(#padding)")
        for line, n in enumerate(LENGTHS)
        for i in range(LONGEST)
    ]


def packed() -> list[str]:
    """The same rows, end to end."""
    owners = [line for line, n in enumerate(LENGTHS) for _ in range(n)]
    return [cell(RIGHT, i % LONGEST, i // LONGEST, COLOURS[o]) for i, o in enumerate(owners)]


def graph(x: int, nodes: tuple[tuple[str, str, float], ...], y: float) -> list[str]:
    """The nodes below each other; the filled part of a box is the work that is left."""
    out = []
    tops = [y + i * STEP for i in range(len(nodes))]
    for top, (name, amount, share) in zip(tops, nodes):
        out.append(box(x, top, PANEL, BOX, PALE, rx="6", stroke=LINE))
        out.append(box(x, top, max(PANEL * share, 12), BOX, WORK, rx="6"))
        out.append(text(x + 12, top + 22, name, 14, weight="600"))
        out.append(text(x + PANEL - 12, top + 22, amount, 13, anchor="end", fill="#495057"))
    middle = x + PANEL / 2
    for top, below in pairwise(tops):
        out.append(arrow(middle, top + BOX + 2, middle, below - 3))
    return out


def arrow(x1: float, y1: float, x2: float, y2: float, width: float = 1.5) -> str:
    line = f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{GREY}" '
    return f'{line}stroke-width="{width:g}" marker-end="url(#head)"/>'


def title(x: int, name: str, rest: str) -> list[str]:
    return [
        text(x, 48, name, 20, weight="700"),
        text(x, 74, rest, 14, fill="#495057"),
    ]


def picture() -> str:
    """The SVG's text."""
    bottom = GRAPH + (len(BEFORE) - 1) * STEP + BOX
    width, height = RIGHT + PANEL + 36, bottom + 60
    middle = (LEFT + PANEL + RIGHT) / 2
    share = f"{TOTAL / PADDED:.0%}"
    body = [
        box(1, 1, width - 2, height - 2, "#ffffff", rx="14", stroke=LINE),
        *title(LEFT, "The model as written", f"[B, L]: {PADDED} rows, {share} of them real"),
        *title(RIGHT, 'backend="gem"', f"[T]: {TOTAL} rows, and where each sequence starts"),
        *padded(),
        *packed(),
        *graph(LEFT, BEFORE, GRAPH),
        *graph(RIGHT, AFTER, GRAPH),
        text(
            RIGHT,
            bottom - 16,
            "the same loss and gradients, up to the order of sums",
            14,
            fill="#495057",
        ),
        arrow(middle - 24, TOP + 66, middle + 22, TOP + 66, 2.5),
        text(
            LEFT, height - 24, "filled: how much of the padded graph's work is done", 13, fill=GREY
        ),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="system-ui, sans-serif" role="img" '
            f'aria-label="A padded batch and its graph, and the packed ones">',
            "<defs>",
            f'<pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{PALE}"/>'
            f'<rect width="2" height="6" fill="{LINE}"/></pattern>',
            f'<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" '
            f'markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker>',
            "</defs>",
            *body,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture())
