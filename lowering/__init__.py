"""Kernels for the gem op set; importing this package registers them in order of preference."""

from importlib.util import find_spec

from . import attention_cpu, attention_cpu_blocked

__all__ = ["attention_cpu", "attention_cpu_blocked"]

if find_spec("triton") is not None:  # a Linux-only package; the CPU kernels do without
    from . import attention_triton_blocks  # isort: skip
    from . import attention_triton_short  # isort: skip
    from . import tile_lists  # isort: skip
    from . import attention_varlen  # isort: skip
    from . import attention_hopper  # isort: skip
    from . import attention_triton  # isort: skip

    __all__ += ["attention_hopper", "attention_triton", "attention_triton_blocks"]
    __all__ += ["attention_triton_short", "attention_varlen", "tile_lists"]
