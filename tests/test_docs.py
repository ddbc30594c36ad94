"""The documentation's code runs, its commands exist, its outputs are those that gem prints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from encoders import Encoder, batch

import gemcompile

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Ahead of a block: <!-- not run: reason -->. It is compiled all the same.
NOT_RUN = re.compile(r"<!-- not run: (.+) -->\s*\Z")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, text, first line, and why it is not run, or ""."""

    language: str
    text: str
    line: int
    not_run: str


def blocks(page: Path) -> list[Block]:
    content = page.read_text()
    out = []
    for found in FENCE.finditer(content):
        before = content[: found.start()]
        why = NOT_RUN.search(before)
        out.append(Block(found[1], found[2], before.count("\n") + 1, why[1] if why else ""))
    return out


def named(pages: list[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.name)


@pytest.fixture(autouse=True, scope="module")
def backend() -> None:
    """In a checkout that is not installed no entry point tells torch of the backend."""
    if "gem" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(gemcompile.gem, name="gem")


# --- Python ---------------------------------------------------------------------------------------


def a_model() -> dict[str, Any]:
    """What README and CONTRIBUTING take for granted."""
    inputs = batch((64, 9, 30, 3, 12, 1, 20, 5), 64)
    return {"torch": torch, "Pass": gemcompile.Pass, "model": Encoder(2), "inputs": inputs}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {"README.md": a_model, "CONTRIBUTING.md": a_model}


@named([p for p in PAGES if any(b.language == "python" for b in blocks(p))])
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one namespace, in order; a text block behind one shows lines that it printed."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch._dynamo.reset()
    names: dict[str, Any] = {"__name__": "docs", **GIVEN.get(page.name, dict)()}
    printed = ""
    for block in blocks(page):
        if block.language == "python":
            code = compile("\n" * block.line + block.text, str(page), "exec")
            if not block.not_run:
                with redirect_stdout(StringIO()) as out:
                    exec(code, names)
                printed = out.getvalue()
        elif block.language == "text" and printed:
            shown, real = normal(block.text), normal(printed)
            missing = [line for line in shown if line and line not in real]
            assert not missing, f"{page.name}:{block.line} shows what is not printed: {missing}"


def normal(text: str) -> list[str]:
    """Lines without what differs between runs: seconds, and the file that a reader's code is in."""
    text = re.sub(r"\d+\.\d+ (s|ms)\b", r"N \1", text)
    return re.sub(r"[\w.]+\.(py|md):\d+", "FILE:LINE", text).splitlines()


def test_blocks_that_are_not_run_are_few() -> None:
    skipped = {f"{p.name}:{b.line}": b.not_run for p in PAGES for b in blocks(p) if b.not_run}
    assert len(skipped) <= 3, skipped


# --- Commands -------------------------------------------------------------------------------------

# Not the project's own: they are taken to exist.
FOREIGN = {"git", "cd", "python3", "pip", "pre-commit", "pytest"}


def targets() -> set[str]:
    """Of the Makefile."""
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def unknown_command(line: str) -> str:
    """What is wrong with a line of a shell block, or ""."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if not words:
        return ""
    name = Path(words[0]).name
    if name == "make":
        wrong = [w for w in words[1:] if "=" not in w and w not in targets()]
        return f"no target {wrong}" if wrong else ""
    if name in ("python", "python3") and len(words) > 1 and words[1].endswith(".py"):
        return "" if (ROOT / words[1]).is_file() else f"no file {words[1]}"
    if name == "gem" or words[1:3] == ["-m", "gemcompile"]:
        return unknown_gem_command(words[1:] if name == "gem" else words[3:])
    return "" if name in FOREIGN or name == "python" else f"unknown command {name}"


def unknown_gem_command(words: list[str]) -> str:
    from gemcompile.cli import _parser

    try:
        _parser().parse_args(words)
    except SystemExit as e:
        return f"gem {' '.join(words)} is not understood" if e.code else ""
    return ""


@named([p for p in PAGES if any(b.language == "bash" for b in blocks(p))])
def test_commands_exist(page: Path) -> None:
    lines = [x for b in blocks(page) if b.language == "bash" for x in b.text.splitlines()]
    wrong = {line: why for line in lines if (why := unknown_command(line))}
    assert not wrong


def test_unknown_commands_are_found() -> None:
    assert unknown_command("make coffee") and unknown_command("python benchmarks/none.py")
    assert not unknown_command("GEM_LOGS=passes python benchmarks/packing.py --device cpu  # slow")


# --- Links and pictures ---------------------------------------------------------------------------


@named(PAGES)
def test_links_lead_to_files(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_included_files_exist() -> None:
    for page in PAGES:
        for name in re.findall(r'^--8<-- "([^":]+)', page.read_text(), re.MULTILINE):
            assert (ROOT / name).is_file(), f"{page.name} includes {name}"


def test_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    headings = set(re.findall(r"^::: gemcompile\.([\w.]+)$", page, re.MULTILINE))
    modules = {heading.split(".")[0] for heading in headings}
    last = {heading.rsplit(".")[-1] for heading in headings}
    public = {*gemcompile.__all__, *gemcompile.ops.__all__} - modules
    assert public <= last, public - last


def test_picture_is_what_its_script_draws() -> None:
    names: dict[str, Any] = {"__name__": "picture"}
    script = ROOT / "docs" / "images" / "before_after.py"
    exec(compile(script.read_text(), str(script), "exec"), names)
    assert names["picture"]() == script.with_suffix(".svg").read_text()


def test_readme_fits_a_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 65
