"""For MkDocs: links from a page to the repository's other files, which the site does not hold."""

from __future__ import annotations

import re
from typing import Any

_PAGES = {"../CONTRIBUTING.md": "contributing.md", "../README.md": "index.md"}
_LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]*)[^)]*\)")
_HOME = re.compile(r"\((?:docs/)([a-z_]+\.md)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead such links to the page that has the text, or leave the file's name in their place."""

    def page(link: re.Match[str]) -> str:
        text, path = link[1], link[2]
        return f"[{text}]({_PAGES[path]})" if path in _PAGES else f"{text} (`{path[3:]}`)"

    return _HOME.sub(r"(\1", _LINK.sub(page, markdown))
