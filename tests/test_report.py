"""The report, what it says in each form, and explain(), which must leave everything as it was."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from encoders import Encoder, batch
from torch import Tensor, nn

import gemcompile
from gemcompile import Report, explain, gem, record
from gemcompile.testing import trace
from gemcompile.work import forward_bytes, forward_flops

PACKED = {"pack": True}


@pytest.fixture(scope="module")
def report() -> Report:
    """Of a model with one site of each kind: attention fused, padding removed."""
    torch.manual_seed(0)
    return explain(Encoder(2), *batch(), options=PACKED)


# --- explain --------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Changes a buffer, an input and the random state, and returns what depends on all three."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        self.steps += 1
        counts += 1
        return self.drop(self.norm(x)) * self.steps + counts


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wrap", ["module", "method", "closure", "compiled"])
def test_explain_changes_nothing(training: bool, wrap: str) -> None:
    model = Stateful().train(training)
    model(torch.randn(3, 4), torch.zeros(4)).sum().backward()
    x, counts = torch.randn(3, 4, requires_grad=True), torch.zeros(4)
    call: Any = {
        "module": model,
        "method": model.forward,
        "closure": lambda x, counts: model(x, counts),
        "compiled": torch.compile(model),
    }[wrap]
    state, grads = copy.deepcopy(model.state_dict()), [p.grad for p in model.parameters()]
    grad_values = [g.clone() for g in grads if g is not None]
    random = torch.get_rng_state()

    found = explain(call, x, counts)

    assert found.graphs == 1 and found.passes
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    for p, grad in zip(model.parameters(), grads):
        assert p.grad is grad
    assert all(torch.equal(a, b) for a, b in zip(grads, grad_values))
    assert model.training is training and x.grad is None
    assert torch.equal(counts, torch.zeros(4))


def test_explain_refuses_unknown_options() -> None:
    with pytest.raises(ValueError, match="did you mean 'pack'"):
        explain(nn.Linear(2, 2), torch.ones(1, 2), options={"pakc": True})


def test_explain_generates_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Inductor was called")

    import gemcompile.backend

    monkeypatch.setattr(gemcompile.backend, "compile_fx", refuse)
    explain(Encoder(1), *batch(), options=PACKED).expect(attention=1, padding=1)


# --- record ---------------------------------------------------------------------------------------


def test_record_collects_what_happens_inside() -> None:
    f = torch.compile(lambda x: x.sin(), backend=gem, options={"inner": "eager"})
    g = torch.compile(lambda x: x.cos(), backend=gem, options={"inner": "eager"})
    x = torch.ones(2)
    with record() as outer:
        f(x)
        with record() as inner:
            f(x)  # compiled already
            g(x)
    g(torch.ones(3, 3))
    assert (outer.graphs, inner.graphs) == (2, 1)


def test_sites_once_with_dynamic_shapes() -> None:
    """Python floats that dynamic=True makes symbolic would run the backend twice."""
    model, example = Encoder(1), batch()
    model.embed = nn.Sequential(model.embed, nn.Dropout(0.1), nn.LayerNorm(16))
    with record() as found:
        torch.compile(model, backend=gem, dynamic=True, options={"inner": "eager", **PACKED})(
            *example
        )
    assert found.graphs == 1
    found.expect(attention=1, padding=1)


# --- its forms ------------------------------------------------------------------------------------


def test_sites(report: Report) -> None:
    report.expect(attention=2, padding=1, graph=0)
    first, second, padding = report.sites
    assert (first.kind, first.status) == ("attention", "rewritten")
    assert first.op == "gem.padded_attention(softmax)"
    assert first.where.startswith("encoders.py:") and first.where == second.where
    assert padding.details["packs"] == padding.details["unpacks"] == 1
    assert "17 of 48 rows are real" in padding.details["padding"]


def test_expect_shows_what_was_declined() -> None:
    found = Report()
    found.add("attention", "declined", "aten.softmax", "it runs over the query axis", "m.py:3")
    with pytest.raises(AssertionError) as e:
        found.expect(attention=1)
    assert str(e.value) == (
        "expected 1 rewritten attention sites, found 0\n"
        "  attention declined at m.py:3: aten.softmax because it runs over the query axis"
    )
    with pytest.raises(ValueError, match="unknown kind of site 'atention'"):
        found.expect(atention=1)


def test_json(report: Report) -> None:
    found = json.loads(report.to_json())
    assert [s["kind"] for s in found["sites"]] == ["attention", "attention", "padding"]
    assert {"name", "changes", "seconds", "before", "after"} <= set(found["passes"][0])
    assert found["graphs"] == 1 and found["seconds"] > 0


def test_text(report: Report) -> None:
    text = str(report)
    assert text.startswith("gem: 1 graph, 3 sites rewritten, 0 declined, compiled in ")
    assert "attention gem.padded_attention(softmax) x2  encoders.py:" in text
    assert "17 of 48 rows are real (35%)" in text
    assert "FuseAttention" in text and max(map(len, text.splitlines())) <= 100


def test_text_of_a_declined_site() -> None:
    model = Encoder(1, pooled=False)
    text = str(explain(model, *batch(), options=PACKED))
    assert "declined" in text
    assert "because its padded output leaves the graph" in text


def test_useful_work(report: Report) -> None:
    """16 wide, 2 heads of 8; lengths 5, 2, 9, 1 of 12: row-wise products, then attention."""
    row_wise = 2 * 16 * (3 * 16 + 16 + 2 * 32)
    assert report.padded_flops == 2 * (48 * row_wise + 2 * 2 * 4 * 12 * 12 * 16)
    assert report.useful_flops == 2 * (17 * row_wise + 2 * 2 * (25 + 4 + 81 + 1) * 16)
    assert "forward work on the first batch: 153 kFLOP, 33% of the padded" in str(report)


def test_bytes_of_values(report: Report) -> None:
    """What may be a view counts nothing, a cast does; 17 packed rows are filled up to 128."""

    def f(x: Tensor) -> Tensor:
        return (x.mT.reshape(3, 2, 4) + 1).to(torch.float64).unsqueeze(0).exp()

    assert forward_bytes(trace(f, torch.randn(3, 4, 2))) == 24 * (4 + 8 + 8)
    assert report.packed_bytes > report.padded_bytes > 0
    assert "values that it makes, before fusion: " in str(report)


def test_flops_of_products() -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        one = torch.einsum("bij,jk->bik", x, w), x @ w, torch.bmm(x, x.mT)
        two = torch.addmm(b, x[0], w), torch.baddbmm(x @ x.mT, x, x.mT)
        return *one, *two, nn.functional.scaled_dot_product_attention(x, x, x)

    gm = trace(f, torch.randn(2, 3, 5), torch.randn(5, 7), torch.randn(7))
    einsum, square = 2 * 2 * 3 * 5 * 7, 2 * 2 * 3 * 3 * 5
    assert forward_flops(gm) == 2 * einsum + square + einsum // 2 + 2 * square + 2 * square


def test_passes(report: Report) -> None:
    names = [p.name for p in report.passes]
    assert names == ["Canonicalize", "FuseAttention", "EliminatePadding", "ShareTiles"]
    for a, b in zip(report.passes, report.passes[1:]):
        assert a.after == b.before
    fuse = report.passes[1]
    assert fuse.changes == 2 and "aten.softmax" in fuse.before
    assert "aten.softmax" not in fuse.after and "gem.padded_attention" in fuse.after


def test_public_names() -> None:
    assert {"explain", "record", "Report", "Site", "Options", "Pass", "Target"} <= set(
        gemcompile.__all__
    )
