"""What a user's project holds: passes of its own, typed, against gemcompile's public names."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule

import gemcompile as gem
from gemcompile.graph import Editor, arguments
from gemcompile.match import Match
from gemcompile.pass_manager import Context

aten = torch.ops.aten


@torch.library.custom_op("ranking_project::gate", mutates_args=())
def gate(x: Tensor, g: Tensor) -> Tensor:
    """x * sigmoid(g), as one operator."""
    return x * torch.sigmoid(g)


@gate.register_fake
def _(x: Tensor, g: Tensor) -> Tensor:
    return torch.empty_like(x)


class FuseGate(gem.Rewrite):
    """x * sigmoid(g) -> ranking_project.gate, for rows of a length that is a multiple of 8."""

    @staticmethod
    def pattern(x: Tensor, g: Tensor) -> Tensor:
        return x * torch.sigmoid(g)

    @staticmethod
    def replacement(x: Tensor, g: Tensor) -> Tensor:
        out: Tensor = gate(x, g)
        return out

    def check(self, m: Match, context: Context) -> str | None:
        length: int = m.value("x").shape[-1]
        return f"the row length {length} is not a multiple of 8" if length % 8 else None


class ReluForGelu(gem.Pass):
    """A cheaper activation, where the user says so. Written by hand, with an Editor."""

    after = ("Canonicalize",)
    before = ("FuseAttention",)

    def __init__(self, at_most: int = 10) -> None:
        self.at_most = at_most

    def run(self, gm: GraphModule, context: Context) -> int:
        changes = 0
        for node in gem.match.calls(gm, aten.gelu):
            if changes == self.at_most:
                context.report.add("graph", "declined", "aten.gelu", "there are enough", node)
                continue
            new = Editor(gm, like=node)(aten.relu.default, arguments(node)["self"])
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
            context.report.add("graph", "rewritten", "aten.relu", where=node)
            changes += 1
        return changes


def sites(report: gem.Report) -> dict[str, str]:
    """Operator -> status, of everything that the passes above recorded."""
    return {site.op: site.status for site in report.of("graph") + report.of("graph", "declined")}
