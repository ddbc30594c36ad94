"""The gem op set: the narrow waist between passes and kernels.

Importing this package registers ``torch.ops.gem.*`` with the plain references; importing
``gemcompile.lowering`` adds the fast kernels.
"""

from gemcompile.ops.activations import Activation, register_activation
from gemcompile.ops.attention import jagged_attention
from gemcompile.ops.packing import PackIndex, pack_index
from gemcompile.ops.padded import padded_attention

__all__ = [
    "Activation",
    "PackIndex",
    "jagged_attention",
    "pack_index",
    "padded_attention",
    "register_activation",
]
