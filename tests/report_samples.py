"""Reports made by hand: large ones, hostile ones, and one with collectives."""

from __future__ import annotations

import random
from dataclasses import replace

from gemcompile import Report
from gemcompile.graph_snapshot import NodeRecord, Snapshot
from gemcompile.report import PassRecord

HOSTILE = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&'\u2028`${1}`"


def report_of(before: Snapshot, after: Snapshot, changes: int = 1, name: str = "Rewrite") -> Report:
    """A report of one graph and of one pass over it."""
    report = Report(graphs=1, seconds=0.5)
    report.passes.append(PassRecord(name, changes, 0.01, "", "", before, after))
    return report


def layered(layers: int, each: int = 50) -> Report:
    """``layers`` modules of ``each`` nodes; the pass replaced two nodes in every one."""
    nodes = [NodeRecord("x", "input", "x", dtype="float32", shape="[s0, 64]")]
    for layer in range(layers):
        entry = nodes[-1].name
        for i in range(each):
            inputs = (nodes[-1].name,) if i % 7 else (nodes[-1].name, entry)
            nodes.append(
                NodeRecord(
                    f"n{layer}_{i}",
                    "call",
                    ("aten.linear", "aten.gelu", "aten.add.Tensor")[i % 3],
                    ", ".join(inputs),
                    tuple(dict.fromkeys(inputs)),
                    "float32",
                    "[s0, 64]",
                    f"model.py:{i}",
                    f"x = step_{i}(x)",
                    f"layers.{layer}.part{i // 10}",
                    origin=layer * each + i,
                )
            )
    before = tuple(nodes)
    fresh = {n.name: f"{n.name}_new" for n in before if n.name.endswith(("_20", "_21"))}
    after = tuple(_renamed(n, fresh) for n in before)
    return report_of(before, after, 2 * layers)


def _renamed(n: NodeRecord, fresh: dict[str, str]) -> NodeRecord:
    if n.name not in fresh and not any(i in fresh for i in n.inputs):
        return n
    inputs = tuple(fresh.get(i, i) for i in n.inputs)
    return replace(n, name=fresh.get(n.name, n.name), inputs=inputs)


def flat(count: int) -> Report:
    """A graph of ``count`` nodes without modules and without repetition."""
    pick = random.Random(0)
    nodes = [NodeRecord("x", "input", "x", dtype="float32", shape="[64]")]
    for i in range(count - 1):
        inputs = {nodes[-pick.randint(1, min(len(nodes), 9))].name for _ in range(2)}
        size = pick.randint(1, 10**6)
        nodes.append(
            NodeRecord(
                f"n{i}",
                "call",
                f"aten.op{pick.randint(0, 99)}",
                inputs=tuple(sorted(inputs)),
                dtype="float32",
                shape=f"[{size}]",
            )
        )
    before = tuple(nodes)
    after = tuple(replace(n, dtype="bfloat16") if i % 10 == 5 else n for i, n in enumerate(before))
    return report_of(before, after, count // 10)


def repeated(blocks: int, each: int = 12) -> Report:
    """Repetition that only the operators tell: no node has a module."""
    nodes = [NodeRecord("x", "input", "x", dtype="float32", shape="[64]")]
    for i in range(blocks * each):
        target = f"aten.op{i % each}"
        inputs = (nodes[-1].name,)
        nodes.append(NodeRecord(f"n{i}", "call", target, inputs=inputs, shape="[64]", dtype="int8"))
    return report_of(tuple(nodes), tuple(nodes), 0)


def hostile() -> Report:
    """Every text that a model can set ends script elements and opens others."""
    n = NodeRecord(HOSTILE, "input", HOSTILE, dtype=HOSTILE, shape=HOSTILE)
    m = NodeRecord(
        "m",
        "call",
        HOSTILE,
        HOSTILE,
        (HOSTILE,),
        "float32",
        HOSTILE,
        HOSTILE,
        HOSTILE,
        HOSTILE,
        ((HOSTILE, HOSTILE),),
    )
    report = report_of((n,), (n, m), 1, HOSTILE)
    details = {HOSTILE: HOSTILE, "padding": HOSTILE}
    report.add("attention", "rewritten", HOSTILE, HOSTILE, HOSTILE, **details)
    report.add("padding", "declined", HOSTILE, HOSTILE, HOSTILE, **details)
    return report


def distributed() -> Report:
    """Two gradients reduced while the backward goes on."""
    rows = [
        ("mm", "aten.mm", ("x",)),
        ("r1", "_c10d_functional.all_reduce", ("mm",)),
        ("mm_1", "aten.mm", ("mm",)),
        ("r2", "_c10d_functional.all_reduce", ("mm_1",)),
        ("mm_2", "aten.mm", ("mm_1",)),
        ("w1", "_c10d_functional.wait_tensor", ("r1",)),
        ("w2", "_c10d_functional.wait_tensor", ("r2",)),
        ("add", "aten.add.Tensor", ("w1", "w2")),
    ]
    nodes = [NodeRecord("x", "input", "x", dtype="float32", shape="[8, 8]")]
    for name, target, inputs in rows:
        nodes.append(
            NodeRecord(name, "call", target, inputs=inputs, dtype="float32", shape="[8, 8]")
        )
    return report_of(tuple(nodes), tuple(nodes), 0)
