"""The project's own tests, by gemcompile.testing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from ranking_passes import FuseGate, ReluForGelu, sites
from torch import Tensor

import gemcompile as gem
from gemcompile import testing


def gated(x: Tensor, g: Tensor) -> Tensor:
    return F.gelu(x) * torch.sigmoid(g)


def test_gate_is_fused() -> None:
    x, g = torch.randn(2, 8), torch.randn(2, 8)
    done = testing.rewrite(FuseGate(), gated, x, g)
    assert sites(done.report) == {"ranking_project.gate": "rewritten"}


def test_odd_rows_are_refused() -> None:
    x, g = torch.randn(2, 5), torch.randn(2, 5)
    testing.assert_refused(FuseGate(), gated, x, g, because="5 is not a multiple of 8")


def test_compiled() -> None:
    x, g = torch.randn(2, 8), torch.randn(2, 8)
    passes: tuple[gem.Pass, ...] = (FuseGate(), ReluForGelu(at_most=1))
    options = gem.Options(passes=passes, inner="eager")
    report = gem.explain(gated, x, g, options=options)
    report.expect(graph=2)
    with gem.record() as seen:
        compiled = torch.compile(gated, backend=lambda gm, args: gem.gem(gm, args, options=options))
        torch.testing.assert_close(compiled(x, g), F.relu(x) * torch.sigmoid(g))
    assert sites(seen) == {"ranking_project.gate": "rewritten", "aten.relu": "rewritten"}
