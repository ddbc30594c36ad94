"""Run a graph with its random draws replaced by fixed values, so that two graphs can be compared.

A pass may draw fewer numbers, or in another order, and still be right: dropout on packed rows does.
With every draw at a value that depends on its arguments alone, such graphs agree again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from . import graph


class FixedDraws(Interpreter):
    """Dropout is the identity, and what is drawn from a distribution is one plausible value."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        schema = getattr(target, "_schema", None)
        if schema is not None:
            given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
            given |= {a.name: x for a, x in zip(schema.arguments, args)} | kwargs
            rule = _RULES.get(target._opname.removesuffix("_"))
            if rule is not None and target.namespace == "aten":
                return _drawn(target, rule, given, args, kwargs)
            if given.get("dropout_p"):  # attention of torch and of gem
                names = [a.name for a in schema.arguments]
                args = tuple(0.0 if n == "dropout_p" else x for n, x in zip(names, args))
                kwargs = {n: 0.0 if n == "dropout_p" else x for n, x in kwargs.items()}
        return super().call_function(target, args, kwargs)


def draws(gm: GraphModule) -> bool:
    """Whether running the graph consumes random numbers, as far as its operators tell."""
    return any(_is_draw(n) for n in gm.graph.nodes)


def unfixable(gm: GraphModule) -> str:
    """The first operator that draws and has no rule here, or ""."""
    return next((graph.target_name(n) for n in gm.graph.nodes if _is_draw(n) and not _rule(n)), "")


def _is_draw(n: Node) -> bool:
    if not isinstance(n.target, torch._ops.OpOverload):
        return False
    tagged = torch.Tag.nondeterministic_seeded in n.target.tags
    return tagged or _rule(n) or any(w in n.target._opname for w in ("dropout", "rand", "rrelu"))


def _rule(n: Node) -> bool:
    target: Any = n.target
    known = target.namespace == "aten" and target._opname.removesuffix("_") in _RULES
    return known or any(a.name == "dropout_p" for a in target._schema.arguments)


def _drawn(target: Any, rule: Any, given: dict[str, Any], args: Any, kwargs: Any) -> Any:
    """The rule's value; where it is a number, a tensor filled with it, of the operator's kind."""
    value = rule(given)
    if target._schema.is_mutable and value is not args[0]:
        return args[0].copy_(value) if isinstance(value, torch.Tensor) else args[0].fill_(value)
    if not isinstance(value, (int, float)):
        return value
    with torch.random.fork_rng():  # shape, dtype and device are the operator's own affair
        return torch.full_like(target(*args, **kwargs), value)


def _same(given: dict[str, Any]) -> Any:
    return given.get("self", given.get("input"))


def _chosen(given: dict[str, Any]) -> torch.Tensor:
    """The most probable category, as often as asked, or each once without replacement."""
    weights, n = given["self"], given["num_samples"]
    if given.get("replacement"):
        best: torch.Tensor = weights.argmax(-1, keepdim=True)
        return best.expand(*weights.shape[:-1], n)
    each: torch.Tensor = weights.topk(n, -1).indices
    return each


def _permutation(given: dict[str, Any]) -> torch.Tensor:
    kinds = {k: given.get(k) for k in ("dtype", "device")}
    asked = {k: x for k, x in kinds.items() if isinstance(x, (torch.dtype, torch.device))}
    options: dict[str, Any] = {"dtype": torch.int64, **asked}
    return torch.arange(given["n"], **options)


def _bernoulli(given: dict[str, Any]) -> Any:
    """The expectation: the tensor of probabilities itself, or the one probability."""
    x = given["self"]
    p = given.get("p", x)
    return torch.full_like(x, p) if isinstance(p, float) else p.to(x.dtype)


_RULES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dropout": _same,
    "feature_dropout": _same,
    "alpha_dropout": _same,
    "feature_alpha_dropout": _same,
    "native_dropout": lambda g: (g["input"], torch.ones_like(g["input"], dtype=torch.bool)),
    "rand": lambda g: 0.5,
    "rand_like": lambda g: 0.5,
    "randn": lambda g: 0.5,
    "randn_like": lambda g: 0.5,
    "randint": lambda g: int(g.get("low", 0)),
    "randint_like": lambda g: int(g.get("low", 0)),
    "randperm": _permutation,
    "bernoulli": _bernoulli,
    "uniform": lambda g: (g["from"] + g["to"]) / 2,
    "normal": lambda g: 0.5,
    "exponential": lambda g: 1.0 / g.get("lambd", 1.0),
    "multinomial": _chosen,
}
