"""Tables on a terminal; in a pipe without colours, and as wide as their content."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Prints text as it is; a pipe has no width of its own."""
    width = None if sys.stdout.isatty() else 160
    return Console(width=width, highlight=False, markup=False, emoji=False, soft_wrap=True)


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> Table:
    """Numbers to the right, texts to the left."""
    out = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left")
    for i, heading in enumerate(headings):
        numbers = all(isinstance(row[i], (int, float)) for row in rows)
        out.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        out.add_row(*(_cell(x) for x in row))
    return out


def _cell(x: object) -> str:
    return f"{x:.2f}" if isinstance(x, float) else str(x)
