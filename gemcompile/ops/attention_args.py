"""What a jagged-attention kernel is given, and what it is asked about beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SHORT = 64  # queries that the heads of one key head have in a sequence, for ``short_queries``


@dataclass(frozen=True)
class AttentionRequest:
    """What decides whether a kernel can run: everything but the values and the row counts.

    ``large`` is True where a tensor has 2^31 elements or more, past 32-bit offsets; ``history``
    where targets or contextual rows are told from the rest; ``short_queries`` where the queries
    that a key head has in a sequence, over the heads of its group, are at most ``SHORT``.
    """

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    activation: str
    causal: bool
    key_mask: bool = False
    positions: bool = False
    bias: bool = False
    out_scale: bool = False
    dropout: bool = False
    large: bool = False
    window: bool = False
    block: bool = False
    history: bool = False
    deterministic: bool = False
    bias_grad: bool = False  # asked of backward kernels only
    short_queries: bool = False


@dataclass(frozen=True, slots=True)
class AttentionArgs:
    """The arguments of ``gem::jagged_attention``, in the order of its schema.

    Attributes:
        q: [Tq, H, D]; k: [Tk, Hk, D]; v: [Tk, Hk, Dv]; Hk divides H, any strides.
        q_offsets, k_offsets: int32 or int64 [B + 1].
        key_mask: bool [Tk]; a False key is seen by nobody.
        q_positions, k_positions: int32 [Tq], [Tk]; a row's place in its padded sequence.
        bias: [1 or B, 1 or H, max_q, max_k], any strides; or a table [1 or H, 2 * reach + 1] of
            relative places.
        out_scale: float32 [1] or [Tq].
        dropout_seed: int64 [1].
        window_left, window_right: how far from its own place a query sees; -1: without limit.
        block: the length of the blocks that a sequence is cut into; 0: not cut.
        num_targets, num_contextual: int32 or int64 [B]; both need ``causal``.
        tiles: what ``gem::attention_tiles`` gives for these offsets and masks, where it is shared.
        deterministic: results must repeat bit for bit.

    ``gemcompile.ops.attention_masks`` defines what these make visible.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor
    k_offsets: Tensor
    key_mask: Tensor | None
    q_positions: Tensor | None
    k_positions: Tensor | None
    bias: Tensor | None
    out_scale: Tensor | None
    dropout_seed: Tensor | None
    activation: str
    scale: float
    causal: bool
    dropout_p: float
    max_q: int
    max_k: int
    window_left: int = -1
    window_right: int = -1
    block: int = 0
    num_targets: Tensor | None = None
    num_contextual: Tensor | None = None
    tiles: Tensor | None = None
    deterministic: bool = False

    @property
    def softmax(self) -> bool:
        return self.activation == "softmax"

    @property
    def aligned_at_end(self) -> bool:
        """Without positions the last query stands where the last key does."""
        return self.q_positions is None and self.k_positions is None

    @property
    def window(self) -> bool:
        return self.window_left >= 0 or self.window_right >= 0

    @property
    def relative(self) -> bool:
        """The bias is a table of relative places."""
        return self.bias is not None and self.bias.dim() == 2

    @property
    def history(self) -> bool:
        """Targets or contextual rows are told from the rest."""
        return self.num_targets is not None or self.num_contextual is not None

    @property
    def masked(self) -> bool:
        """What a query sees depends on its place."""
        return self.causal or self.window or self.block > 0

    def request(self) -> AttentionRequest:
        return AttentionRequest(
            dtype=self.q.dtype,
            heads=self.q.shape[1],
            kv_heads=self.k.shape[1],
            head_dim=self.q.shape[2],
            value_dim=self.v.shape[2],
            activation=self.activation,
            causal=self.causal,
            key_mask=self.key_mask is not None,
            positions=self.q_positions is not None or self.k_positions is not None,
            bias=self.bias is not None,
            out_scale=self.out_scale is not None,
            dropout=self.dropout_p > 0.0,
            large=max(x.numel() for x in (self.q, self.k, self.v)) >= 2**31,
            window=self.window,
            block=self.block > 0,
            history=self.history,
            deterministic=self.deterministic,
            short_queries=self.max_q * (self.q.shape[1] // self.k.shape[1]) <= SHORT,
        )
