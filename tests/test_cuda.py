"""The whole path on a GPU: packed training steps against eager, one synchronisation a step."""

from __future__ import annotations

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
    (
        out.float() * torch.linspace(0.5, 1.5, out.numel(), device="cuda").view(out.shape)
    ).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest relative distance of the output and of the gradients."""
    pairs = list(zip(found, expected, strict=True))
    scale = max(float(b.float().norm()) for _, b in pairs)
    return max(
        float((a.float() - b.float()).norm()) / max(float(b.float().norm()), 1e-3 * scale)
        for a, b in pairs
    )


@pytest.mark.parametrize("style", ["sdpa", "manual", "causal only"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 6e-2)])
def test_packed_training_equals_eager(style: str, dtype: torch.dtype, tolerance: float) -> None:
    model = Encoder("mean", style=style, width=64).cuda().to(dtype)
    compiled = torch.compile(model, backend=gem, dynamic=True, options={"pack": True})
    with record() as report:
        for lens, length in (([90, 3, 40, 17], 90), ([200, 0, 1], 200), ([0, 0], 40)):
            args = batch(lens, length)
            found, expected = gradients(model, compiled, *args), gradients(model, model, *args)
            if style == "sdpa" or min(lens) > 0:  # hand-written softmax of nothing is NaN in eager
                assert distance(found, expected) < tolerance
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
    assert distance(found, expected) < 6e-2


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
    assert len([w for w in seen if "synchroniz" in str(w.message)]) <= 1
