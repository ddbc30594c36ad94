"""gem doctor: what it finds, the kernels it names, and a self-test that can fail."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import gemcompile.backend
import gemcompile.cli.machine as machine
import gemcompile.cli.self_test
from gemcompile import Target
from gemcompile.cli import main
from gemcompile.cli.choices import choices
from gemcompile.cli.self_test import Outcome, self_test


def found(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *argv])
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, content


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-test", "--target", "cuda:90"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    assert "kernels on cuda:90" in printed
    assert "  varlen: it computes softmax, not gelu (gelu, D 64, bfloat16;" in printed
    assert "self-test" not in printed


def test_kernels_of_a_hopper_gpu() -> None:
    by_name = {c.request: c for c in choices(Target("cuda", 90))}
    usual = by_name["softmax, D 128, bfloat16"]
    assert (usual.forward, usual.backward) == ("hopper", "hopper")
    assert "hopper" not in usual.refused
    single = by_name["gelu, D 64, float32"]
    assert single.forward == "triton"
    assert single.refused["hopper"] == "it computes in bfloat16 or float16, not torch.float32"
    assert by_name["softmax, D 64, bfloat16, few queries"].forward == "short"


def test_forced_kernel_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEM_KERNEL", "hopper")
    assert {c.forward for c in choices(Target("cpu"))} == {"none"}


@pytest.mark.parametrize("text", ["tpu", "cuda:", "cuda:sm_90", "hip:90", "cpu:1"])
def test_unknown_target(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--target", text]) == 2
    assert f"--target {text} is none; write cpu, cuda:90" in capsys.readouterr().err


# --- the machine ----------------------------------------------------------------------------------


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine._parts("2.13.0+cpu") == (2, 13)
    assert machine._parts("2.9.1") < (2, 11) < machine._parts("2.14.0a0+git1")
    old = machine.versioned("torch", "2.9.1", (2, 9), (2, 11), (2, 13))
    assert (old.state, old.cure) == ("fail", "gem needs torch 2.11 or later")
    new = machine.versioned("torch", "2.14", (2, 14), (2, 11), (2, 13))
    assert (new.state, new.cure) == ("note", "newer than 2.13, the last one tested")
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    assert machine._torch().state == "fail"
    monkeypatch.setattr(metadata, "version", lambda name: "3.7.0")
    assert "H100 and H200 need triton 3.6" in machine._triton().cure


def test_failed_finding_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    code, content = found("--no-test", capsys=capsys)
    assert code == 1
    assert [f["name"] for f in content["machine"] if f["state"] == "fail"] == ["torch"]


@pytest.mark.parametrize(
    ("values", "state"), [([machine.VALUE], "ok"), ([], "note"), (["other:gem"], "fail")]
)
def test_entry_point(values: list[str], state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [metadata.EntryPoint(machine.NAME, v, machine.GROUP) for v in values]
    monkeypatch.setattr(metadata, "entry_points", lambda **_: points)
    assert machine._backend().state == state


def test_cache_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new"))
    texts = {f.name: f.text for f in machine._caches()}
    assert texts["Triton's cache"] == str(tmp_path / "new")
    full = machine.shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: full)
    finding = machine._cache("x", tmp_path, "X_DIR")
    assert (finding.text, finding.state) == (f"{tmp_path}, 1 MiB free", "note")
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    assert machine._cache("x", tmp_path, "X_DIR").cure == "set X_DIR to another folder"


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in machine.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert list(machine._switches()) == []
    monkeypatch.setenv("GEM_DISABLE", "1")
    (finding,) = machine._switches()
    assert (finding.state, finding.cure) == ("note", "gem is switched off: unset it")


# --- the self-test --------------------------------------------------------------------------------


def test_self_test_passes() -> None:
    """With code generation, as a user runs it."""
    (outcome,) = self_test("cpu")
    assert outcome.error == ""
    assert 0 < outcome.gem < 1e-5


def eager_with(monkeypatch: pytest.MonkeyPatch, fault: float) -> None:
    """gem without code generation, and every output off by ``fault``."""
    real = gemcompile.backend.gem

    def gem(gm: Any, inputs: Any, *, options: dict[str, Any]) -> Any:
        call = real(gm, inputs, options={**options, "inner": "eager"})
        return lambda *args: tuple(x * (1 + fault) for x in call(*args))

    monkeypatch.setattr(gemcompile.backend, "gem", gem)


@pytest.mark.parametrize("fault", [0.0, 0.01])
def test_self_test_sees_a_wrong_result(fault: float, monkeypatch: pytest.MonkeyPatch) -> None:
    eager_with(monkeypatch, fault)
    (outcome,) = self_test("cpu")
    assert bool(outcome.error) == bool(fault)
    if fault:
        assert "from float64, eager" in str(outcome)


def test_self_test_sees_a_missing_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemcompile.backend.passes, "forward", lambda: [])
    eager_with(monkeypatch, 0.0)
    (outcome,) = self_test("cpu")
    assert outcome.error.startswith("AssertionError: expected 1 rewritten attention sites")


def test_failed_self_test_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome("cpu", "float32", 1.0, 1e-7, 1.0, "no compiler")
    monkeypatch.setattr("gemcompile.cli.doctor.self_test", lambda device: [outcome])
    code, content = found(capsys=capsys)
    assert code == 1
    assert content["self_test"][0]["error"] == "no compiler"
    assert main(["doctor"]) == 1
    assert "float32 on cpu: failed: no compiler" in capsys.readouterr().out
