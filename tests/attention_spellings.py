"""The same attention, as different people write it.

Every spelling takes q, k, v of [B, L, E] and the lengths [B], and returns [B, L, E]. Those in
REWRITTEN become one op; DECLINED ones keep their nodes, each for the reason given.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, DIM = 4, 8
WIDTH = HEADS * DIM
ROOT = math.sqrt(DIM)

Spelling = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
REWRITTEN: dict[str, Spelling] = {}
DECLINED: dict[str, tuple[Spelling, str]] = {}


def rewritten(f: Spelling) -> Spelling:
    REWRITTEN[f.__name__] = f
    return f


def declined(reason: str) -> Callable[[Spelling], Spelling]:
    def note(f: Spelling) -> Spelling:
        DECLINED[f.__name__] = (f, reason)
        return f

    return note


def valid(lens: Tensor, length: int) -> Tensor:
    """bool [B, L]: True where a position holds an event."""
    return torch.arange(length, device=lens.device)[None, :] < lens[:, None]


def keys(lens: Tensor, scores: Tensor) -> Tensor:
    """bool [B, 1, 1, L]."""
    return valid(lens, scores.shape[-1])[:, None, None, :]


def split(x: Tensor) -> Tensor:
    """[B, L, E] to [B, H, L, D]."""
    return x.view(x.shape[0], x.shape[1], HEADS, DIM).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    """[B, H, L, D] to [B, L, E]."""
    return x.transpose(1, 2).reshape(x.shape[0], -1, WIDTH)


def split_all(*xs: Tensor) -> list[Tensor]:
    return [split(x) for x in xs]


# --- Softmax written by hand. ------------------------------------------------------------------


@rewritten
def masked_fill_inf(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.transpose(-2, -1) / ROOT
    s = s.masked_fill(~keys(lens, s), float("-inf"))
    return join(s.softmax(-1) @ v)


@rewritten
def masked_fill_finite(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = torch.matmul(q, k.transpose(2, 3)) * (DIM**-0.5)
    s = s.masked_fill(keys(lens, s) == 0, -1e9)
    return join(torch.matmul(torch.softmax(s, dim=-1), v))


@rewritten
def additive_as_in_bert(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    mask = (1.0 - keys(lens, q.mT).to(q.dtype)) * torch.finfo(q.dtype).min
    s = torch.matmul(q, k.transpose(-1, -2)) / ROOT
    p = F.dropout(F.softmax(s + mask, dim=-1), 0.0, True)
    return join(torch.matmul(p, v))


@rewritten
def where_after_scaled_queries(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q * DIM**-0.5) @ k.mT
    s = torch.where(valid(lens, s.shape[-1])[:, None, None], s, torch.finfo(s.dtype).min)
    return join(F.softmax(s, -1) @ v)


@rewritten
def where_of_a_tensor_fill(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.mT / ROOT
    s = torch.where(keys(lens, s), s, torch.full([], -1e9, dtype=s.dtype))
    return join(F.softmax(s, -1) @ v)


@rewritten
def einsum_heads_first(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) * DIM**-0.5
    s = s.masked_fill(~keys(lens, s), float("-inf"))
    return join(torch.einsum("bhqk,bhkd->bhqd", s.softmax(-1), v))


@rewritten
def einsum_rows_first(q, k, v, lens):
    q, k, v = (x.unflatten(-1, (HEADS, DIM)) for x in (q, k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / DIM**0.5
    s = s.masked_fill(~keys(lens, s), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v).flatten(2)


@rewritten
def einsum_odd_orders(q, k, v, lens):
    """Scores as [key, head, batch, query], softmax over the first dimension."""
    q, k, v = (x.unflatten(-1, (HEADS, DIM)) for x in (q, k, v))
    s = torch.einsum("bmhd,bnhd->mhbn", k, q) / ROOT
    s = s.masked_fill(~valid(lens, s.shape[0]).t()[:, None, :, None], float("-inf"))
    return torch.einsum("xmhn,bmhd->bnhd".replace("xmhn", "mhbn"), s.softmax(0), v).flatten(2)


@rewritten
def einsum_with_ellipsis(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = torch.einsum("...qd,...kd->...qk", q, k) / ROOT
    s = s.masked_fill(~keys(lens, s), float("-inf"))
    return join(torch.einsum("...qk,...kd->...qd", s.softmax(-1), v))


@rewritten
def transposed_product(q, k, v, lens):
    """(v^T p^T)^T instead of p v, and k q^T instead of q k^T."""
    q, k, v = split_all(q, k, v)
    s = (k @ q.mT / ROOT).masked_fill(~keys(lens, q.mT).mT, float("-inf"))
    return join((v.mT @ s.softmax(-2)).mT)


@rewritten
def bmm_heads_in_the_batch(q, k, v, lens):
    n = q.shape[1]
    q, k, v = (split(x).reshape(-1, n, DIM) for x in (q, k, v))
    s = torch.bmm(q, k.transpose(1, 2)) * DIM**-0.5
    mask = valid(lens, n)[:, None, None, :].expand(-1, HEADS, n, -1).reshape(-1, n, n)
    o = torch.bmm(s.masked_fill(~mask, float("-inf")).softmax(-1), v)
    return join(o.view(-1, HEADS, n, DIM))


@rewritten
def bmm_with_repeated_mask(q, k, v, lens):
    n = q.shape[1]
    q, k, v = (split(x).reshape(-1, n, DIM) for x in (q, k, v))
    s = torch.bmm(q, k.transpose(1, 2)) * DIM**-0.5
    mask = valid(lens, n).repeat_interleave(HEADS, dim=0)[:, None, :]
    o = torch.bmm(s.masked_fill(~mask, float("-inf")).softmax(-1), v)
    return join(o.view(-1, HEADS, n, DIM))


@rewritten
def baddbmm_bias(q, k, v, lens):
    n = q.shape[1]
    q, k, v = (split(x).reshape(-1, n, DIM) for x in (q, k, v))
    zeros = torch.zeros(lens.shape[0], n, dtype=q.dtype)
    bias = zeros.masked_fill(~valid(lens, n), float("-inf"))[:, None, None, :]
    bias = bias.expand(-1, HEADS, n, n).reshape(-1, n, n)
    s = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=DIM**-0.5)
    return join(torch.bmm(F.softmax(s, -1), v).view(-1, HEADS, n, DIM))


@rewritten
def one_head(q, k, v, lens):
    s = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(WIDTH)
    s = s.masked_fill(~valid(lens, s.shape[-1])[:, None, :], float("-inf"))
    return torch.bmm(s.softmax(-1), v)


@rewritten
def exp_over_sum(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.transpose(-2, -1) / ROOT).masked_fill(~keys(lens, q.mT), float("-inf"))
    e = (s - s.amax(-1, keepdim=True)).exp()
    return join((e / e.sum(-1, keepdim=True)) @ v)


@rewritten
def exp_over_sum_plain(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.transpose(-2, -1) / ROOT).masked_fill(~keys(lens, q.mT), float("-inf"))
    e = s.exp()
    return join((e / e.sum(-1, keepdim=True)) @ v)


@rewritten
def exp_times_mask(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.transpose(-2, -1) / ROOT
    top = s.max(dim=-1, keepdim=True).values.detach()
    e = (s - top).exp() * keys(lens, s)
    return join((e / e.sum(-1, keepdim=True)) @ v)


@rewritten
def exp_of_log_softmax(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), float("-inf"))
    return join(s.log_softmax(-1).exp() @ v)


@rewritten
def maximum_subtracted_before_softmax(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), -1e9)
    return join((s - s.amax(-1, keepdim=True)).softmax(-1) @ v)


@rewritten
def float32_softmax(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.transpose(-2, -1) / ROOT).float().masked_fill(~keys(lens, q.mT), -1e4)
    return join(torch.softmax(s, -1, dtype=torch.float32).to(q.dtype) @ v)


@rewritten
def queries_zeroed_after(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.transpose(-2, -1) / ROOT
    mask = valid(lens, s.shape[-1])
    p = s.masked_fill(~mask[:, None, None, :], -1e9).softmax(-1) * mask[:, None, :, None]
    return join(p @ v)


@rewritten
def keys_zeroed_again_after(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.transpose(-2, -1) / ROOT
    mask = keys(lens, s)
    p = s.masked_fill(~mask, -1e9).softmax(-1).masked_fill(~mask, 0.0)
    return join(p @ v)


@rewritten
def outer_product_mask(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.transpose(-2, -1) / ROOT
    mask = valid(lens, s.shape[-1])
    both = mask[:, None, :, None] & mask[:, None, None, :]
    return join(s.masked_fill(~both, -1e9).softmax(-1) @ v)


@rewritten
def outer_product_mask_of_floats(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.transpose(-2, -1) / ROOT
    mask = valid(lens, s.shape[-1]).float()
    both = (mask[:, :, None] * mask[:, None, :]).unsqueeze(1)
    return join(s.masked_fill(both == 0, torch.finfo(s.dtype).min).softmax(-1) @ v)


@rewritten
def causal_and_padding(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    n = q.shape[2]
    causal = torch.tril(torch.ones(n, n, dtype=torch.bool))
    visible = causal[None, None] & keys(lens, q.mT)
    s = (q @ k.transpose(-2, -1) / ROOT).masked_fill(~visible, float("-inf"))
    return join(s.softmax(-1) @ v)


@rewritten
def causal_by_index_comparison(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    i = torch.arange(q.shape[2])
    hidden = (i[None, :] > i[:, None]) | ~keys(lens, q.mT)
    s = (q @ k.mT / ROOT).masked_fill(hidden, -1e9)
    return join(s.softmax(-1) @ v)


@rewritten
def causal_by_added_triangle(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    n = q.shape[2]
    s = q @ k.mT / ROOT + torch.triu(torch.full((n, n), float("-inf")), diagonal=1)
    s = s.masked_fill(~keys(lens, s), float("-inf"))
    return join(s.softmax(-1) @ v)


@rewritten
def causal_only(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    n = q.shape[2]
    hidden = torch.triu(torch.ones(n, n), diagonal=1).bool()
    return join((q @ k.mT / ROOT).masked_fill(hidden, float("-inf")).softmax(-1) @ v)


@rewritten
def strictly_causal_keeps_its_offset(q, k, v, lens):
    """A query sees itself and one key ahead: not the op's causal, so a bias."""
    q, k, v = split_all(q, k, v)
    n = q.shape[2]
    visible = torch.ones(n, n).tril(1).bool() & keys(lens, q.mT)
    return join((q @ k.mT / ROOT).masked_fill(~visible, -1e9).softmax(-1) @ v)


