"""The backend: options, modes, user passes, verification, and falling back to plain Inductor."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from encoders import Encoder, batch
from everyday_models import Checkpointed
from observe import assert_near, without_code_generation
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule

import gemcompile
import gemcompile.backend
from gemcompile import Options, Pass, Report, gem
from gemcompile.identity import stamped
from gemcompile.pass_manager import Context, OrderError, PassError, PassManager, ordered
from gemcompile.prologue import Prologue
from gemcompile.testing import run_passes, trace

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parents[1]
aten = torch.ops.aten


def compiled(options: dict[str, Any] | None = None, model: Any = None, x: Any = None) -> Report:
    """Compile a small model without code generation and check its result."""
    model = model or nn.Sequential(nn.Linear(4, 4), nn.GELU())
    x = torch.randn(2, 4) if x is None else x
    with gemcompile.record() as report:
        y = torch.compile(model, backend=gem, options={"inner": "eager", **(options or {})})(x)
    torch.testing.assert_close(y, model(x))
    return report


# --- entry point, options, modes ------------------------------------------------------------------


def test_found_by_name_without_import(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = ["[torch_dynamo_backends]"]
    lines += [f"{k} = {v}" for k, v in settings["entry-points"]["torch_dynamo_backends"].items()]
    info = tmp_path / "gemcompile-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gemcompile\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
    code = (
        "import sys, torch\n"
        "assert 'gemcompile' not in sys.modules\n"
        "f = torch.compile(torch.sin, backend='gem', options={'inner': 'eager'})\n"
        "x = torch.ones(3)\n"
        "assert torch.equal(f(x), x.sin())\n"
        "assert 'gemcompile.backend' in sys.modules\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown gem option 'pck'; did you mean 'pack'?"):
        Options.parse({"pck": True})
    with pytest.raises(BackendCompilerFailed, match="did you mean 'padded_outputs'"):
        compiled({"padded_output": "zero"})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pack", "yes", "option pack='yes' is not one of 'auto', True, False"),
        ("pack", 1, "option pack=1 is not one of"),
        ("inner", "nvcc", "'inductor', 'eager'"),
        ("passes", (print,), "not a gemcompile.Pass object"),
    ],
)
def test_wrong_value(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.parse({name: value})


def test_options_take_effect() -> None:
    model, example = Encoder(), batch()
    packed: dict[object, int] = {}
    for pack in (True, False):
        with gemcompile.record() as report:
            torch.compile(model, backend=gem, options={"pack": pack, "inner": "eager"})(*example)
        packed[pack] = len(report.of("padding"))
        torch._dynamo.reset()
    assert packed == {True: 1, False: 0}


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_mode_is_translated(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def compile_fx(gm: GraphModule, inputs: list[Any], config_patches: dict[str, Any]) -> Any:
        seen.append(config_patches)
        return gm

    monkeypatch.setattr(gemcompile.backend, "compile_fx", compile_fx)
    torch.compile(nn.Linear(4, 4), backend=gem, mode=mode)(torch.randn(2, 4))
    expected = torch._inductor.list_mode_options(mode)
    assert expected and expected.items() <= seen[0].items()


def test_unknown_mode() -> None:
    with pytest.raises(BackendCompilerFailed, match="mode"):
        torch.compile(nn.Linear(4, 4), backend=gem, mode="fastest")(torch.randn(2, 4))


def test_inductor_options_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def compile_fx(gm: GraphModule, inputs: list[Any], config_patches: dict[str, Any]) -> Any:
        seen.append(config_patches)
        return gm

    monkeypatch.setattr(gemcompile.backend, "compile_fx", compile_fx)
    options = {"inductor": {"max_fusion_size": 7}}
    torch.compile(nn.Linear(4, 4), backend=gem, options=options)(torch.randn(2, 4))
    assert seen[0]["max_fusion_size"] == 7


def test_disabled_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEM_DISABLE", "1")
    calls: list[Any] = []
    monkeypatch.setattr(
        gemcompile.backend, "compile_fx", lambda gm, inputs, config_patches: calls.append(gm) or gm
    )
    report = compiled()
    assert report.graphs == 0
    (gm,) = calls
    assert gm.graph.find_nodes(op="call_function", target=torch._C._nn.linear)


def test_logs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GEM_LOGS", "passes, graphs")
    torch.compile(Encoder(1), backend=gem, options={"inner": "eager"})(*batch())
    printed = capsys.readouterr().err
    assert "gem: 1 graph" in printed
    assert "--- after FuseAttention" in printed


# --- passes ---------------------------------------------------------------------------------------


class Quieten(Pass):
    """Replaces gelu by relu, which is wrong."""

    after = ("EliminatePadding",)

    def run(self, gm: GraphModule, context: Context) -> int:
        nodes = gm.graph.find_nodes(op="call_function", target=aten.gelu.default)
        for n in nodes:
            n.target = aten.relu.default
            n.kwargs = {}
        return len(nodes)


class Early(Pass):
    before = ("Canonicalize",)

    def __init__(self, note: str = "") -> None:
        self.note = note

    def run(self, gm: GraphModule, context: Context) -> int:
        return 0


class Late(Pass):
    after = ("Early", "EliminatePadding")

    def run(self, gm: GraphModule, context: Context) -> int:
        return 0


def test_user_passes_are_ordered() -> None:
    report = compiled({"passes": (Late(), Early())})
    names = [p.name for p in report.passes]
    built_in = ["Canonicalize", "FuseAttention", "EliminatePadding", "ShareTiles"]
    assert names == ["Early", *built_in, "Late"]


def test_disabled_passes_do_not_run() -> None:
    report = compiled({"passes": (Late(),), "disable": ["Late", "EliminatePadding"]})
    assert [p.name for p in report.passes] == ["Canonicalize", "FuseAttention", "ShareTiles"]
    with pytest.raises(BackendCompilerFailed, match="disable names 'FuseAtention'; the passes are"):
        compiled({"disable": "FuseAtention"})


def test_circle_is_named() -> None:
    class First(Pass):
        after = ("Late",)
        before = ("Early",)

    with pytest.raises(OrderError, match="in a circle: Late -> First -> Early -> Late"):
        ordered([Late(), First(), Early()])
    with pytest.raises(BackendCompilerFailed, match="in a circle"):
        compiled({"passes": (Late(), First(), Early())})


def test_lost_checkpoint_mark_is_named() -> None:
    class Unmarked(Pass):
        def run(self, gm: GraphModule, context: Context) -> int:
            (gelu,) = gm.graph.find_nodes(op="call_function", target=aten.gelu.default)
            with gm.graph.inserting_after(gelu):
                new = gm.graph.call_function(aten.neg.default, (gelu,))
            gelu.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
            new.meta["val"] = gelu.meta["val"]
            return 1

    gm = trace(Checkpointed(), torch.randn(3, 16))
    with pytest.raises(PassError, match="aten.neg lost its checkpoint mark"):
        run_passes(gm, [Unmarked()])


def test_no_cuda_graphs_for_packed_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_code_generation(monkeypatch), gemcompile.record() as report:
        options = {"pack": True, "inductor": {"triton.cudagraphs": True}}
        torch.compile(Encoder(1), backend=gem, options=options)(*batch())
    (site,) = report.of("graph", "declined")
    assert (site.op, site.reason[:15]) == ("CUDA graphs", "the number of p")


def test_two_passes_of_one_name() -> None:
    with pytest.raises(OrderError, match="two passes are named Late"):
        ordered([Late(), Late()])


def test_identity() -> None:
    assert Early("a").identity() == Early("a").identity()
    assert Early("a").identity() != Early("b").identity()
    assert Early().identity() != Late().identity()
    unstable = Early()
    unstable.note = object()  # type: ignore[assignment]
    assert unstable.identity() is None
    assert Options(passes=(unstable,)).identity() is None


def test_capture_failure_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(gm: GraphModule, inputs: Any) -> GraphModule:
        raise RuntimeError("unheard of")

    monkeypatch.setattr(gemcompile.backend, "capture", refuse)
    (site,) = compiled().sites
    assert str(site) == "graph declined: the whole graph because RuntimeError: unheard of"


def test_failure_behind_the_passes_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the packed graph's symbols stand in Dynamo's guards already."""
    model, example = Encoder(1), batch()
    calls: list[int] = []

    def compile_fx(gm: GraphModule, inputs: Any, config_patches: Any) -> Any:
        calls.append(len(inputs))
        if len(calls) == 1:
            # A guard on the packed row count, as code generation makes them.
            groups = next(i for i in inputs[::-1] if isinstance(i, torch.SymInt))
            assert groups * 7 < 10**6
            raise NotImplementedError("no kernel")
        return gm

    monkeypatch.setattr(gemcompile.backend, "compile_fx", compile_fx)
    with gemcompile.record() as report:
        y = torch.compile(model, backend=gem, options={"pack": True})(*example)
    assert_near(y.detach(), model(*example).detach())
    assert calls[0] == calls[1] + 5
    assert [s.reason for s in report.sites] == ["NotImplementedError: no kernel"]


