"""MovieLens-100K as histories of item ids, and padded batches of them.

The licence of the data forbids redistribution, so nothing of it is kept here. The file comes out
of the `recbole` wheel (fetched once by pip into `.cache/`, never installed or imported), or from a
path that the user gives: `ml-100k.inter`, or the original `u.data`.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

WHEEL = "recbole==1.2.1"
MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"
CACHE = Path(__file__).parent / ".cache"


class Batch(NamedTuple):
    """A padded batch of histories; L is the longest of them.

    items: [B, L] int64, 0 where there is none.
    targets: [B, L] int64, the item that follows each item, 0 where there is none.
    lengths: [B] int64, how many leading entries of each row are real.
    """

    items: Tensor
    targets: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device) for tensor in self))

    @property
    def events(self) -> int:
        return int(self.lengths.sum())


def load(path: Path | None = None) -> list[Tensor]:
    """One int64 tensor a user: the ids (from 1) of the items rated, oldest first."""
    text = path.read_text() if path else read_wheel()
    ratings: dict[str, list[tuple[float, int]]] = {}
    for line in text.splitlines():
        user, item, _, time = line.split("\t")[:4]
        if item.isdigit():  # the header line of `ml-100k.inter` is not
            ratings.setdefault(user, []).append((float(time), int(item)))
    # The sort is stable and looks at the time alone: equal times stay in the file's order.
    return [
        torch.tensor([item for _, item in sorted(history, key=lambda event: event[0])])
        for history in ratings.values()
    ]


def read_wheel() -> str:
    """The text of `ml-100k.inter`, out of a wheel that pip fetches on first use."""
    if not list(CACHE.glob("recbole-*.whl")):
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        result = subprocess.run(
            [*fetch, "--dest", str(CACHE), WHEEL], capture_output=True, text=True
        )
        if result.returncode:
            raise SystemExit(
                f"pip could not fetch {WHEEL}, which carries the MovieLens-100K file; "
                f"give the file with --data PATH\n{result.stderr}"
            )
    with zipfile.ZipFile(next(CACHE.glob("recbole-*.whl"))) as wheel:
        return wheel.read(MEMBER).decode()


def pad(histories: list[Tensor]) -> Batch:
    """Next-item prediction on whole histories: every event but the last predicts its successor."""
    return Batch(
        items=pad_sequence([history[:-1] for history in histories], batch_first=True),
        targets=pad_sequence([history[1:] for history in histories], batch_first=True),
        lengths=torch.tensor([len(history) - 1 for history in histories]),
    )


def training_batches(histories: list[Tensor], size: int, epochs: int, seed: int) -> Iterator[Batch]:
    """Batches of users in random order, the incomplete last one of each epoch dropped.

    The last event of each user is left out for the test.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(histories), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            yield pad([histories[user][:-1] for user in order[start : start + size]])


def test_batches(histories: list[Tensor], size: int) -> Iterator[Batch]:
    """Every user once; the last target of each row is the event that training left out."""
    for start in range(0, len(histories), size):
        yield pad(histories[start : start + size])
