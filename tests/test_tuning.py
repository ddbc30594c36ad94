"""How the tiles of the portable kernels are chosen: keys, shipped choices, the bounded search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from kernel_cases import Case, build

from gemcompile.lowering import tuning
from gemcompile.lowering.tuning import Tiling
from gemcompile.target import Target

HOPPER, AMPERE = Target("cuda", 90), Target("cuda", 80)
CALL = build(Case((300, 2, 0), dim=40, value_dim=64, causal=True), torch.device("cpu")).args


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "_SHIPPED", tmp_path / "shipped")
    tuning.choices.cache_clear()
    yield tmp_path
    tuning.choices.cache_clear()


def as_if(monkeypatch: pytest.MonkeyPatch, target: Target, searching: bool) -> None:
    monkeypatch.setattr(Target, "of", staticmethod(lambda device: target))
    monkeypatch.setattr(tuning, "searching", lambda device: searching)


def never(tiles: Tiling) -> None:
    raise AssertionError("searched")


def test_keys_hold_buckets_only() -> None:
    assert tuning.key_of("key", CALL) == "key, float32, width 64, softmax, causal, keys to 256"

    def keys(*lengths: int) -> str:
        args = build(Case(lengths, activation="silu"), torch.device("cpu")).args
        return tuning.key_of("forward", args).partition("keys ")[2]

    assert keys(60) == keys(10, 3) == keys() == "to 64"
    assert keys(900, 1000) == "to 1024" and keys(1200, 1000) == "above 1024"


@pytest.mark.parametrize("kind", ["forward", "query", "key"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_a_search_is_bounded_and_starts_with_the_rule(
    kind: str, dtype: torch.dtype, width: int
) -> None:
    tilings = tuning.candidates(kind, dtype, width, HOPPER)
    assert tilings[0] == tuning.rule(kind, dtype, width, HOPPER)
    assert 2 <= len(tilings) == len(set(tilings)) <= tuning.MOST


def test_shipped_choices_are_taken_without_a_search(
    user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if(monkeypatch, HOPPER, searching=True)
    shipped = user_folder / "shipped"
    shipped.mkdir()
    key = tuning.key_of("forward", CALL)
    (shipped / "cuda_90.json").write_text(json.dumps({key: [128, 32, 8, 2]}))
    assert tuning.tiling("forward", CALL, never) == Tiling(128, 32, 8, 2)


def test_a_search_happens_once_and_is_kept_for_later_processes(
    user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if(monkeypatch, AMPERE, searching=True)
    wanted = Tiling(32, 64, 4, 1)
    asked: list[list[Tiling]] = []

    def search(tilings: list[Tiling], run: object) -> Tiling:
        asked.append(tilings)
        return wanted

    monkeypatch.setattr(tuning, "search", search)
    assert tuning.tiling("query", CALL, never) == wanted
    assert tuning.tiling("query", CALL, never) == wanted
    tuning.choices.cache_clear()  # as a new process
    assert tuning.tiling("query", CALL, never) == wanted
    assert len(asked) == 1


def test_only_what_was_searched_is_kept(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a shipped choice would hide the one that a newer package ships."""
    as_if(monkeypatch, HOPPER, searching=True)
    monkeypatch.setattr(tuning, "search", lambda tilings, run: Tiling(32, 64, 4, 1))
    shipped = user_folder / "shipped" / "cuda_90.json"
    shipped.parent.mkdir()
    forward, query, key = (tuning.key_of(kind, CALL) for kind in ("forward", "query", "key"))
    shipped.write_text(json.dumps({forward: [128, 32, 8, 2]}))
    tuning.tiling("query", CALL, never)
    tuning.choices.cache_clear()  # as a new process, whose package ships something else
    shipped.write_text(json.dumps({forward: [64, 32, 4, 1], query: [16, 16, 4, 1]}))
    tuning.tiling("key", CALL, never)
    (own,) = (user_folder / "gemcompile").rglob("*.json")
    assert set(json.loads(own.read_text())) == {query, key}
    assert tuning.tiling("forward", CALL, never) == Tiling(64, 32, 4, 1)
    assert tuning.tiling("query", CALL, never) == Tiling(32, 64, 4, 1)


def test_without_being_asked_the_rule_decides(
    user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if(monkeypatch, AMPERE, searching=False)
    expected = tuning.rule("query", torch.float32, 64, AMPERE)
    assert tuning.tiling("query", CALL, never) == expected
    assert not list(user_folder.rglob("*.json"))


def test_an_unwritable_folder_is_no_failure(
    user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user_folder / "gemcompile").write_text("in the way")
    tuning.save(AMPERE, {"a": Tiling(32, 32, 4, 1)})
    assert tuning.choices(AMPERE) == {}


@pytest.mark.cuda
def test_search_on_the_device_skips_what_does_not_fit() -> None:
    from triton.runtime.errors import OutOfResources

    x = torch.zeros(1 << 20, device="cuda")

    def run(tiles: Tiling) -> None:
        if tiles.num_stages == 9:
            raise OutOfResources(1, 0, "shared memory")
        for _ in range(tiles.BM):
            x.add_(1)

    tilings = [Tiling(64, 0, 0, 0), Tiling(1, 0, 0, 9), Tiling(2, 0, 0, 0)]
    assert tuning.search(tilings, run) == tilings[2]


def test_shipped_files_name_what_the_kernels_ask_for() -> None:
    kinds = {"forward", "query", "key"}
    for path in Path(tuning.__file__).parent.glob("tuned/*.json"):
        for key, tiles in json.loads(path.read_text()).items():
            assert key.partition(",")[0] in kinds and len(key.split(", ")) == 6
            assert all(n > 0 for n in tiles) and len(tiles) == 4
