"""What a graph held at one moment: plain records of its nodes, which outlive the graph's changes.

A report keeps one snapshot for each graph that a pass left behind. Nodes that the pass did not
touch are the same records in both, so that a snapshot costs what the pass changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.fx import GraphModule, Node

_LONGEST = 200  # characters of a constant argument or a source line that are kept
_GROUPS = re.compile(r"gem_groups_(\d+)")
_ROOT = re.compile(r"^[LG]\[['\"][^'\"]*['\"]\]\.?")
_INPUT = re.compile(r"^[LG]\[['\"]([^'\"]*)['\"]\]")
_CONTAINER = re.compile(r"\b_(?:modules|parameters|buffers)\b\.?")
_INDEX = re.compile(r"\[['\"]?([^'\"\]]*)['\"]?\]")


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node.

    Attributes:
        name: unique in its graph, and never given to another node of it.
        op: "input", "parameter" (or a buffer), "attribute", "call" or "output".
        target: "aten.linear", "gem.jagged_attention"; for a parameter its name in the model.
        args: the arguments as text, values by name.
        inputs: names of the values used.
        dtype: "float32"; "int" for a symbolic size, "" where there is no value or several.
        shape: "[s0, 16]"; for several values their types in brackets.
        where: the user's line, "file.py:41", or "".
        code: the text of that line, or "".
        module: the module whose forward made it, "layers.0.norm1", or "".
        notes: annotations, in words.
        region: the number of the packed row set that the value's rows belong to, or None.
        origin: equal for a node and what replaced it, or None.
    """

    name: str
    op: str
    target: str
    args: str = ""
    inputs: tuple[str, ...] = ()
    dtype: str = ""
    shape: str = ""
    where: str = ""
    code: str = ""
    module: str = ""
    notes: tuple[tuple[str, str], ...] = ()
    region: int | None = None
    origin: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "inputs": list(self.inputs), "notes": dict(self.notes)}


Snapshot = tuple[NodeRecord, ...]


def snapshot(gm: GraphModule, previous: Snapshot = ()) -> Snapshot:
    """The nodes of ``gm``, in order; records equal to one of ``previous`` are shared with it."""
    known = {r.name: r for r in previous}
    sizes = _Sizes(gm)
    records: list[NodeRecord] = []
    for n in gm.graph.nodes:
        new = _record(n, sizes)
        old = known.get(new.name)
        records.append(old if old is not None and old == new else new)
    return tuple(records)


@dataclass
class SnapshotTable:
    """Snapshots as two lists for JSON: every record once, every snapshot as places in that list."""

    nodes: list[NodeRecord] = field(default_factory=list)
    snapshots: list[list[int]] = field(default_factory=list)
    _places: dict[NodeRecord, int] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)

    def add(self, shot: Snapshot | None) -> int | None:
        """The snapshot's number; None for None."""
        if shot is None:
            return None
        if id(shot) not in self._seen:
            self._seen[id(shot)] = len(self.snapshots)
            self.snapshots.append(list(self._add_nodes(shot)))
        return self._seen[id(shot)]

    def _add_nodes(self, shot: Snapshot) -> Iterable[int]:
        for record in shot:
            place = self._places.setdefault(record, len(self.nodes))
            if place == len(self.nodes):
                self.nodes.append(record)
            yield place


class _Sizes:
    """Sizes as text, and the row set that a symbolic size counts the rows of."""

    def __init__(self, gm: GraphModule) -> None:
        self._texts: dict[Any, str] = {}
        self._regions: dict[Any, int] = {}
        for n in gm.graph.find_nodes(op="placeholder"):
            found = _GROUPS.fullmatch(str(n.target))
            value = n.meta.get("val")
            if found and isinstance(value, torch.SymInt):
                self._regions.update(
                    dict.fromkeys(value.node.expr.free_symbols, int(found.group(1)))
                )

    def text(self, size: int | torch.SymInt) -> str:
        if isinstance(size, int):
            return str(size)
        expr = size.node.expr
        if expr not in self._texts:
            self._texts[expr] = str(expr)
        return self._texts[expr]

    def region(self, value: Any) -> int | None:
        value = value[0] if isinstance(value, (tuple, list)) and value else value
        if self._regions and isinstance(value, torch.Tensor):
            sizes: list[Any] = [s for s in value.shape if isinstance(s, torch.SymInt)]
            for symbol in (symbol for s in sizes for symbol in s.node.expr.free_symbols):
                if symbol in self._regions:
                    return self._regions[symbol]
        return None

    def type_of(self, value: Any) -> tuple[str, str]:
        """(dtype, shape) as text."""
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            return dtype, f"[{', '.join(map(self.text, value.shape))}]"
        if isinstance(value, torch.SymInt):
            return "int", self.text(value)
        if isinstance(value, (tuple, list)):
            return "", f"({', '.join(''.join(self.type_of(v)) for v in value)})"
        return "", ""


