"""The whole path on a GPU: packed training steps against eager, one synchronisation a step."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from padding_models import Encoder, keep_mask
from torch import Tensor

from gemcompile import gem, record

pytestmark = pytest.mark.cuda


def batch(lens: list[int], length: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, 100, (len(lens), length), device="cuda")
    return ids, torch.tensor(lens, device="cuda")


def gradients(model: nn.Module, call: nn.Module, *args: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = call(*args)
    weight = torch.linspace(0.5, 1.5, out.numel(), device="cuda").view(out.shape)
    (out.float() * weight).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def distances(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Relative distance of each result; results that are next to nothing count by the largest."""
    pairs = list(zip(found, truth, strict=True))
    floor = 1e-3 * max(float(b.double().norm()) for _, b in pairs)
    return [
        float((a.double() - b.double()).norm()) / max(float(b.double().norm()), floor)
        for a, b in pairs
    ]


def check(model: nn.Module, compiled: nn.Module, args: tuple[Tensor, ...], slack: float) -> None:
    """The error against float64 is at most twice eager's, plus a little."""
    exact = copy.deepcopy(model).double()
    truth = gradients(exact, exact, *args)
    ours = distances(gradients(model, compiled, *args), truth)
    eager = distances(gradients(model, model, *args), truth)
    for a, b in zip(ours, eager, strict=True):
        assert a <= 2 * b + slack, (ours, eager)


@pytest.mark.parametrize("style", ["sdpa", "manual", "causal only"])
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
def test_packed_training_equals_eager(style: str, dtype: torch.dtype, slack: float) -> None:
    model = Encoder("mean", style=style, width=64).cuda().to(dtype)
    compiled = torch.compile(model, backend=gem, dynamic=True, options={"pack": True})
    with record() as report:
        for lens, length in (([90, 3, 40, 17], 90), ([200, 0, 1], 200), ([0, 0], 40)):
            args = batch(lens, length)
            if style == "manual" and min(lens) == 0:
                compiled(*args)  # hand-written softmax of nothing is NaN in eager
            else:
                check(model, compiled, args, slack)
    report.expect(attention=2, padding=1)
    assert report.graphs == 1


class Hstu(nn.Module):
    """SiLU attention, masked sum: GDPA on the way to the portable kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(100, 64), nn.Linear(64, 192)

    def forward(self, ids: Tensor, lens: Tensor) -> Tensor:
        b, n = ids.shape
        keep = keep_mask(lens, n)
        x = self.embed(ids)
        q, k, v = (t.view(b, n, 2, 32).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        a = F.silu(q @ k.mT) / n
        a = a.masked_fill(~keep[:, None, None, :], 0.0)
        y = (a @ v).transpose(1, 2).flatten(2)
        return ((x + y) * keep[..., None]).sum(1)


def test_silu_attention_under_autocast() -> None:
    model = Hstu().cuda()
    compiled = torch.compile(model, backend=gem, dynamic=True, options={"pack": True})
    args = batch([70, 5, 33], 70)
    with torch.autocast("cuda", dtype=torch.bfloat16), record() as report:
        found, expected = gradients(model, compiled, *args), gradients(model, model, *args)
    report.expect(attention=1, padding=1)
    assert max(distances(found, expected)) < 6e-2


def test_one_synchronisation_a_step() -> None:
    model = Encoder("mean", width=64).cuda()
    compiled = torch.compile(model, backend=gem, dynamic=True, options={"pack": True})
    args = batch([90, 3, 40], 90)
    for _ in range(2):
        compiled(*args).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            compiled(*args).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in seen if "synchroniz" in str(w.message)]) == 1
