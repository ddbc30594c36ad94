"""The Gluon kernels: on a Hopper GPU where there is one, compiled for it where there is none.

Run as a script, this file is the process of its own that compiles.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from kernel_cases import Case, build, check, forced, run
from own_process import run_script

import gemcompile.lowering  # noqa: F401  (registers the kernels)
from gemcompile.ops import kernels
from gemcompile.ops.attention_args import AttentionRequest
from gemcompile.target import Target

if find_spec("triton") is not None:
    from gemcompile.lowering import attention_hopper

    DIMS = attention_hopper.HEAD_DIMS
else:
    DIMS = (128,)

HERE = Path(__file__).parent
HOPPER = Target("cuda", 90)
BASE = AttentionRequest(torch.bfloat16, 4, 4, 128, 128, "softmax", False)

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the triton package")
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

MIXED = (0, 1, 37, 64, 65, 127, 128, 129, 300, 0, 259, 0)
MIXED_KEYS = (77, 0, 256, 100, 193, 300, 128, 63, 1, 64, 31, 0)
LONG = (513, 700, 90, 0, 900)  # three consumers, one pass
LONG_KEYS = (577, 300, 155, 20, 1000)
PAIRS = ((MIXED, None), (MIXED, MIXED_KEYS), (MIXED_KEYS, MIXED), (LONG, None), (LONG, LONG_KEYS))


def case(lengths: tuple[int, ...], keys: tuple[int, ...] | None = None, **changed) -> Case:
    options = {"heads": 4, "dim": 128, "dtype": torch.bfloat16} | changed
    return Case(lengths, keys, **options)


# Each in two passes and in one.
BOTH = (
    *(
        case(lengths, keys, activation=activation, dim=dim, causal=causal)
        for dim in DIMS
        for activation in ("softmax", "gelu_tanh")
        for causal in (False, True)
        for lengths, keys in PAIRS
    ),
    *(
        case(lengths, keys, activation="silu", causal=True, out_scale="rows", dtype=torch.float16)
        for lengths, keys in PAIRS
    ),
    case(LONG, LONG_KEYS, out_scale="rows", causal=True, dim=DIMS[0]),
    case(MIXED, dtype=torch.float16, scale=2.0),
    case(MIXED_KEYS, MIXED, kv_heads=2),
    case(MIXED_KEYS, MIXED, kv_heads=2, causal=True, dim=DIMS[0]),
    case(LONG, LONG_KEYS, kv_heads=1, activation="gelu_tanh", causal=True),
)
CASES = (
    *(case(MIXED, MIXED_KEYS, activation=activation) for activation in ("gelu", "silu")),
    case(LONG, activation="gelu", scale=0.09),
    case(LONG, out_scale="one"),
    # Scores outgrow the maximum of the first blocks.
    *(
        case(lengths, scale=scale, causal=causal)
        for lengths in (MIXED, LONG)
        for scale in (2.0, 9.0)
        for causal in (False, True)
    ),
    case(LONG, (40, 700, 0, 3, 65), kv_heads=1, dim=DIMS[0]),
    case(MIXED, offsets=torch.int64),
    case(MIXED, strided=True),
    case(MIXED, expanded_grad=True),
    case(()),
    case((0, 0)),
    case((1,)),
    case((5, 0), (0, 4)),
    case((0, 3), (7, 0), activation="gelu_tanh"),
)


def passes(one: bool):
    """Backward in one pass or in two, however long the sequences are."""
    return mock.patch.object(attention_hopper, "one_pass_pays", lambda args: one)


@on_hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_right(case):
    check(case, "hopper", "cuda")


@on_hopper
@pytest.mark.parametrize("one", [False, True], ids=["two", "one"])
@pytest.mark.parametrize("case", BOTH, ids=str)
def test_right_in_passes(case, one):
    with passes(one):
        check(case, "hopper", "cuda", repeat=not one)


@on_hopper
@pytest.mark.parametrize("programs", [1, 3, 5])
@pytest.mark.parametrize("one", [False, True], ids=["two", "one"])
@pytest.mark.parametrize("dim", DIMS)
def test_many_tiles_a_program(dim, one, programs):
    """Deadlocks and races between tiles do not show with one tile a program."""
    with (
        passes(one),
        mock.patch.object(attention_hopper, "programs", lambda device: programs),
    ):
        for lengths, keys in ((MIXED, None), (LONG, LONG_KEYS)):
            for options in ({}, {"causal": True}, {"activation": "gelu_tanh", "causal": True}):
                check(case(lengths, keys, dim=dim, **options), "hopper", "cuda", repeat=False)


@on_hopper
@pytest.mark.parametrize("one", [False, True], ids=["two", "one"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("activation", ["softmax", "gelu_tanh"])
@pytest.mark.parametrize("dim", DIMS)
def test_forty_runs_give_the_same_bits(dim, activation, causal, one):
    lengths = tuple(1 + 37 * i % 509 for i in range(96))
    options = dict(activation=activation, causal=causal, dim=dim)
    call = build(case(lengths, **options), torch.device("cuda"))
    with passes(one):
        first = run(call, "hopper")
        for _ in range(39):
            again = run(call, "hopper")
            for name, value in first.items():
                if one and name == "q":  # summed in any order, in float32
                    torch.testing.assert_close(value, again[name], atol=0.02, rtol=0.02)
                else:
                    assert torch.equal(value, again[name]), name


def test_one_pass_only_where_results_may_vary():
    args = build(case((900, 800)), torch.device("cpu")).args
    assert attention_hopper.one_pass_pays(args)
    assert not attention_hopper.one_pass_pays(replace(args, deterministic=True))
    assert not attention_hopper.one_pass_pays(replace(args, causal=True))
    assert not attention_hopper.one_pass_pays(build(case(MIXED), torch.device("cpu")).args)


@on_hopper
def test_slices_of_one_projection_are_not_copied():
    call = build(case(MIXED), torch.device("cuda"))
    rows, heads, dim = call.args.q.shape
    wide = torch.empty(rows, 3, heads, dim, dtype=torch.bfloat16, device="cuda")
    for i, name in enumerate(("q", "k", "v")):
        wide[:, i] = getattr(call.args, name)
    slices = dict(zip(("q", "k", "v"), wide.unbind(1), strict=True))
    expected = run(call, "hopper")
    assert all(attention_hopper._aligned(x) is x for x in slices.values())
    actual = run(replace(call, args=replace(call.args, **slices)), "hopper")
    for name, value in expected.items():
        assert torch.equal(value, actual[name]), name


@on_hopper
def test_no_host_sync():
    call = build(case(MIXED), torch.device("cuda"))
    run(call, "hopper")  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        with forced("hopper"):
            out, lse = attention_hopper.forward(call.args)
            attention_hopper.backward(out, call.args, out, lse, False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def reason(target: Target = HOPPER, **changed) -> str | None:
    return attention_hopper.supports(target, replace(BASE, **changed))


def test_refusals():
    assert reason(Target("cuda", 80)) == "it runs on cuda:90, not on cuda:80"
    assert reason(Target("cpu")) == "it runs on cuda:90, not on cpu"
    with mock.patch("triton.__version__", "3.6.0"):
        assert reason() is None
        assert reason(kv_heads=1, activation="gelu", large=True) is None
        assert reason(dtype=torch.float16, causal=True, out_scale=True) is None
        assert "float32" in reason(dtype=torch.float32)
        assert "relu" in reason(activation="relu")
        assert reason(head_dim=96) == "head dimension 96 is not 64 or 128"
        assert reason(value_dim=64) == "head dimension 128 is not value dimension 64"
        assert reason(window=True, bias=True) == "it has no bias and no window"
        assert reason(key_mask=True) == "it has no key_mask"
    with mock.patch("triton.__version__", "3.9.1"):
        assert reason() == "it is written for triton 3.6, not 3.9.1"


def test_preferred_to_the_portable_kernel():
    for op in ("jagged_attention", "jagged_attention_backward"):
        names = [kernel.name for kernel in kernels.kernels_of(op)]
        assert names.index("hopper") < names.index("triton")


def needs_its_triton() -> None:
    import triton

    if not triton.__version__.startswith(attention_hopper.TRITON + "."):
        pytest.skip(f"the Gluon kernels are written for triton {attention_hopper.TRITON}")


def test_compile_for_sm_90_without_a_device(tmp_path):
    needs_its_triton()
    output = run_script(__file__, cache=tmp_path)
    for kernel in (
        *("forward_kernel 2", "forward_kernel 3", "key_kernel", "query_kernel"),
        *("prepare_kernel", "one_pass_kernel", "finish_kernel"),
    ):
        assert kernel in output


def compile_kernels() -> None:
    """Launches with a driver that compiles for sm_90 and runs nothing; prints what it compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    driver = mock.Mock()
    driver.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    driver.get_current_device.return_value = 0
    driver.get_current_stream.return_value = 0
    triton.runtime.driver.set_active(driver)
    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        kib = kernel.metadata.shared / 1024
        assert kib <= 227, f"{self.fn.__name__} wants {kib} KiB of shared memory, sm_90 has 227"
        print(self.fn.__name__, options.get("GROUPS", ""), f"{kib:.0f} KiB", flush=True)

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(attention_hopper, "programs", lambda device: 132),
    ):
        whole = dict(causal=True, dtype=torch.float16, out_scale="rows")
        for each in (
            case((5, 70)),
            case((5, 70), kv_heads=2, dim=64, activation="gelu"),
            case((900, 0), **whole),
        ):
            args = build(each, torch.device("cpu")).args
            out, lse = attention_hopper.forward(args)
            for one in (False, True):
                with passes(one):
                    attention_hopper.backward(torch.empty_like(out), args, out, lse, False)


if __name__ == "__main__":
    compile_kernels()
