"""FuseAttention: every spelling of attention becomes ``gem::padded_attention``, or is declined.

The pass starts at the product with v and walks up to q k^T. Which axis is which is known by labels
(axes.py), what masks mean is in masks.py and attention_additive.py, the walk in attention_walk.py,
what it proves in a `Match` (attention_match.py). attention_plan.py decides whether the op can say
it, and attention_rewrite.py writes it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from gemcompile.graph import target_name
from gemcompile.pass_manager import Context, Pass
from gemcompile.report import source_line

from .attention_arrange import Sizes
from .attention_encoder import write_out_encoder_layers
from .attention_match import Declined, Match, NotAttention
from .attention_mutation import Changes, erase_unread_mutations
from .attention_places import Placed, Placer
from .attention_plan import Plan, plan
from .attention_rewrite import MaskCache, rewrite
from .attention_scores import Scores
from .attention_sdpa import match_sdpa
from .attention_walk import match_contraction
from .contractions import contraction

aten = torch.ops.aten


class FuseAttention(Pass):
    """Rewrites attention to one op; the next passes pack it and kernels run it."""

    after = ("Canonicalize",)
    before = ("FuseRotary", "EliminatePadding")

    def run(self, gm: GraphModule, context: Context) -> int:
        """Rewrite every proven site; report each site, rewritten or declined."""
        gm.graph.eliminate_dead_code()
        changes = write_out_encoder_layers(gm)
        graph = _Surroundings(gm.graph)
        scores = Scores(_parameters(gm.graph, context))
        sizes, cache, placer = Sizes(gm.graph), MaskCache(gm), Placer(context.options.strict)
        for node in list(gm.graph.nodes):
            try:
                match = _match(node, scores)
                if match is None:
                    continue
                graph.check(match)
                site = plan(match, context.options.strict, placer)
                rewrite(gm, site, sizes, cache)
            except NotAttention:
                continue
            except Declined as reason:
                context.report.add("attention", "declined", target_name(node), str(reason), node)
                continue
            _report(context, site)
            changes += 1
        if changes:
            gm.graph.eliminate_dead_code()
            erase_unread_mutations(gm.graph)
        return changes


def _match(node: Node, scores: Scores) -> Match | None:
    if node.op != "call_function":
        return None
    if node.target is aten.scaled_dot_product_attention.default:
        return match_sdpa(node)
    if str(node.target) in ("flex_attention", "flex_attention_backward"):
        raise Declined(
            "flex_attention is a fused kernel already, with its mask in a program of its own"
        )
    return match_contraction(node, scores)


def _parameters(graph: Graph, context: Context) -> set[Node]:
    """Inputs and attributes that are parameters of the model."""
    inputs = graph.find_nodes(op="placeholder")
    found = {
        node for node, x in zip(inputs, context.example_inputs) if isinstance(x, torch.nn.Parameter)
    }
    for node in graph.find_nodes(op="get_attr"):
        owner = graph.owning_module
        if isinstance(getattr(owner, str(node.target), None), torch.nn.Parameter):
            found.add(node)
    return found


class _Surroundings:
    """What must hold around a match: one autocast and grad mode, no other readers, no mutation."""

    def __init__(self, graph: Graph) -> None:
        self.changes = Changes(graph)
        self.mode: dict[Node, int] = {}
        mode = 0
        for node in graph.nodes:
            mode += _changes_mode(node)
            self.mode[node] = mode

    def check(self, match: Match) -> None:
        """Raise Declined where the surroundings forbid the rewrite."""
        inside = {match.node, *match.interior}
        if len({self.mode.get(n, -1) for n in inside}) > 1:
            raise Declined("autocast or grad mode changes between the scores and the output")
        if len({n.meta.get("ac_graph_id") for n in inside}) > 1:
            raise Declined("it reaches across the border of an activation checkpoint")
        self._check_readers(match, inside)
        operands = [n for x in (match.q, match.k, match.v) for n, _ in x.places]
        inner = [*operands, *match.interior]
        if self.changes.between(inner, match.node, ancestors=False) or self.changes.between(
            match.mask_nodes, match.node, ancestors=True
        ):
            raise Declined("a tensor that it reads is changed in place")

    def _check_readers(self, match: Match, inside: set[Node]) -> None:
        """Scores and weights must have no other readers, unless those die with the match."""
        weights = True
        for node in list(match.interior):
            for user in node.users:
                if user not in inside:
                    dying = _dying(user, inside, match.reads())
                    if dying is not None:
                        match.interior += dying - set(match.interior)
                        continue
                    what = "weights" if weights else "scores"
                    place = source_line(user)
                    reader = target_name(user) + (f" at {place}" if place else "")
                    if user.op == "output":
                        reader = "the caller"
                    raise Declined(f"the attention {what} are also used by {reader}")
            weights = weights and contraction(node) is None


def _dying(reader: Node, inside: set[Node], kept: set[Node]) -> set[Node] | None:
    """A reader of the scores and all that is made from it, where only the match uses that.

    So it is with ``zeros_like(scores)`` in a mask; None where something else lives on.
    """
    seen: set[Node] = set()
    stack = [reader]
    while stack:
        node = stack.pop()
        if node in inside or node in seen:
            continue
        if node in kept or node.op == "output" or len(seen) > 50:
            return None
        seen.add(node)
        stack += node.users
    return seen


def _changes_mode(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return name in ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")


def _report(context: Context, site: Plan) -> None:
    masks, match = site.before, site.match
    reason = f"assuming that {site.assumed}" if site.assumed else ""
    kinds = ["keys"] if masks.keys else []
    kinds += _kinds(masks.placed)
    kinds += ["queries"] if masks.rows or site.after.rows else []
    details: dict[str, object] = {"mask": ", ".join(kinds) or "none"}
    if match.biases or masks.dense:
        details["bias"] = "relative" if site.table else True
    if masks.placed.why:
        details["mask kept as a tensor"] = masks.placed.why
    if site.bias_kept:
        details["bias kept as a tensor"] = site.bias_kept
    if match.dropout is not None:
        details["dropout"] = match.dropout_p
    op = f"gem.padded_attention({match.activation})"
    context.report.add("attention", "rewritten", op, reason, match.node, **details)


def _kinds(placed: Placed) -> list[str]:
    """What is hidden by place, in words."""
    rule, kinds = placed.rule, []
    if rule.causal:
        kinds.append("causal")
    if rule.left >= 0 or rule.right >= 0:
        sides = ("any" if side < 0 else str(side) for side in (rule.left, rule.right))
        kinds.append("window ({}, {})".format(*sides))
    if placed.block:
        kinds.append(f"blocks of {placed.block}")
    if rule.history is not None:
        kinds.append("targets")
    if rule.contextual:
        kinds.append(f"{rule.contextual} contextual")
    return kinds
