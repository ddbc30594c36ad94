"""Scripts beside the tests, each run in a process of its own.

TRITON_INTERPRET is read when a kernel is decorated, and a failing backend may abort the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_script(script: str, *arguments: str, cache: Path, interpret: bool = False) -> str:
    """Output of a script; fails with it where the script does. ``cache`` is Triton's, a new one."""
    path = os.pathsep.join([str(HERE.parent), str(HERE), *sys.path])
    environment = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout
