"""The packed row count as a backed symbol, and the small graph that computes row sets before the
main graph.

A row set is a bool mask [B, L] whose true rows are kept, packed into groups of 128. Its index
tensors depend on data, so they are made ahead of the main graph, with one integer read back per
mask and step, and enter as trailing inputs. The number of groups is a *backed* symbol with a
declared range: Inductor then chooses persistent kernels and 32-bit indices as it does for any
dynamic input, which it does not do for an unbacked size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from .graph import fake_mode_of
from .ops.packing import pack_index

ROWS = 128  # rows in a group
_ASSUMED_GROUPS = 64  # where the first batch is not at hand
_INT32 = 2**31 - 1


class PrologueDeclined(Exception):
    """A mask cannot be computed ahead of the graph; the message is a clause."""


@dataclass
class RowSet:
    """One mask's packed rows, as inputs of the main graph.

    Attributes:
        index: int64 [128 groups], the flat row number b * L + l, -1 for rows that only fill up.
        inverse: int64 [B * L], the packed row of a padded row, -1 where it is dropped.
        offsets: int32 [B + 1].
        positions: int32 [128 groups], l of each row.
        lengths: kept rows of each sequence of the first batch, None where that is not at hand.
        total: all rows of the first batch, or None.
        bound: the largest number of groups that the compiled graph may be given.
    """

    mask: Node
    index: Node
    inverse: Node
    offsets: Node
    positions: Node
    symbol: sympy.Symbol
    bound: int
    lengths: list[int] | None
    total: int | None

    @property
    def rows(self) -> int | None:
        """Kept rows of the first batch, or None."""
        return None if self.lengths is None else sum(self.lengths)


@dataclass
class Prologue:
    """The row sets of one graph, their fake inputs and the graph that computes their masks."""

    gm: GraphModule
    example_inputs: Sequence[Any]
    sets: dict[Node, RowSet] = field(default_factory=dict)
    fakes: list[Any] = field(default_factory=list)
    module: GraphModule | None = None

    def __post_init__(self) -> None:
        self._inputs = self.gm.graph.find_nodes(op="placeholder")

    def count(self, mask: Node) -> tuple[int | None, int | None]:
        """(kept rows, all rows) of a mask on the first batch, where that is at hand, else Nones.

        Raises:
            PrologueDeclined: the mask depends on randomness, on a mutated tensor or on an opaque
                operator.
        """
        value = self.first(mask)
        return (None, None) if value is None else (int(value.sum()), value.numel())

    def first(self, mask: Node) -> torch.Tensor | None:
        """The mask of the first batch, or None where that is not at hand; raises as `count`."""
        module = self._module_for([mask])
        tensors = [x for x in self.example_inputs if isinstance(x, torch.Tensor)]
        if any(isinstance(x, FakeTensor) for x in tensors):
            return None
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            (value,) = module(*map(_concrete, self.example_inputs))
        return cast(torch.Tensor, value)

    def add(self, mask: Node, widest: int) -> RowSet:
        """The row set of ``mask`` (bool [B, L]); a packed row has up to ``widest`` elements.

        Raises:
            PrologueDeclined: as `count`; or the first batch exceeds what 32-bit indices reach.
        """
        if mask in self.sets:
            return self.sets[mask]
        first = self.first(mask)
        lengths = None if first is None else first.sum(1).tolist()
        rows = None if lengths is None else sum(lengths)
        bound = max(_INT32 // (ROWS * max(widest, 1)), 2)
        hint = _ASSUMED_GROUPS if rows is None else max(-(-rows // ROWS), 1)
        if hint > bound:
            raise PrologueDeclined(f"{rows} packed rows of {widest} elements exceed 32-bit indices")
        symbol, groups = self._symbol(min(max(hint, 2), bound), bound)
        fake_mode = fake_mode_of(self.gm)
        value = mask.meta["val"]
        with fake_mode:
            n = groups * ROWS
            new = {
                "index": torch.empty(n, dtype=torch.int64, device=value.device),
                "inverse": torch.empty(
                    value.shape[0] * value.shape[1], dtype=torch.int64, device=value.device
                ),
                "offsets": torch.empty(value.shape[0] + 1, dtype=torch.int32, device=value.device),
                "positions": torch.empty(n, dtype=torch.int32, device=value.device),
            }
        i = len(self.sets)
        self._placeholder(f"gem_groups_{i}", groups)
        nodes = {name: self._placeholder(f"gem_{name}_{i}", fake) for name, fake in new.items()}
        self.fakes += [groups, *new.values()]
        total = None if first is None else first.numel()
        rowset = RowSet(mask, **nodes, symbol=symbol, bound=bound, total=total, lengths=lengths)
        self.sets[mask] = rowset
        return rowset

    def _placeholder(self, name: str, fake: Any) -> Node:
        graph = self.gm.graph
        last = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(last):
            n = graph.placeholder(name)
        n.meta["val"] = fake
        n._dynamo_source = None  # AOTAutograd asks every input for one
        return n

    def _symbol(self, hint: int, bound: int) -> tuple[sympy.Symbol, Any]:
        env = shape_env_of(self.gm)
        source = ConstantSource(f"gem_groups_{len(self.sets)}")
        symbol = env.create_symbol(
            hint, source, DimDynamic.DYNAMIC, None, positive=True, do_not_specialize_zero_one=True
        )
        env.var_to_range[symbol] = ValueRanges(1, bound)
        return symbol, env.create_symintnode(symbol, hint=hint, source=source)

    def _module_for(self, masks: Sequence[Node]) -> GraphModule:
        needed = _ancestors(masks)
        _check_pure(self.gm.graph, needed)
        graph = Graph()
        env: dict[Node, Node] = {}
        for n in self.gm.graph.nodes:
            if n in needed or n in self._inputs:
                env[n] = graph.node_copy(n, env.__getitem__)
        graph.output(tuple(env[m] for m in masks))
        return GraphModule(self.gm, graph)

    def seal(self) -> None:
        """Fix the prologue's graph, while the mask nodes are still in the main graph."""
        self.module = self._module_for(list(self.sets))

    def masks(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        """The masks' values for the arguments of one step."""
        assert self.module is not None
        with torch.no_grad():
            out: Sequence[torch.Tensor] = self.module(*args)
        return out

    def extra_inputs(self, args: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """The main graph's trailing inputs for the arguments of one step, and the group counts."""
        extra: list[Any] = []
        counts: list[int] = []
        for mask in self.masks(args):
            p = pack_index(mask, ROWS)
            counts.append(p.index.shape[0] // ROWS)
            extra += [counts[-1], p.index, p.inverse, p.offsets, p.positions]
        return extra, counts

    def runner(self, main: Callable[..., Any], beyond: Callable[..., Any]) -> Callable[..., Any]:
        """The step: masks, index tensors, main graph; ``beyond`` serves batches above bounds."""
        checks = self.take_guards()
        bounds = [s.bound for s in self.sets.values()]

        def step(*args: Any) -> Any:
            extra, counts = self.extra_inputs(args)
            within = all(c <= b for c, b in zip(counts, bounds))
            if not within or not all(check(counts) for check in checks):
                return beyond(*args)
            return main(*args, *extra)

        return step

    def take_guards(self) -> list[Callable[[list[int]], bool]]:
        """Remove the guards on the group counts from Dynamo's list, which cannot evaluate them.

        Those that hold over the whole declared range need nothing; the rest become checks of the
        step, except comparisons by which Inductor merely chooses between kernels that are all
        right.
        """
        env = shape_env_of(self.gm)
        symbols = [s.symbol for s in self.sets.values()]
        mine = [g for g in env.guards if g.expr.free_symbols & set(symbols)]
        env.guards[:] = [g for g in env.guards if not g.expr.free_symbols & set(symbols)]
        checks: list[Callable[[list[int]], bool]] = []
        for guard in mine:
            expr = guard.expr
            if bound_sympy(expr, env.var_to_range) == ValueRanges(sympy.true, sympy.true):
                continue
            if _is_heuristic(guard) or not expr.free_symbols <= set(symbols):
                continue
            holds = sympy.lambdify(symbols, expr)
            checks.append(lambda counts, holds=holds: bool(holds(*counts)))  # type: ignore[misc]
        return checks


def _is_heuristic(guard: Any) -> bool:
    """Inductor compares sizes to choose split reductions and tile shapes: all of them are right."""
    where = str(guard.sloc)
    return any(f"_inductor/{f}" in where for f in ("choices", "codegen", "ir.py", "scheduler"))


def shape_env_of(gm: GraphModule) -> ShapeEnv:
    """Dynamo's shape environment, in which the graph's symbols live."""
    context = TracingContext.try_get()
    mode = (context and context.fake_mode) or fake_mode_of(gm)
    if mode.shape_env is None:
        raise PrologueDeclined("the graph has no symbolic shapes")
    return mode.shape_env


def _concrete(x: Any) -> Any:
    return x.node.hint if isinstance(x, torch.SymInt) else x


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack += n.all_input_nodes
    return found


def _check_pure(graph: Graph, needed: set[Node]) -> None:
    for n in needed:
        if n.op not in ("placeholder", "get_attr") and not _is_pure(n):
            raise PrologueDeclined(
                f"the mask depends on {n.target}, which cannot be computed ahead of the graph"
            )
    for n in graph.nodes:
        op = n.target
        if isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable:
            for a, s in zip(n.args, op._schema.arguments):
                if s.is_write and isinstance(a, Node) and _roots(a) & needed:
                    raise PrologueDeclined("a tensor that the mask depends on is changed in place")


def _is_pure(n: Node) -> bool:
    if n.op != "call_function":
        return False
    op = n.target
    if not isinstance(op, torch._ops.OpOverload):
        return getattr(op, "__module__", "") in ("_operator", "math", "torch")
    return not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags


def _roots(n: Node) -> set[Node]:
    """``n`` and what it may be a view of."""
    found = {n}
    while n.op == "call_function" and n.args and isinstance(n.args[0], Node):
        n = n.args[0]
        found.add(n)
    return found
