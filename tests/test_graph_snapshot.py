"""What a report keeps of a graph's nodes: their facts, and each of them once."""

from __future__ import annotations

import pytest
import torch
from encoders import Encoder, batch

from gemcompile import Report, explain
from gemcompile.graph_snapshot import module_path, snapshot, source
from gemcompile.testing import trace


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    return explain(Encoder(2), *batch(), options={"pack": True})


def test_snapshots_share_what_did_not_change(report: Report) -> None:
    for a, b in zip(report.passes, report.passes[1:]):
        assert a.nodes_after is b.nodes_before
    fuse, share = report.passes[1], report.passes[3]
    assert share.nodes_before is share.nodes_after
    assert fuse.nodes_before is not None and fuse.nodes_after is not None
    kept = {id(n) for n in fuse.nodes_before} & {id(n) for n in fuse.nodes_after}
    assert len(kept) > len(fuse.nodes_after) // 2
    found = report.to_dict()
    assert len(found["snapshots"]) == 4
    assert found["passes"][3]["snapshot_before"] == found["passes"][3]["snapshot_after"] == 3
    names = [found["nodes"][i]["name"] for i in found["snapshots"][3]]
    assert names == [n.name for n in share.nodes_after or ()]


def test_records(report: Report) -> None:
    shot = report.passes[-1].nodes_after
    assert shot is not None
    by_target = {n.target: n for n in shot}
    weight = by_target["calls.0.qkv.weight"]
    assert (weight.op, weight.module, weight.shape) == ("parameter", "calls.0.qkv", "[48, 16]")
    linear = next(n for n in shot if n.target == "aten.linear")
    assert linear.dtype == "float32" and linear.region == 0 and linear.module == "calls.0.qkv"
    assert linear.where.startswith("encoders.py:") and "self.qkv" in linear.code
    assert linear.inputs[1] == weight.name and linear.args.count(", ") == 2
    assert by_target["ids"].op == "input" and by_target["ids"].region is None


def test_record_of_constants() -> None:
    gm = trace(lambda x: x.clamp(0, 1).sum([0]), torch.ones(2, 3))
    records = {n.target: n for n in snapshot(gm)}
    assert records["aten.clamp"].args.endswith(", 0, 1")
    assert records["aten.sum.dim_IntList"].args.endswith(", [0]")
    assert records["output"].op == "output"


def test_module_path() -> None:
    name = "L['self']._modules['layers']._modules['0']._parameters['w']"
    assert module_path(name) == "layers.0.w"
    assert module_path("L['self'].calls[0].norm") == "calls.0.norm"


def test_source_skips_torch() -> None:
    trace_ = (
        '  File "/a/m.py", line 3, in f\n    y = g(x)\n  File "/b/torch/nn/x.py", line 9, in g\n'
    )
    assert source(trace_) == ("m.py:3", "y = g(x)")
    assert source("") == ("", "")
