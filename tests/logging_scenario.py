"""Run by test_conventions.py in a process of its own, since TORCH_LOGS is read at torch's import.

Compiles one graph as usual, and one that falls back to Inductor; the arguments say what before.
"""

from __future__ import annotations

import logging
import sys

import torch
from torch import nn
from torch.fx import GraphModule

import gemcompile
from gemcompile import Pass, gem
from gemcompile.pass_manager import Context


class Fails(Pass):
    def run(self, gm: GraphModule, context: Context) -> int:
        raise KeyError("on purpose")


if "set_logs" in sys.argv:
    torch._logging.set_logs(modules={"gemcompile": logging.INFO})
if "root" in sys.argv:
    logging.basicConfig(format="root: %(message)s", level=logging.INFO)


def attend(q: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT).softmax(-1) @ q


q = torch.randn(2, 2, 8, 16)
torch.compile(attend, backend=gem, options={"inner": "eager"})(q)
options = {"inner": "eager", "passes": (Fails(),)}
torch.compile(nn.Linear(4, 4), backend=gem, options=options)(torch.ones(2, 4))
print(gemcompile.__version__)
