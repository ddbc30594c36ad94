"""The command line: what it prints, its exit codes, and its words on bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from encoders import Encoder, batch
from torch import Tensor, nn

import gemcompile.backend
import gemcompile.cli.bench
from gemcompile.cli import main
from gemcompile.cli.bench import Row
from gemcompile.cli.errors import BadInput
from gemcompile.cli.factory import load
from gemcompile.cli.sample import Size
from gemcompile.explain import dry_run
from gemcompile.options import Options

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parents[1]
FACTORIES = """
import torch
from torch import nn

def linear():
    print("a word on stdout")
    return nn.Linear(4, 4), torch.ones(2, 4)

def keywords():
    return nn.Linear(4, 4), {"input": torch.ones(2, 4)}

def positional():
    return torch.add, (torch.ones(2), torch.ones(2))

def misfit():
    return nn.Linear(4, 4), torch.ones(2, 5)

def raises():
    raise KeyError("no data")

def needs(x):
    return x

def triple():
    return 1, 2, 3

def no_model():
    return 3, ()

def no_args():
    return nn.Linear(4, 4), 7

class Namespace:
    linear = staticmethod(linear)

number = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder; returns its name, which no other test imports."""
    name = f"factories_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code and message of a command that prints nothing else."""
    code = main(argv)
    printed = capsys.readouterr()
    assert printed.out == ""
    return code, printed.err


