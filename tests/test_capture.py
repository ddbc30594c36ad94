"""Capture: everyday models under gem behave as with stock Inductor, and as in eager mode."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from everyday_models import (
    MODELS,
    AutocastIsland,
    Breaks,
    Checkpointed,
    FeedForward,
    rows,
)
from observe import Observation, assert_equal, assert_near, observe, without_code_generation
from torch import nn

import gemcompile
from gemcompile import gem
from gemcompile.graph import text
from gemcompile.report import source_line
from gemcompile.testing import trace

# Where what Inductor writes is part of the question: output strides, aliases, buffers, casts.
GENERATED = ["autocast_region", "checkpointed", "buffers", "output_strided", "output_aliases"]


@functools.cache
def eager(name: str, mode: str) -> list[Observation]:
    return observe(MODELS[name], None, mode)


def options(name: str, **more: Any) -> dict[str, Any]:
    """Attention dropout keeps the model's random stream only where attention is not rewritten."""
    disable = ("FuseAttention",) if MODELS[name]().random_attention else ()
    return {"disable": disable, **more}


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = MODELS[name]()
    with without_code_generation(monkeypatch) as stock:
        expected = observe(MODELS[name], stock)
        for dynamic in (None, True):
            with gemcompile.record() as report:
                found = observe(MODELS[name], gem, dynamic=dynamic, options=options(name))
            assert report.graphs == case.graphs
            reasons = [s.reason for s in report.of("graph", "declined")]
            assert all(case.falls_back and case.falls_back in r for r in reasons), reasons
            assert bool(reasons) == bool(case.falls_back)
            assert_equal(found, expected, case.low_precision)
            if not case.eager_differs:
                assert_equal(found, eager(name, "train"), case.low_precision)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str, mode: str) -> None:
    found = observe(MODELS[name], gem, mode, options=options(name, inner="eager"))
    # Under torch 2.11 Dynamo itself gives nn.MultiheadAttention's result other strides than eager.
    strides = not name.startswith("mha") or torch.__version__ >= "2.13"
    assert_equal(found, eager(name, mode), MODELS[name]().low_precision, strides)


@pytest.mark.parametrize("name", GENERATED)
def test_training_with_generated_code(name: str) -> None:
    expected = observe(MODELS[name], "inductor")
    found = observe(MODELS[name], gem, options=options(name))
    assert_equal(found, expected, MODELS[name]().low_precision)


# --- loops around the model ----------------------------------------------------------------------


def test_amp_loop_with_grad_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(backend: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = FeedForward()
        call = torch.compile(model, backend=backend) if backend else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = call(torch.randn(3, 8, 16)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        return losses + [p.detach() for p in model.parameters()]

    with without_code_generation(monkeypatch) as stock:
        found, expected = train(gem), train(stock)
    for x, y, z in zip(found, expected, train(None)):
        assert_near(x, y)
        assert_near(x, z, 2e-2)


def test_train_and_eval_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(backend: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        call = torch.compile(model, backend=backend) if backend else model
        seen = []
        for training in (True, False, True, False):
            model.train(training)
            with torch.set_grad_enabled(training):
                y = call(torch.randn(4, 8))
            if training:
                y.square().sum().backward()
            seen.append(y.detach())
        return [*seen, *(p.grad for p in model.parameters()), *model.buffers()]

    with without_code_generation(monkeypatch), torch._inductor.config.patch(fallback_random=True):
        found = run(gem)
    for x, y in zip(found, run(None), strict=True):
        assert_near(x, y)


def test_state_dict_keys_stay() -> None:
    model = FeedForward()
    before = list(model.state_dict())
    call = torch.compile(model, backend=gem, options={"inner": "eager"})
    call(torch.randn(3, 8, 16))
    assert list(model.state_dict()) == before
    assert list(call.state_dict()) == list(torch.compile(model).state_dict())


def test_fullgraph() -> None:
    eager = {"inner": "eager"}
    x = torch.randn(3, 8, 16)
    model = FeedForward()
    y = torch.compile(model, backend=gem, fullgraph=True, options=eager)(x)
    torch.testing.assert_close(y, model(x))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        torch.compile(Breaks(), backend=gem, fullgraph=True, options=eager)(rows())


# --- what the captured graph holds ---------------------------------------------------------------


def test_whole_operators_and_source_lines() -> None:
    gm = trace(FeedForward(), torch.randn(3, 8, 16))
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert [n.target for n in calls][:4] == [
        torch.ops.aten.linear.default,
        torch.ops.aten.layer_norm.default,
        torch.ops.aten.gelu.default,
        torch.ops.aten.linear.default,
    ]
    assert all(source_line(n).startswith("everyday_models.py:") for n in calls)


def test_autocast_regions_are_entered() -> None:
    gm = trace(AutocastIsland(), torch.randn(3, 8, 16))
    dtypes = {n.target: n.meta["val"].dtype for n in gm.graph.nodes if "matmul" in str(n.target)}
    assert dtypes == {torch.ops.aten.matmul.default: torch.float32}
    linears = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert {n.meta["val"].dtype for n in linears} == {torch.bfloat16}
    assert text(gm).count("_enter_autocast") == text(gm).count("_exit_autocast") == 2


def test_checkpointed_bodies_are_inlined_and_marked() -> None:
    gm = trace(Checkpointed(), rows(3, 16))
    marked = [n.target for n in gm.graph.nodes if "recompute" in n.meta]
    assert marked.count(torch.ops.aten.linear.default) == 2
    (add,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert "recompute" not in add.meta


@pytest.mark.parametrize("name", ["selective_checkpoint", "autograd_function", "conditional"])
def test_opaque_leaves(name: str) -> None:
    case = MODELS[name]()
    gm = trace(case.model, *case.args)
    leaves = [n for n in gm.graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)]
    assert len(leaves) == 1


def test_tensor_subclass_is_worked_around() -> None:
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2).sin() + x, torch.relu(w @ w)

    x, w = two(torch.randn(4), torch.randn(4)), torch.randn(3, 3)
    found = torch.compile(f, backend=gem, fullgraph=True)(x, w)
    for a, b in zip(found, f(x, w)):
        assert type(a) is type(b)
        torch.testing.assert_close(getattr(a, "a", a), getattr(b, "a", b))
        torch.testing.assert_close(getattr(a, "b", a), getattr(b, "b", b))


def test_python_floats_do_not_compile_twice() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4), nn.LayerNorm(4), nn.Dropout(0.1))
    with gemcompile.record() as report:
        torch.compile(model, backend=gem, dynamic=True, options={"inner": "eager"})(
            torch.zeros(3, 5, dtype=torch.long)
        )
    assert report.graphs == 1
