"""Writes docs/images/report.png: the report page of the MovieLens example's model.

    python docs/images/report.py

Needs Chromium (CHROMIUM names its path where it is not on PATH) and playwright.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

# Not `wait_for_function`: it polls through eval, which the page's policy forbids.
READY = (
    "() => new Promise(r => { const look = () => window.gem ? r() : setTimeout(look, 5); look() })"
)
HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "examples" / "movielens"))


def main() -> None:
    from model import NextItem

    from gemcompile import explain

    torch.manual_seed(0)
    lengths = torch.tensor([12, 3, 40, 25, 7, 60, 9, 18])
    items = torch.randint(1, 1682, (8, 60))
    report = explain(NextItem(1682, 200, layers=6), items, items, lengths, options={"pack": True})
    browser_path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        browser = play.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1200, "height": 900})
        tab.goto(report.to_html(Path(folder) / "report.html").as_uri())
        tab.evaluate(READY)
        tab.screenshot(path=HERE / "report.png")
        browser.close()


if __name__ == "__main__":
    main()
