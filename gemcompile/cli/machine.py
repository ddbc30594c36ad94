"""What gem meets on this machine: versions, devices, its own installation, caches, switches."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

GROUP, NAME, VALUE = "torch_dynamo_backends", "gem", "gemcompile.backend:gem"
PYTHON = (3, 10)
TORCH, TORCH_TESTED = (2, 11), (2, 13)
TRITON, TRITON_HOPPER = (3, 6), (3, 6)  # the Hopper kernels are written for one release
SWITCHES = ("GEM_DISABLE", "GEM_KERNEL", "GEM_CHECK", "GEM_TUNE", "GEM_LOGS", "TORCH_LOGS")


@dataclass(frozen=True)
class Finding:
    """One thing found; ``state`` is "ok", "note" (works, but see the cure) or "fail"."""

    name: str
    text: str
    state: str = "ok"
    cure: str = ""


def machine() -> list[Finding]:
    """Everything, in the order in which a person would ask."""
    found = [_python(), _torch(), _triton(), *_devices(), _compiler(), _backend()]
    return [*found, *_caches(), *_switches()]


def _python() -> Finding:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < PYTHON:
        return Finding("Python", text, "fail", f"gem needs {_dotted(PYTHON)} or later")
    return Finding("Python", text)


def _torch() -> Finding:
    built = torch.version.cuda or torch.version.hip
    text = f"{torch.__version__}, built for {f'CUDA or ROCm {built}' if built else 'CPU alone'}"
    return versioned("torch", text, _parts(torch.__version__), TORCH, TORCH_TESTED)


def versioned(
    name: str, text: str, version: tuple[int, ...], least: tuple[int, int], tested: tuple[int, int]
) -> Finding:
    """Too old is a failure, newer than any tested release a note."""
    if version < least:
        return Finding(name, text, "fail", f"gem needs {name} {_dotted(least)} or later")
    if version > tested:
        return Finding(name, text, "note", f"newer than {_dotted(tested)}, the last one tested")
    return Finding(name, text)


def _triton() -> Finding:
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        cure = "pip install triton" if platform.system() == "Linux" else "it is for Linux alone"
        return Finding("triton", "not installed: no GPU kernels", "note", cure)
    parts = _parts(version)
    if parts < TRITON:
        cure = f"gem's GPU kernels need triton {_dotted(TRITON)} or later"
        return Finding("triton", version, "fail" if torch.cuda.is_available() else "note", cure)
    if parts != TRITON_HOPPER:
        cure = f"the fastest kernels for H100 and H200 need triton {_dotted(TRITON_HOPPER)}"
        return Finding("triton", version, "note", cure)
    return Finding("triton", version)


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        cure = "torch is built for GPUs: see nvidia-smi for the driver" if built else ""
        yield Finding("GPU", "none", "note" if built else "ok", cure)
        return
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        arch = f"sm_{properties.major}{properties.minor}"
        if torch.version.hip:
            arch = properties.gcnArchName.split(":")[0]
        yield Finding(f"GPU {i}", f"{properties.name}, {arch}, {memory}")


def _compiler() -> Finding:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return Finding("C++ compiler", str(get_cpp_compiler()))
    except Exception as e:  # Inductor raises a type of its own, by release
        cure = "install g++ or clang++, or name one in CXX; Inductor needs it on a CPU"
        return Finding("C++ compiler", f"none ({type(e).__name__})", "note", cure)


def _backend() -> Finding:
    points = metadata.entry_points(group=GROUP, name=NAME)
    values = sorted({p.value for p in points})
    if not values:
        cure = "pip install the package, or give torch.compile backend=gemcompile.gem"
        return Finding(
            "backend 'gem'", "not registered: torch.compile will not find it", "note", cure
        )
    if values != [VALUE]:
        cure = "another package uses the name; give torch.compile backend=gemcompile.gem"
        return Finding("backend 'gem'", ", ".join(values), "fail", cure)
    return Finding("backend 'gem'", f"registered as {VALUE}")


def _caches() -> Iterator[Finding]:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemcompile"
    triton = os.environ.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")
    yield _cache("Inductor's cache", Path(cache_dir()), "TORCHINDUCTOR_CACHE_DIR")
    yield _cache("Triton's cache", Path(triton), "TRITON_CACHE_DIR")
    yield _cache("searched tiles", own, "XDG_CACHE_HOME")


def _cache(name: str, path: Path, variable: str) -> Finding:
    """A folder that is there or can be made, with room in it."""
    there = path
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK):
        return Finding(name, f"{path}, not writable", "note", f"set {variable} to another folder")
    free = shutil.disk_usage(there).free
    if free < 2**30:
        cure = f"free some space, or set {variable} to another folder"
        return Finding(name, f"{path}, {free / 2**20:.0f} MiB free", "note", cure)
    return Finding(name, str(path))


def _switches() -> Iterator[Finding]:
    for name in SWITCHES:
        if value := os.environ.get(name):
            off = name == "GEM_DISABLE" and value != "0"
            cure = "gem is switched off: unset it" if off else ""
            yield Finding(name, value, "note" if off else "ok", cure)


def _parts(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13)"""
    return tuple(int("".join(filter(str.isdigit, x)) or 0) for x in version.split(".")[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