def test_batches_above_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 32-bit indices would not reach, the original graph takes over, with the same result."""
    monkeypatch.setattr("gemcompile.prologue._INT32", 1)  # bound: two groups of 128 rows
    calls: list[str] = []
    real = Prologue.runner

    def runner(self: Prologue, main: Any, beyond: Any) -> Any:
        def seen(name: str, f: Any) -> Any:
            return lambda *args: calls.append(name) or f(*args)

        return real(self, seen("packed", main), seen("original", beyond))

    monkeypatch.setattr(Prologue, "runner", runner)
    model = Encoder(1)
    call = torch.compile(model, backend=gem, dynamic=True, options={"pack": True, "inner": "eager"})
    with gemcompile.record() as report:
        for lengths in ((100, 90), (150, 200), (100, 20)):
            example = batch(lengths, length=200)
            assert_near(call(*example).detach(), model(*example).detach())
    report.expect(padding=1)
    assert report.graphs == 1
    assert calls == ["packed", "original", "packed"]


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("mode", ["train", "no_grad", "inference_mode"])
def test_packed(mode: str, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths change at every step: one graph, results and gradients as in eager mode."""
    model = Encoder(1, "sdpa")
    surround = {"train": nullcontext, "no_grad": torch.no_grad}.get(mode, torch.inference_mode)
    with without_code_generation(monkeypatch), gemcompile.record() as report:
        call = torch.compile(model, backend=gem, dynamic=dynamic, options={"pack": True})
        for lengths in ((5, 2, 9, 1), (1, 1, 1, 1), (12, 12, 12, 12), (7, 1, 3, 12)):
            example = batch(lengths)
            with surround():
                found, expected = call(*example), model(*example)
            assert_near(found.detach(), expected.detach())
            if mode == "train":
                parameters = list(model.parameters())
                ours = torch.autograd.grad(found.square().sum(), parameters)
                theirs = torch.autograd.grad(expected.square().sum(), parameters)
                for a, b in zip(ours, theirs, strict=True):
                    assert_near(a, b)
    report.expect(attention=1, padding=1, graph=0)
    assert report.graphs == 1


