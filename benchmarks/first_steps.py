"""A stranger's first steps, timed: from a clone to an own model compiled and its report open.

    python benchmarks/first_steps.py [--out FILE.json] [--keep FOLDER]

Clones this checkout's last commit, makes a virtual environment, installs the package with the
tested set of versions, and follows docs/index.md: its model is compiled with backend="gem" and
trained for a step, its report is written as a page and opened in a headless browser, where there is
one. Needs Python alone; every cache starts empty. Exit code 1: a step failed, or all of them took
over ten minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT = 600.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# What the user writes beside the model of the start page.
TRAIN = """
import json
import sys
import time

import torch
from user_model import ids, label, model

import gemcompile as gem

compiled = torch.compile(model, backend="gem", options={"pack": True})
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def step():
    start = time.perf_counter()
    loss = compiled(ids, label)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


with gem.record() as report:
    first = step()
report.expect(attention=1, padding=1)
report.to_html("report.html")
print(report, file=sys.stderr)
print(json.dumps({"first": first, "second": step(), "torch": torch.__version__}))
"""


class Walk:
    """Runs the steps, one after the other, in a folder; notes the seconds of each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "gemcompile"
        self.python = self.home / ".venv" / "bin" / "python"
        self.seconds: dict[str, float] = {}
        self.notes: dict[str, Any] = {}
        self.environment = {
            **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")},
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "TRITON_CACHE_DIR": str(folder / "cache" / "triton"),
        }

    def timed(self, name: str, step: Callable[[], None]) -> None:
        print(f"{name} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        step()
        self.seconds[name] = time.perf_counter() - start

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        done = subprocess.run(
            [str(c) for c in command],
            cwd=cwd or self.folder,
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=LIMIT,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-4000:]}")
        return done.stdout

    def clone(self) -> None:
        self.run("git", "clone", "--quiet", ROOT, self.home)

    def environment_made(self) -> None:
        self.run(sys.executable, "-m", "venv", self.home / ".venv")

    def installed(self) -> None:
        pip = (self.python, "-m", "pip", "install", "--quiet", "--no-cache-dir")
        self.run(*pip, "--constraint", "constraints.txt", ".", cwd=self.home)

    def trained(self) -> None:
        (self.folder / "user_model.py").write_text(start_page_model())
        (self.folder / "train.py").write_text(TRAIN)
        self.notes.update(json.loads(self.run(self.python, "train.py").splitlines()[-1]))

    def opened(self) -> None:
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            self.notes["browser"] = "no browser found"
            return
        page = (self.folder / "report.html").as_uri()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000")
        shown = self.run(browser, *flags, "--dump-dom", page)
        if "gem.padded_attention" not in shown:
            raise SystemExit("the opened report does not show the rewritten attention")
        self.notes["browser"] = self.run(browser, "--version").strip()


def start_page_model() -> str:
    """The first Python block of docs/index.md: a padded model and a batch of it."""
    page = (ROOT / "docs" / "index.md").read_text()
    found = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def walk(folder: Path) -> Walk:
    out = Walk(folder)
    out.timed("git clone", out.clone)
    out.timed("virtual environment", out.environment_made)
    out.timed("pip install", out.installed)
    out.timed("compile, first training step, report", out.trained)
    out.timed("open the report", out.opened)
    return out


def processor() -> str:
    """Its name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, and to leave there")
    given = parser.parse_args()
    if given.keep:
        given.keep.mkdir(parents=True, exist_ok=True)
        done = walk(given.keep.absolute())
    else:
        with tempfile.TemporaryDirectory() as folder:
            done = walk(Path(folder))
    total = sum(done.seconds.values())
    machine = f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    notes = done.notes
    print("| step | seconds |\n|---|--:|")
    for name, seconds in {**done.seconds, "all": total}.items():
        print(f"| {name} | {seconds:.1f} |")
    print(f"\n{datetime.date.today()}, {machine}, torch {notes['torch']}, {notes['browser']}.")
    print(
        f"The first training step took {notes['first']:.1f} s, the second {notes['second']:.3f} s."
    )
    if given.out:
        figures = {"seconds": done.seconds, "total": total, "machine": machine, **notes}
        given.out.write_text(json.dumps(figures, indent=1))
    return int(total > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
