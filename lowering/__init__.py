"""Kernels for the gem op set; importing this package registers them in order of preference."""
