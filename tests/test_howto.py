"""The how-to programs run, say that all is well, and stay as short as the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_process import run_script

HOWTO = Path(__file__).parents[1] / "examples" / "howto"
PROGRAMS = sorted(p.name for p in HOWTO.glob("*.py"))


def test_all_programs_are_there() -> None:
    assert PROGRAMS == ["write_a_matcher.py", "write_a_pass.py", "write_an_op_with_kernel.py"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, tmp_path: Path) -> None:
    last = run_script(f"../examples/howto/{name}", cache=tmp_path).splitlines()[-1]
    assert last.startswith("ok: ")


def test_the_kernel_itself(tmp_path: Path) -> None:
    script = "../examples/howto/write_an_op_with_kernel.py"
    last = run_script(script, cache=tmp_path, interpret=True).splitlines()[-1]
    assert last.startswith("ok: howto.swiglu ran as the Triton kernel")


def test_op_kernel_and_rewrite_are_under_60_lines() -> None:
    text = (HOWTO / "write_an_op_with_kernel.py").read_text()
    own, _, _ = text.partition("# --- what it is worth")
    assert "@triton.jit" in own and "register_autograd" in own and "gem.Rewrite" in own
    assert len(own.rstrip().splitlines()) < 60
