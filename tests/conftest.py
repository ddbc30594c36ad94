"""What every test shares: golden files, a clean compiler, and the `cuda` marker."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is imported: a cache of this run's own, so that no test passes thanks to what an
# earlier run left behind, and compiling in this process (a worker pool costs more than it saves).
_cache_dir: str | None = None
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    _cache_dir = tempfile.mkdtemp(prefix="gemcompile-tests-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache_dir
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Shapes are small, and `make test` runs two processes at a time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--accept", action="store_true", help="write golden files instead of comparing"
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    # With pytest-xdist the workers inherit the directory; only the process that made it removes it.
    if _cache_dir is not None:
        shutil.rmtree(_cache_dir, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compare a text with `tests/golden/<file>/<test>.txt`; `pytest --accept` writes the file."""
    path = GOLDEN / request.path.stem / f"{request.node.name}.txt"

    def check(text: str) -> None:
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--accept"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        if not path.exists():
            pytest.fail(f"{path} is missing; write it with: pytest --accept -k {request.node.name}")
        assert text == path.read_text()

    return check


@pytest.fixture(autouse=True)
def _clean_slate() -> Iterator[None]:
    """Start each test from the same seed and without the graphs that the last one compiled."""
    torch.manual_seed(0)
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
