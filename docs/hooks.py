"""For MkDocs: pages that are files of the repository's root, and links to files beyond the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_PAGES = {"CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
_INCLUDED = re.compile(r'^--8<-- "(\w+\.md)"$', re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([\w./-]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Take in the root's page, so that its links are seen; lead links to pages of the site."""
    included = _INCLUDED.search(markdown)
    if included:
        markdown = (ROOT / included[1]).read_text()
    folder = ROOT if included else ROOT / "docs"

    def page(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        target = (folder / path).resolve()
        if not target.exists() or target.is_relative_to(ROOT / "docs"):
            name = target.relative_to(ROOT / "docs") if target.exists() else path
            return f"[{text}]({name}{anchor})"
        name = str(target.relative_to(ROOT))
        return f"[{text}]({_PAGES[name]}{anchor})" if name in _PAGES else f"{text} (`{name}`)"

    return _LINK.sub(page, markdown)
