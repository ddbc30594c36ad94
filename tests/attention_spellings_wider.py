"""Spellings with biases, scales, grouped heads, torch's own operators, and other activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attention_spellings import (
    DEVICE,
    DIM,
    HEADS,
    ROOT,
    WIDTH,
    join,
    keys,
    rewritten,
    split,
    split_all,
    valid,
)
from torch import nn


@rewritten
def learned_bias(q, k, v, lens):
    """A dense additive bias [H, L, L] that gets a gradient."""
    n = q.shape[1]
    bias = torch.einsum("lh,mh->hlm", k[0, :, :HEADS], v[0, :, :HEADS])
    q, k, v = split_all(q, k, v)
    s = q @ k.mT / ROOT + bias.view(HEADS, n, n)
    return join(s.masked_fill(~keys(lens, s), float("-inf")).softmax(-1) @ v)


@rewritten
def bias_scaled_with_the_scores(q, k, v, lens):
    n = q.shape[1]
    bias = k[0, :, :1] - v[0, :, :1].mT
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT + bias.view(1, 1, n, n)) / ROOT
    return join(s.masked_fill(~keys(lens, s), -1e9).softmax(-1) @ v)


@rewritten
def learned_temperature(q, k, v, lens):
    scale = 1 + k[0, 0, :HEADS].sigmoid().view(HEADS, 1, 1)
    q, k, v = split_all(q, k, v)
    s = q @ k.mT * scale
    return join(s.masked_fill(~keys(lens, s), float("-inf")).softmax(-1) @ v)


@rewritten
def scalar_tensor_scale(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.mT / torch.sqrt(torch.full([], float(DIM), device=DEVICE))
    return join(s.masked_fill(~keys(lens, s), float("-inf")).softmax(-1) @ v)


@rewritten
def mask_from_a_slice_of_a_table(q, k, v, lens):
    """A table that is not known to be causal: a small bias, and the key mask as such."""
    n = q.shape[1]
    table = (
        torch.arange(40, device=DEVICE)[:, None] * 3 % 7 >= torch.arange(40, device=DEVICE) % 5
    ).view(1, 1, 40, 40)
    q, k, v = split_all(q, k, v)
    s = torch.where(table[:, :, :n, :n], q @ k.mT / ROOT, -1e9)
    return join(s.masked_fill(~keys(lens, s), -1e9).softmax(-1) @ v)


@rewritten
def segments(q, k, v, lens):
    """Queries see keys of their own session only: a mask over queries and keys."""
    session = (torch.arange(q.shape[1], device=DEVICE) // 3)[None] * lens[:, None] % 4
    q, k, v = split_all(q, k, v)
    mine = (session[:, :, None] == session[:, None, :]).unsqueeze(1)
    s = (q @ k.mT / ROOT).masked_fill(~(mine & keys(lens, q.mT)), float("-inf"))
    return join(s.softmax(-1).nan_to_num(0.0) @ v)


@rewritten
def grouped_queries_repeated(q, k, v, lens):
    q = split(q)
    k, v = (x[..., : 2 * DIM].unflatten(-1, (2, DIM)).transpose(1, 2) for x in (k, v))
    k, v = (x.repeat_interleave(HEADS // 2, dim=1) for x in (k, v))
    s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), -1e9)
    return join(s.softmax(-1) @ v)


@rewritten
def grouped_queries_expanded(q, k, v, lens):
    q = split(q)
    b, n = k.shape[:2]
    k, v = (x[..., : 2 * DIM].reshape(b, n, 2, DIM).transpose(1, 2) for x in (k, v))
    k, v = (
        x[:, :, None].expand(b, 2, HEADS // 2, n, DIM).reshape(b, HEADS, n, DIM) for x in (k, v)
    )
    s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), float("-inf"))
    return join(s.softmax(-1) @ v)


@rewritten
def one_key_head_for_all(q, k, v, lens):
    q = split(q)
    k, v = (x[:, None, :, :DIM] for x in (k, v))
    s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), float("-inf"))
    return join(s.softmax(-1) @ v)


@rewritten
def no_mask_at_all(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    return join((q @ k.mT / ROOT).softmax(-1) @ v)


@rewritten
def masks_made_like_the_scores(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.mT / ROOT
    causal = torch.ones_like(s[0, 0]).tril().bool()
    s = torch.where(causal & keys(lens, s), s, torch.full_like(s, -1e9))
    return join(s.softmax(-1) @ v)


@rewritten
def mask_as_additive_log(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.mT / ROOT + keys(lens, q.mT).float().log()
    return join(s.softmax(-1) @ v)


# --- torch's own attention. --------------------------------------------------------------------


@rewritten
def sdpa_bool_mask(q, k, v, lens):
    mask = valid(lens, q.shape[1])[:, None, None, :]
    return join(F.scaled_dot_product_attention(*split_all(q, k, v), attn_mask=mask))


@rewritten
def sdpa_expanded_mask(q, k, v, lens):
    n = q.shape[1]
    mask = valid(lens, n)[:, None, None, :].expand(-1, HEADS, n, n)
    return join(F.scaled_dot_product_attention(*split_all(q, k, v), attn_mask=mask))


@rewritten
def sdpa_float_mask(q, k, v, lens):
    n = q.shape[1]
    mask = torch.zeros(q.shape[0], 1, 1, n, device=DEVICE).masked_fill(
        ~valid(lens, n)[:, None, None, :], float("-inf")
    )
    return join(F.scaled_dot_product_attention(*split_all(q, k, v), attn_mask=mask))


@rewritten
def sdpa_causal_and_padding(q, k, v, lens):
    n = q.shape[1]
    mask = (
        torch.ones(n, n, dtype=torch.bool, device=DEVICE).tril() & valid(lens, n)[:, None, None, :]
    )
    return join(F.scaled_dot_product_attention(*split_all(q, k, v), attn_mask=mask, scale=0.3))


@rewritten
def sdpa_causal_flag(q, k, v, lens):
    """Right-padded causal attention needs no key mask: the op lets the padding be packed away."""
    return join(F.scaled_dot_product_attention(*split_all(q, k, v), is_causal=True))


@rewritten
def sdpa_grouped_queries(q, k, v, lens):
    q = split(q)
    k, v = (x[..., : 2 * DIM].unflatten(-1, (2, DIM)).transpose(1, 2) for x in (k, v))
    mask = keys(lens, q.mT)
    return join(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True))


_mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)


@rewritten
def multihead_attention(q, k, v, lens):
    return _mha(q, k, v, key_padding_mask=~valid(lens, q.shape[1]), need_weights=False)[0]


@rewritten
def multihead_attention_weights_dropped(q, k, v, lens):
    return _mha(q, k, v, key_padding_mask=~valid(lens, q.shape[1]))[0]


@rewritten
def multihead_attention_causal(q, k, v, lens):
    n = q.shape[1]
    mask = nn.Transformer.generate_square_subsequent_mask(n)
    pad = torch.zeros(q.shape[0], n, device=DEVICE).masked_fill(~valid(lens, n), float("-inf"))
    return _mha(q, k, v, key_padding_mask=pad, attn_mask=mask, need_weights=False)[0]


# --- Another function in softmax's place. ------------------------------------------------------


@rewritten
def gelu_masked_after(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    a = F.gelu(q @ k.transpose(-2, -1) * DIM**-0.5) * keys(lens, q.mT)
    return join(a @ v)


@rewritten
def gelu_tanh_masked_before(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), 0.0)
    return join(F.gelu(s, approximate="tanh") @ v)


@rewritten
def hstu(q, k, v, lens):
    """SiLU over N, causal and padding as 0/1 numbers."""
    q, k, v = (x.view(*x.shape[:2], HEADS, DIM) for x in (q, k, v))
    n = q.shape[1]
    a = F.silu(torch.einsum("bnhd,bmhd->bhnm", q, k)) / n
    a = a * torch.tril(torch.ones(n, n, device=DEVICE))[None, None] * keys(lens, a).to(a.dtype)
    return torch.einsum("bhnm,bmhd->bnhd", a, v).reshape(q.shape[0], n, WIDTH)


@rewritten
def hstu_one_mask_and_bias(q, k, v, lens):
    n = q.shape[1]
    bias = (k[0, :, :1] - v[0, :, :1].mT)[None, None]
    mask = torch.tril(torch.ones(n, n, device=DEVICE)).bool()[None] & valid(lens, n)[:, None, :]
    q, k, v = split_all(q, k, v)
    a = F.silu(q @ k.mT + bias) * mask.unsqueeze(1) / n
    return join(a @ v)


@rewritten
def silu_over_true_length(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.mT / ROOT
    a = s * s.sigmoid() * keys(lens, s) / lens.clamp(min=1).view(-1, 1, 1, 1)
    return join(a @ v)


@rewritten
def relu_filled_after(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    a = torch.relu(q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), 0.0)
    return join(a @ v)


@rewritten
def squared_relu(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), float("-inf"))
    return join(torch.relu(s) ** 2 / s.shape[-1] @ v)


@rewritten
def sigmoid_filled_before(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), float("-inf"))
    return join(torch.sigmoid(s) @ v)


@rewritten
def leaky_relu_queries_and_keys(q, k, v, lens):
    mask = valid(lens, q.shape[1])
    q, k, v = split_all(q, k, v)
    a = F.leaky_relu(q @ k.mT / ROOT) * (mask[:, None, :, None] & mask[:, None, None, :])
    return join(a @ v)


@rewritten
def hardswish_masked_scores(q, k, v, lens):
    """hardswish(0) = 0, so that a mask on the scores is one on the weights."""
    q, k, v = split_all(q, k, v)
    a = F.hardswish(q @ k.mT / ROOT * keys(lens, q.mT))
    return join(a @ v)


@rewritten
def linear_attention(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    n = q.shape[2]
    a = (q @ k.mT) * torch.tril(torch.ones(n, n, device=DEVICE)) * keys(lens, q.mT)
    return join(a @ v)
