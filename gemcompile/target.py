"""What code is compiled for; asked instead of the machine, so a CPU test can say "as if sm_90"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Target:
    """A device kind and its architecture.

    Attributes:
        device: "cpu", "cuda" or "hip".
        arch: compute capability as major * 10 + minor (90 for H100 and H200), the gfx name on AMD,
            0 on CPU.
    """

    device: str
    arch: int | str = 0

    @staticmethod
    def of(device: torch.device) -> Target:
        """The target that ``device`` of this machine is."""
        return _of(device.type, device.index)

    def __str__(self) -> str:
        return self.device if self.device == "cpu" else f"{self.device}:{self.arch}"


@lru_cache(maxsize=64)
def _of(kind: str, index: int | None) -> Target:
    if kind != "cuda" or not torch.cuda.is_available():
        return Target(kind)
    if torch.version.hip:
        return Target("hip", torch.cuda.get_device_properties(index).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(index)
    return Target("cuda", major * 10 + minor)
