"""Which drafts the model accepts: those that it would have sampled itself.

Every row of a verified draft is sampled as it would be without speculation: greedy, or by the draw that the request's
seed and the row's position name. A draft is accepted where it is that token. For drafts that are tokens and no
distribution (n-grams, a draft model's most likely token) this accepts draft d with probability p(d), and otherwise
gives a token of p without d: rejection sampling (Leviathan et al., Fast Inference from Transformers via Speculative
Decoding, ICML 2023, Sec. 2.3), and the very tokens of an engine that does not speculate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from executor.serving.request_text import Text
from policies import Track


class Wide(NamedTuple):
    """The rows of one speculating decode in a batch. context: of its first row; row: of the block tables; drafts: those
    that are verified; width: its rows, more than the drafts where some are placeholders."""

    track: Track
    epoch: int
    text: Text
    context: int
    row: int
    drafts: list[int]
    width: int


def accept(sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The tokens that a decode delivers: accepted drafts, then the model's own token. sampled: one per row, the first
    of them the token after the request's last one."""
    count = 0
    while count < len(drafts) and sampled[count] == drafts[count]:
        count += 1
    return list(sampled[: count + 1])
