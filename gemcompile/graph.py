"""Over torch.fx graphs: a stable text form, and an editor whose nodes carry value and origin."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_arg

from gemcompile.ops.padded import padded_attention_result

# Meta keys that say where a node comes from; a replacement must carry them on.
ORIGIN = (
    "stack_trace",
    "custom",
    "recompute",
    "ac_graph_id",
    "nn_module_stack",
    "seq_nr",
    "source_fn_stack",
)

_DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b1",
}  # fmt: skip


# Composite ops whose result is known without a look at what they are made of: that would ask
# questions of sizes, and leave guards on them behind, for kernels that may never run.
_RESULTS: dict[Any, Callable[..., Any]] = {
    torch.ops.gem.padded_attention.default: padded_attention_result
}


def text(gm: GraphModule) -> str:
    """The graph as text, the same on every machine: values numbered, with dtype and shape."""
    names = {n: f"%{i}" for i, n in enumerate(gm.graph.nodes)}
    return "\n".join(_line(n, names) for n in gm.graph.nodes)


def _line(n: Node, names: dict[Node, str]) -> str:
    def show(a: Any) -> str:
        if isinstance(a, Node):
            return names[a]
        if isinstance(a, (list, tuple)):
            return "[" + ", ".join(map(show, a)) + "]"
        return str(a)

    args = ", ".join([*map(show, n.args), *(f"{k}={show(v)}" for k, v in n.kwargs.items())])
    if n.op == "output":
        return f"return {args}"
    head = {"placeholder": "input", "get_attr": f"attr {n.target}"}.get(
        n.op, f"{target_name(n)}({args})"
    )
    notes = (n.meta.get("custom") or {}).get("gem")
    tail = f" {{{', '.join(f'{k}: {v}' for k, v in sorted(notes.items()))}}}" if notes else ""
    return f"{names[n]} = {head}{_type(n.meta.get('val'))}{tail}"


def target_name(n: Node) -> str:
    """ "aten.add.Tensor", "gem.padded_attention", "getitem"."""
    if isinstance(n.target, torch._ops.OpOverload):
        return str(n.target).removesuffix(".default")
    return getattr(n.target, "__name__", str(n.target))


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = ", ".join(str(s) for s in value.shape)
        return f" : {_DTYPES.get(value.dtype, str(value.dtype))}[{shape}]"
    if isinstance(value, (tuple, list)):
        return f" : ({', '.join(_type(v)[3:] for v in value)})"
    return "" if value is None else " : sym" if isinstance(value, torch.SymInt) else ""


def describe(value: Any) -> str:
    """The type of a value as `text` writes it: "f32[s0, 16]"; "nothing" for None."""
    return _type(value).removeprefix(" : ") or ("nothing" if value is None else str(value))


def value(n: Argument) -> Any:
    """The fake value of a node, or the argument itself."""
    return n.meta.get("val") if isinstance(n, Node) else n


def shape(n: Node) -> torch.Size:
    """Sizes of a tensor node."""
    return torch.Size(n.meta["val"].shape)


def is_call(n: object, *targets: Any) -> bool:
    """True where n calls one of these operators."""
    return isinstance(n, Node) and n.op == "call_function" and n.target in targets


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Proven equal, without adding a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def arguments(n: Node) -> dict[str, Any]:
    """All arguments of an operator call by schema name, defaults filled in."""
    schema = n.target._schema.arguments  # type: ignore[union-attr]
    out: dict[str, Any] = {}
    for i, a in enumerate(schema):
        given = (
            n.args[i]
            if i < len(n.args)
            else n.kwargs.get(a.name, a.default_value if a.has_default_value() else None)
        )
        out[a.name] = given
    return out


class Editor:
    """Inserts nodes whose value is known and whose origin is that of the node they replace.

    edit = Editor(gm, like=node)          # new nodes go before ``node``
    mask = edit(aten.bitwise_not.default, pad)
    """

    def __init__(self, gm: GraphModule, like: Node, before: Node | None = None) -> None:
        self.graph: Graph = gm.graph
        self.like = like
        self.before: Node = before or like
        self.fake_mode: FakeTensorMode = fake_mode_of(gm)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            n = self.graph.call_function(target, args, kwargs)
        n.meta.update({k: self.like.meta[k] for k in ORIGIN if k in self.like.meta})
        n.meta["val"] = self.evaluate(target, args, kwargs)
        return n

    def evaluate(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The fake result of a call on nodes."""
        a, k = map_arg((args, kwargs), lambda x: x.meta["val"])
        with torch.no_grad(), self.fake_mode, _no_mode_tracing():
            return _RESULTS.get(target, target)(*a, **k)

    def item(self, n: Node, i: int) -> Node:
        """Element i of a node that returns several values."""
        return self(operator.getitem, n, i)

    def symbol(self, size: sympy.Expr | int | torch.SymInt) -> int | Node:
        """A size as an argument for a node: the number, or nodes that compute it from the graph's
        inputs.

        Raises:
            LookupError: a symbol that no input of the graph carries.
        """
        if isinstance(size, torch.SymInt):
            size = size.node.expr
        if isinstance(size, int) or size.is_Integer:
            return int(size)
        if size.is_Symbol:
            return self._symbol_input(size)
        if isinstance(size, (sympy.Mul, sympy.Add)):
            combine = operator.mul if isinstance(size, sympy.Mul) else operator.add
            parts = [self.symbol(a) for a in size.args]
            out = parts[0]
            for p in parts[1:]:
                out = self(combine, out, p)
            return out
        raise LookupError(f"size {size} is not a product of the graph's input sizes")

    def _symbol_input(self, symbol: sympy.Expr) -> Node:
        placeholders: list[Node] = list(self.graph.find_nodes(op="placeholder"))
        for n in placeholders:
            v = n.meta.get("val")
            if isinstance(v, torch.SymInt) and v.node.expr == symbol:
                return n
        for n in placeholders:
            v = n.meta.get("val")
            for i, s in enumerate(v.shape if isinstance(v, torch.Tensor) else ()):
                if isinstance(s, torch.SymInt) and s.node.expr == symbol:
                    return self(torch.ops.aten.sym_size.int, n, i)
        raise LookupError(f"no input of the graph carries the size {symbol}")

    def size(self, n: Node, dim: int) -> int | Node:
        """A size of ``n``: the number where it is static, else a node."""
        s = shape(n)[dim]
        return s if isinstance(s, int) else self(torch.ops.aten.sym_size.int, n, dim)


@contextmanager
def _no_mode_tracing() -> Iterator[None]:
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing():
        yield


def fake_mode_of(gm: GraphModule) -> FakeTensorMode:
    """The fake mode of the graph's values."""
    for n in gm.graph.nodes:
        v = n.meta.get("val")
        for t in v if isinstance(v, (tuple, list)) else (v,):
            if isinstance(t, FakeTensor):
                return t.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)
