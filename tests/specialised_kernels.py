"""What the tests of the specialised Triton kernels share: interpreting and compiling their cases.

Both happen in a process of their own (``own_process``).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Sequence
from types import ModuleType
from unittest import mock

import torch
from kernel_cases import Case, build, check

from gemcompile.target import Target

SHARED_KIB = {
    Target("cuda", 80): 163,
    Target("cuda", 89): 99,
    Target("cuda", 90): 227,
    Target("cuda", 100): 227,
    Target("hip", "gfx942"): 64,
    Target("hip", "gfx950"): 160,
}


def interpret(kernel: str, cases: Iterable[Case]) -> None:
    """Checks the cases, in float32: the interpreter computes bfloat16 wrongly."""
    passed, failed = 0, 0
    for case in cases:
        try:
            check(case, kernel, repeat=False)
            passed += 1
        except Exception:
            failed += 1
            print(f"FAILED {case}")
            traceback.print_exc(limit=-4, file=sys.stdout)
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


def compile_everywhere(launcher: ModuleType, cases: Sequence[Case], most: int) -> None:
    """Runs a launcher with a driver that compiles for each target and launches nothing.

    All cases for sm_90, the first ``most`` for the others. Prints a line per kernel, and exits with
    1 where one wants more shared memory than there is.
    """
    failed = 0
    for number, (target, limit) in enumerate(SHARED_KIB.items()):
        for case in cases if target.arch == 90 else cases[:most]:
            for name, kib in compiled(launcher, build(case, torch.device("cpu")), target, number):
                verdict = "ok" if kib <= limit else f"FAILED: more than {limit}"
                failed += kib > limit
                print(f"{target} {name} {case}: {kib:.0f} KiB {verdict}", flush=True)
    sys.exit(1 if failed else 0)


def compiled(launcher, call, target: Target, number: int) -> list[tuple[str, float]]:
    """(name, KiB of shared memory) of the kernels that a forward and a backward launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    warp = 64 if target.device == "hip" else 32
    driver = mock.Mock()
    driver.get_current_target.return_value = GPUTarget(target.device, target.arch, warp)
    driver.get_current_device.return_value = number  # kernels are kept by device
    driver.get_current_stream.return_value = 0
    triton.runtime.driver.set_active(driver)
    launch, used = JITFunction.run, []

    def compile_only(self, *args, grid, warmup, **options):
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        used.append((self.fn.__name__, kernel.metadata.shared / 1024))
        return kernel

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(Target, "of", staticmethod(lambda device: target)),
    ):
        out, lse = launcher.forward(call.args)
        launcher.backward(call.dout, call.args, out, lse, False)
    return used
