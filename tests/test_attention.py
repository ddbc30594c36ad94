"""FuseAttention: the graphs it writes, the traps it avoids, and what it says about a site."""

from __future__ import annotations

import math
from typing import Any

import attention_near_misses  # noqa: F401 (fills DECLINED)
import attention_spellings as spellings
import attention_spellings_wider  # noqa: F401 (fills REWRITTEN)
import pytest
import torch
import torch.nn.attention.flex_attention  # noqa: F401 (makes its operator known)
import torch.nn.functional as F
from attention_helpers import Rewritten, inputs, only_site
from attention_spellings import HEADS, ROOT, WIDTH, join, keys, split_all, valid
from torch import nn

from gemcompile.graph import text
from gemcompile.options import Options
from gemcompile.passes.attention import FuseAttention
from gemcompile.testing import run_passes

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


# --- The graph. --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "masked_fill_inf",
        "bmm_heads_in_the_batch",
        "outer_product_mask",
        "grouped_queries_repeated",
        "hstu",
        "learned_bias",
        "mask_from_a_slice_of_a_table",
        "multihead_attention",
    ],
)
def test_graph(name: str, golden: Any) -> None:
    run = Rewritten(spellings.REWRITTEN[name], dynamic=False)
    run(*inputs())
    golden(text(run.graph))


def test_key_mask_is_the_models_own_and_made_once_for_all_layers() -> None:
    def two_layers(q, k, v, pad):
        for _ in range(2):
            a, b, c = split_all(q, k, v)
            s = (a @ b.mT / ROOT).masked_fill(pad[:, None, None, :], float("-inf"))
            q = q + join(s.softmax(-1) @ c)
        return q

    q, k, v, lengths = inputs()
    run = Rewritten(two_layers)
    run.check([q, k, v, ~valid(lengths, 16)])
    run.report.expect(attention=2)
    calls = run.graph.graph.find_nodes(
        op="call_function", target=torch.ops.gem.padded_attention.default
    )
    assert len({n.args[3] for n in calls}) == 1
    assert run.targets().count("aten.bitwise_not.default") == 1


def test_one_mask_serves_batches_of_two_sizes() -> None:
    def attend(q, k, v, mask):
        outs = []
        for n in (3, 2):
            a, b, c = split_all(q[:n], k[:n], v[:n])
            outs.append(join((a @ b.mT / ROOT).masked_fill(mask, -1e9).softmax(-1) @ c))
        return torch.cat(outs)

    run = Rewritten(attend, dynamic=False)
    run.check([*inputs(length=6)[:3], torch.tensor([1, 0, 1, 1, 0, 1]).bool()])
    run.report.expect(attention=2)


# --- Dropout. ----------------------------------------------------------------------------------


def dropped(p: float, train: bool) -> Any:
    def attend(q, k, v, lens):
        q, k, v = split_all(q, k, v)
        s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), float("-inf"))
        return join(F.dropout(s.softmax(-1), p, train) @ v)

    return attend


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.4, False)])
def test_dropout_that_does_nothing_leaves_no_trace(p: float, train: bool) -> None:
    run = Rewritten(dropped(p, train))
    run.check(inputs())
    run.report.expect(attention=1)
    assert not {"aten.dropout.default", "aten.randint.low"} & set(run.targets())


def test_dropout_moves_into_the_op_with_a_seed_from_the_graph() -> None:
    run = Rewritten(dropped(0.25, True))
    args = inputs()
    run(*args)
    assert only_site(run).details["dropout"] == 0.25
    assert run.targets().count("aten.randint.low") == 1
    assert "aten.dropout.default" not in run.targets()


