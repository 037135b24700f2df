"""A decode that speculates: drafted tokens are verified together with its next one, and some of them are accepted.

Acceptance differs from request to request, so such a decode is a cohort of one, which nobody joins. Its steps are
tokens: planning takes a width (the next token and the drafts held), completion delivers what was accepted and takes the
rest back, as vLLM's V1 rolls its computed tokens back. Blocks that were taken for rejected drafts are kept.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from policies.work.cohort import Cohort
from policies.work.request import Ns
from policies.work.track import Track

if TYPE_CHECKING:
    from policies.kv_memory.ledger import KVLedger


class Speculator(Cohort):
    """The decode of one speculating request.

    planned counts tokens: those delivered and the widths in flight, so that base + planned is its context, whatever is
    accepted; times holds the time of every token delivered, equal ones where tokens came together.
    """

    __slots__ = ("_flights", "_track", "_verified")

    def __init__(self, number: int, block_size: int, *, by_id: bool = True) -> None:
        super().__init__(number, block_size, by_id=by_id)
        self.speculates = True
        self._track: Track | None = None
        # Widths in flight, in plan order.
        self._flights: deque[int] = deque()
        # Tokens that the last plan knew to be right: only blocks of these may be shared.
        self._verified = 0

    @property
    def track(self) -> Track:
        """Whose decode it is."""
        assert self._track is not None
        return self._track

    @property
    def promised(self) -> int:
        """Tokens that what is in flight delivers at least: one a width, and one if its prompt is."""
        return self.planned - len(self.times) - sum(self._flights) + len(self._flights)

    @property
    def surely_done(self) -> bool:
        """Whether what is in flight reaches the declared limit even if no draft is accepted."""
        track = self.track
        return len(self.times) + self.promised >= track.segment_start + track.limit_after - track.produced

    def join(self, track: Track, segment_start: int, decodes_from: int) -> None:
        self._members[track] = None
        self._track = track
        track.cohort = self
        track.base = self.longest_base = track.own_context - self.planned
        track.segment_start = segment_start
        track.decodes_from = decodes_from
        self.size = self.peak = 1
        self.context_total = track.own_context
        self._verified = track.own_context
        self.ends_at[segment_start + track.ends_after - track.produced] = {track: None}

    def leave(self, track: Track, *, deliver: bool = False) -> None:
        """Let it go. Tokens of its widths in flight are lost."""
        del self._members[track]
        self.size = self.context_total = 0
        self.ends_at.clear()
        self.planned -= sum(self._flights)
        self._flights.clear()
        done = len(self.times)
        start = track.segment_start
        if done > start:
            track.segments.append((self.number, start, done))
            track.produced += done - start
            track.last_token_ns = self.times[-1]
        track.cohort = None
        track.drafts = 0
        track.own_known = track.request.prompt_tokens + track.produced
        track.own_context = min(self._verified, track.own_known)

    def plan_tokens(self, tokens: int, holds: int, ledger: KVLedger) -> bool:
        """Plan a width and take blocks for `holds` tokens in all; False, and nothing has changed, if there are none."""
        track = self.track
        short = ledger.blocks_for(holds) - track.blocks
        if short > 0:
            if short > ledger.free_blocks:
                return False
            ledger.extend(track, holds)
        self._verified = self.context_total + 1
        self._flights.append(tokens)
        self.planned += tokens
        self.context_total += tokens
        return True

    def receive(self, accepted: int, now_ns: Ns) -> int:
        """The oldest width has returned: deliver its next token and the accepted drafts, never beyond the answer's end.

        Returns how many tokens were delivered.
        """
        width = self._flights.popleft()
        track = self.track
        end = track.segment_start + track.ends_after - track.produced
        delivered = min(accepted + 1, width, end - len(self.times))
        self.times += [now_ns] * delivered
        rejected = width - delivered
        self.planned -= rejected
        self.context_total -= rejected
        return delivered
