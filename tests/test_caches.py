"""Inductor's and AOTAutograd's caches on disk: the next process hits, a difference misses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gemcompile.identity
from gemcompile.identity import source_digest

HERE = Path(__file__).parent
FIRST = ["small", "pass", "packed"]
SECOND = [*FIRST, "other option", "pass with another option", "pass without identity"]
SECOND += ["other source"]


def process(scenarios: list[str], cache: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Run scenarios in a fresh process that is one rank of a job."""
    path = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    env = {**os.environ, **own, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, str(HERE / "cache_scenarios.py"), *scenarios]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """A cold process, and a later one on another rank."""
    cache = tmp_path_factory.mktemp("inductor")
    return [process(FIRST, cache, rank=0), process(SECOND, cache, rank=1)]


@pytest.mark.parametrize("name", FIRST)
def test_second_process_hits(runs: list[dict[str, dict[str, Any]]], name: str) -> None:
    cold, warm = (r[name] for r in runs)
    assert cold["autograd_cache_miss"] == 1 and cold["autograd_cache_hit"] == 0
    assert warm["autograd_cache_hit"] == 1 and warm["autograd_cache_miss"] == 0
    assert warm["fxgraph_cache_hit"] == 2 and warm["fxgraph_cache_miss"] == 0  # forward, backward
    assert cold["bypass"] == warm["bypass"] == 0


def test_report_is_filled_when_the_caches_are_warm(runs: list[dict[str, dict[str, Any]]]) -> None:
    cold, warm = (r["packed"]["report"] for r in runs)
    assert [s["kind"] for s in warm["sites"]] == ["attention", "padding"]
    assert warm["sites"] == cold["sites"]
    assert [p["after"] for p in warm["passes"]] == [p["after"] for p in cold["passes"]]


@pytest.mark.parametrize("name", ["other option", "pass with another option", "other source"])
def test_difference_misses(runs: list[dict[str, dict[str, Any]]], name: str) -> None:
    found = runs[1][name]
    assert found["autograd_cache_hit"] == found["fxgraph_cache_hit"] == 0
    assert found["autograd_cache_miss"] == 1
    assert found["bypass"] == 0


def test_pass_without_identity_bypasses(runs: list[dict[str, dict[str, Any]]]) -> None:
    found = runs[1]["pass without identity"]
    assert found["autograd_cache_hit"] == found["fxgraph_cache_hit"] == 0
    assert found["bypass"] > 0
    (site,) = found["report"]["sites"]
    assert (site["kind"], site["op"]) == ("graph", "the compile caches")
    assert site["reason"].startswith("Noted has no stable identity")


FILES = ["backend.py", "ops/attention.py", "passes/x.py", "lowering/y.py"]


@pytest.mark.parametrize("edited", FILES)
def test_digest_covers_every_file(
    edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a = 1\n")
    monkeypatch.setattr(gemcompile.identity, "__file__", str(tmp_path / "identity.py"))
    before = source_digest.__wrapped__()
    assert before == source_digest.__wrapped__()
    (tmp_path / edited).write_text("a = 2\n")
    assert source_digest.__wrapped__() != before
