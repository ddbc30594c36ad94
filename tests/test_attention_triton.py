"""The Triton kernels on a machine without a GPU: interpreted, and compiled for other machines."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from kernel_cases import old_numpy
from own_process import run_script

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the triton package")


@old_numpy
def test_kernels_under_the_interpreter(tmp_path):
    output = run_script("interpreted_kernels.py", cache=tmp_path, interpret=True)
    assert "0 failed" in output and not output.startswith("0 passed")


def test_kernels_compile_for_nvidia_and_amd(tmp_path):
    output = run_script("compiled_kernels.py", cache=tmp_path)
    for target in ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950"):
        for kernel in ("tile lists", "forward", "query", "key"):
            assert f"{target} {kernel}" in output
