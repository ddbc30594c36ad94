"""Kernels for the gem op set; importing this package registers them in order of preference."""

from . import attention_cpu, attention_cpu_blocked

__all__ = ["attention_cpu", "attention_cpu_blocked"]
