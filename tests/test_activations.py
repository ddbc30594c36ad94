"""Activations that users register; tests/kernel_cases.py runs one on every kernel."""

from __future__ import annotations

import own_activation
import pytest
import torch

from gemcompile.lowering import attention_triton
from gemcompile.ops import Activation, jagged_attention, register_activation
from gemcompile.ops.activations import ELEMENTWISE
from gemcompile.ops.attention_args import AttentionRequest
from gemcompile.target import Target


def test_attention_with_a_registered_activation() -> None:
    q, k, v = torch.randn(3, 7, 2, 8)
    offsets = torch.tensor([0, 3, 7])
    out = jagged_attention(q, k, v, offsets, activation=own_activation.NAME, scale=0.5)
    scores = own_activation.forward(torch.einsum("ihd,jhd->hij", q[3:], k[3:]) * 0.5)
    torch.testing.assert_close(out[3:], torch.einsum("hij,jhd->ihd", scores, v[3:]))


def test_it_works_in_a_compiled_model() -> None:
    def model(q: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return jagged_attention(q, q, q, offsets, activation=own_activation.NAME).sum()

    q, offsets = torch.randn(7, 2, 8, requires_grad=True), torch.tensor([0, 3, 7])
    (ours,) = torch.autograd.grad(torch.compile(model, backend="aot_eager")(q, offsets), q)
    (theirs,) = torch.autograd.grad(model(q, offsets), q)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("name", "activation", "complaint"),
    [
        ("gelu", Activation(torch.tanh, own_activation.backward), "'gelu' is there already"),
        ("softmax", Activation(torch.tanh, own_activation.backward), "'softmax' is there already"),
        ("mine", Activation(torch.tanh, own_activation.backward), "at x = -4.000 backward gives"),
        ("mine", Activation(torch.cos, lambda g, x: -g * x.sin()), "f\\(0\\) is 1.0000"),
    ],
)
def test_what_is_refused(name: str, activation: Activation, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        register_activation(name, activation)
    assert "mine" not in ELEMENTWISE


def test_unknown_names_are_told_what_there_is() -> None:
    q = torch.randn(3, 1, 8)
    with pytest.raises(ValueError, match="quick_gelu, or registered by register_activation; got"):
        jagged_attention(q, q, q, torch.tensor([0, 3]), activation="gelux")


def test_without_a_triton_function_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        ELEMENTWISE, "plain", Activation(own_activation.forward, own_activation.backward)
    )
    request = AttentionRequest(torch.float32, 1, 1, 8, 8, "plain", False)
    reason = attention_triton.supports(Target("cuda", 90), request)
    assert reason == "activation 'plain' was registered without a Triton function"
