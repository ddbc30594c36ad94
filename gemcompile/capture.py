"""Dynamo's torch-level graph, replayed node by node into pre-dispatch ATen.

Pre-dispatch ATen has one spelling per operator while linear, layer_norm, softmax and
scaled_dot_product_attention are still whole and autograd is still to come. ``make_fx(gm,
pre_dispatch=True)`` alone loses what this replay keeps:

- autocast regions are entered while tracing, so that dtypes inside them are right;
- bodies of vanilla activation checkpoints are inlined with recompute marks: passes see through them
  and the partitioner recomputes as before;
- other higher-order operators, and whatever touches a tensor subclass, stay opaque nodes;
- Dynamo's sources, static-input marks and the user's source lines survive.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.source import ConstantSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.traceback import preserve_node_meta
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy

_ENTER = torch.amp.autocast_mode._enter_autocast
_EXIT = torch.amp.autocast_mode._exit_autocast
_GET_DATA = getattr(torch._C._autograd, "_get_data_attr")  # noqa: B009  missing in torch's stubs

# What Dynamo keeps on placeholders and AOTAutograd asks for.
_INPUT_MARKS = ("tensor_dict", "steal_arg", "grapharg", "example_value")


class CaptureDeclined(Exception):
    """The graph holds something the replay cannot carry faithfully; the message is a clause."""


def capture(gm: GraphModule, example_inputs: Any) -> GraphModule:
    """The pre-dispatch ATen graph of Dynamo's graph, with the same inputs and outputs.

    Args:
        gm: the graph Dynamo hands to a backend.
        example_inputs: its inputs, used where a placeholder carries no fake value of its own.

    Raises:
        CaptureDeclined: the graph cannot be replayed; compile the original instead.
        TensorifyScalarRestartAnalysis: Dynamo must trace again with Python floats as constants.
    """
    specialize_symbolic_floats(gm)
    if gm.graph.find_nodes(op="call_function", target=_GET_DATA):
        raise CaptureDeclined("the model reads .data, which hides a use from autograd")
    placeholders = gm.graph.find_nodes(op="placeholder")
    examples = [n.meta.get("example_value", x) for n, x in zip(placeholders, example_inputs)]
    fake_mode = _fake_mode(examples)
    examples = [_plain_copy(e) if _is_subclass(e) else e for e in examples]
    with (
        tracing(TracingContext(fake_mode)),
        fake_mode,
        enable_python_dispatcher(),
        preserve_node_meta(),
    ):
        aten = make_fx(_Replay(gm).run, pre_dispatch=True, _allow_non_fake_inputs=True)(*examples)
    _carry_marks(gm, aten)
    for n in aten.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(aten, str(n.target), None), FakeTensor):
            raise CaptureDeclined(f"{n.target} is a tensor made while tracing")
    return aten


def specialize_symbolic_floats(gm: GraphModule) -> None:
    """Make Python floats that ``dynamic=True`` turned into inputs constant again, before any work
    is done.

    Inductor would do the same in its joint pass, after a whole compile, and run the backend twice.
    """
    symbols = [s for s in _symbolic_floats(gm) if not TensorifyState.should_specialize(s)]
    for s in symbols:
        TensorifyState.specialize(s)
    if symbols:
        raise TensorifyScalarRestartAnalysis


def _symbolic_floats(gm: GraphModule) -> Iterator[str]:
    for n in gm.graph.find_nodes(op="placeholder"):
        memo = getattr(n.meta.get("example_value"), "item_memo", None)
        name = getattr(getattr(getattr(memo, "node", None), "_expr", None), "name", None)
        if isinstance(name, str):
            yield name


def _fake_mode(examples: list[Any]) -> FakeTensorMode:
    for e in examples:
        if isinstance(e, FakeTensor):
            return e.fake_mode
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise CaptureDeclined("no fake tensor mode is known")
    return context.fake_mode


def _is_subclass(x: object) -> bool:
    return isinstance(x, torch.Tensor) and is_traceable_wrapper_subclass(x)


def _plain_copy(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _carry_marks(dynamo: GraphModule, aten: GraphModule) -> None:
    pairs = zip(aten.graph.find_nodes(op="placeholder"), dynamo.graph.find_nodes(op="placeholder"))
    for new, old in pairs:
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        new.meta.update({k: old.meta[k] for k in _INPUT_MARKS if k in old.meta})
    for key, value in dynamo.meta.items():
        aten.meta.setdefault(key, value)
    theirs: Any = getattr(dynamo, "_param_name_to_source", None)
    if theirs is not None:
        own = [name for name, _ in (*aten.named_parameters(), *aten.named_buffers())]
        sources = {name: ConstantSource(f"gem_{name}") for name in own}
        marked: Any = aten
        marked._param_name_to_source = {**sources, **theirs}


class _Replay(Interpreter):
    """Runs Dynamo's graph under a tracer, entering autocast and inlining checkpoints on the way."""

    _regions = itertools.count(1 << 20)  # ids of checkpoint regions, apart from Dynamo's own

    def run_node(self, n: Node) -> Any:
        self.node = n
        if n.op.startswith("call") and self._touches_subclass(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return self._leaf(n.op, n.target, args, kwargs)
        return super().run_node(n)

    @staticmethod
    def _touches_subclass(n: Node) -> bool:
        near = [
            n.meta.get("example_value"),
            *(i.meta.get("example_value") for i in n.all_input_nodes),
        ]
        return any(map(_is_subclass, pytree.tree_leaves(near)))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _ENTER:
            # Recorded as a node by the tracer, and set for real while the region is replayed.
            region = torch.autocast(*args, **kwargs)
            region.__enter__()
            return region
        if target is _EXIT:
            return args[0].__exit__(None, None, None)
        if target is tag_activation_checkpoint and "_checkpoint_context_fn" not in args[0].meta:
            return _Checkpointed(args[0], next(self._regions)).run(*args[1:])
        if isinstance(target, HigherOrderOperator):
            return self._leaf("call_function", target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def _leaf(self, op: str, target: Any, args: Any, kwargs: Any) -> Any:
        """One opaque node whose result is what Dynamo recorded."""
        if "example_value" not in self.node.meta:
            raise CaptureDeclined(f"{target} has no recorded result")
        mode = get_proxy_mode()
        assert mode is not None
        tracer: Any = mode.tracer

        def proxy(a: Any) -> Any:
            if not isinstance(a, GraphModule):
                return tracer.unwrap_proxy(a)
            name = next(
                f"gem_leaf_{i}"
                for i in itertools.count()
                if not hasattr(tracer.root, f"gem_leaf_{i}")
            )
            setattr(tracer.root, name, a)
            return tracer.create_proxy("get_attr", name, (), {})

        pargs, pkwargs = pytree.tree_map(
            proxy, (args, kwargs), is_leaf=lambda a: isinstance(a, GraphModule)
        )
        out = tracer.create_proxy(op, target, pargs, pkwargs)
        with disable_proxy_modes_tracing():
            fake = pytree.tree_map(_plain_copy, self.node.meta["example_value"])
        return track_tensor_tree(fake, out, constant=None, tracer=tracer)


class _Checkpointed(_Replay):
    """The body of one vanilla activation checkpoint: its nodes are marked for recomputation."""

    def __init__(self, gm: GraphModule, region: int) -> None:
        super().__init__(gm)
        self.region = region

    def run_node(self, n: Node) -> Any:
        n.meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=self.region)
        return super().run_node(n)
