"""Every spelling of attention on a GPU: gem's kernels against eager in float64, in bfloat16.

What each becomes is settled on CPU (test_attention_spellings); here the kernels that the target's
own choice gives meet the masks, biases and layouts that users write.
"""

from __future__ import annotations

import attention_spellings as spellings
import attention_spellings_places as places
import attention_spellings_wider as wider
import pytest
import torch
from attention_helpers import results
from torch import Tensor

from gemcompile import gem, record

pytestmark = pytest.mark.cuda


SLACK = {torch.bfloat16: 1e-2, torch.float32: 1e-3}


def inputs(dtype: torch.dtype, lengths: list[int]) -> list[Tensor]:
    shape = (len(lengths), max(lengths), spellings.WIDTH)
    rows = [torch.randn(shape, dtype=dtype, device="cuda").requires_grad_() for _ in range(3)]
    return [*rows, torch.tensor(lengths, device="cuda")]


def exact(args: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in args]


def distance(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm().clamp(min=1e-2))


def in_eager(fn: spellings.Spelling, lengths: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """(arguments, results) in bfloat16, or in float32 where the spelling mixes types."""
    for dtype in SLACK:
        args = inputs(dtype, lengths)
        try:
            return args, results(fn, args)
        except RuntimeError as e:
            refused = str(e)
    pytest.skip(f"eager runs it on CPU only: {refused}")


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (spellings, places, wider):
        monkeypatch.setattr(module, "DEVICE", "cuda")


@pytest.mark.parametrize("name", [*spellings.REWRITTEN, *places.DENSE])
def test_spelling_is_as_exact_as_eager(name: str) -> None:
    fn = spellings.REWRITTEN[name] if name in spellings.REWRITTEN else places.DENSE[name][0]
    torch._dynamo.reset()
    torch.manual_seed(0)
    args, eager = in_eager(fn, [16, 9, 5, 1])
    with record() as report:
        ours = results(torch.compile(fn, backend=gem, dynamic=True), args)
    report.expect(attention=1)
    for a, b, c in zip(ours, eager, results(fn, exact(args)), strict=True):
        assert distance(a, c) <= 2 * distance(b, c) + SLACK[args[0].dtype]
