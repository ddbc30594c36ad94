"""The same attention, as different people write it.

Every spelling takes q, k, v of [B, L, E] and the lengths [B], and returns [B, L, E]. Those in
REWRITTEN become one op; DECLINED ones keep their nodes, each for the reason given.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = "cpu"  # of what the spellings make themselves; tests on a GPU set it
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
    s = torch.where(keys(lens, s), s, torch.full([], -1e9, dtype=s.dtype, device=DEVICE))
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
    zeros = torch.zeros(lens.shape[0], n, dtype=q.dtype, device=DEVICE)
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
    causal = torch.tril(torch.ones(n, n, dtype=torch.bool, device=DEVICE))
    visible = causal[None, None] & keys(lens, q.mT)
    s = (q @ k.transpose(-2, -1) / ROOT).masked_fill(~visible, float("-inf"))
    return join(s.softmax(-1) @ v)


@rewritten
def causal_by_index_comparison(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    i = torch.arange(q.shape[2], device=DEVICE)
    hidden = (i[None, :] > i[:, None]) | ~keys(lens, q.mT)
    s = (q @ k.mT / ROOT).masked_fill(hidden, -1e9)
    return join(s.softmax(-1) @ v)


@rewritten
def causal_by_added_triangle(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    n = q.shape[2]
    s = q @ k.mT / ROOT + torch.triu(torch.full((n, n), float("-inf"), device=DEVICE), diagonal=1)
    s = s.masked_fill(~keys(lens, s), float("-inf"))
    return join(s.softmax(-1) @ v)


@rewritten
def causal_only(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    n = q.shape[2]
    hidden = torch.triu(torch.ones(n, n, device=DEVICE), diagonal=1).bool()
    return join((q @ k.mT / ROOT).masked_fill(hidden, float("-inf")).softmax(-1) @ v)


@rewritten
def strictly_causal_keeps_its_offset(q, k, v, lens):
    """A query sees itself and one key ahead: not the op's causal, so a bias."""
    q, k, v = split_all(q, k, v)
    n = q.shape[2]
    visible = torch.ones(n, n, device=DEVICE).tril(1).bool() & keys(lens, q.mT)
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
    s += torch.zeros(lens.shape[0], 1, 1, s.shape[-1], device=DEVICE).masked_fill_(
        ~keys(lens, s), -1e9
    )
    return join(s.softmax(-1) @ v)
