"""A pass made of a pattern and what takes its place, both plain functions of tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from . import graph
from .graph_checks import BrokenGraph
from .match import Match, Pattern, find
from .pass_manager import Context, Pass


class Rewrite(Pass):
    """Replace every place where ``pattern`` stands by ``replacement``.

        class FuseGate(gem.Rewrite):
            @staticmethod
            def pattern(x, gate):
                return x * torch.sigmoid(gate)

            @staticmethod
            def replacement(x, gate):
                return my_gate(x, gate)

            def check(self, m, context):
                odd = m.value("x").shape[-1] % 8
                return "the row length is not a multiple of 8" if odd else None

    Each place is recorded in the report, rewritten or declined with the reason.

    Attributes:
        pattern: what to look for; see `gemcompile.match.Pattern` for what its parameters mean.
        replacement: takes the same parameters; it is traced with the shapes of the place, and its
            operators (a custom op is one) stand in the graph afterwards.
        spellings: further functions of the same parameters, tried where ``pattern`` does not stand.
        examples: examples for the parameters, as `gemcompile.match.Pattern` takes them.
        kind: the kind of site in the report.
        patterns: made of ``pattern`` and ``spellings``, for `gemcompile.match.find`.
    """

    pattern: ClassVar[Callable[..., Any]]
    replacement: ClassVar[Callable[..., Any]]
    spellings: ClassVar[tuple[Callable[..., Any], ...]] = ()
    examples: ClassVar[dict[str, Any]] = {}
    kind: ClassVar[str] = "graph"
    patterns: ClassVar[tuple[Pattern, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "pattern"):
            functions = (cls.pattern, *cls.spellings)
            cls.patterns = tuple(Pattern(f, **cls.examples) for f in functions)

    def check(self, m: Match, context: Context) -> str | None:
        """None, or why this place must stay, as a clause fit to follow "declined because"."""
        return None

    def run(self, gm: GraphModule, context: Context) -> int:
        """Rewrite every place; returns how many."""
        changes = 0
        for m in find(gm, self.patterns, context, self.kind):
            reason = self.check(m, context)
            old = graph.target_name(m.output)
            if reason is not None:
                context.report.add(self.kind, "declined", old, reason, m.output)
                continue
            new = insert(gm, m, type(self).replacement)
            context.report.add(self.kind, "rewritten", graph.target_name(new), "", m.output)
            m.output.replace_all_uses_with(new)
            gm.graph.erase_node(m.output)
            changes += 1
        return changes


def insert(gm: GraphModule, m: Match, function: Callable[..., Any]) -> Node:
    """Write ``function`` of the match's parameters into the graph, before the match's output.

    Raises:
        BrokenGraph: the result's shape, dtype or device is not that of the match's output, or the
            function makes a constant tensor.
    """
    names = [name for name, x in m.bound.items() if isinstance(x, Node)]
    traced = _trace(gm, m, names, function)
    env: dict[Node, Any] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), (m[name] for name in names))
    )
    result: Any = None
    for n in traced.graph.nodes:
        if n.op == "output":
            result = env.get(n.args[0], None)
        elif n.op == "get_attr":
            raise BrokenGraph("its replacement makes a constant tensor; use numbers or torch.full")
        elif n.op != "placeholder":
            with gm.graph.inserting_before(m.output):
                new = env[n] = gm.graph.node_copy(n, env.__getitem__)
            like = m.output.meta
            new.meta = {"val": n.meta.get("val")} | {k: like[k] for k in graph.ORIGIN if k in like}
    found, wanted = (graph.describe(graph.value(x)) for x in (result, m.output))
    if not isinstance(result, Node) or found != wanted:
        raise BrokenGraph(f"its replacement gives {found} instead of {wanted}")
    return result


def _trace(
    gm: GraphModule, m: Match, names: list[str], function: Callable[..., Any]
) -> GraphModule:
    mode = graph.fake_mode_of(gm)

    def call(*values: torch.Tensor) -> Any:
        return function(**{**m.bound, **dict(zip(names, values))})

    fakes = [m.value(name) for name in names]
    around: list[Any] = [tracing(TracingContext(mode)), mode, enable_python_dispatcher()]
    with ExitStack() as stack:
        for context in (*around, torch.no_grad(), *_autocast_around(m.output)):
            stack.enter_context(context)
        traced: GraphModule = make_fx(call, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
    traced.graph.eliminate_dead_code()
    return traced


def _autocast_around(node: Node) -> list[torch.autocast]:
    """The autocast regions of the graph in which a node stands, outermost first."""
    regions: dict[Node, torch.autocast] = {}
    for n in node.graph.nodes:
        if n is node:
            break
        if n.target is torch.amp.autocast_mode._enter_autocast:
            regions[n] = torch.autocast(*n.args, **n.kwargs)
        elif n.target is torch.amp.autocast_mode._exit_autocast:
            del regions[n.args[0]]
    return list(regions.values())
