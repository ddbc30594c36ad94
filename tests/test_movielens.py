"""The MovieLens example: its data, its model, and that gem trains it as eager does."""

from __future__ import annotations

import zipfile
from pathlib import Path

import data
import model
import pytest
import torch
import training

import gemcompile

HISTORIES = [torch.randint(1, 20, (n,)) for n in (3, 9, 5, 4, 21, 6)]


def small(attention: str) -> model.NextItem:
    return model.NextItem(19, 21, width=16, heads=2, layers=2, dropout=0.0, attention=attention)


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    """Three users; the file is in no order, and user 7's last two ratings have the same time."""
    rows = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    rows += ["7\t30\t5\t300", "8\t10\t1\t50", "7\t10\t3\t100", "7\t20\t4\t300", "9\t5\t2\t1"]
    path = tmp_path / "ml-100k.inter"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_histories_are_in_order_of_time(ratings: Path) -> None:
    assert [history.tolist() for history in data.load(ratings)] == [[10, 30, 20], [10], [5]]


def test_file_is_read_out_of_the_wheel(
    ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "recbole-1.2.1-py3-none-any.whl", "w") as wheel:
        wheel.write(ratings, data.MEMBER)
    monkeypatch.setattr(data, "CACHE", tmp_path)
    assert [len(history) for history in data.load()] == [3, 1, 1]


def test_training_never_sees_the_test_event() -> None:
    for batch in data.training_batches(HISTORIES, size=4, epochs=1, seed=0):
        assert batch.items.shape[1] == batch.lengths.max()
        for items, targets, length in zip(*batch, strict=True):
            whole = [*items[:length].tolist(), int(targets[length - 1])]
            assert any(whole == history[:-1].tolist() for history in HISTORIES)
            assert not items[length:].any() and not targets[length:].any()


def test_every_epoch_has_every_user_in_an_order_of_its_own() -> None:
    batches = list(data.training_batches(HISTORIES, size=6, epochs=2, seed=0))
    first, second = (batch.lengths for batch in batches)
    assert sorted(first.tolist()) == sorted(second.tolist()) == [1, 2, 3, 4, 7, 19]
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize("attention", ["softmax", "silu"])
def test_padding_does_not_change_the_model(attention: str) -> None:
    net = small(attention)
    batch = data.pad(HISTORIES)
    together = net(*batch) * batch.events
    alone = sum(net(*data.pad([history])) * (len(history) - 1) for history in HISTORIES)
    torch.testing.assert_close(together, alone)


def test_rank_counts_unseen_items_only() -> None:
    """With one-hot scores by hand: the answer ranks behind the two better items not yet seen."""

    class Fixed(model.NextItem):
        def predict(self, items: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return torch.arange(20.0).expand(len(items), 20).clone()

    net = Fixed(19, 21)
    # Item 17 is the answer; 19 has been seen, so only 18 is better: rank 1 of 0, 1, 2...
    hits, gain = training.evaluate(net, [torch.tensor([19, 3, 17])], "cpu")
    assert hits == 1.0
    assert gain == pytest.approx(1 / torch.log2(torch.tensor(3.0)).item())
    # Item 5 has more than ten unseen items above it.
    assert training.evaluate(net, [torch.tensor([19, 3, 5])], "cpu") == (0.0, 0.0)
    assert net.training


def test_runs_side_by_side_see_the_same() -> None:
    settings = training.Settings(epochs=1, batch_size=3)
    runs = [training.start("eager", HISTORIES, settings, "cpu") for _ in range(2)]
    training.train(runs, HISTORIES, settings, "cpu")
    assert runs[0].losses == runs[1].losses
    assert len(runs[0].losses) == training.steps(HISTORIES, settings) == 2


@pytest.mark.parametrize("attention", ["softmax", "silu"])
def test_gem_trains_it_packed(attention: str) -> None:
    net = small(attention)
    options = {"inner": "eager", "pack": True}
    with gemcompile.record() as report:
        compiled = torch.compile(net, backend=gemcompile.gem, dynamic=True, options=options)
        for histories in (HISTORIES, HISTORIES[:4]):
            batch = data.pad(histories)
            net.zero_grad()
            expected = net(*batch)
            expected.backward()
            gradients = [parameter.grad for parameter in net.parameters()]
            net.zero_grad()
            actual = compiled(*batch)
            actual.backward()
            torch.testing.assert_close(actual, expected)
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)
    report.expect(attention=2, padding=1)
