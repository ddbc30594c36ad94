"""torch's own scaled_dot_product_attention, where it carries a mask that gem can use."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from gemcompile.graph import arguments, same_size, shape, value

from .attention_additive import additive
from .attention_match import MASK_FILL, NO_PADDING, Declined, Masking, Match, operand, swallows
from .axes import Axis, Label, Labels, aligned, expression, fresh, regroup
from .masks import Band, conjuncts


def match_sdpa(node: Node) -> Match:
    """The attention of a scaled_dot_product_attention call.

    Raises:
        Declined: it is left to torch, with the reason.
    """
    given = arguments(node)
    q, k, v, mask = given["query"], given["key"], given["value"], given["attn_mask"]
    if mask is None and not given["is_causal"]:
        raise Declined(NO_PADDING)
    match = Match(node, fresh(node), "softmax", fused=True)
    batch, row = match.out[:-2], match.out[-2]
    match.keys, match.depth = (Axis(shape(k)[-2]),), (Axis(shape(q)[-1]),)
    match.rows = row
    match.batch = tuple(axis for label in batch for axis in label)
    match.score_dtype = value(node).dtype
    out_shape = shape(node)[:-2]
    match.q = operand(q, _sdpa_labels(q, out_shape, batch, (row, match.depth)))
    match.k = operand(k, _sdpa_labels(k, out_shape, batch, (match.keys, match.depth)))
    match.v = operand(v, _sdpa_labels(v, out_shape, batch, (match.keys, match.out[-1])))
    match.scale = _sdpa_scale(given["scale"], match.depth)
    if given["dropout_p"]:
        match.dropout, match.dropout_p = node, float(given["dropout_p"])
    if given["is_causal"]:
        match.hidden.append(Masking((Band(row, match.keys, 0),), -math.inf, True, True))
    if mask is not None:
        scores = (*out_shape, shape(q)[-2], shape(k)[-2])
        labels = aligned(mask, scores, (*batch, row, match.keys))
        if labels is None:
            raise Declined("the mask does not broadcast to the scores")
        _sdpa_mask(match, mask, labels)
        match.mask_nodes.append(mask)
    return match


def _sdpa_labels(
    x: Node, out_shape: torch.Size, batch: Labels, last: tuple[Label, Label]
) -> Labels:
    """Labels of q, k or v; with enable_gqa a head of k serves several neighbouring query heads."""
    sizes = shape(x)[:-2]
    skip = len(batch) - len(sizes)
    out: list[Label] = []
    for size, full, label in zip(sizes, out_shape[skip:], batch[skip:]):
        if same_size(size, full):
            out.append(label)
        elif same_size(size, 1):
            out.append(())
        else:
            split = regroup([label], [size, expression(full) / expression(size)])
            if split is None:
                raise Declined("the heads of q are not proven to be a multiple of the heads of k")
            out.append(split[0])
    return (*out, *last)


def _sdpa_scale(scale: object, depth: Label) -> float:
    if isinstance(scale, (int, float)):
        return float(scale)
    size = depth[0].size
    if scale is not None or not size.is_Integer:
        raise Declined("the scale is not a constant")
    return float(1 / math.sqrt(int(size)))


def _sdpa_mask(match: Match, mask: Node, labels: Labels) -> None:
    if value(mask).dtype is torch.bool:
        match.hidden.append(Masking(conjuncts(mask, labels, True), -math.inf, True, True))
        return
    masks, match.biases = additive(mask, labels, 1.0, MASK_FILL)
    for hidden in masks:
        uniform = swallows(hidden.fill, value(mask).dtype)
        match.hidden.append(Masking(hidden.literals, hidden.fill, uniform, False))
