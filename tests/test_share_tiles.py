"""One list of tiles for all layers with the same offsets and mask."""

from __future__ import annotations

import pytest
import torch
from padding_models import Encoder
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gemcompile import passes
from gemcompile.graph import arguments
from gemcompile.ops import jagged_attention
from gemcompile.options import Options
from gemcompile.passes import ShareTiles
from gemcompile.target import Target
from gemcompile.testing import run_passes, trace

ATTENTION = torch.ops.gem.jagged_attention.default
TILES = torch.ops.gem.attention_tiles.default
HOPPER = Target("cuda", 90)


def calls(gm: torch.fx.GraphModule, op: object) -> list[torch.fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=op))


@pytest.mark.parametrize("causal", [False, True])
def test_layers_of_a_packed_model_share_one_list(causal: bool) -> None:
    model = Encoder("mean", causal=causal, layers=3)
    ids, lens = torch.randint(1, 100, (4, 12)), torch.tensor([12, 3, 1, 7])
    gm = trace(model, ids, lens)
    run_passes(gm, passes.forward(), Options(pack=True), HOPPER)
    attention, lists = calls(gm, ATTENTION), calls(gm, TILES)
    assert len(attention) == 3 and len(lists) == 1
    assert all(arguments(n)["tiles"] is lists[0] for n in attention)
    assert arguments(lists[0])["causal"] is causal
    assert str(lists[0].meta["val"].dtype) == "torch.int32"


def two_kinds(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    a = jagged_attention(x, x, x, ends) + jagged_attention(x, y, y, ends)
    b = jagged_attention(x, x, x, ends, causal=True)
    return a + b + jagged_attention(x, x, x, ends, window=(3, None))


def test_other_masks_have_their_own_and_values_stay() -> None:
    x, y = torch.randn(2, 9, 2, 8)
    args = x, y, torch.tensor([0, 4, 9])
    gm = trace(two_kinds, *args)
    given = [int(v) if isinstance(v, torch.SymInt) else v for v in gm.meta["example_inputs"]]
    (expected,) = gm(*given)
    run_passes(gm, [ShareTiles()], target=HOPPER)
    assert len(calls(gm, ATTENTION)) == 4 and len(calls(gm, TILES)) == 3
    leaves = [v.requires_grad_() for v in given if isinstance(v, Tensor) and v.dim() == 3]
    (out,) = gm(*given)
    assert torch.equal(out, expected)
    ours = torch.autograd.grad(out.square().sum(), leaves)
    theirs = torch.autograd.grad(two_kinds(*args).square().sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_padded_attention_on_a_gpu_brings_its_list() -> None:
    def layer(x: Tensor) -> Tensor:
        nothing = [None] * 4
        op = torch.ops.gem.padded_attention
        return op(x, x, x, *nothing, "silu", 1.0, True, "assume", 0.0)

    with FakeTensorMode():
        gm = make_fx(layer)(torch.empty(2, 9, 2, 8, device="cuda"))
    (attention,), (tiles,) = calls(gm, ATTENTION), calls(gm, TILES)
    assert arguments(attention)["tiles"] is tiles
    assert arguments(tiles)["q_rows"] == 18 and arguments(tiles)["causal"] is True


def test_on_cpu_nothing_is_added() -> None:
    x = torch.randn(9, 2, 8)
    gm = trace(two_kinds, x, x.clone(), torch.tensor([0, 4, 9]))
    run_passes(gm, [ShareTiles()])
    assert not calls(gm, TILES)
