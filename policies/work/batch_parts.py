"""What a batch is made of: chunks of prompts, steps of cohorts, and the shape that is all a cost model may see.

Named tuples: one of each is made per iteration. They stay interpreted where the modules that use them are compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from policies.work.cohort import Cohort
    from policies.work.track import Track


class BatchShape(NamedTuple):
    """The shape of one iteration; hashable. Simulator and executor log the same columns.

    chunks: (tokens, prefix) of every prefill chunk in batch order, never collapsed into a sum; `prefix` is the
        context that the KV cache already holds for that request.
    decodes: requests that decode one token each; decode_context_total / _max: their contexts *before* this
        iteration's token (that token's own key and value are not counted).
    dummy_tokens: padding rows; they cost linear layers only: no KV, no attention, no sampling.
    sampled: rows that go through the output head and the sampler.
    executed_rows: rows really executed once graph padding is counted; 0 where no padding was applied.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    decode_context_total: int = 0
    decode_context_max: int = 0
    dummy_tokens: int = 0
    sampled: int = 0
    executed_rows: int = 0

    @property
    def prefill_tokens(self) -> int:
        return sum([tokens for tokens, _ in self.chunks])

    @property
    def tokens(self) -> int:
        """Useful tokens: prefill and decode together, without dummies."""
        return sum([tokens for tokens, _ in self.chunks]) + self.decodes

    @property
    def rows(self) -> int:
        """Rows of the `[rows, hidden]` matrix: every linear layer pays for these."""
        return max(self.tokens + self.dummy_tokens, self.executed_rows)


class Chunk(NamedTuple):
    """Part of a prompt: `tokens` new ones on top of `prefix` cached ones; `samples` when it ends the prompt."""

    track: Track
    tokens: int
    prefix: int
    samples: bool


class Decodes(NamedTuple):
    """One cohort's step: `size` members, contexts before the step. `step` indexes the cohort's list of token times."""

    cohort: Cohort
    step: int
    size: int
    context_total: int
    context_max: int
