"""Requests whose KV cache moves between two engines: prompts computed here for another, answers begun elsewhere.

On the engine that computes the prompt a request added with `hands_over` ends with its first token, but keeps its
blocks until they have been read (`release`). On the engine that decodes, a request is expected (`receive`), takes its
blocks as soon as there is room (`reserve`), and joins the queue once its KV has arrived (`arrive`); it then lacks one
token, as any decode does.

Free blocks go to the request that waits longest, as in vLLM, whose preempted requests stand at the front of the one
queue: requests in the queue that hold no blocks (they were preempted) come before every request that is still expected.
Requests whose KV lies here already come first of all, because they need no more room. Their blocks are taken back only
if nothing runs and nothing else could; their KV is recomputed then.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from policies.edges.errors import PolicyError
from policies.work.request import Ns, Request
from policies.work.track import Track

if TYPE_CHECKING:
    from policies.scheduling.lifecycle import Roster


class Handover:
    """The moving requests of one scheduler. held: ended, blocks kept. expected: known, their KV not here yet.

    gave_back: `reclaim` has freed blocks that nobody has been told of; whoever tells them sets it back.
    """

    __slots__ = ("_scheduler", "expected", "gave_back", "held")

    def __init__(self, scheduler: Roster) -> None:
        self._scheduler = scheduler
        self.held: dict[int, Track] = {}
        self.expected: dict[int, Track] = {}
        self.gave_back = False

    # The engine that computes the prompt

    def release(self, request_id: int) -> None:
        """The KV of a request that ended here has been read, or nobody wants it any more: its blocks are free."""
        track = self.held.pop(request_id, None)
        if track is not None:
            self._scheduler.ledger.release(track)
            self._scheduler.queues.changes += 1

    # The engine that decodes

    def receive(self, request: Request, now_ns: Ns, *, ends_after: int | None, computed: int, produced: int) -> Track:
        """Expect a request whose first `computed` tokens of KV will be handed over, if it can run here.

        produced: output tokens delivered elsewhere; computed is prompt + produced - 1.
        """
        if not 0 < computed < request.prompt_tokens + produced:
            raise PolicyError(
                f"request {request.id}: KV of {computed} tokens handed over, expected 1 to "
                f"{request.prompt_tokens + produced - 1}"
            )
        track = self._scheduler.enter(request, now_ns, ends_after, computed, produced)
        if track.status == "waiting":
            track.status = "expected"
            self.expected[request.id] = track
        return track

    def reserve(self, track: Track) -> bool:
        """Take the blocks of an expected request's KV and of its next token, or of all that its policy reserves on
        admission; False (and nothing taken) without room beside the requests that wait for blocks already."""
        scheduler = self._scheduler
        ledger = scheduler.ledger
        tokens = self._tokens(track)
        free = ledger.free_blocks - scheduler.watermark_blocks
        free -= ledger.admission_blocks(track, track.computed, tokens)
        if free < 0:
            return False
        queues = scheduler.queues
        for waiting in islice(queues.waiting, len(queues.holding), None):
            free -= ledger.admission_blocks(waiting, ledger.cached_tokens(waiting), self._tokens(waiting))
            if free < 0:
                return False
        ledger.admit(track, track.computed)
        ledger.extend(track, tokens)
        return True

    def _tokens(self, track: Track) -> int:
        """Tokens whose blocks the policy will want when it admits a request."""
        scheduler = self._scheduler
        ledger = scheduler.ledger
        reserved = scheduler.policy.reserves(track, ledger)
        if ledger.blocks_for(reserved) > ledger.total_blocks - scheduler.watermark_blocks:
            # More than the pool has: the policy will never admit it, which the queue finds out.
            reserved = 0
        return max(track.own_known, reserved)

    def arrive(self, track: Track) -> None:
        """The KV of an expected request is here: it may be planned."""
        del self.expected[track.request.id]
        track.status = "waiting"
        self._scheduler.announce(track)
        self._scheduler.queues.enqueue_in_front(track)

    def reclaim(self) -> bool:
        """Take back the blocks of the last waiting request that holds some; False if none does."""
        scheduler = self._scheduler
        queues = scheduler.queues
        if not queues.holding:
            return False
        track, _ = queues.holding.popitem()
        queues.prefill_tokens += track.computed
        track.computed = 0
        scheduler.ledger.release(track)
        queues.changes += 1
        self.gave_back = True
        return True
