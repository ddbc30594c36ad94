"""gemcompile: a torch.compile backend for ranking and recommendation models.

import torch
model = torch.compile(model, backend="gem")
"""

from __future__ import annotations

from . import match, ops, testing
from .backend import gem
from .bisect import Bisection, bisect
from .explain import explain
from .options import Options
from .pass_manager import Pass
from .report import Report, Site, record
from .rewrite import Rewrite
from .target import Target

__version__ = "0.1.0"
__all__ = [
    "Bisection",
    "Options",
    "Pass",
    "Report",
    "Rewrite",
    "Site",
    "Target",
    "bisect",
    "explain",
    "gem",
    "match",
    "ops",
    "record",
    "testing",
]
