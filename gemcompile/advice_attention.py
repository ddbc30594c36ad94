"""Why attention stays as it is, and what to write instead: (sentence, nearest pattern, advice)."""

from __future__ import annotations

_SOFTMAX = "`softmax(scale * q @ k.mT + bias) @ v`, hidden keys filled with -inf"
_POINTWISE = "`activation(scale * q @ k.mT).masked_fill(hidden, 0) @ v`"
_SDPA = "`scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])`"
_AXES = "q [B, H, Lq, D], k [B, H, Lk, D], v [B, H, Lk, Dv], softmax over Lk"
_KEYS = "a mask of keys [B, 1, 1, Lk], or one of places: causal, a window, blocks, HSTU's"
_ALONE = "scores and weights that nobody else reads, in one mode, unchanged until they are used"
_TABLE = "a bias gathered from a table by the distance of places, j - i"
_PLACES = "comparisons of i - j, i or j with constants, or with one integer tensor [B]"
_FILL = '`scores.masked_fill(~keep, float("-inf")).softmax(-1)`'

KNOWN: tuple[tuple[str, str, str], ...] = (
    # --- What stands between q k^T and v. ---
    (
        "{OP} stands between the scores and {ACTIVATION}",
        _SOFTMAX,
        "scale, mask and bias the scores, nothing else; move other functions onto q or k, or drop "
        "them where the model allows",
    ),
    (
        "{OP} stands between the weights and the values",
        _SOFTMAX,
        "between the weights and v only dropout, a mask and a scale; apply other functions to v or "
        "to the output",
    ),
    (
        "softmax runs over {WRONG} axis, not the keys",
        _AXES,
        "softmax over the axis that is summed with v: `(q @ k.mT).softmax(-1) @ v`",
    ),
    (
        "the mask is multiplied into the logits before softmax",
        _SOFTMAX,
        f"{_FILL}: a score of 0 is not hidden, it still weighs exp(0)",
    ),
    (
        "the fill value {FILL} is too small to count as a mask",
        _SOFTMAX,
        f"{_FILL}; a finite fill counts from -1e4 downwards",
    ),
    (
        "{ACTIVATION} of the fill value {FILL} is not 0",
        _POINTWISE,
        "mask after the activation: `activation(scores).masked_fill(~keep, 0.0)`",
    ),
    (
        "keys are masked after the softmax but not before it",
        _SOFTMAX,
        f"{_FILL}, then no mask is needed after it",
    ),
    (
        "masked weights are set to {FILL} instead of 0",
        _SOFTMAX,
        "`weights.masked_fill(~keep, 0.0)`",
    ),
    (
        "the scores are multiplied by a tensor that varies over the keys",
        _SOFTMAX,
        "a weight for each key belongs to k: `q @ (k * weight[..., None]).mT`; a mask of zeros and "
        "ones is `scores.masked_fill(mask == 0, ...)`",
    ),
    (
        "the weights are multiplied by a tensor that varies over the keys",
        _SOFTMAX,
        "a weight for each key belongs to v: `weights @ (v * weight[..., None])`; a mask of zeros "
        "and ones is `weights.masked_fill(mask == 0, 0.0)`",
    ),
    (
        "the exponentials are multiplied by something that is not a mask",
        _SOFTMAX,
        "a bool mask before softmax, `masked_fill(~keep, -inf)`; or a positive weight as a bias: "
        "`(scores + weight.log()).softmax(-1)`",
    ),
    (
        "the weights pass through dropout in a way the op does not have",
        _SOFTMAX,
        "one `F.dropout(weights, p)` with 0 < p < 1",
    ),
    (
        "the scores are subtracted or scaled by an addition",
        _SOFTMAX,
        "`scores + bias`, the scale multiplied onto the scores before",
    ),
    (
        "a bias or mask is scaled by a tensor",
        _SOFTMAX,
        "scale first, then add: `(q @ k.mT) * temperature + bias`",
    ),
    (
        "the mask is applied before a scale whose sign is not known",
        _SOFTMAX,
        "scale first, then mask: `((q @ k.mT) * temperature).masked_fill(~keep, -inf)`",
    ),
    ("baddbmm scales by a symbolic number", _SOFTMAX, "Python numbers as alpha and beta"),
    ("the scale is not a constant", _SDPA, "a Python number as scale, or q multiplied by it"),
    # --- Axes. ---
    (
        "the scores themselves are broadcast",
        _AXES,
        "expand q or k before the product, not the scores after it",
    ),
    ("there is a single key", _AXES, "v itself: attention over one key returns its value"),
    (
        "the keys of the scores are not the keys of the values",
        _AXES,
        "k and v with one common axis of keys, in the same order",
    ),
    (
        "the weights are shared along an axis of the values",
        _AXES,
        "one width of v behind the keys: `v.flatten(-2)`, and unflatten the output",
    ),
    (
        "the values vary along an axis that is neither batch, key nor head",
        _AXES,
        "v with the batch, keys and heads of k, and one width",
    ),
    (
        "queries and keys are contracted over something else than the head dimension",
        _AXES,
        "q and k that share batch and heads, summed over their last axis: `q @ k.mT`",
    ),
    (
        "the scores have no batch dimension",
        _AXES,
        "a batch of one: `q[None]`, `k[None]`, `v[None]`",
    ),
    (
        "the whole batch shares its keys and values",
        _AXES,
        "nothing: keys that all sequences share hold no padding",
    ),
    (
        "head dimension {SIZE} is larger than {LIMIT}",
        _AXES,
        "more heads of at most 256 numbers each",
    ),
    (
        "no value in the graph has the size {SIZE}",
        _AXES,
        "views whose sizes are those of tensors or inputs: `x.view(b, n, heads, -1)` with b, "
        "n from `x.shape`",
    ),
    (
        "the heads of q are not proven to be a multiple of the heads of k",
        _SDPA,
        "head counts that are Python numbers, not sizes that vary between calls",
    ),
    # --- Masks and biases. ---
    (
        "there is no padding mask: torch's own kernel is as good",
        _SDPA,
        "nothing, where no key is padding; else hand the mask over: "
        "`attn_mask=keep[:, None, None, :]`",
    ),
    ("the mask does not broadcast to the scores", _SDPA, "`attn_mask` of [B, 1, 1, Lk]"),
    (
        "the mask is as large as the scores",
        _KEYS,
        "the key mask [B, 1, 1, Lk] and, apart from it, a mask of places made with `torch.arange` "
        "in the model",
    ),
    (
        "the mask varies along an axis that the scores do not have",
        _KEYS,
        "a mask that broadcasts to the scores [B, H, Lq, Lk]",
    ),
    (
        "positions are compared along axes that are not queries and keys",
        _KEYS,
        "`triu` or `tril` over the last two axes of the scores [..., Lq, Lk]",
    ),
    (
        "the bias is as large as the scores",
        "a bias that batch or heads share, or a table of relative places, j - i",
        "a bias of [1, H, Lq, Lk] or [B, 1, Lq, Lk], or `table[:, j - i + L - 1]`",
    ),
    (
        "the bias varies along an axis that the scores do not have",
        "a bias that broadcasts to [B, H, Lq, Lk]",
        "a bias that broadcasts to the scores [B, H, Lq, Lk]",
    ),
    (
        "a mask over queries and keys cannot be a bias before {ACTIVATION}",
        _KEYS,
        "a mask of keys, causal, a window or blocks, made in the model with `torch.arange`",
    ),
    (
        "the additive mask hides whole queries, where softmax then ignores it",
        _SOFTMAX,
        "a mask of keys alone before softmax, `keep[:, None, None, :]`; zero the padded queries "
        "in the output",
    ),
    (
        "it is not proven that {ASSUMPTION}, and strict=True",
        _SOFTMAX,
        f"{_FILL} in place of an added number; or `strict=False`, which records the assumption",
    ),
    # --- What surrounds it. ---
    (
        "flex_attention is a fused kernel already, with its mask in a program of its own",
        _SDPA,
        "the same attention as matrix products, or `scaled_dot_product_attention`",
    ),
    (
        "the attention {WHAT} are also used by {READER}",
        _ALONE,
        "do not return or log them while training (`need_weights=False`), or compute them apart",
    ),
    (
        "a tensor that it reads is changed in place",
        _ALONE,
        "an operation out of place: `x = x + y` for `x += y`, `torch.where` for `x[mask] = y`",
    ),
    (
        "autocast or grad mode changes between the scores and the output",
        _ALONE,
        "the whole attention inside one autocast or `no_grad` block",
    ),
    (
        "it reaches across the border of an activation checkpoint",
        _ALONE,
        "the whole attention inside the checkpointed function",
    ),
    # --- Masks of places that stay tensors: a site is rewritten with them, but stores them. ---
    (
        "for some lengths it is no window and none of HSTU's masks",
        _PLACES,
        "causal, a window (`i - j <= w`), blocks (`i // c == j // c`), or HSTU's masks",
    ),
    (
        "places are compared with a tensor of more than the batch",
        _PLACES,
        "one integer for each sequence, [B, 1, 1]",
    ),
    ("places are compared with a tensor of floats", _PLACES, "lengths as integers"),
    (
        "places are compared with more than one tensor",
        _PLACES,
        "one integer tensor [B]; the other mask as a mask of keys",
    ),
    ("places are compared with {NUMBER}", _PLACES, "a whole number as the bound"),
    ("places are added or multiplied", _PLACES, "differences of places, i - j, compared"),
    ("more than two places are compared", _PLACES, "several comparisons joined by `&`"),
    (
        "the distance of two places is not compared with a constant",
        _PLACES,
        "a Python number as the width of the window",
    ),
    (
        "places are compared with a number that varies from call to call",
        _PLACES,
        "a Python number as the width of the window, not one made from sizes",
    ),
    (
        "{OP} is taken of places",
        _PLACES,
        "comparisons, `clamp`, `abs`, `minimum` and `maximum` of places",
    ),
    (
        "queries and keys are not equally many",
        _PLACES,
        "as many queries as keys, or only a mask of keys where they differ",
    ),
    # --- Biases that stay tensors. ---
    ("it varies along the batch", _TABLE, "one table for all sequences"),
    (
        "it depends on places otherwise than by their distance j - i",
        _TABLE,
        "`table[:, (j - i) + m - 1]`, or buckets of j - i",
    ),
    (
        "it is an input, not made of places",
        _TABLE,
        "the table as the parameter, gathered by j - i in the model",
    ),
    ("{OP} is not element-wise", _TABLE, "element-wise operators between the table and the scores"),
    (
        "an operand of {OP} is of another shape",
        _TABLE,
        "operands of the table's own shape, or numbers",
    ),
    ("what it is read from varies along more than the heads", _TABLE, "a table [heads, buckets]"),
)
