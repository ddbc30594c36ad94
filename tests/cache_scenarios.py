"""Run as a process of its own by test_caches.py: compiles what the arguments name, prints counters.

One line of JSON for each scenario: cache hits, misses and bypasses, and the report.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from encoders import batch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule

import gemcompile.identity
from gemcompile import Pass, gem, record
from gemcompile.pass_manager import Context


class Noted(Pass):
    """Does nothing; its note is an option of its own."""

    def __init__(self, note: object) -> None:
        self.note = note

    def run(self, gm: GraphModule, context: Context) -> int:
        return 0


class Pooled(nn.Module):
    """The smallest model that packs: embedding, attention, mean over the valid positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        keep = torch.arange(ids.shape[1])[None, :] < lengths[:, None]
        x = self.embed(ids)[:, None]
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=keep[:, None, None, :])[:, 0]
        return (x * keep[:, :, None]).sum(1)


OPTIONS: dict[str, dict[str, Any]] = {
    "small": {},
    "other option": {"pack": True},
    "pass": {"passes": (Noted("a"),)},
    "pass with another option": {"passes": (Noted("b"),)},
    "pass without identity": {"passes": (Noted(object()),)},
    "other source": {},
    "packed": {"pack": True},
}


def run(name: str) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    if name == "other source":
        gemcompile.identity.source_digest = lambda: "edited"  # type: ignore[assignment]
    model: nn.Module = Pooled() if name == "packed" else nn.Linear(4, 4)
    args = batch() if name == "packed" else (torch.randn(2, 4),)
    with record() as report:
        y = torch.compile(model, backend=gem, options=OPTIONS[name])(*args)
        y.square().sum().backward()
    torch.testing.assert_close(y, model(*args))
    kinds = [f"{cache}_cache_{k}" for cache in ("autograd", "fxgraph") for k in ("hit", "miss")]
    found = {**counters["aot_autograd"], **counters["inductor"]}
    bypasses = sum(v for k, v in found.items() if k.endswith("cache_bypass"))
    return {**{k: found.get(k, 0) for k in kinds}, "bypass": bypasses, "report": report.to_dict()}


if __name__ == "__main__":
    for scenario in sys.argv[1:]:
        print(json.dumps({"name": scenario, **run(scenario)}))
