"""EliminatePadding: what it packs, what it refuses and why, and that values and gradients stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from padding_models import EXITS, Block, Encoder, Torch, TwoMasks, keep_mask
from torch import Tensor
from torch.fx import GraphModule

from gemcompile import Options, gem, record
from gemcompile.graph import text
from gemcompile.ops.packing import pack_index
from gemcompile.passes import Canonicalize, EliminatePadding, FuseAttention
from gemcompile.prologue import ROWS
from gemcompile.report import Report
from gemcompile.testing import run_passes, trace

PASSES = (Canonicalize, FuseAttention, EliminatePadding)


def packed(
    model: nn.Module, *args: Any, pack: Any = True, dynamic: bool = True, **options: Any
) -> tuple[GraphModule, Report]:
    """The model's graph after the passes."""
    gm = trace(model, *args, dynamic=dynamic)
    return gm, run_passes(gm, [p() for p in PASSES], Options(pack=pack, **options))


def run(gm: GraphModule, inputs: Sequence[Any]) -> Any:
    """The rewritten graph on a batch given as the graph's own inputs."""
    inputs = [x.node.hint if isinstance(x, torch.SymInt) else x for x in inputs]
    prologue = gm.meta["gem_context"].prologue
    extra: list[Any] = []
    for mask in prologue.masks(inputs) if prologue else ():
        p = pack_index(mask, ROWS)
        extra += [p.index.shape[0] // ROWS, *p]
    return gm(*inputs, *extra)


def results(model: nn.Module, call: Callable[..., Any], *args: Any) -> list[Tensor]:
    """Output of ``call(*args)`` and parameter gradients of the model."""
    model.zero_grad()
    out = call(*args)
    out = out[0] if isinstance(out, (tuple, list)) else out
    (out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def batch(lens: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1, 100, (len(lens), length)), torch.tensor(lens)


LENS = ([5, 12, 1], [12, 12, 12], [1, 1, 2])


@pytest.mark.parametrize("head", EXITS)
def test_exits(head: str) -> None:
    model = Encoder(head)
    gm, report = packed(model, *batch(LENS[0], 12))
    report.expect(attention=2, padding=1)
    (site,) = report.of("padding")
    assert site.details["unpacks"] == 1
    assert site.details["packs"] <= 2  # the ids, and the target of the loss
    assert "padded_attention" not in text(gm)
    names = [p.name for p in gm.graph.find_nodes(op="placeholder")]
    assert [n for n in names if "groups" in n] == ["gem_groups_0"]
    inputs = gm.meta["example_inputs"]
    expected = results(model, model, *batch_of(inputs))
    close(results(model, run, gm, inputs), expected)


def batch_of(inputs: Sequence[Any]) -> list[Tensor]:
    """ids and lens among the graph's inputs."""
    found = [x for x in inputs if isinstance(x, Tensor) and x.dtype == torch.int64 and x.dim()]
    return sorted(found, key=lambda t: -t.dim())


@pytest.mark.parametrize("style", ["sdpa", "manual", "finite"])
@pytest.mark.parametrize("causal", [False, True])
def test_spellings_through_the_backend_without_codegen(style: str, causal: bool) -> None:
    model = Encoder("mean", style=style, causal=causal)
    compiled = torch.compile(model, backend=gem, dynamic=True, options=EAGER)
    with record() as report:
        for lens in LENS:
            ids, lengths = batch(lens, 12)
            close(
                results(model, compiled, ids, lengths),
                results(model, model, ids, lengths),
            )
    report.expect(attention=2, padding=1)


EAGER = {"pack": True, "inner": "eager"}


def test_empty_sequences_and_batches() -> None:
    model = Encoder("mean")
    compiled = torch.compile(model, backend=gem, dynamic=True, options=EAGER)
    with record() as report:
        for lens, length in (([3, 0, 7], 7), ([0, 0], 5), ([0, 1], 9), ([4, 4, 4, 4], 4)):
            ids, lengths = batch(lens, length)
            close(
                results(model, compiled, ids, lengths),
                results(model, model, ids, lengths),
            )
    assert report.graphs == 1


def test_transformer_encoder_layer_keeps_its_own_layout() -> None:
    """nn.MultiheadAttention works on [L, B, E] and [L * B, E]: axes are followed through both."""
    model = Torch().train()
    x, lens = torch.randn(3, 10, 32), torch.tensor([10, 4, 1])
    gm, report = packed(model, x, lens)
    report.expect(attention=1, padding=1)
    compiled = torch.compile(model, backend=gem, dynamic=True, options=EAGER)
    close(results(model, compiled, x, lens), results(model, model, x, lens))


def test_two_masks_make_two_row_sets() -> None:
    model = TwoMasks()
    ids, lens = batch([7, 2, 4], 7)
    items, wanted = batch([3, 5, 1], 5)
    gm, report = packed(model, ids, lens, items, wanted)
    report.expect(attention=2, padding=2)
    compiled = torch.compile(model, backend=gem, dynamic=True, options=EAGER)
    args = (ids, lens, items, wanted)
    close(results(model, compiled, *args), results(model, model, *args))


def test_same_length_of_history_and_items_is_no_confusion() -> None:
    model = TwoMasks()
    args = (*batch([5, 2, 4], 5), *batch([3, 5, 1], 5))
    for dynamic in (True, False):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=gem, dynamic=dynamic, options=EAGER)
        close(results(model, compiled, *args), results(model, model, *args))


class GivenMask(nn.Module):
    """The mask is made outside; ``kind`` says how it is used."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.block = kind, Block(32, 2, "sdpa", 0.0, False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.kind == "float":
            mask = mask.float()
            return (self.block(x, mask.bool()) * mask.unsqueeze(-1)).sum(1)
        keep = ~mask if self.kind == "padding" else mask
        return (self.block(x, keep) * keep.unsqueeze(-1)).sum(1)


class NumberMask(GivenMask):
    """A mask of numbers comes from the data loader; nothing says that they are 0 and 1."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.block(x, mask != 0 if self.kind == "int" else ~(mask == 0))
        return (y * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


@pytest.mark.parametrize("kind", ["int", "float"])
def test_masks_of_numbers(kind: str) -> None:
    model = NumberMask(kind)
    mask = keep_mask(torch.tensor([6, 0, 3]), 6).to(torch.int64 if kind == "int" else torch.float32)
    x = torch.randn(3, 6, 32)
    gm, report = packed(model, x, mask)
    report.expect(attention=1, padding=1)
    assert "key_mask" not in text(gm) and "bitwise_or" not in text(gm)
    close(results(model, run, gm, gm.meta["example_inputs"]), results(model, model, x, mask))


def test_outputs_are_zeroed_by_a_mask_of_numbers() -> None:
    """More rows are packed than the mask keeps, so that the mask itself must zero the rest."""

    class Raw(GivenMask):
        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            y = self.block(x, mask != 0)
            return y, y[torch.arange(x.shape[0]), mask.sum(1) - 1]

    model, lens = Raw("int"), torch.tensor([6, 0, 3])
    x, mask = torch.randn(3, 6, 32), keep_mask(lens, 6).long()
    gm, report = packed(model, x, mask, padded_outputs="zero")
    report.expect(padding=1)
    expected, last = model(x, mask)
    found, found_last = run(gm, gm.meta["example_inputs"])
    torch.testing.assert_close(
        found, expected.masked_fill(mask[..., None] == 0, 0.0), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(found_last, last, rtol=1e-4, atol=1e-5)


def test_the_complement_of_a_number_is_no_mask() -> None:
    """~1 is -2: bitwise_not negates bools only."""

    class Bitwise(GivenMask):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y = self.block(x, mask)
            return (y * (~mask.long()).unsqueeze(-1)).sum(1)

    model = Bitwise("keep")
    x, keep = torch.randn(3, 6, 32), keep_mask(torch.tensor([6, 0, 3]), 6)
    gm, _ = packed(model, x, keep)
    close(results(model, run, gm, gm.meta["example_inputs"]), results(model, model, x, keep))


def test_a_mask_of_one_sequence_expanded_to_all() -> None:
    class Shared(GivenMask):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y = self.block(x, mask[:1].expand(x.shape[0], -1))
            return (y * mask[:1].unsqueeze(-1).expand(x.shape[0], -1, 1)).sum(1)

    model = Shared("keep")
    x, keep = torch.randn(3, 6, 32), keep_mask(torch.tensor([4, 0, 3]), 6)
    gm, _ = packed(model, x, keep)
    close(results(model, run, gm, gm.meta["example_inputs"]), results(model, model, x, keep))


@pytest.mark.parametrize("kind", ["keep", "padding", "float"])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_any_mask(kind: str, seed: int) -> None:
    """Left-padded, right-padded, with holes, empty: any bool [B, L]."""
    torch.manual_seed(seed)
    model = GivenMask(kind)
    x, mask = torch.randn(3, 6, 32), torch.rand(3, 6) < torch.rand(())
    gm, report = packed(model, x, mask)
    report.expect(attention=1, padding=1)
    inputs = [t for t in gm.meta["example_inputs"]]
    close(results(model, run, gm, inputs), results(model, model, x, mask))


def test_nan_in_padded_rows_stays_there() -> None:
    model = GivenMask("keep")
    x, keep = torch.randn(2, 5, 32), keep_mask(torch.tensor([5, 2]), 5)
    gm, _ = packed(model, x, keep)
    clean = run(gm, gm.meta["example_inputs"])[0]
    poisoned = x.masked_fill(~keep[..., None], float("nan"))
    inputs = [poisoned if t is x else t for t in gm.meta["example_inputs"]]
    torch.testing.assert_close(run(gm, inputs)[0], clean)


def test_dropout_is_kept_inside_the_region() -> None:
    model = Encoder("mean", dropout=0.5).train()
    gm, report = packed(model, *batch(LENS[0], 12))
    assert text(gm).count("aten.dropout") == 4
    report.expect(padding=1)


def test_in_place_residuals() -> None:
    class InPlace(Encoder):
        def leave(self, x: Tensor, ids: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
            y = self.norm(x)
            y += x
            y.mul_(2.0)
            return self.score((y * keep[:, :, None]).sum(1))

    model = InPlace("mean")
    gm, report = packed(model, *batch(LENS[0], 12))
    report.expect(padding=1)
    assert report.of("padding")[0].details["unpacks"] == 1
    inputs = gm.meta["example_inputs"]
    expected = results(model, model, *batch_of(inputs))
    close(results(model, run, gm, inputs), expected)


# --- refusals -------------------------------------------------------------------------------------


def declined(report: Report) -> list[str]:
    return [s.reason for s in report.sites if s.kind == "padding" and s.status == "declined"]


def test_padded_output_is_named_with_its_cure() -> None:
    gm, report = packed(Encoder("raw", style="finite"), *batch(LENS[0], 12))
    reasons = declined(report)
    assert len(reasons) == 2
    assert "padded output leaves the graph" in reasons[0]
    assert "padded_outputs='zero'" in reasons[0]
    assert "jagged" not in text(gm)


def test_padded_outputs_zero_packs_and_zeroes() -> None:
    model = Encoder("raw")
    ids, lens = batch(LENS[0], 12)
    gm, report = packed(model, ids, lens, padded_outputs="zero")
    report.expect(padding=1)
    out = run(gm, gm.meta["example_inputs"])[0]
    keep = keep_mask(lens, 12)[..., None]
    torch.testing.assert_close(out, torch.where(keep, model(ids, lens), 0.0), rtol=1e-4, atol=1e-5)


class Mixing(Encoder):
    """Something between the blocks and the exit that mixes rows, or reads padded ones."""

    def __init__(self, how: str) -> None:
        super().__init__("mean", style="finite")
        self.how = how
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.bn = nn.BatchNorm1d(32)

    def leave(self, x: Tensor, ids: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
        if self.how == "convolution":
            x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        elif self.how == "cumsum":
            x = x.cumsum(1)
        elif self.how == "batch norm":
            x = self.bn(x.transpose(1, 2)).transpose(1, 2)
        elif self.how == "roll":
            x = x.roll(1, 1)
        elif self.how == "mean of all":
            return self.score(x.mean(1))
        elif self.how == "flip of the batch":
            x = x.flip(0)
        return super().leave(x, ids, keep, lens)


@pytest.mark.parametrize(
    "how, op",
    [
        ("convolution", "conv1d"),
        ("cumsum", "cumsum"),
        ("batch norm", "batch_norm"),
        ("roll", "roll"),
        ("mean of all", "mean"),
        ("flip of the batch", "flip"),
    ],
)
def test_the_observer_of_padded_rows_is_named(how: str, op: str) -> None:
    model = Mixing(how)
    gm, report = packed(model, *batch(LENS[0], 12))
    reasons = declined(report)
    assert reasons and op in reasons[-1] and "test_padding.py" in reasons[-1], reasons
    if how != "batch norm":  # it would count the batch twice
        inputs = gm.meta["example_inputs"]
        close(results(model, run, gm, inputs), results(model, model, *batch_of(inputs)))


def test_finite_fill_with_rows_outside_the_key_mask() -> None:
    """The row that a clamped gather reads of an empty sequence averages padded values."""
    model = Encoder("last clamped", style="finite")
    gm, report = packed(model, *batch([5, 0, 1], 12))
    assert any("finite fill" in r for r in declined(report))
    inputs = gm.meta["example_inputs"]
    expected = results(model, model, *batch_of(inputs))
    close(results(model, run, gm, inputs), expected)


def test_packing_that_does_not_pay_is_declined() -> None:
    model = Encoder("mean")
    for lens, worth in (([99, 100, 100, 100, 101], False), ([30, 20, 100, 10, 7], True)):
        gm, report = packed(model, *batch(lens, 101), pack="auto")
        assert bool(report.of("padding")) == worth
        if not worth:
            assert any(r.startswith("fill is") for r in declined(report))


def test_pack_false_packs_nothing() -> None:
    gm, report = packed(Encoder("mean"), *batch(LENS[0], 12), pack=False)
    assert not report.of("padding") and "padded_attention" in text(gm)


class Pooled(nn.Module):
    """Attention over ids, sum-pooled: the smallest model that packs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x = self.embed(ids)
        q = x.unflatten(-1, (2, 16)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=keep[:, None, None, :])
        return ((x + y.transpose(1, 2).flatten(2)) * keep[:, :, None]).sum(1)


def test_golden_graph(golden: Callable[[str], None]) -> None:
    ids, lens = batch(LENS[0], 12)
    gm, _ = packed(Pooled(), ids, keep_mask(lens, 12))
    golden(text(gm))


@pytest.mark.parametrize("head", ["last", "masked loss", "mean"])
def test_causal_attention_without_key_mask(head: str) -> None:
    """SASRec's way: the future is hidden, and padding at the end is then unseen by real items."""
    model = Encoder(head, style="causal only")
    gm, report = packed(model, *batch(LENS[0], 12))
    report.expect(attention=2, padding=1)
    assert "padded_attention" not in text(gm)
    inputs = gm.meta["example_inputs"]
    close(results(model, run, gm, inputs), results(model, model, *batch_of(inputs)))


# --- compiled -------------------------------------------------------------------------------------


def test_one_compile_over_many_batches() -> None:
    """Totals 0, 1 and all, B == L now and then: one graph each for dynamic=True and None."""
    model = Encoder("mean", layers=1)
    for dynamic, most in ((True, 1), (None, 2)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiled = torch.compile(model, backend=gem, dynamic=dynamic, options={"pack": True})
        with record() as report:
            for i in range(25):
                b = int(torch.randint(2, 7, ()))
                n = b if i % 6 == 5 else int(torch.randint(3, 60, ()))
                lens = torch.randint(0, n + 1, (b,)) * (i % 7 != 3)
                if i == 4:
                    lens = torch.tensor([0] * (b - 1) + [1])
                ids = torch.randint(1, 100, (b, n))
                close(
                    results(model, compiled, ids, lens),
                    results(model, model, ids, lens),
                )
        assert report.graphs <= most


def test_above_the_declared_bound_the_original_graph_takes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gemcompile.prologue._INT32", 128 * 64 * 3)  # three groups of width 64
    model = Encoder("mean", layers=1)
    compiled = torch.compile(model, backend=gem, dynamic=True, options={"pack": True})
    for lens, length in (([5, 60, 9], 60), ([300, 250, 7], 300), ([5, 6], 8)):
        ids, lengths = batch(lens, length)
        close(
            results(model, compiled, ids, lengths),
            results(model, model, ids, lengths),
        )
