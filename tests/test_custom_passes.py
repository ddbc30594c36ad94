"""Passes of users: a failing one is named and left out, their options count in the caches' key."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from encoders import Encoder, Layer, batch
from observe import assert_near
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule

import gemcompile
from gemcompile import Options, Pass, Report, gem
from gemcompile.graph import Editor
from gemcompile.pass_manager import Context, PassError
from gemcompile.testing import run_passes, trace

aten = torch.ops.aten


def compiled(*passes: Pass, **options: Any) -> Report:
    """Compile a small model with these passes, without code generation, and check its result."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4)
    with gemcompile.record() as report:
        chosen = {"inner": "eager", "passes": passes, **options}
        y = torch.compile(model, backend=gem, options=chosen)(x)
    torch.testing.assert_close(y, model(x))
    return report


def last(gm: GraphModule) -> tuple[Any, Any]:
    """The output node and its first value."""
    (output,) = gm.graph.find_nodes(op="output")
    return output, output.args[0][0]


# --- passes that fail -----------------------------------------------------------------------------


class Raises(Pass):
    def run(self, gm: GraphModule, context: Context) -> int:
        context.report.add("linear", "rewritten", "never")
        raise KeyError("no such node")


class OutOfOrder(Pass):
    """Leaves a node before its input."""

    def run(self, gm: GraphModule, context: Context) -> int:
        first = next(n for n in gm.graph.nodes if n.op == "call_function")
        first.args = (last(gm)[1], *first.args[1:])
        return 1


class Valueless(Pass):
    def run(self, gm: GraphModule, context: Context) -> int:
        output, value = last(gm)
        with gm.graph.inserting_before(output):
            output.args = ((gm.graph.call_function(aten.neg.default, (value,)),),)
        return 1


class AddsAnInput(Pass):
    def run(self, gm: GraphModule, context: Context) -> int:
        inputs = gm.graph.find_nodes(op="placeholder")
        with gm.graph.inserting_after(inputs[-1]):
            gm.graph.placeholder("stray")
        return 1


class DropsAnInput(Pass):
    def run(self, gm: GraphModule, context: Context) -> int:
        bias = gm.graph.find_nodes(op="placeholder")[1]
        (linear,) = bias.users
        linear.args = linear.args[:2]
        gm.graph.erase_node(bias)
        return 1


class TwoOutputs(Pass):
    def run(self, gm: GraphModule, context: Context) -> int:
        output, value = last(gm)
        output.args = ((value, value),)
        return 1


class OtherType(Pass):
    def run(self, gm: GraphModule, context: Context) -> int:
        output, value = last(gm)
        edit = Editor(gm, like=value, before=output)
        output.args = ((edit(aten.to.dtype, value, torch.float64),),)
        return 1


class OtherShape(Pass):
    def run(self, gm: GraphModule, context: Context) -> int:
        output, value = last(gm)
        output.args = ((Editor(gm, like=value, before=output)(aten.t.default, value),),)
        return 1


class SaysNothing(Pass):
    def run(self, gm: GraphModule, context: Context) -> int:
        return None  # type: ignore[return-value]


