"""The Triton kernels on a machine without a GPU: interpreted, and compiled for other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from kernel_cases import old_numpy

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the triton package")
HERE = Path(__file__).parent


def run_script(name: str, tmp_path: Path, **environment: str) -> str:
    """Output of a script beside this file; fails with it where the script does."""
    path = os.pathsep.join([str(HERE.parent), str(HERE), *sys.path])
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(HERE / name)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@old_numpy
def test_kernels_under_the_interpreter(tmp_path):
    output = run_script("interpreted_kernels.py", tmp_path, TRITON_INTERPRET="1")
    assert "0 failed" in output and not output.startswith("0 passed")


def test_kernels_compile_for_nvidia_and_amd(tmp_path):
    output = run_script("compiled_kernels.py", tmp_path)
    for target in ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950"):
        for kernel in ("tile lists", "forward", "query", "key"):
            assert f"{target} {kernel}" in output
