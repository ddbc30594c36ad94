"""Find places in a graph by a pattern that is written as a plain Python function.

    def gated(x, gate, limit: float):
        return x * torch.sigmoid(gate).clamp(max=limit)

    for m in gem.match.find(gm, gem.match.Pattern(gated), context):
        m["x"], m["limit"], m.output  # two nodes and a number

The function is traced to the ATen operators that passes see, and compared with the graph modulo

- the order of the operands of add, mul, maximum, minimum, eq, ne, `&` and `|`;
- arguments by position or by name, defaults, and dimensions counted from either end;
- chains of views: two chains that lead from the same value to the same shape are equal, copies
  (`contiguous`, `clone`) and views that change nothing are passed over, permutations are composed.

Where a pattern uses no view and no size, it matches tensors of any rank. `calls` finds single
operators; `gemcompile.Rewrite` is a whole pass made of a pattern and its replacement.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import tracing
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from . import graph
from .match_unify import Found, unify
from .pass_manager import Context
from .report import source_line

__all__ = ["Match", "Pattern", "calls", "find", "obstacle", "surroundings"]

_MODES = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    torch._C._set_grad_enabled,
)


@dataclass(frozen=True)
class Match:
    """One place where a pattern stands.

    Attributes:
        output: the node whose value the pattern computes.
        bound: what each parameter of the pattern's function is here: a node, a number, a function.
        interior: the other nodes of the pattern, in graph order.
    """

    output: Node
    bound: Mapping[str, Any]
    interior: tuple[Node, ...]

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def value(self, name: str) -> Any:
        """The fake tensor that a parameter is here (shape, dtype, device), or the number."""
        return graph.value(self.bound[name])

    @property
    def where(self) -> str:
        """The user's line, "file.py:41"."""
        return source_line(self.output)


