"""Not attention as the op means it, or not proven: each with the reason it is declined for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attention_spellings import (
    ROOT,
    declined,
    join,
    keys,
    split_all,
    valid,
)


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
