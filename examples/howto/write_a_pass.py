"""Write a pass by hand: linear layers that read the same input become one product.

    python examples/howto/write_a_pass.py

A pass changes a graph in place and says how many changes it made. What it declines, it records.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import gemcompile as gem
from gemcompile.graph import Editor, arguments, shape
from gemcompile.pass_manager import Context

aten = torch.ops.aten


class MergeLinears(gem.Pass):
    """q(x), k(x), v(x) -> one linear over the stacked weights, and a split of its result."""

    after = ("EliminatePadding",)  # it has to see the layers as they were written

    def __init__(self, at_least: int = 2) -> None:
        self.at_least = at_least  # an option of the pass: part of the compile caches' key

    def run(self, gm: GraphModule, context: Context) -> int:
        changes = 0
        around = gem.match.surroundings(gm)
        groups: dict[object, list[Node]] = {}
        for n in gem.match.calls(gm, aten.linear):
            # Only nodes under the same autocast, grad mode and checkpoint region may be merged.
            groups.setdefault((n.args[0], around[n]), []).append(n)
        for group in groups.values():
            if len(group) < self.at_least:
                continue
            reason = self.refusal(group)
            status = "declined" if reason else "rewritten"
            context.report.add("linear", status, f"{len(group)} linears", reason, group[0])
            if not reason:
                self.merge(gm, group)
                changes += 1
        return changes

    def refusal(self, group: list[Node]) -> str:
        """Why these layers stay apart, as a clause fit to follow "declined because"."""
        weights = [arguments(n)["weight"] for n in group]
        biases = [arguments(n)["bias"] for n in group]
        if any(w.op not in ("placeholder", "get_attr") for w in weights):
            return "a weight is computed in the graph"
        if len({b is None for b in biases}) > 1:
            return "some of them have a bias and some have none"
        return ""

    def merge(self, gm: GraphModule, group: list[Node]) -> None:
        edit = Editor(gm, like=group[0])  # new nodes go before the first, and know their values
        weights = [arguments(n)["weight"] for n in group]
        biases = [arguments(n)["bias"] for n in group]
        stacked = edit(aten.cat.default, weights)
        bias = None if biases[0] is None else edit(aten.cat.default, biases)
        product = edit(aten.linear.default, group[0].args[0], stacked, bias)
        sizes = [int(shape(w)[0]) for w in weights]
        parts = edit(aten.split_with_sizes.default, product, sizes, -1)
        results = [edit.item(parts, i) for i in range(len(group))]
        for n, result in zip(group, results):
            n.replace_all_uses_with(result)
            gm.graph.erase_node(n)


class Gates(nn.Module):
    """Three layers that read the same rows, and two that may not be merged."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, n) for n in (8, 8, 4))
        self.d, self.e = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) * self.b(x).sigmoid()
        total: Tensor = (self.d(y) + self.e(y)).sum() + self.c(x).square().sum()
        return total


def main() -> None:
    torch.manual_seed(0)
    model, x = Gates(), torch.randn(32, 16)

    # What the pass does to the graph, and whether values and gradients stay as they are.
    done = gem.testing.assert_same(MergeLinears(), model, x, changes=1)
    print(done.text, "\n")

    # As a user turns it on (backend="gem" where gemcompile is installed). `verify` compares the
    # graph after each pass with the original; `strict` raises where a pass fails.
    options: dict[str, Any] = {
        "passes": [MergeLinears()],
        "verify": True,
        "strict": True,
        "inner": "eager",
    }
    with gem.record() as report:
        loss = torch.compile(model, backend=gem.gem, options=options)(x)
    torch.testing.assert_close(loss, model(x))
    report.expect(linear=1)
    print(report, "\n")

    # Its options are part of the compile caches' key, and its name switches it off.
    assert MergeLinears(2).identity() == MergeLinears().identity() != MergeLinears(3).identity()
    report = gem.explain(model, x, options={**options, "disable": ["MergeLinears"]})
    report.expect(linear=0)
    print("ok: three linears became one product, two stayed with the reason in the report")


if __name__ == "__main__":
    main()
