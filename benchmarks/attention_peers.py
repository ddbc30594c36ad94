"""What jagged attention is measured beside. A peer that is not installed is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from attention_shapes import Batch
from common import seconds
from torch import Tensor


@dataclass
class Peer:
    """A forward to time, what to differentiate it by, and the upstream gradient."""

    name: str
    forward: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    dout: Tensor
    note: str = ""
    softmax: bool = True


def peers(batch: Batch, wanted: list[str]) -> Iterator[Peer]:
    """The wanted peers that can run the shape here."""
    if batch.shape.block:
        return
    if batch.device == "cpu":
        yield _padded_sdpa(batch, "padded SDPA", None)
        return
    if "varlen" in wanted:
        yield Peer("FA2 varlen", lambda: _varlen(batch), batch.inputs, batch.dout)
    if "fa4" in wanted:
        yield from _flash_attention_4(batch)
    if "padded" in wanted:
        yield _padded_sdpa(batch, "padded cuDNN", "CUDNN_ATTENTION")
        yield _padded_sdpa(batch, "padded flash", "FLASH_ATTENTION")
    if "flex" in wanted:
        yield _flex(batch)


def _varlen(batch: Batch) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if batch.shape.causal else (-1, -1)
    ends = (batch.q_offsets, batch.k_offsets, batch.max_q, batch.max_k)
    return varlen_attn(*batch.inputs, *ends, window_size=window)


def _flash_attention_4(batch: Batch) -> Iterator[Peer]:
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError:
        return

    def forward() -> Tensor:
        ends: dict[str, Any] = {"cu_seqlens_q": batch.q_offsets, "cu_seqlens_k": batch.k_offsets}
        out = flash_attn_varlen_func(*batch.inputs, **ends, causal=batch.shape.causal)
        return out[0] if isinstance(out, tuple) else out

    yield Peer("FA4", forward, batch.inputs, batch.dout)


def _padded_sdpa(batch: Batch, name: str, backend: str | None) -> Peer:
    """Dense attention on the padded batch; on a GPU without a mask, the least it can cost."""
    sides = ((batch.q, batch.q_lengths, batch.max_q), (batch.k, batch.k_lengths, batch.max_k))
    q, k = (_padded(*side) for side in sides)
    v = _padded(batch.v, batch.k_lengths, batch.max_k)
    causal, mask = batch.shape.causal, None
    if batch.device == "cpu":
        mask = (torch.arange(batch.max_k) < batch.k_lengths[:, None])[:, None, None]
        if causal:
            mask = mask & torch.ones(batch.max_q, batch.max_k, dtype=torch.bool).tril()

    def forward() -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Peer(name, forward, (q, k, v), torch.randn_like(q))


def _padded(x: Tensor, lengths: Tensor, longest: int) -> Tensor:
    pieces = x.detach().split(lengths.tolist())
    padded = torch.stack([F.pad(p, (0, 0, 0, 0, 0, longest - p.shape[0])) for p in pieces])
    return padded.transpose(1, 2).contiguous().requires_grad_()


def _flex(batch: Batch) -> Peer:
    """FlexAttention over the packed rows with a mask of sequences, whose making is timed apart."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q_owner, k_owner = (
        torch.repeat_interleave(torch.arange(len(x)), x).to(batch.device)
        for x in (batch.q_lengths, batch.k_lengths)
    )
    causal = batch.shape.causal

    def same_sequence(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = q_owner[i] == k_owner[j]
        return same & (i >= j) if causal else same

    def make() -> Any:
        rows, keys = batch.q.shape[0], batch.k.shape[0]
        return create_block_mask(same_sequence, None, None, rows, keys, batch.device, _compile=True)

    torch._functorch.config.donated_buffer = False  # else backward runs only once
    mask = make()
    cost = 1e3 * seconds(make, batch.device)
    inputs = tuple(
        x.detach().transpose(0, 1)[None].contiguous().requires_grad_() for x in batch.inputs
    )
    compiled = torch.compile(flex_attention, dynamic=True)
    note = f"mask {cost:.0f} ms a batch"
    forward = lambda: compiled(*inputs, block_mask=mask)  # noqa: E731
    return Peer("FlexAttention", forward, inputs, torch.randn_like(inputs[0]), note)