BROKEN = {
    Raises: "KeyError: 'no such node'",
    OutOfOrder: "it left the graph out of order: Argument",
    Valueless: "neg_default = aten.neg has no value; insert nodes with gemcompile.graph.Editor",
    AddsAnInput: "it added the input stray, which nobody supplies",
    DropsAnInput: "it removed the input",
    TwoOutputs: "it left 2 outputs instead of 1",
    OtherType: "it made output 0 f64[2, 4] instead of f32[2, 4]",
    OtherShape: "it made output 0 f32[4, 2] instead of f32[2, 4]",
    SaysNothing: "its run() returned None instead of the number of changes",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_failing_pass_is_named_and_left_out(
    broken: type[Pass], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gemcompile"):
        report = compiled(broken())
    (site,) = report.sites
    assert (site.kind, site.status, site.op) == ("graph", "declined", f"pass {broken.__name__}")
    own = "Canonicalize, FuseAttention, EliminatePadding, ShareTiles"
    start = f"pass {broken.__name__} failed after {own}: {BROKEN[broken]}"
    assert site.reason.startswith(start) and "\n" not in site.reason
    assert broken.__name__ not in [p.name for p in report.passes]
    assert f"the graph before {broken.__name__}:\n%0 = input : f32[4, 4]" in caplog.text


@pytest.mark.parametrize("broken", BROKEN)
def test_strict_raises(broken: type[Pass]) -> None:
    gm = trace(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4), dynamic=False)
    with pytest.raises(PassError, match=f"pass {broken.__name__} failed after no other pass") as e:
        run_passes(gm, [broken()])
    assert e.value.culprit == broken.__name__
    assert "aten.gelu" in e.value.before
    assert BROKEN[broken] in e.value.reason


def test_strict_raises_with_the_traceback() -> None:
    with pytest.raises(
        BackendCompilerFailed, match="pass Raises failed .* KeyError: 'no such"
    ) as e:
        compiled(Raises(), strict=True)
    message = str(e.value)
    assert 'raise KeyError("no such node")' in message and "test_custom_passes.py" in message
    assert "pass_manager.py" not in message.split("the graph before")[0]


def test_two_failing_passes_are_both_left_out() -> None:
    report = compiled(Raises(), TwoOutputs())
    assert [s.op for s in report.sites] == ["pass Raises", "pass TwoOutputs"]


def test_the_other_passes_still_rewrite() -> None:
    """A packed graph was ready when the pass behind it failed: it is made once more."""
    model = Encoder(1)
    with gemcompile.record() as report:
        options = {"pack": True, "passes": (Raises(),), "inner": "eager"}
        call = torch.compile(model, backend=gem, options=options)
        for lengths in ((5, 2, 9, 1), (12, 12, 12, 12)):
            example = batch(lengths)
            assert_near(call(*example).detach(), model(*example).detach())
    report.expect(attention=1, padding=1, linear=0)
    assert report.graphs == 1
    assert [s.op for s in report.sites if s.status == "declined"] == ["pass Raises"]


def test_a_long_graph_is_shortened_in_the_message() -> None:
    def long(x: torch.Tensor) -> torch.Tensor:
        for _ in range(300):
            x = x + 1
        return x

    with pytest.raises(PassError, match="102 more lines; PassError.before holds all") as e:
        run_passes(trace(long, torch.randn(2), dynamic=False), [Raises()])
    assert len(e.value.before.splitlines()) == 302


# --- what counts in the caches' key ---------------------------------------------------------------

SOURCE = """
from gemcompile import Pass

class Mine(Pass):
    def __init__(self, strength=1):
        self.strength = strength

    def run(self, gm, context):
        return 0
"""


def load(path: Path, source: str) -> Any:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mine", path)
    assert spec and spec.loader
    loaded = sys.modules["mine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def key(p: Pass) -> Any:
    return Options(passes=(p,)).identity()


def test_a_passs_options_and_source_are_part_of_the_key(tmp_path: Path) -> None:
    mine = load(tmp_path / "mine.py", SOURCE)
    first = key(mine.Mine())
    assert first is not None
    assert first == key(mine.Mine(1)) != key(mine.Mine(2))
    edited = load(tmp_path / "mine.py", SOURCE.replace("return 0", "return 0  # edited"))
    assert key(edited.Mine()) != first


# --- verify ---------------------------------------------------------------------------------------


class Halves(Pass):
    """Halves the first gelu, which is wrong."""

    after = ("EliminatePadding",)

    def run(self, gm: GraphModule, context: Context) -> int:
        for n in gm.graph.find_nodes(op="call_function", target=aten.gelu.default)[:1]:
            half = Editor(gm, like=n, before=n.next)(aten.mul.Tensor, n, 0.5)
            n.replace_all_uses_with(half, delete_user_cb=lambda user, half=half: user is not half)
            return 1
        return 0


class Dropping(Layer):
    """Drops attention weights and rows, which are packed: less is drawn than in eager mode."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        visible = keep[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=0.5)
        return F.dropout(y, 0.5)


class Random(nn.Module):
    """Draws in many ways, in front of padding that is packed away."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(1)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        y = F.dropout(self.encoder(ids, lengths), 0.5)
        noise = torch.randn_like(y) * torch.rand(y.shape) + torch.randint(0, 5, y.shape)
        order = torch.randperm(y.shape[0])
        z: Tensor = (y + noise + torch.bernoulli(torch.full_like(y, 0.5)))[order]
        return F.gelu(z + torch.empty_like(z).uniform_(1, 2))


def verified(model: nn.Module, *passes: Pass, **options: Any) -> Report:
    with gemcompile.record() as report:
        chosen = {"inner": "eager", "verify": True, "pack": True, "passes": passes, **options}
        torch.compile(model, backend=gem, options=chosen)(*batch())
    return report


@pytest.mark.parametrize("kind", ["dropout", "many draws"])
def test_verify_compares_graphs_that_draw(kind: str) -> None:
    model = Random() if kind == "many draws" else Encoder(1)
    if kind == "dropout":
        model.layers[0].__class__ = Dropping
    report = verified(model)
    report.expect(attention=1, padding=1)
    assert report.of("graph", "declined") == []
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="pass Halves changed output 0: .* draws fixed"):
        verified(model, Halves())


def test_verify_says_when_it_cannot() -> None:
    class Unfixed(nn.Module):
        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            return F.rrelu(F.gelu(ids.float()), training=True)

    reason = "results cannot be compared: the graph calls aten.rrelu, whose random result cannot"
    (site,) = verified(Unfixed(), Halves()).sites
    assert site.op == "verify" and site.reason.startswith(reason)
    torch._dynamo.reset()
    sites = verified(Encoder(1), padded_outputs="zero").of("graph", "declined")
    assert [s.reason[28:] for s in sites] == ["padded_outputs='zero' asks for other results"]
