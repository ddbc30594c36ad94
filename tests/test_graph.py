"""The graph editor."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from gemcompile.graph import Editor, value


def test_a_padded_attention_on_a_gpu_asks_nothing_of_its_sizes() -> None:
    """torch's attention pads a float32 mask by its length modulo 8; gem may pack it instead."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 4)
    x = mode.from_tensor(torch.zeros(3, 90, 2, 8), symbolic_context=sizes)
    with mode:
        rows = torch.empty(x.shape, device="cuda")
        mask = torch.empty(x.shape[:2], dtype=torch.bool, device="cuda")
    graph = Graph()
    nodes = []
    for name, fake in (("x", rows), ("mask", mask)):
        nodes.append(graph.placeholder(name))
        nodes[-1].meta["val"] = fake
    end = graph.output(nodes[0])
    edit = Editor(GraphModule({}, graph), like=end)
    (q, keep), op = nodes, torch.ops.gem.padded_attention.default
    out = edit(op, q, q, q, keep, None, None, None, "softmax", 1.0, False, "zero", 0.0)
    assert value(out).shape == rows.shape and value(out).device.type == "cuda"
    assert not env.guards
