"""Compiles the Triton kernels for machines that are not there: python compiled_kernels.py.

A process of its own, as a failing backend may abort it. Prints one line per kernel and target with
the shared memory it takes, and exits with 1 where that is more than the target has.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gemcompile.lowering import attention_triton as launcher
from gemcompile.lowering import tile_lists, tuning
from gemcompile.ops.tiles import SECTIONS
from gemcompile.target import Target

TARGETS = {  # shared memory of one block, in KiB
    GPUTarget("cuda", 80, 32): 163,
    GPUTarget("cuda", 90, 32): 227,
    GPUTarget("cuda", 100, 32): 227,
    GPUTarget("hip", "gfx942", 64): 64,
    GPUTarget("hip", "gfx950", 64): 160,
}
KERNELS = {
    "forward": launcher.forward_kernel,
    "query": launcher.query_kernel,
    "key": launcher.key_kernel,
}
POINTERS = {
    "TILES": "*i32",
    "LSE": "*fp32",
    "DELTA": "*fp32",
    "DBIAS": "*i64",  # deterministic
    "PER_UNIT": "*fp32",
    "OUT_SCALE": "*fp32",
    "Q_OFFSETS": "*i32",
    "K_OFFSETS": "*i32",
    "Q_POSITIONS": "*i32",
    "K_POSITIONS": "*i32",
    "KEY_MASK": "*u8",
    "SEED": "*i64",
    "TARGETS": "*i32",
    "CONTEXTUAL": "*i32",
}


@dataclass(frozen=True)
class Config:
    dtype: torch.dtype
    dim: int
    activation: str = "softmax"
    causal: bool = False
    everything: bool = False  # every optional input, and the gradient of the bias
    history: bool = False  # targets, contextual rows, a window and a table of relative places
    block: int = 0


EVERYTHING = Config(torch.bfloat16, 64, "gelu", causal=True, everything=True, block=64)
HISTORY = Config(torch.bfloat16, 128, "silu", causal=True, history=True)
WIDE = Config(torch.bfloat16, 256)
CONFIGS = (EVERYTHING, WIDE, Config(torch.float32, 256, causal=True), HISTORY)


def constants(config: Config, kernel: str, target: GPUTarget) -> dict[str, Any]:
    mine = Target(target.backend, target.arch)
    tiles = tuning.rule(kernel, config.dtype, tuning.padded_dim(config.dim), mine)
    flags = ("HAS_KEY_MASK", "HAS_Q_POSITIONS", "HAS_K_POSITIONS", "HAS_BIAS", "HAS_OUT_SCALE")
    return {
        "H": 4,
        "GROUP": 2,
        "D": config.dim,
        "DV": config.dim,
        "BLOCK_D": tuning.padded_dim(config.dim),
        "BLOCK_DV": tuning.padded_dim(config.dim),
        "BM": tiles.BM,
        "BN": tiles.BN,
        "ACT": config.activation,
        "CAUSAL": config.causal,
        "WINDOW": config.history,
        "HISTORY": config.history,
        "RELATIVE": config.history,
        "BLOCK": config.block,
        "DROPOUT": config.everything,
        "BIAS_GRAD": config.everything,
        "EXACT": config.everything,
        **dict.fromkeys(flags, config.everything),
        "HAS_BIAS": config.everything or config.history,
    }


def compiled(config: Config, kernel: str, target: GPUTarget) -> Any:
    fn = KERNELS[kernel]
    values = {n: v for n, v in constants(config, kernel, target).items() if n in fn.arg_names}
    element = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[config.dtype]

    def kind(name: str) -> str:
        if name in values:
            return "constexpr"
        if name.isupper():
            return POINTERS.get(name, element)
        return "fp32" if name in ("scale", "keep_scale") else "i32"

    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(fn.arg_names)
        if name not in values and (name.isupper() or name.endswith(("_st", "_sh")))
    }
    source = ASTSource(
        fn=fn,
        signature={name: kind(name) for name in fn.arg_names},
        constexprs={(fn.arg_names.index(n),): v for n, v in values.items()},
        attrs=aligned,
    )
    mine = Target(target.backend, target.arch)
    tiles = tuning.rule(kernel, config.dtype, tuning.padded_dim(config.dim), mine)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return triton.compile(source, target=target, options=options)


def compile_tile_lists(target: GPUTarget) -> None:
    kernel = tile_lists.tile_list_kernel
    values = {"SECTIONS": SECTIONS, "LIMITED": True, "R": 16, "CHUNK": 256}
    kinds = {"TILES": "*i32", "Q_OFFSETS": "*i32", "K_OFFSETS": "*i64"}
    source = ASTSource(
        fn=kernel,
        signature={
            name: "constexpr" if name in values else kinds.get(name, "i32")
            for name in kernel.arg_names
        },
        constexprs={(kernel.arg_names.index(n),): v for n, v in values.items()},
    )
    triton.compile(source, target=target)
    print(f"{target.backend}:{target.arch} tile lists: ok", flush=True)


def main() -> int:
    failed = 0
    for target, limit in TARGETS.items():
        compile_tile_lists(target)
        for config in CONFIGS if target.arch == 90 else CONFIGS[: 1 + (target.arch == 80)]:
            for kernel in KERNELS:
                used = compiled(config, kernel, target).metadata.shared / 1024
                verdict = "ok" if used <= limit else f"FAILED: more than {limit}"
                failed += used > limit
                where = f"{target.backend}:{target.arch}"
                print(f"{where} {kernel} {config}: {used:.0f} KiB {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
