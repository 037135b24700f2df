"""The queues as a policy sees them: who waits, and what of the running work is free to be planned now."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from policies.cohort import Cohort
from policies.host import Host
from policies.track import Track


class Queues:
    """Read-only to policies.

    waiting: arrival order, preempted requests in front. prefill_tokens: prompt tokens (and tokens to recompute) not yet
    planned, over waiting and running. decode_tokens_promised: declared output tokens not yet planned.
    num_running: admitted requests, those in flight included.
    """

    __slots__ = (
        "_chase_chunks", "_chase_decodes", "decode_tokens_promised", "in_flight_batches", "num_running", "parts",
        "prefill_tokens", "waiting",
    )  # fmt: skip

    def __init__(self, host: Host) -> None:
        self.waiting: deque[Track] = deque()
        # Admission order: cohorts, and prompts half done. One list for all, in flight or not.
        self.parts: list[Cohort | Track] = []
        self.num_running = 0
        self.in_flight_batches = 0
        self.prefill_tokens = 0
        self.decode_tokens_promised = 0
        self._chase_chunks = host.chase_chunks or host.chase_decodes
        self._chase_decodes = host.chase_decodes

    @property
    def running(self) -> list[Cohort | Track]:
        """A snapshot of what may be planned now, in admission order: cohorts, and prompts half done.

        Work in flight shows only where the host lets it be chased. A victim of `draft.preempt` stays in a snapshot
        taken before: its cohort is smaller, its own context 0.
        """
        if self._chase_decodes or not self.in_flight_batches:
            return self.parts[:]
        return [
            part
            for part in self.parts
            if not part.in_flight or (self._chase_chunks and isinstance(part, Track))
        ]

    @property
    def cohorts(self) -> list[Cohort]:
        """The decodes of `running`."""
        return [part for part in self.running if isinstance(part, Cohort)]

    @property
    def partial(self) -> list[Track]:
        """The prompts half done of `running`."""
        return [part for part in self.running if isinstance(part, Track)]

    def running_tracks(self) -> Iterator[Track]:
        """Every admitted request, in flight or not; O(running)."""
        for part in self.parts:
            if isinstance(part, Cohort):
                yield from part.members()
            else:
                yield part
