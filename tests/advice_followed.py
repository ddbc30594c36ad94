"""Attention that gem declines, and the same as its advice writes it: both take q, k, v, lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from attention_spellings import ROOT, join, keys, split_all, valid

Spelling = Callable[..., Any]


@dataclass(frozen=True)
class Pair:
    """A declined spelling and what to write instead.

    Attributes:
        heading: of the advice that the reason leads to.
        advice: a part of it, the one that is followed.
        equal: both give the same values.
    """

    before: Spelling
    after: Spelling
    heading: str
    advice: str
    equal: bool = True


def attend(scores: Spelling | None = None, weights: Spelling | None = None) -> Spelling:
    """Softmax attention with a step of the user's between the product, softmax and v."""

    def forward(q, k, v, lens):
        q, k, v = split_all(q, k, v)
        s = q @ k.mT / ROOT
        keep = keys(lens, s)
        s = s.masked_fill(~keep, float("-inf")) if scores is None else scores(s, keep, k)
        p = s.softmax(-1)
        return join((p if weights is None else weights(p, keep, v)) @ v)

    return forward


def weight(x):
    """A positive number for each key, [B, H, L]."""
    return x[..., 0].exp()


def keys_weighted(s, keep, k):
    return (s * weight(k)[:, :, None, :]).masked_fill(~keep, float("-inf"))


def keys_weighted_in_k(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ (k * weight(k)[..., None]).mT / ROOT
    return join(s.masked_fill(~keys(lens, s), float("-inf")).softmax(-1) @ v)


def values_weighted(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.mT / ROOT
    p = s.masked_fill(~keys(lens, s), float("-inf")).softmax(-1)
    return join((p * weight(v)[:, :, None, :]) @ v)


def values_weighted_in_v(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.mT / ROOT
    p = s.masked_fill(~keys(lens, s), float("-inf")).softmax(-1)
    return join(p @ (v * weight(v)[..., None]))


def exponentials_weighted(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.mT / ROOT
    e = (s - s.amax(-1, keepdim=True)).exp() * keys(lens, s) * weight(k[:, :1])[:, :, None, :]
    return join(e / e.sum(-1, keepdim=True) @ v)


def weight_as_bias(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.mT / ROOT + weight(k[:, :1])[:, :, None, :].log()
    return join(s.masked_fill(~keys(lens, s), float("-inf")).softmax(-1) @ v)


def temperature(q):
    """A number for each sequence, [B, 1, 1, 1]."""
    return q[:, :1, :1, :1].exp()


def mask_before_temperature(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT).masked_fill(~keys(lens, q.mT), float("-inf"))
    return join((s * temperature(q)).softmax(-1) @ v)


def temperature_before_mask(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT) * temperature(q)
    return join(s.masked_fill(~keys(lens, q.mT), float("-inf")).softmax(-1) @ v)


def sigmoid_then_mask(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = q @ k.mT / ROOT
    return join(s.sigmoid().masked_fill(~keys(lens, s), 0.0) @ v)


def mask_then_sigmoid(q, k, v, lens):
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT / ROOT).masked_fill(~keys(lens, q.mT), 0.0)
    return join(s.sigmoid() @ v)


def sdpa_unmasked(q, k, v, lens):
    return join(F.scaled_dot_product_attention(*split_all(q, k, v)))


def sdpa_masked(q, k, v, lens):
    keep = valid(lens, q.shape[1])
    return join(
        F.scaled_dot_product_attention(*split_all(q, k, v), attn_mask=keep[:, None, None, :])
    )


def one_sequence(q, k, v, lens):
    return (q[0] @ k[0].mT).masked_fill(~valid(lens, q.shape[1])[:1], -1e9).softmax(-1) @ v[0]


def batch_of_one(q, k, v, lens):
    q, k, v = q[0][None], k[0][None], v[0][None]
    s = (q @ k.mT).masked_fill(~valid(lens, q.shape[1])[:1, None, :], -1e9)
    return (s.softmax(-1) @ v)[0]


FILL = 'masked_fill(~keep, float("-inf")).softmax(-1)'

FOLLOWED = (
    Pair(
        attend(lambda s, keep, k: s * keep),
        attend(),
        "the mask is multiplied into the logits before softmax",
        FILL,
        equal=False,
    ),
    Pair(
        attend(lambda s, keep, k: s.masked_fill(~keep, -100)),
        attend(),
        "the fill value FILL is too small to count as a mask",
        FILL,
        equal=False,
    ),
    Pair(
        attend(lambda s, keep, k: s, lambda p, keep, v: p * keep),
        attend(),
        "keys are masked after the softmax but not before it",
        FILL,
        equal=False,
    ),
    Pair(
        attend(keys_weighted),
        keys_weighted_in_k,
        "the scores are multiplied by a tensor that varies over the keys",
        "q @ (k * weight[..., None]).mT",
    ),
    Pair(
        values_weighted,
        values_weighted_in_v,
        "the weights are multiplied by a tensor that varies over the keys",
        "weights @ (v * weight[..., None])",
    ),
    Pair(
        exponentials_weighted,
        weight_as_bias,
        "the exponentials are multiplied by something that is not a mask",
        "(scores + weight.log()).softmax(-1)",
    ),
    Pair(
        mask_before_temperature,
        temperature_before_mask,
        "the mask is applied before a scale whose sign is not known",
        "((q @ k.mT) * temperature).masked_fill",
    ),
    Pair(
        mask_then_sigmoid,
        sigmoid_then_mask,
        "ACTIVATION of the fill value FILL is not 0",
        "activation(scores).masked_fill(~keep, 0.0)",
        equal=False,
    ),
    Pair(
        sdpa_unmasked,
        sdpa_masked,
        "there is no padding mask: torch's own kernel is as good",
        "attn_mask=keep[:, None, None, :]",
        equal=False,
    ),
    Pair(
        one_sequence,
        batch_of_one,
        "the scores have no batch dimension",
        "q[None]",
    ),
)
