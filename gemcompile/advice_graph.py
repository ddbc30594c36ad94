"""Why padding stays, or a whole graph as it is: (sentence, nearest pattern, advice)."""

from __future__ import annotations

_REGION = "embeddings, row-wise layers and masked attention that end in a masked sum, mean or loss"
_MASK = "a bool mask [B, L] made from lengths or ids by pure operators"
_PLACE = "values that nobody else reads, in one mode, with nothing changed in place between them"
_CAPTURE = "a graph of tensors and torch operators that Dynamo captures whole"
_PASS = "a pass whose new nodes are made by `gemcompile.graph.Editor`, which gives them values"

KNOWN: tuple[tuple[str, str, str], ...] = (
    # --- Padding. ---
    (
        "its padded output leaves the graph ({CAUSE}); {CURE}",
        _REGION,
        "the loss inside the compiled module, and no graph break before it; or "
        '`options={"padded_outputs": "zero"}`, where rows outside the mask may be anything',
    ),
    (
        "{OP} observes padded rows{PLACE}",
        _REGION,
        "a mask before it: `x * keep[..., None]`, `x.masked_fill(~keep[..., None], 0)`, "
        "`x[torch.arange(B), lengths - 1]`, `ignore_index` in the loss",
    ),
    (
        "its padded rows are used in two ways{PLACE}",
        _REGION,
        "one mask for all uses of the tensor, or a use of its own for each",
    ),
    (
        "the next attention needs padded rows{PLACE}",
        _REGION,
        '`masked_fill(~keep, float("-inf"))` in the next attention: with a finite fill a row '
        "without a valid key averages all values",
    ),
    (
        "rows outside the key mask are observed, and with a finite fill a row without a valid key "
        "averages padded values; fill with -inf instead",
        _REGION,
        '`masked_fill(~keep, float("-inf"))` in place of the finite fill',
    ),
    (
        "its keys have no padding mask",
        _REGION,
        "the mask in every attention: `attn_mask=keep[:, None, None, :]`, with `&` for causal",
    ),
    (
        "fill is {FILL}: packing would cost more than it saves",
        _REGION,
        'nothing, if batches are this full; else `options={"pack": True}`',
    ),
    (
        "the mask depends on {OP}, which cannot be computed ahead of the graph",
        _MASK,
        "the mask as an input, or computed from inputs without randomness and opaque operators",
    ),
    (
        "a tensor that the mask depends on is changed in place",
        _MASK,
        "out-of-place operators on what the mask is made from",
    ),
    (
        "{ROWS} packed rows of {WIDTH} elements exceed 32-bit indices",
        _REGION,
        "a smaller batch; a larger one runs as Inductor compiles it",
    ),
    (
        "the graph has no symbolic shapes",
        _REGION,
        "`torch.compile(model, backend='gem')` as the caller, not a graph traced by hand",
    ),
    # --- Places that a pattern of a pass matches. ---
    (
        "an intermediate value is also used by {READER}{PLACE}",
        _PLACE,
        "compute the value apart for its other reader, or let the pattern end at it",
    ),
    (
        "autocast or grad mode changes inside it",
        _PLACE,
        "the whole computation inside one autocast or `no_grad` block",
    ),
    (
        "a tensor may be changed in place inside it",
        _PLACE,
        "an operation out of place: `x = x + y` for `x += y`, `torch.where` for `x[mask] = y`",
    ),
    # --- Whole graphs. ---
    (
        "the model reads .data, which hides a use from autograd",
        _CAPTURE,
        "`x.detach()` in place of `x.data`",
    ),
    (
        "{NAME} is a tensor made while tracing",
        _CAPTURE,
        "make the tensor in `__init__` with `register_buffer`, or hand it in",
    ),
    (
        "no fake tensor mode is known",
        _CAPTURE,
        "`torch.compile(model, backend='gem')` as the caller; gem cannot compile a graph alone",
    ),
    (
        "{OP} has no recorded result",
        _CAPTURE,
        "keep the operator out of the compiled function with `torch.compiler.disable`",
    ),
    (
        "pass {NAME} failed after {EARLIER}: {MESSAGE}",
        _PASS,
        'repair the pass, or leave it out: `options={"disable": ("NAME",)}`',
    ),
    (
        "{NAMES} has no stable identity; give it an identity() method",
        "a pass defined in a file, whose attributes are plain values",
        "`def identity(self)`, which returns a tuple equal in every process for equal behaviour",
    ),
    (
        "results cannot be compared: {REASON}",
        "dropout and the usual distributions, whose draws `verify` fixes; outputs kept as they are",
        "a check without that operator, or with `padded_outputs` left at `exact`",
    ),
    (
        "the number of packed rows changes at every step",
        "CUDA graphs replay fixed shapes",
        '`options={"pack": False}` to keep CUDA graphs, or `mode="default"` to keep packing',
    ),
    (
        "{ERROR}: {MESSAGE}",
        _CAPTURE,
        "an error inside gem or Inductor; the graph runs as Inductor compiles it. "
        '`options={"strict": True}` raises it with its traceback: please report it',
    ),
)