# --- explain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["{0}:linear", "{0}.py:linear", "{0}:Namespace.linear"])
def test_explain(place: str, factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", place.format(factories)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("gem: 1 graph, 0 sites rewritten")
    assert "backward: ran, 2 parameters and inputs have gradients" in printed.out
    assert "a word on stdout" in printed.err  # stdout is the report's alone


def test_explain_writes_json(factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{factories}:linear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["graphs"] == 1


def test_explain_writes_a_page(factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{factories}:linear", "--html", "page.html"]) == 0
    assert "page: page.html" in capsys.readouterr().out
    assert Path("page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["keywords", "positional"])
def test_arguments_of_every_form(name: str, factories: str) -> None:
    call = load(f"{factories}:{name}")
    assert isinstance(call(), Tensor)


def test_explain_takes_options(factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--option", "disable=('FuseAttention',)", "--option", "pack=auto"]
    assert main(["explain", f"{factories}:linear", "--json", *options]) == 0
    names = [p["name"] for p in json.loads(capsys.readouterr().out)["passes"]]
    assert "Canonicalize" in names and "FuseAttention" not in names


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("{0}", "names no factory; write module:factory or path/to/file.py:factory"),
        (":linear", "names no factory"),
        ("{0}:", "names no factory"),
        ("no_such_module:f", "there is no module 'no_such_module'; run in the folder"),
        ("{0}.sub:f", "there is no module '{0}.sub'"),
        ("no_such.py:f", "there is no file 'no_such.py'"),
        ("{0}:liner", "has no 'liner'; did you mean 'linear'?"),
        ("{0}:number", "number in {0} is of type int, not a function"),
        ("{0}:raises", "raised KeyError: 'no data'; it must take no argument"),
        ("{0}:needs", "it must take no argument, and return (model, args)"),
        ("{0}:triple", "returned a tuple of 3; it must return (model, args)"),
        ("{0}:no_model", "the model that factory {0}:no_model returned is a int"),
        ("{0}:no_args", "the arguments that factory {0}:no_args returned are a int"),
        ("{0}:misfit", "fails on the factory's arguments without gem, too: RuntimeError: mat1"),
    ],
)
def test_bad_factories(
    argument: str, message: str, factories: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = fails(capsys, "explain", argument.format(factories))
    assert code == 2
    assert printed.startswith("gem explain: ") and printed.count("\n") == 1
    assert message.format(factories) in printed


def test_module_that_breaks(factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken_module_of_this_test.py").write_text("import torch\nimport missing_package\n")
    code, printed = fails(capsys, "explain", "broken_module_of_this_test:f")
    assert code == 2
    assert "raised ModuleNotFoundError: No module named 'missing_package'" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--option", "pck=True"], "unknown gem option 'pck'; did you mean 'pack'?"),
        (["--option", "pack"], "--option pack has no value; write --option pack=VALUE"),
        (["--option", "pack=yes"], "option pack='yes' is not one of 'auto', True, False"),
        (["--html", "no_folder/page.html"], "there is no folder 'no_folder'; make it first"),
        (["--html", "."], "--html . is a folder"),
    ],
)
def test_bad_options(
    options: list[str], message: str, factories: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = fails(capsys, "explain", f"{factories}:linear", *options)
    assert code == 2 and message in printed


def test_model_that_only_the_compiler_breaks(
    factories: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def capture(*_: object) -> None:
        raise RuntimeError("unheard of")

    monkeypatch.setattr(gemcompile.backend, "capture", capture)
    code, printed = fails(capsys, "explain", f"{factories}:linear", "--option", "strict=True")
    assert code == 1
    assert "the model runs as it is, and fails under torch.compile" in printed
    assert "RuntimeError: unheard of" in printed


def test_debug_shows_the_traceback(factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = fails(capsys, "explain", f"{factories}:raises", "--debug")
    assert code == 2
    assert "Traceback" in printed and 'raise KeyError("no data")' in printed


@pytest.mark.parametrize("argv", [[], ["explain"], ["simulate"], ["bench", "--rounds", "few"]])
def test_argparse_refuses(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: gem" in capsys.readouterr().err


def test_backward_leaves_gradients_alone() -> None:
    """A tensor that the model reaches through a closure is no copy, and keeps its gradient."""
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.full((3,), 5.0)
    x = torch.randn(3, requires_grad=True)
    _, count = dry_run(lambda t: (t * weight, t.detach()), (x,), {}, Options(), backward=True)
    assert count == 2
    assert x.grad is None and torch.equal(weight.grad, torch.full((3,), 5.0))
    _, count = dry_run(torch.sin, (torch.ones(3),), {}, Options(), backward=True)
    assert count is None


def test_backward_of_a_packed_model() -> None:
    model = Encoder(1)
    report, count = dry_run(model, batch(), {}, Options(pack=True), backward=True)
    report.expect(attention=1, padding=1)
    assert count == len(list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())


# --- the script, and starting it ------------------------------------------------------------------


def test_script_and_module_are_the_same(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert settings["scripts"] == {"gem": "gemcompile.cli:main"}
    command = [sys.executable, "-m", "gemcompile", "explain", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "gem explain: 'nothing' names no factory; write module:factory or path/to/file.py:factory\n"
    )


# --- bench ----------------------------------------------------------------------------------------


class Halves(nn.Module):
    """Stands in for what torch.compile makes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self.model(*inputs)
        return out


def test_bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    backends: list[Any] = []

    def compile(model: nn.Module, backend: Any = "inductor", **options: Any) -> nn.Module:
        backends.append(backend)
        return Halves(model)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setitem(gemcompile.cli.bench.SIZES, "cpu", Size(5, 12, 16, 2, 1))
    assert main(["bench", "--device", "cpu", "--rounds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert backends == ["inductor", gemcompile.gem]
    assert [round(row["fill"], 1) for row in found["rows"]] == [1.0, 0.5, 0.2]
    assert all(row["gem_ms"] > 0 and row["speed_up"] > 0 for row in found["rows"])
    assert found["environment"]["torch"] == torch.__version__


def test_bench_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row(0.5, 4.0, 2.0, 1.0, 2.0)]
    monkeypatch.setattr(gemcompile.cli.bench, "measure", lambda *_: rows)
    assert main(["bench", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert ["0.50", "4.00", "2.00", "1.00", "2.00"] in [
        line.split() for line in printed.split("\n")
    ]
    assert f"torch {torch.__version__}" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "tpu"], "--device tpu is not one of cpu, cuda"),
        (["--rounds", "0"], "--rounds 0 times nothing; give 1 or more"),
    ],
)
def test_bench_refuses(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = fails(capsys, "bench", *argv)
    assert code == 2 and message in printed


def test_bench_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match="torch finds no GPU here"):
        gemcompile.cli.bench._device("cuda")


def test_bench_that_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(gemcompile.cli.bench, "measure", measure)
    code, printed = fails(capsys, "bench", "--device", "cpu")
    assert code == 1 and "the benchmark's model failed: RuntimeError: no compiler" in printed
