"""From a reason that gem gave to what a user could write instead.

A reason is a sentence with holes: "the fill value -100 is too small to count as a mask". The
sentences stand in advice_attention.py and advice_graph.py with their holes named; each is a
heading of docs/troubleshooting.md, and tests/test_advice.py keeps them in step with the code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from . import advice_attention, advice_graph

_HOLE = re.compile(r"\{([A-Z]*)\}")
# Holes that are left out of a heading; and one that stands for the name of a Python error.
_UNSAID = ("PLACE",)
_WORD = ("ERROR",)


@dataclass(frozen=True)
class Advice:
    """What is known about one sentence.

    Attributes:
        sentence: the reason with named holes, "the fill value {FILL} is too small ...".
        pattern: the nearest form that gem knows, one line.
        write: what could stand in the model instead.
    """

    sentence: str
    pattern: str
    write: str

    @property
    def heading(self) -> str:
        """The sentence as docs/troubleshooting.md has it: "the fill value FILL is too small"."""
        return _HOLE.sub(lambda hole: "" if hole[1] in _UNSAID else hole[1], self.sentence)

    @property
    def anchor(self) -> str:
        """The heading's anchor on that page, as GitHub and MkDocs make it."""
        return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", self.heading).strip().lower())

    @property
    def regex(self) -> re.Pattern[str]:
        """Matches every reason that fills the sentence's holes."""
        parts = _HOLE.split(self.sentence)  # text, hole, text, hole, ..., text
        holes = [r"\w+" if name in _WORD else ".*" for name in parts[1::2]]
        texts = [re.escape(text) for text in parts[::2]]
        return re.compile("".join(a + b for a, b in zip(texts, [*holes, ""])), re.DOTALL)


KNOWN: tuple[Advice, ...] = tuple(
    Advice(sentence, pattern, write)
    for sentence, pattern, write in (*advice_attention.KNOWN, *advice_graph.KNOWN)
)


@lru_cache(maxsize=1024)
def advise(reason: str) -> Advice | None:
    """What could be written instead, for a reason that a report gives.

    Args:
        reason: the clause after "declined because", as `Site.reason` has it; also the sentence that
            a rewritten site gives for a mask it kept as a tensor.

    Returns:
        None for a sentence that gem does not say: that of a user's own pass.
    """
    found = [a for a in KNOWN if a.regex.fullmatch(reason)]
    return max(found, key=lambda a: len(_HOLE.sub("", a.sentence)), default=None)
