"""Activation checkpoints and autocast islands: rewritten too, recomputed and rounded as before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from encoders import Encoder, batch
from everyday_models import AutocastIsland
from functorch.compile import make_boxed_func
from observe import assert_near
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule, Node

import gemcompile.backend
from gemcompile import Report, gem, record

ATTENTION = ("gem.jagged_attention", "aten._scaled_dot_product_flash_attention_for_cpu")


class Compiled:
    """Trains a model for one step without code generation; keeps forward and backward graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: nn.Module, *args: Tensor) -> None:
        self.monkeypatch, self.model, self.args = monkeypatch, model, args
        self.graphs: list[GraphModule] = []

    def __call__(self, backend: Any = None, **options: Any) -> Report:
        def keep(gm: GraphModule, example_inputs: Any, **_: Any) -> Any:
            self.graphs.append(gm)
            return make_boxed_func(gm.forward)

        def stock(gm: GraphModule, example_inputs: Any, **how: Any) -> Any:
            return compile_fx(gm, example_inputs, inner_compile=keep, **how)

        torch._dynamo.reset()
        self.model.zero_grad()
        self.graphs.clear()
        with record() as report, self.monkeypatch.context() as patch:
            patch.setattr(gemcompile.backend, "compile_fx", stock)
            if backend is gem:
                call = torch.compile(self.model, backend=gem, options=options)
            else:
                call = torch.compile(self.model, backend=stock)
            y = call(*self.args)
            y.square().sum().backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.results = [y.detach(), *grads]
        return report

    def count(self, operators: tuple[str, ...]) -> list[int]:
        """How often forward and backward graph call an operator, random ones through a wrapper."""
        return [sum(_calls(n) in operators for n in gm.graph.nodes) for gm in self.graphs]


def _calls(n: Node) -> str:
    target = n.target
    if isinstance(target, torch._ops.HigherOrderOperator):  # run_and_save_rng_state and its kind
        target = next((a for a in n.args if isinstance(a, torch._ops.OpOverload)), target)
    return str(target).removesuffix(".default")


@pytest.mark.parametrize("checkpointed", [False, True])
def test_packed_through_checkpoints(checkpointed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Encoder(2, "sdpa", checkpointed=checkpointed)
    step = Compiled(monkeypatch, model, *batch())
    matmuls = ("aten.mm", "aten.addmm", "aten.bmm")

    step()
    expected = step.results
    stock = [step.count(ops) for ops in (ATTENTION, matmuls, ("aten.erf",))]
    report = step(gem, pack=True)
    ours = [step.count(ops) for ops in (ATTENTION, matmuls, ("aten.erf",))]

    report.expect(attention=2, padding=1)
    assert report.of("padding")[0].details["packs"] == 1
    assert ours == stock
    assert ours[0] == ([2, 2] if checkpointed else [2, 0])
    for a, b in zip(step.results, expected, strict=True):
        assert_near(a, b)


def test_handwritten_attention_in_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Encoder(2, "masked_fill", checkpointed=True)
    step = Compiled(monkeypatch, model, *batch())
    step(gem, pack=True).expect(attention=2, padding=1)
    assert step.count(ATTENTION) == [2, 2]
    model.checkpointed = False
    found = step.results
    step()
    for a, b in zip(found, step.results, strict=True):
        assert_near(a, b)


# --- autocast -------------------------------------------------------------------------------------


def products(gm: GraphModule) -> Counter[tuple[str, torch.dtype]]:
    """The matrix products of a graph and what they are computed in."""
    names = ("aten.mm", "aten.addmm", "aten.bmm")
    calls = [n for n in gm.graph.nodes if _calls(n) in names]
    return Counter((_calls(n), n.meta["val"].dtype) for n in calls)


def test_island_keeps_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: the same products in the same precision as stock Inductor."""
    step = Compiled(monkeypatch, AutocastIsland(), torch.randn(3, 8, 16))
    step()
    expected, stock = step.results, [products(gm) for gm in step.graphs]
    step(gem, disable=("FuseAttention",))
    assert [products(gm) for gm in step.graphs] == stock
    assert all({dtype for _, dtype in p} == {torch.float32, torch.bfloat16} for p in stock)
    for a, b in zip(step.results, expected, strict=True):
        assert_near(a, b)


def test_attention_in_an_island_is_fused_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Compiled(monkeypatch, AutocastIsland(), torch.randn(3, 8, 16))
    step(gem).expect(attention=1)
    names = ("gem.jagged_attention", "gem.jagged_attention_backward")
    calls = [n for gm in step.graphs for n in gm.graph.nodes if _calls(n) in names]
    assert [_calls(n) for n in calls] == list(names)
    for n in calls:
        inputs = [i.meta["val"] for i in n.all_input_nodes]
        assert {t.dtype for t in inputs if t.is_floating_point()} == {torch.float32}
    found = step.results
    step()
    for a, b in zip(found, step.results, strict=True):
        assert_near(a, b, 2e-2)