def test_dropout_drops_at_its_rate_and_afresh_each_time() -> None:
    run = Rewritten(dropped(0.25, True))
    q, k, _, lengths = inputs(batch=2, length=64)
    ones = torch.ones_like(q).detach()
    first, second = run(q, k, ones, lengths), run(q, k, ones, lengths)
    assert not torch.equal(first, second)
    # With v = 1 a row's output is the kept weight over 1 - p: its mean over many rows is 1.
    assert abs(first.mean().item() - 1) < 0.1
    torch.manual_seed(7)
    a = run(q, k, ones, lengths)
    torch.manual_seed(7)
    assert torch.equal(a, run(q, k, ones, lengths))


# --- Queries of their own length. --------------------------------------------------------------


def test_pooling_queries_shared_by_the_batch() -> None:
    def pool(seeds, x, lens):
        x = x.unflatten(-1, (HEADS, -1))
        s = torch.einsum("shd,blhd->bhsl", seeds.unflatten(-1, (HEADS, -1)), x) / ROOT
        s = s.masked_fill(~valid(lens, x.shape[1])[:, None, None], -1e9)
        return torch.einsum("bhsl,blhd->bshd", s.softmax(-1), x).flatten(2)

    seeds = nn.Parameter(torch.randn(2, WIDTH))
    run = Rewritten(pool)
    run.check([seeds, inputs()[1], torch.tensor([16, 0, 3])])
    run.report.expect(attention=1)


def test_one_query_without_a_query_dimension() -> None:
    def target_attention(candidate, history, lens):
        s = torch.einsum("be,ble->bl", candidate, history) / 3
        s = s.masked_fill(~valid(lens, history.shape[1]), -1e9)
        return torch.einsum("bl,ble->be", s.softmax(-1), history)

    run = Rewritten(target_attention)
    q, k, _, _ = inputs()
    run.check([q[:, 0].detach().requires_grad_(), k, torch.tensor([16, 5, 0])])
    run.report.expect(attention=1)


def test_cross_attention_masks_the_keys_of_the_other_sequence() -> None:
    def cross(q, k, v, lens):
        q, k, v = split_all(q, k, v)
        s = (q @ k.mT / ROOT).masked_fill(~keys(lens, k.mT), -1e9)
        return join(s.softmax(-1) @ v)

    q, _, _, _ = inputs(length=7)
    _, k, v, lengths = inputs(length=16)
    run = Rewritten(cross)
    run.check([q, k, v, lengths])
    run.report.expect(attention=1)


# --- Modules. ----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_transformer_encoder(train: bool, norm_first: bool) -> None:
    if not train and TORCH < (2, 13):
        pytest.skip("Dynamo of this torch cannot trace the encoder's inference operator")
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 64, 0.0, activation="gelu", batch_first=True, norm_first=norm_first
    ).train(train)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    run = Rewritten(lambda x, pad: encoder(x, src_key_padding_mask=pad))
    x, _, _, lengths = inputs()
    with torch.set_grad_enabled(train):
        run.check([x.detach().requires_grad_(train), ~valid(lengths, 16)])
    run.report.expect(attention=2)
    assert not [t for t in run.targets() if "encoder_layer" in t or "dot_product" in t]


def test_flex_attention_is_declined_with_its_reason() -> None:
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    graph.output(graph.call_function(torch.ops.higher_order.flex_attention, (q, q, q)))
    report = run_passes(torch.fx.GraphModule({}, graph), [FuseAttention()])
    (site,) = report.sites
    assert site.reason == (
        "flex_attention is a fused kernel already, with its mask in a program of its own"
    )


# --- What is said, and what is passed by. --------------------------------------------------------


def test_report_names_line_masks_and_assumption() -> None:
    run = Rewritten(spellings.additive_as_in_bert)
    run(*inputs())
    site = only_site(run)
    assert site.op == "gem.padded_attention(softmax)"
    assert site.where.startswith("attention_spellings.py:")
    assert site.details == {"mask": "keys"}
    assert site.reason == "assuming that every sequence has a valid key"


def test_strict_declines_what_rests_on_an_assumption() -> None:
    run = Rewritten(spellings.additive_as_in_bert, options=Options(strict=True))
    run.check(inputs())
    reason = "it is not proven that every sequence has a valid key, and strict=True"
    assert only_site(run).reason == reason


