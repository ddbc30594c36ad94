"""gem.bisect finds the pass and the place that change a model's result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from encoders import Encoder, batch
from torch import Tensor, nn
from torch.fx import GraphModule

import gemcompile as gem
from gemcompile.graph import Editor
from gemcompile.match import calls
from gemcompile.pass_manager import Context

aten = torch.ops.aten


class Same(gem.Rewrite):
    """A right pass: silu written out."""

    @staticmethod
    def pattern(x: Tensor) -> Tensor:
        return F.silu(x)

    @staticmethod
    def replacement(x: Tensor) -> Tensor:
        return x * x.sigmoid()


class AlsoSame(gem.Rewrite):
    """Another right one."""

    @staticmethod
    def pattern(x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def replacement(x: Tensor) -> Tensor:
        return 2 * torch.sigmoid(2 * x) - 1


class Crude(gem.Pass):
    """Writes every gelu anew, which is right, but those of 24 columns as relu, which is wrong."""

    after = ("Same",)
    before = ("AlsoSame",)

    def run(self, gm: GraphModule, context: Context) -> int:
        changes = 0
        for i, n in enumerate(calls(gm, aten.gelu)):
            wrong = n.args[0].meta["val"].shape[-1] == 24
            op = aten.relu.default if wrong else aten.gelu.default
            new = Editor(gm, like=n)(op, n.args[0])
            context.report.add("linear", "rewritten", f"change {i}", "", n)
            n.replace_all_uses_with(new)
            gm.graph.erase_node(n)
            changes += 1
        return changes


class Mixed(nn.Module):
    """Four gelus; the pass above makes the third one wrong."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (16, 16, 16, 24, 16)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        x = F.gelu(a(x))
        x = F.gelu(b(F.silu(x)))
        x = F.gelu(c(x))  # the wrong one
        return torch.tanh(F.gelu(d(x)))


LINES = Path(__file__).read_text().splitlines()
THIRD = f"test_bisect.py:{next(i for i, s in enumerate(LINES, 1) if s.endswith('# the wrong one'))}"


def test_pass_and_site_are_found() -> None:
    model, x = Mixed(), torch.randn(3, 16)
    options = {"passes": [Same(), Crude(), AlsoSame()]}
    found = gem.bisect(model, [x], options=options)
    assert (found.guilty, found.op, found.where) == ("Crude", "aten.gelu", THIRD)
    assert found.site is not None and found.site.op == "change 2"
    assert found.difference.startswith(("output 0 differs, ", "the gradient of "))
    assert found.switch_off == 'options={"disable": ["Crude"]}'
    assert found.compiles < 15
    text = str(found)
    assert text.startswith("pass Crude changes the result: ")
    assert f"  site      aten.gelu at {THIRD}\n" in text
    assert '  leave it out with options={"disable": ["Crude"]}' in text
    # And what it says is so.
    assert gem.bisect(model, [x], options={**options, "disable": ["Crude"]}).guilty is None


def test_right_passes_are_acquitted() -> None:
    found = gem.bisect(Mixed(), [torch.randn(3, 16)], options={"passes": [Same(), AlsoSame()]})
    assert found.guilty is None and found.compiles == 2
    assert str(found).startswith("no pass changes the result")


def test_tolerance_and_loss() -> None:
    class Near(Same):
        @staticmethod
        def replacement(x: Tensor) -> Tensor:
            return x * x.sigmoid() * 1.001

    args, options = [torch.randn(3, 16)], {"passes": [Near()]}
    assert gem.bisect(Mixed(), args, options=options).guilty == "Near"
    assert gem.bisect(Mixed(), args, options=options, tolerance=0.1).guilty is None

    class Detached(Same):
        @staticmethod
        def replacement(x: Tensor) -> Tensor:
            return F.silu(x.detach())

    found = gem.bisect(Mixed(), args, options={"passes": [Detached()]}, loss=lambda y: y.mean())
    assert found.guilty == "Detached" and found.op == "aten.silu"
    assert found.difference.startswith("the gradient of layers.0.")


def test_packed_model_that_draws() -> None:
    """Behind gem's own passes, with dropout: draws are fixed, and the reference is gem's graph."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder(1)

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            return F.dropout(self.encoder(ids, lengths), 0.5).sigmoid()

    class Wrong(gem.Pass):
        after = ("EliminatePadding",)

        def run(self, gm: GraphModule, context: Context) -> int:
            for n in calls(gm, aten.gelu):
                n.target, n.kwargs = aten.relu.default, {}
            return 1

    model = Model()
    found = gem.bisect(model, batch(), options={"pack": True, "passes": [Wrong()]})
    assert (found.guilty, found.op) == ("Wrong", "aten.gelu")
    assert found.where.startswith("encoders.py:")


class Raises(gem.Pass):
    def run(self, gm: GraphModule, context: Context) -> int:
        raise ValueError("not today")


def test_failing_passes_are_named() -> None:
    found = gem.bisect(Mixed(), [torch.randn(3, 16)], options={"passes": [Raises()]})
    assert found.guilty is None
    assert found.left_out and "ValueError: not today" in found.left_out[0]
    assert "  left out  pass Raises failed after " in str(found)


def test_a_pass_that_is_wrong_everywhere_has_no_site() -> None:
    class Shifts(gem.Pass):
        def run(self, gm: GraphModule, context: Context) -> int:
            (output,) = gm.graph.find_nodes(op="output")
            (value,) = output.args[0]
            edit = Editor(gm, like=value, before=output)
            output.args = ((edit(aten.add.Tensor, value, 1),),)
            return 1

    found = gem.bisect(Mixed(), [torch.randn(3, 16)], options={"passes": [Shifts()]})
    assert (found.guilty, found.op, found.site) == ("Shifts", "", None)


def test_nothing_is_changed() -> None:
    model, x = Mixed(), torch.randn(3, 16, requires_grad=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    gem.bisect(model, [x], options={"passes": [Crude()]})
    assert torch.equal(state, torch.get_rng_state())
    assert x.grad is None and all(p.grad is None for p in model.parameters())
    for k, v in model.state_dict().items():
        torch.testing.assert_close(v, before[k], rtol=0, atol=0)


def test_wrong_before_any_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    import gemcompile.backend

    real = gemcompile.backend.capture

    def wrong(gm: GraphModule, inputs: Any) -> GraphModule:
        aten_graph = real(gm, inputs)
        for n in calls(aten_graph, aten.tanh):
            n.target = aten.sigmoid.default
        aten_graph.recompile()
        return aten_graph

    monkeypatch.setattr(gemcompile.backend, "capture", wrong)
    found = gem.bisect(Mixed(), [torch.randn(3, 16)])
    assert found.guilty == "capture" and "GEM_DISABLE=1" in str(found)
