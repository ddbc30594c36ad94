"""What torch's users expect of a backend: TORCH_LOGS and TORCH_TRACE, modes, caches, types."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from encoders import Encoder, batch
from observe import without_code_generation
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor_config

import gemcompile
from gemcompile import Report, explain, gem
from gemcompile.modes import inductor_patches
from gemcompile.options import Options

HERE = Path(__file__).parent
ROOT = HERE.parent


def python(*arguments: str, cwd: Path = HERE, **variables: str) -> subprocess.CompletedProcess[str]:
    """A fresh process with the tests' modules at hand, and torch's own switches off."""
    path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    kept = {k: v for k, v in os.environ.items() if k not in ("TORCH_LOGS", "TORCH_TRACE")}
    env = {**kept, "PYTHONPATH": path, **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)


# --- types ----------------------------------------------------------------------------------------

TORCHS_GAP = 'Type argument 1 for class "SymInt"'  # torch says "type" of a name it does not export


def pyright(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("pyright", reason="pyright is in the extra 'test'")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return python("-m", "pyright", *arguments, cwd=cwd, PATH=path)


def test_public_names_are_typed(tmp_path: Path) -> None:
    """Public is what the reference lists; typed for any checker, which mypy alone does not say."""
    listed = re.findall(r"^::: ([\w.]+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    done = pyright("--verifytypes", "gemcompile", "--ignoreexternal", "--outputjson", cwd=tmp_path)
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    inside = tuple(f"{name}." for name in listed)
    public = [s for s in symbols if f"{s['name']}.".startswith(inside)]
    missing = {*listed, "gemcompile.pass_manager.Pass.run"} - {s["name"] for s in public}
    assert missing <= {"gemcompile.match", "gemcompile.testing"}, "modules are no symbols"
    errors = [
        f"{s['name']}: {d['message']}"
        for s in public
        for d in s["diagnostics"]
        if d["severity"] == "error" and TORCHS_GAP not in d["message"]
    ]
    assert not errors, "\n".join(errors)


CHECKS = {
    "pytest": ["-m", "pytest", "-q", "-c", "pyproject.toml", "--rootdir", ".", "."],
    "mypy": ["-m", "mypy", "--cache-dir", os.devnull, "."],
}


@pytest.mark.parametrize("tool", [*CHECKS, "pyright"])
def test_user_project(tool: str) -> None:
    """A project that subclasses gem's classes: its tests pass, both type checkers are content."""
    project = HERE / "user_project"
    if tool == "pyright":
        done = pyright("--pythonpath", sys.executable, ".", cwd=project)
    else:
        done = python(*CHECKS[tool], cwd=project, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    expected = {"pytest": "3 passed", "mypy": "no issues found in 2 source files"}
    assert expected.get(tool, "0 errors, 0 warnings") in done.stdout


# --- logs -----------------------------------------------------------------------------------------

LINE = "gem: 1 graph, 1 sites rewritten"
REPORT = "gem.padded_attention(softmax)  logging_scenario.py"
PASS = "FuseAttention: 1 changes in"
GRAPH = "after FuseAttention"
WARNING = "gem goes on without Fails"
# setting -> what is printed of these; docs/logging.md has the same table
SHOWN = {
    "": {WARNING},
    "gemcompile": {WARNING, LINE},
    "+gemcompile": {WARNING, LINE, REPORT, PASS, GRAPH},
    "+gemcompile.passes": {WARNING, PASS},
    "+gemcompile.graph": {WARNING, GRAPH},
    "-gemcompile": set(),
    "+gemcompile,-gemcompile.graph": {WARNING, LINE, REPORT, PASS},
}


def shown(text: str) -> set[str]:
    return {part for part in (LINE, REPORT, PASS, GRAPH, WARNING) if part in text}


@pytest.mark.parametrize("setting", SHOWN)
def test_torch_logs(setting: str, tmp_path: Path) -> None:
    out = tmp_path / "log"
    variables = {"TORCH_LOGS": setting, "TORCH_LOGS_OUT": str(out)} if setting else {}
    done = python("logging_scenario.py", **variables)
    assert done.returncode == 0, done.stderr
    assert shown(done.stderr) == SHOWN[setting]
    if setting == "gemcompile":
        assert shown(out.read_text()) == SHOWN[setting]
        assert done.stderr.count(LINE) == 1


def test_logging_page_has_every_setting() -> None:
    text = (ROOT / "docs" / "logging.md").read_text()
    settings = set(re.findall(r"`TORCH_LOGS=([^`]+)`", text))
    assert settings - {"gemcompile,recompiles", "gem"} == set(SHOWN) - {""}


def test_set_logs() -> None:
    done = python("logging_scenario.py", "set_logs")
    assert shown(done.stderr) == {WARNING, LINE}


def test_root_logger() -> None:
    """Without TORCH_LOGS gem's loggers are like any other; with it, both handlers print."""
    plain = python("logging_scenario.py", "root").stderr
    assert plain.count(LINE) == 1 and f"root: {LINE}" in plain
    both = python("logging_scenario.py", "root", TORCH_LOGS="gemcompile,recompiles").stderr
    assert both.count(LINE) == 2 and f"root: {LINE}" in both


def test_short_name_is_refused_by_torch() -> None:
    done = python("-c", "import torch", TORCH_LOGS="gem")
    assert done.returncode != 0 and "Invalid log settings: gem" in done.stderr


def test_torch_trace(tmp_path: Path) -> None:
    python("logging_scenario.py", TORCH_TRACE=str(tmp_path))
    (file,) = tmp_path.glob("*.log")
    names = re.findall(r'"name": "(gem_\w+)"', file.read_text())
    assert sorted(names) == ["gem_after_FuseAttention", "gem_report", "gem_report"]


# --- modes ----------------------------------------------------------------------------------------


def test_modes_are_inductors() -> None:
    modes = torch._inductor.list_mode_options()
    assert {"default", "reduce-overhead", "max-autotune"} <= modes.keys()
    for mode, settings in modes.items():
        assert inductor_patches(mode, Options()) == settings
    assert inductor_patches(None, Options()) == {}


def test_options_stand_over_the_mode() -> None:
    options = Options(inductor={"triton.cudagraphs": False, "max_fusion_size": 7})
    patches = inductor_patches("max-autotune", options)
    assert patches["max_autotune"] and patches["coordinate_descent_tuning"]
    assert patches["triton.cudagraphs"] is False and patches["max_fusion_size"] == 7


def test_unknown_mode_and_setting() -> None:
    x = torch.ones(2, 4)
    message = "mode='fastest' is not one of 'default', .*'reduce-overhead'"
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(nn.Linear(4, 4), backend=gem, mode="fastest")(x)
    options: dict[str, Any] = {"inductor": {"max_fusion_sise": 7}}
    with pytest.raises(BackendCompilerFailed, match="did you mean 'max_fusion_size'?"):
        torch.compile(nn.Linear(4, 4), backend=gem, options=options)(x)


def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of each compile, in place of code generation."""
    seen: list[dict[str, Any]] = []
    real = gemcompile.backend._inductor

    def inductor(gm: Any, inputs: Any, patches: dict[str, Any]) -> Any:
        seen.append(patches)
        return real(gm, inputs, patches)

    monkeypatch.setattr(gemcompile.backend, "_inductor", inductor)
    return seen


@pytest.mark.parametrize("asked", ["mode", "process"])
def test_cuda_graphs_of_packed_graphs(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped, and the report says so, whichever way they were asked for."""
    seen = handed_over(monkeypatch)
    mode = "reduce-overhead" if asked == "mode" else "default"
    with (
        inductor_config.patch({"triton.cudagraphs": asked == "process"}),
        without_code_generation(monkeypatch),
        gemcompile.record() as report,
    ):
        lengths = (64, 9, 30, 3, 12, 1, 20, 5)  # padded enough that the cost rule packs
        torch.compile(Encoder(1), backend=gem, mode=mode)(*batch(lengths, 64))
    report.expect(padding=1)
    (site,) = report.of("graph", "declined")
    assert str(site) == (
        "graph declined: CUDA graphs because the number of packed rows changes at every step"
    )
    assert [patches["triton.cudagraphs"] for patches in seen] == [False]


def test_cuda_graphs_of_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = handed_over(monkeypatch)
    with without_code_generation(monkeypatch), gemcompile.record() as report:
        torch.compile(nn.Linear(4, 4), backend=gem, mode="max-autotune")(torch.ones(2, 4))
    assert [patches["triton.cudagraphs"] for patches in seen] == [True]
    report.expect(graph=0)
    assert report.of("graph", "declined") == []


# --- pickles and caches ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    return explain(Encoder(2), *batch(), options={"pack": True})


COPIES: dict[str, Callable[[Report], Report]] = {
    "pickle": lambda report: pickle.loads(pickle.dumps(report)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", COPIES)
def test_report_survives(way: str, report: Report) -> None:
    other = COPIES[way](report)
    assert other == report and other is not report
    assert str(other) == str(report)
    assert other.to_json() == report.to_json()
    other.expect(attention=2, padding=1)


def test_report_is_read_in_another_process(report: Report, tmp_path: Path) -> None:
    (tmp_path / "report").write_bytes(pickle.dumps(report))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).to_json())"
    done = python("-c", code, str(tmp_path / "report"))
    assert done.stdout.strip() == report.to_json(), done.stderr


CARRY = """
import pickle, sys
import torch
from cache_scenarios import run

file = sys.argv[1]
if sys.argv[2] == "load":
    torch.compiler.load_cache_artifacts(open(file, "rb").read())
found = run("packed")
if sys.argv[2] == "save":
    open(file, "wb").write(torch.compiler.save_cache_artifacts()[0])
print(*(found[k] for k in ("autograd_cache_miss", "autograd_cache_hit", "fxgraph_cache_hit")))
"""


def test_caches_travel(tmp_path: Path) -> None:
    """What one process compiled, another with an empty cache on disk takes from bytes."""
    counts = []
    for step in ("save", "load"):
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / step)}
        done = python("-c", CARRY, str(tmp_path / "artifacts"), step, **cache)
        assert done.returncode == 0, done.stderr
        counts.append(done.stdout.split())
    assert counts == [["1", "0", "0"], ["0", "1", "2"]]