def test_reader_of_the_weights_is_named() -> None:
    run = Rewritten(spellings.DECLINED["weights_also_returned"][0])
    run(*inputs())
    assert only_site(run).reason.startswith(
        "the attention weights are also used by aten.mean at attention_near_misses.py:"
    )


def test_wide_heads_are_declined() -> None:
    run = Rewritten(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, dynamic=False)
    run(*(torch.randn(2, 4, 264) for _ in range(3)))
    assert only_site(run).reason == "head dimension 264 is larger than 256"


def test_scores_without_a_batch_are_declined() -> None:
    run = Rewritten(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    run(*(torch.randn(5, 8) for _ in range(3)))
    assert only_site(run).reason == "the scores have no batch dimension"


class Memory(nn.Module):
    """Attention over learned slots."""

    def __init__(self, softmax: bool) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(8, WIDTH))
        self.values = nn.Parameter(torch.randn(8, WIDTH))
        self.softmax = softmax

    def forward(self, x):
        s = x @ self.keys.mT
        return (s.softmax(-1) if self.softmax else s.relu()) @ self.values


def experts(x, first, second):
    """A feed-forward layer for each expert: two bmm with an activation between, not attention."""
    return torch.bmm(F.gelu(torch.bmm(x, first)), second)


def gates(x, router, expert):
    return torch.einsum("ble,lbd->bld", (x @ router).softmax(-1), expert)


def test_other_uses_of_the_same_operators_are_passed_by_in_silence() -> None:
    x = torch.randn(4, 6, WIDTH)
    mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    first, second = nn.Parameter(torch.randn(4, WIDTH, 12)), nn.Parameter(torch.randn(4, 12, WIDTH))
    chain = Rewritten(lambda q, k, v: (q @ k.mT) @ v)
    cases = [
        (chain, [x, x + 1, x + 2]),
        (Rewritten(Memory(softmax=False)), [x]),
        (Rewritten(mlp), [x]),
        (Rewritten(lambda x: experts(x, first, second)), [x]),
        (Rewritten(lambda x: (x @ mlp[0].weight.mT).softmax(-1) @ mlp[2].weight.mT), [x]),
    ]
    for run, args in cases:
        run(*args)
        assert run.report.sites == []


def test_learned_queries_may_pool_but_q_scaled_by_a_module_parameter_stays_exact() -> None:
    scale = nn.Parameter(torch.tensor(0.3))

    def attend(q, k, v, lens):
        q, k, v = split_all(q, k, v)
        s = (q @ k.mT * scale).masked_fill(~keys(lens, q.mT), -1e9)
        return join(s.softmax(-1) @ v)

    run = Rewritten(attend)
    args = inputs()
    run(*args).sum().backward()
    ours, scale.grad = scale.grad, None
    attend(*args).sum().backward()
    torch.testing.assert_close(ours, scale.grad, rtol=1e-4, atol=1e-4)
    run.report.expect(attention=1)


def test_symbolic_scale_by_the_length() -> None:
    def attend(q, k, v, lens):
        q, k, v = split_all(q, k, v)
        s = (q @ k.mT / q.shape[2] ** 0.5).masked_fill(~keys(lens, q.mT), -1e9)
        return join(s.softmax(-1) @ v)

    run = Rewritten(attend)
    run.check(inputs())
    run.check(inputs(length=9))
    run.report.expect(attention=1)
    assert run.graphs == 1


def test_scale_folds_into_the_op() -> None:
    run = Rewritten(spellings.where_after_scaled_queries)
    run(*inputs())
    (op,) = run.graph.graph.find_nodes(
        op="call_function", target=torch.ops.gem.padded_attention.default
    )
    assert math.isclose(op.args[8], 1 / ROOT)
    assert "aten.mul.Tensor" not in run.targets()