# --- verify ---------------------------------------------------------------------------------------


def test_verify_names_the_wrong_pass() -> None:
    model, example = Encoder(1), batch()
    options = {"passes": (Late(), Quieten(), Early()), "verify": True, "inner": "eager"}
    with pytest.raises(BackendCompilerFailed, match="pass Quieten changed output 0: .* beside"):
        torch.compile(model, backend=gem, options={**options, "pack": True})(*example)


def test_verify_sees_gradients() -> None:
    class Detaches(Pass):
        def run(self, gm: GraphModule, context: Context) -> int:
            (output,) = gm.graph.find_nodes(op="output")
            (value,) = output.args[0]
            with gm.graph.inserting_before(output):
                detached = gm.graph.call_function(aten.detach.default, (value,))
            detached.meta.update(value.meta)
            output.args = ((detached,),)
            return 1

    with pytest.raises(BackendCompilerFailed, match="Detaches changed the gradient of input 0"):
        compiled({"passes": (Detaches(),), "verify": True})


def test_verify_accepts_what_is_right() -> None:
    with gemcompile.record() as report:
        for training in (True, False):
            with torch.set_grad_enabled(training):
                torch.compile(
                    Encoder(), backend=gem, options={"pack": True, "verify": True, "inner": "eager"}
                )(*batch())
    report.expect(attention=4, padding=2)


# --- the pass manager and the stamp ---------------------------------------------------------------


def test_pass_records() -> None:
    gm = trace(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4))
    report = run_passes(gm, [Early(), Quieten()])
    early, quieten = report.passes
    assert (early.changes, quieten.changes) == (0, 1)
    assert early.before == early.after == quieten.before
    assert "aten.gelu" in quieten.before and "aten.relu" in quieten.after
    assert quieten.seconds > 0


def test_pass_manager_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="option disable names 'Nobody'; the passes are Early"):
        PassManager([Early()], ["Nobody"])


def test_stamp_keeps_the_users_hook() -> None:
    seen: list[Any] = []
    name = "post_grad_custom_pre_pass"
    hook = stamped(Options(), {name: seen.append})[name]
    hook("graph")
    assert seen == ["graph"]
    assert hook.uuid() is None  # a bare function has no identity
    assert stamped(Options(), {})[name].uuid() is not None
