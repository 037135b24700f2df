"""As many requests in time as possible: earliest deadline first, and under overload the longest prompt steps back.

On one machine the rule of Moore and Hodgson keeps the most jobs in time: take them by deadline, and whenever the last
one taken would be late, give up the longest of those taken so far. A prompt's job is its prefill; it is given up for
its first token only, and served from what is left once nobody who can still be in time waits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Policy, Promises, knob
from policies.contract.queues import Queues
from policies.kv_memory.ledger import KVView
from policies.sized_by_time import rows_within
from policies.work.batch import BatchShape
from policies.work.request import NS_PER_S, Ns
from policies.work.track import Track


@dataclass(frozen=True)
class MostInTime(Policy):
    """Decodes always run. Prompts that can make the TTFT target come by deadline, the longest given up where not all
    can; a batch has as many tiles as the TBT target allows. Given-up prompts run while few others do."""

    ttft_s: float = knob(2.0, "TTFT target, seconds", least=0)
    tbt_s: float = knob(0.2, "TBT target, seconds", least=0)
    chunk_size: int = knob(4096, "most tokens of one batch, where time sets no tighter limit", least=1)
    use: float = knob(0.9, "share of the TBT target that a batch may take by its estimate", least=0.01, most=1)
    lost: float = knob(0.5, "share of the running requests below which given-up prompts are started", least=0, most=1)
    window: int = knob(512, "waiting requests compared, earliest deadlines first", least=1)

    promises: ClassVar[Promises] = Promises(decodes=True, keeps_running=True)
    paper: ClassVar[str] = "Moore, An n job, one machine sequencing algorithm (Management Science 15, 1968)"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9, watermark=0.01)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        draft.decode_all()
        if not queues.partial and not queues.waiting:
            return
        draft.only_for_now()  # deadlines come nearer while nothing else changes
        left, iteration_ns = self._room(0, queues, draft, host)
        if left <= 0:
            return
        kept, given_up = self._sorted_out(queues, draft, now_ns, iteration_ns / max(1, left))
        if prefix := next((track.context for track in (*kept, *given_up)), 0):
            left, _ = self._room(prefix, queues, draft, host)
        for prompt in kept:
            if left <= 0:
                return
            granted = (
                draft.chunk(prompt, left) if prompt.order >= 0 else draft.admit(prompt, left, reserve=prompt.known)
            )
            if not granted:
                return  # whoever memory refuses keeps its turn
            left -= granted
        # Only decodes in time lose something to those that are late.
        most = self.lost * queues.num_running if queues.anybody_decodes else float("inf")
        late = sum(1 for track in queues.running_tracks() if track.order >= 0 and self._is_late(track))
        for prompt in given_up:
            if left <= 0:
                return
            if prompt.order >= 0:
                left -= draft.chunk(prompt, left)
            elif late < max(1.0, most):
                granted = draft.admit(prompt, left, reserve=prompt.known)
                if not granted:
                    return
                left -= granted
                late += 1

    def plans_ahead(self, *, on_gpu: bool, stages: int, speculation: str = "") -> bool:
        return on_gpu and stages == 1 and not speculation

    def _room(self, prefix: int, queues: Queues, draft: Draft, host: Host) -> tuple[int, Ns]:
        """Prefill tokens, behind so many of their prompt, beside the decodes granted; and how long that batch takes."""
        decodes = draft.shape
        if host.estimator is None:
            return self.chunk_size - decodes.decode_rows, 0

        def shape_of(rows: int) -> BatchShape:
            return decodes._replace(chunks=((rows - decodes.decode_rows, prefix),))

        least = (decodes.decode_rows // host.tile + 1) * host.tile
        rows = max(least, self.chunk_size)
        if not queues.anybody_decodes:
            return rows - decodes.decode_rows, host.estimate_ns(shape_of(rows))
        limit_ns = round(self.use * self.tbt_s * NS_PER_S)
        rows = rows_within(host, limit_ns, least, rows, shape_of)
        batch_ns = host.estimate_ns(shape_of(rows))
        # Decodes that fill the time alone let nobody in: somebody ends soon.
        return (rows - decodes.decode_rows if batch_ns <= limit_ns else 0), batch_ns

    def _sorted_out(self, queues: Queues, draft: Draft, now_ns: Ns, token_ns: float) -> tuple[list[Track], list[Track]]:
        """Prompts that will be in time, by deadline, and those given up, shortest first."""
        waiting: Iterable[Track] = ()
        lost: Iterable[Track] = ()
        if not draft.preempted:
            # Behind those put in front the queue is sorted by arrival, so the lost ones come first.
            queue, front = queues.waiting, len(queues.in_front)
            target_ns = round(self.ttft_s * NS_PER_S)
            alive = bisect_left(queue, now_ns - target_ns, front, key=_arrival_ns)
            waiting = [*islice(queue, front), *islice(queue, alive, alive + self.window)]
            lost = islice(queue, front, min(alive, front + self.window))
        given_up = list(lost)
        kept: list[tuple[Ns, int, Track]] = []
        taken: list[tuple[int, int, Track]] = []  # a heap, the longest first
        gone: set[int] = set()
        work_ns = 0.0
        for due_ns, number, track in sorted(self._by_deadline([*queues.partial, *waiting])):
            kept.append((due_ns, number, track))
            heappush(taken, (-track.lacking, number, track))
            work_ns += track.lacking * token_ns
            if now_ns + work_ns > due_ns:
                _, longest, out = heappop(taken)
                gone.add(longest)
                given_up.append(out)
                work_ns -= out.lacking * token_ns
        given_up.sort(key=lambda track: (track.order < 0, track.lacking, track.request.id))
        return [track for _, number, track in kept if number not in gone], given_up

    def _by_deadline(self, tracks: Iterable[Track]) -> Iterable[tuple[Ns, int, Track]]:
        """Deadline, request and track; the next token of one that was preempted is due a gap after its last."""
        for track in tracks:
            request = track.request
            if track.first_token_ns < 0:
                yield request.arrival_ns + round(self.ttft_s * NS_PER_S), request.id, track
            else:
                yield track.last_token_ns + round(self.tbt_s * NS_PER_S), request.id, track

    def _is_late(self, track: Track) -> bool:
        return track.first_token_ns - track.request.arrival_ns > self.ttft_s * NS_PER_S


def _arrival_ns(track: Track) -> Ns:
    return track.request.arrival_ns
