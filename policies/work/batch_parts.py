"""What a batch is made of: chunks of prompts, steps of cohorts, and the shape that is all a cost model may see.

Named tuples: one of each is made per iteration. They stay interpreted where the modules that use them are compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from policies.work.cohort import Cohort
    from policies.work.speculator import Speculator
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
    draft_tokens: drafts that decodes verify beside their next token: rows beyond one a decode.
    draft_context_total: their decodes' contexts, once for every draft.
    drafting: tokens drafted after this iteration for every request that samples in it; 0 without speculation.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    decode_context_total: int = 0
    decode_context_max: int = 0
    dummy_tokens: int = 0
    sampled: int = 0
    executed_rows: int = 0
    draft_tokens: int = 0
    draft_context_total: int = 0
    drafting: int = 0

    @property
    def prefill_tokens(self) -> int:
        return sum([tokens for tokens, _ in self.chunks])

    @property
    def tokens(self) -> int:
        """Useful tokens: prefill and decode together, without dummies."""
        return sum([tokens for tokens, _ in self.chunks]) + self.decodes + self.draft_tokens

    @property
    def decode_rows(self) -> int:
        """Rows of the decodes: one each, and one for every draft."""
        return self.decodes + self.draft_tokens

    @property
    def requests_sampled(self) -> int:
        """Requests that get a token: sampled rows without those of drafts."""
        return self.sampled - self.draft_tokens

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


class Verified(NamedTuple):
    """The step of one speculating decode: `tokens` rows (its next token and drafts) on top of `context` cached ones.

    placeholders: its drafts are none: rows that fill a width which the engine wants whole, and never accepted.
    """

    cohort: Speculator
    track: Track
    tokens: int
    context: int
    placeholders: bool = False

    @property
    def drafts(self) -> int:
        return self.tokens - 1
