"""Write a matcher: RMS norm in several spellings becomes torch's own operator.

    python examples/howto/write_a_matcher.py

A pattern is a plain function. What is left to write is the condition under which the replacement
is right, as a sentence where it does not hold.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemcompile as gem
from gemcompile.match import Match
from gemcompile.pass_manager import Context


def by_power(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x * x).mean(-1, keepdim=True).add(eps).rsqrt() * weight


def by_division(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class FuseRMSNorm(gem.Rewrite):
    """x * rsqrt(mean(x^2) + eps) * weight  ->  aten.rms_norm(x, weight, eps)"""

    @staticmethod
    def pattern(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    spellings = (by_power, by_division)

    @staticmethod
    def replacement(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def check(self, m: Match, context: Context) -> str | None:
        weight = m.value("weight")
        if weight.dim() != 1:
            return f"the weight has {weight.dim()} dimensions instead of one"
        if m["eps"] <= 0:
            return "eps is not positive"
        return None


class Norm(nn.Module):
    """One spelling of RMS norm."""

    def __init__(self, spelling: str, shape: tuple[int, ...] = (16,)) -> None:
        super().__init__()
        self.spelling, self.weight = spelling, nn.Parameter(torch.rand(shape))

    def forward(self, x: Tensor) -> Tensor:
        if self.spelling == "divide":
            return self.weight * (x / (1e-5 + x.square().mean(dim=-1, keepdim=True)).sqrt())
        if self.spelling == "power":
            return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        scale = torch.rsqrt(x.pow(2).mean(dim=x.dim() - 1, keepdim=True) + 1e-6)
        return self.weight * (scale * x)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16)
    model = nn.Sequential(Norm("rsqrt"), nn.Linear(16, 16), Norm("power"), Norm("rsqrt", (8, 16)))

    # Where does the pattern stand? `find` proves that what it yields may be replaced.
    graph = gem.testing.trace(model, x, dynamic=False)
    for m in gem.match.find(graph, FuseRMSNorm.patterns):
        print(f"found at {m.where}: eps {m['eps']}, weight {list(m.value('weight').shape)}")

    # Two places are rewritten, values and gradients stay; the third one has the wrong weight.
    done = gem.testing.assert_same(FuseRMSNorm(), model, x, changes=2)
    assert done.refusals == ["the weight has 2 dimensions instead of one"]
    print(f"\n{done.text}\n")

    # The square is not a power here: no spelling is written like this, so that nothing matches.
    done = gem.testing.rewrite(FuseRMSNorm(), Norm("divide"), x)
    assert done.changes == 0 and done.refusals == []

    # In a compile (backend="gem" where gemcompile is installed), with sizes that change: nothing is
    # compiled again.
    options: dict[str, Any] = {"passes": [FuseRMSNorm()], "inner": "eager"}
    compiled = torch.compile(model, backend=gem.gem, dynamic=True, options=options)
    with gem.record() as report:
        for batch in (2, 3, 7):
            y = torch.randn(batch, 8, 16)
            torch.testing.assert_close(compiled(y), model(y))
    assert report.graphs == 1
    print(report)
    print("ok: two spellings became aten.rms_norm, one place was declined with a reason")


if __name__ == "__main__":
    main()