def _record(n: Node, sizes: _Sizes) -> NodeRecord:
    value = n.meta.get("val")
    op, target, module = _identity(n)
    dtype, shape = sizes.type_of(value)
    where, code = source(n.meta.get("stack_trace") or "")
    return NodeRecord(
        name=n.name,
        op=op,
        target=target,
        args=_arguments(n),
        inputs=tuple(i.name for i in n.all_input_nodes),
        dtype=dtype,
        shape=shape,
        where=where,
        code=code,
        module=module,
        notes=_notes(n, value),
        region=sizes.region(value),
        origin=n.meta.get("seq_nr") if n.op == "call_function" else None,
    )


def _identity(n: Node) -> tuple[str, str, str]:
    """(op, target, module)."""
    if n.op == "placeholder":
        source_of = getattr(n, "_dynamo_source", None)
        try:
            name = source_of.name if source_of is not None else ""
            name = name() if callable(name) else name
        except NotImplementedError:  # sources without a name
            name = ""
        if not name:
            return "input", str(n.target), ""
        path = module_path(name)
        if "_parameters[" in name or "_buffers[" in name:
            return "parameter", path, path.rpartition(".")[0]
        return "input", _INPUT.sub(r"\1", name), ""
    stack = n.meta.get("nn_module_stack") or {}
    module = module_path(str(list(stack.values())[-1][0])) if stack else ""
    if n.op == "get_attr":
        return "attribute", str(n.target), module
    return ("output", "output", "") if n.op == "output" else ("call", _target_name(n), module)


def _target_name(n: Node) -> str:
    if isinstance(n.target, torch._ops.OpOverload):
        return str(n.target).removesuffix(".default")
    return getattr(n.target, "__name__", str(n.target))


@lru_cache(maxsize=8192)
def module_path(name: str) -> str:
    """ "L['self']._modules['layers']._modules['0'].norm" as "layers.0.norm"."""
    inner = _ROOT.sub("", name)
    inner = _CONTAINER.sub("", inner)
    return _INDEX.sub(r".\1", inner).replace("..", ".").strip(".")


def _arguments(n: Node) -> str:
    def show(a: Any) -> str:
        if isinstance(a, Node):
            return a.name
        if isinstance(a, (list, tuple)):
            return f"[{', '.join(map(show, a))}]"
        return str(a)[:_LONGEST]

    return ", ".join([*map(show, n.args), *(f"{k}={show(v)}" for k, v in n.kwargs.items())])


def _notes(n: Node, value: Any) -> tuple[tuple[str, str], ...]:
    notes: dict[str, str] = {}
    for key, note in sorted(((n.meta.get("custom") or {}).get("gem") or {}).items()):
        notes[str(key)] = str(note)
    if n.meta.get("recompute") is not None:
        notes["checkpoint"] = "recomputed in the backward pass"
    if n.op == "placeholder" and isinstance(value, torch.SymInt):
        hint = getattr(value.node, "hint", None)
        if hint is not None:
            notes["first batch"] = str(hint)
    return tuple(notes.items())


@lru_cache(maxsize=8192)
def source(stack_trace: str) -> tuple[str, str]:
    """The user's innermost line of a stack trace as ("file.py:41", its text).

    Frames of torch itself are skipped. ("", "") where there is no trace.
    """
    where = code = ""
    lines = stack_trace.splitlines()
    for i, line in enumerate(lines):
        line = line.strip()
        if line.startswith('File "'):
            path, _, rest = line[6:].partition('", line ')
            if "/torch/" not in path or not where:
                where = f"{path.rsplit('/', 1)[-1]}:{rest.split(',')[0]}"
                following = lines[i + 1].strip() if i + 1 < len(lines) else ""
                code = "" if following.startswith('File "') else following[:_LONGEST]
    return where, code