class Pattern:
    """What to look for, as a function of tensors that returns a tensor.

    Args:
        function: its parameters are tensors; one annotated ``float`` stands for any number.
        examples: by parameter name, a tensor of the rank and dtype to trace with (default: float32
            [3, 5, 7]; sizes other than 0 and 1 stand for any size, equal ones for the same), or a
            tuple of functions any of which may stand there.

    Raises:
        TypeError: an example for a name that the function does not have.
        ValueError (on first use): a parameter that no operator takes, or a result that is not one
            operator's.
    """

    def __init__(self, function: Callable[..., Any], **examples: Any) -> None:
        self.function = function
        self.parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
        unknown = [name for name in examples if name not in self.parameters]
        if unknown:
            raise TypeError(f"pattern {function.__name__} has no parameter {unknown[0]!r}")
        self.examples = examples

    def at(self, node: Node) -> Match | None:
        """The match whose output is ``node``, or None."""
        for traced in self._traced:
            found = unify(traced.output, node, traced.numbers)
            if found is not None:
                return traced.match(node, found)
        return None

    @cached_property
    def _traced(self) -> list[_Traced]:
        choices = {k: v for k, v in self.examples.items() if isinstance(v, tuple)}
        return [
            self._trace(dict(zip(choices, chosen)))
            for chosen in itertools.product(*choices.values())
        ]

    def _trace(self, chosen: dict[str, Any]) -> _Traced:
        numbers: dict[float, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.annotation in (float, "float"):
                numbers[0.73162539 + 0.0137 * len(numbers)] = name  # values that nobody writes
            elif name not in chosen:
                tensors[name] = self.examples.get(name, torch.empty(3, 5, 7))
        constant = {**chosen, **{name: value for value, name in numbers.items()}}

        def call(*values: torch.Tensor) -> Any:
            return self.function(**constant, **dict(zip(tensors, values)))

        with tracing(None), enable_python_dispatcher(), torch.no_grad():
            gm = make_fx(call, pre_dispatch=True, tracing_mode="symbolic")(*tensors.values())
        gm.graph.eliminate_dead_code()
        (output,) = gm.graph.find_nodes(op="output")
        traced = _Traced(gm, output.args[0], list(tensors), numbers, chosen)
        traced.check(self.function.__name__)
        return traced


@dataclass(frozen=True)
class _Traced:
    """A pattern's graph for one choice of functions."""

    gm: GraphModule
    output: Any
    tensors: list[str]
    numbers: dict[float, str]
    chosen: dict[str, Any]

    def check(self, name: str) -> None:
        if not isinstance(self.output, Node) or self.output.op != "call_function":
            raise ValueError(f"pattern {name} must return the result of an operator")
        inputs = self.gm.graph.find_nodes(op="placeholder")
        unused = [n for n, node in zip(self.tensors, inputs) if not node.users]
        used: set[Any] = set()
        for n in self.gm.graph.nodes:
            torch.fx.node.map_aggregate((n.args, n.kwargs), used.add)
        unused += [n for value, n in self.numbers.items() if value not in used]
        if unused:
            raise ValueError(f"no operator of pattern {name} takes {unused[0]!r} as it is")

    def match(self, node: Node, found: Found) -> Match:
        inputs = self.gm.graph.find_nodes(op="placeholder")
        bound = {n: found.nodes[p] for n, p in zip(self.tensors, inputs)}
        order = {n: i for i, n in enumerate(node.graph.nodes)}
        inside = sorted(found.interior - {node} - set(bound.values()), key=order.__getitem__)
        return Match(node, {**bound, **found.numbers, **self.chosen}, tuple(inside))


def find(
    gm: GraphModule,
    pattern: Pattern | Sequence[Pattern],
    context: Context | None = None,
    kind: str = "graph",
) -> Iterator[Match]:
    """The places where a pattern stands and may be rewritten, in graph order.

    They do not overlap, unless the caller lets one stand. The graph may be changed between two of
    them.

    Args:
        pattern: one, or several to be tried in turn.
        context: where given, a place that matches but may not be rewritten (see `obstacle`) is
            recorded in its report as a declined site of ``kind``.
    """
    patterns = [pattern] if isinstance(pattern, Pattern) else list(pattern)
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node._erased:
            continue
        m = next((m for p in patterns if (m := p.at(node)) is not None), None)
        if m is None:
            continue
        reason = obstacle(m)
        if reason is None:
            yield m
        elif context is not None:
            context.report.add(kind, "declined", graph.target_name(node), reason, node)


def obstacle(m: Match) -> str | None:
    """Why the nodes of a match cannot be replaced by one, as a clause, or None.

    Their values must have no other readers; autocast, grad mode and checkpoint region must be the
    same for all; and nothing may be changed in place between the first and the last of them.
    """
    inside = {m.output, *m.interior}
    for node in m.interior:
        for user in node.users:
            if user not in inside:
                place = source_line(user)
                reader = "the caller" if user.op == "output" else graph.target_name(user)
                return f"an intermediate value is also used by {reader}" + (
                    f" at {place}" if place and user.op != "output" else ""
                )
    if len({n.meta.get("ac_graph_id") for n in inside}) > 1:
        return "it reaches across the border of an activation checkpoint"
    node = m.interior[0] if m.interior else m.output
    while node is not m.output:
        if node.op == "call_function" and node.target in _MODES:
            return "autocast or grad mode changes inside it"
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return "a tensor may be changed in place inside it"
        node = node.next
    return None


def calls(
    gm: GraphModule, *operators: Any, where: Callable[[Node], bool] = lambda n: True
) -> list[Node]:
    """The calls of operators that satisfy a predicate, in graph order.

    Args:
        operators: `torch.ops.aten.add` for all its overloads, `torch.ops.aten.add.Tensor` for one.
    """
    return [
        n
        for n in gm.graph.nodes
        if n.op == "call_function"
        and (n.target in operators or getattr(n.target, "_overloadpacket", None) in operators)
        and where(n)
    ]


def surroundings(gm: GraphModule) -> dict[Node, tuple[int, Any]]:
    """What every node stands in: the stretch of one autocast and grad mode, the checkpoint region.

    Only nodes with equal surroundings may be merged into one.
    """
    found: dict[Node, tuple[int, Any]] = {}
    stretch = 0
    for n in gm.graph.nodes:
        stretch += n.op == "call_function" and n.target in _MODES
        found[n] = stretch, n.meta.get("ac_graph_id")
    return found