@rewritten
def keys_transposed_beforehand(q, k, v, lens):
    q, v = split_all(q, v)
    kt = k.view(*k.shape[:2], HEADS, DIM).permute(0, 2, 3, 1)
    s = torch.matmul(q, kt).div(ROOT)
    s.masked_fill_(~keys(lens, s), float("-inf"))
    return join(s.softmax(-1) @ v)


@rewritten
def in_place_throughout(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.mT
    s /= ROOT
    s += torch.zeros(lens.shape[0], 1, 1, s.shape[-1]).masked_fill_(~keys(lens, s), -1e9)
    return join(s.softmax(-1) @ v)


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
    s = q @ k.mT / torch.sqrt(torch.full([], float(DIM)))
    return join(s.masked_fill(~keys(lens, s), float("-inf")).softmax(-1) @ v)


@rewritten
def mask_from_a_slice_of_a_table(q, k, v, lens):
    """A table that is not known to be causal: a small bias, and the key mask as such."""
    n = q.shape[1]
    table = (torch.arange(40)[:, None] * 3 % 7 >= torch.arange(40) % 5).view(1, 1, 40, 40)
    q, k, v = split_all(q, k, v)
    s = torch.where(table[:, :, :n, :n], q @ k.mT / ROOT, -1e9)
    return join(s.masked_fill(~keys(lens, s), -1e9).softmax(-1) @ v)


@rewritten
def segments(q, k, v, lens):
    """Queries see keys of their own session only: a mask over queries and keys."""
    session = (torch.arange(q.shape[1]) // 3)[None] * lens[:, None] % 4
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
    mask = torch.zeros(q.shape[0], 1, 1, n).masked_fill(
        ~valid(lens, n)[:, None, None, :], float("-inf")
    )
    return join(F.scaled_dot_product_attention(*split_all(q, k, v), attn_mask=mask))


@rewritten
def sdpa_causal_and_padding(q, k, v, lens):
    n = q.shape[1]
    mask = torch.ones(n, n, dtype=torch.bool).tril() & valid(lens, n)[:, None, None, :]
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
    pad = torch.zeros(q.shape[0], n).masked_fill(~valid(lens, n), float("-inf"))
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
    a = a * torch.tril(torch.ones(n, n))[None, None] * keys(lens, a).to(a.dtype)
    return torch.einsum("bhnm,bmhd->bnhd", a, v).reshape(q.shape[0], n, WIDTH)


@rewritten
def hstu_one_mask_and_bias(q, k, v, lens):
    n = q.shape[1]
    bias = (k[0, :, :1] - v[0, :, :1].mT)[None, None]
    mask = torch.tril(torch.ones(n, n)).bool()[None] & valid(lens, n)[:, None, :]
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
    a = (q @ k.mT) * torch.tril(torch.ones(n, n)) * keys(lens, q.mT)
    return join(a @ v)


# --- Not attention as the op means it, or not proven. --------------------------------------------


@declined("softmax runs over the query axis, not the keys")
def softmax_over_queries(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), -1e9)
    return join(s.softmax(-2) @ v)


@declined("softmax runs over a batch or head axis, not the keys")
def softmax_over_heads(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    return join((q @ k.mT / ROOT).softmax(1) @ v)


@declined("softmax runs over the query axis, not the keys")
def exp_over_sum_of_queries(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    e = (q @ k.mT / ROOT).exp()
    return join((e / e.sum(-2, keepdim=True)) @ v)


@declined("the mask is multiplied into the logits before softmax")
def mask_times_logits(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.mT / ROOT * keys(lens, q.mT)
    return join(s.softmax(-1) @ v)


@declined("the fill value -100 is too small to count as a mask")
def small_fill(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), -100)
    return join(s.softmax(-1) @ v)


@declined("sigmoid of the fill value 0 is not 0")
def sigmoid_of_zero(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), 0.0)
    return join(s.sigmoid() @ v)


@declined("aten.tanh stands between the scores and softmax")
def capped_scores(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = torch.tanh(q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), -1e9)
    return join(s.softmax(-1) @ v)


@declined("the bias is as large as the scores")
def relative_scores(q, k, v, lens):
    """Transformer-XL: a second product of the scores' own size."""
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT + q @ v.mT) / ROOT
    return join(s.masked_fill(~keys(lens, s), -1e9).softmax(-1) @ v)


@declined("keys are masked after the softmax but not before it")
def mask_after_softmax(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    p = (q @ k.mT / ROOT).softmax(-1) * keys(lens, q.mT)
    return join(p @ v)


@declined("the attention weights are also used by")
def weights_also_returned(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    p = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), -1e9).softmax(-1)
    return join(p @ v) + p.mean()


@declined("there is no padding mask: torch's own kernel is as good")
def sdpa_without_mask(q, k, v, lens):
    return join(F.scaled_dot_product_attention(*split_all(q, k, v)))


@declined("the additive mask hides whole queries, where softmax then ignores it")
def additive_outer_product(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    mask = valid(lens, q.shape[2]).float()
    both = mask[:, None, :, None] * mask[:, None, None, :]
    return join((q @ k.mT / ROOT + (1 - both) * -1e9).softmax(-1) @ v)
