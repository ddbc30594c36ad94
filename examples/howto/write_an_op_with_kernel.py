"""Write an op with a Triton kernel, and the rewrite that puts it into models: silu(gate) * x.

python examples/howto/write_an_op_with_kernel.py                     # plain torch on a CPU
TRITON_INTERPRET=1 python examples/howto/write_an_op_with_kernel.py  # the kernel, on a CPU
"""

import os

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

import gemcompile as gem

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def kernel(x, gate, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + i, i < n, 0.0).to(tl.float32)
    y = tl.load(x + i, i < n, 0.0) * g * tl.sigmoid(g)
    tl.store(out + i, y.to(out.dtype.element_ty), i < n)


@torch.library.custom_op("howto::swiglu", mutates_args=())
def swiglu(x: Tensor, gate: Tensor) -> Tensor:
    x, gate, out = x.contiguous(), gate.contiguous(), x.new_empty(x.shape)
    if not (x.is_cuda or INTERPRETED):
        return torch.mul(F.silu(gate), x, out=out)
    kernel[(triton.cdiv(x.numel(), 1024),)](x, gate, out, x.numel(), BLOCK=1024)
    return out


swiglu.register_fake(lambda x, gate: x.new_empty(x.shape))


def backward(ctx, grad):
    x, gate = ctx.saved_tensors
    s = gate.sigmoid()
    return grad * gate * s, grad * x * s * (1 + gate * (1 - s))


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


swiglu.register_autograd(backward, setup_context=save)


class FuseSwiGLU(gem.Rewrite):
    pattern = staticmethod(lambda x, gate: F.silu(gate) * x)
    replacement = staticmethod(swiglu)

    def check(self, m, context):
        same = m.value("x").shape == m.value("gate").shape
        return None if same else "the gate is broadcast"


# --- what it is worth: everything above is the op, its kernel and its rewrite ---------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(self.up(x) * F.silu(self.gate(x)))


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = "the Triton kernel" if device == "cuda" or INTERPRETED else "plain torch"
    model, x = Block().to(device), torch.randn(8, 16, device=device, requires_grad=True)

    # The op by itself: schema, fake shapes and backward, and the kernel against the formula.
    a, b = (torch.randn(5, 300, device=device, requires_grad=True) for _ in range(2))
    torch.library.opcheck(swiglu, (a, b))
    torch.testing.assert_close(swiglu(a, b), F.silu(b) * a)
    ours, theirs = (torch.autograd.grad(f(a, b).square().sum(), (a, b)) for f in (swiglu, formula))
    torch.testing.assert_close(ours, theirs)

    # In a model: the graph, then values and gradients, then the compiled step.
    print(gem.testing.assert_same(FuseSwiGLU(), model, x, changes=1).text, "\n")
    options = {"passes": [FuseSwiGLU()]}
    if device == "cpu":
        options["inner"] = "eager"  # no C++ compiler needed; leave it out to run Inductor
    with gem.record() as report:
        y = torch.compile(model, backend=gem.gem, options=options)(x)
        y.square().sum().backward()
    torch.testing.assert_close(y, model(x))
    report.expect(graph=1)
    print(report)
    print(f"ok: howto.swiglu ran as {kind} on {device}")


def formula(x, gate):
    return F.silu(gate) * x


if __name__ == "__main__":
    main()
