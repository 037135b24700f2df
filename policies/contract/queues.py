"""The queues as a policy sees them: who waits, and what of the running work is free to be planned now."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from heapq import heappop, heappush
from typing import Any

from policies.contract.host import Host
from policies.work.cohort import Cohort
from policies.work.request import Ns
from policies.work.track import Track


class Queues:
    """Read-only to policies.

    waiting: in the order in which requests came, those of in_front first (preempted, or with KV that was handed over).
    prefill_tokens: prompt tokens (and tokens to recompute) not yet
    planned, over waiting and running. decode_tokens_promised: declared output tokens not yet planned.
    num_running: admitted requests, those in flight included. running_by_slo: how many of them per SLO class.
    changes: grows whenever somebody arrives, is admitted, samples a first token, stops or ends, or blocks are freed.
    """

    __slots__ = (
        "_by_class",
        "_by_priority",
        "_chase_chunks",
        "_chase_decodes",
        "_cohorts",
        "_field",
        "_in_line",
        "_lined_up",
        "_named",
        "_partial",
        "_rank",
        "changes",
        "decode_tokens_promised",
        "holding",
        "in_flight_batches",
        "in_front",
        "in_host_memory",
        "num_running",
        "parts",
        "prefill_tokens",
        "running_by_slo",
        "waiting",
    )

    def __init__(self, host: Host) -> None:
        self.waiting: deque[Track] = deque()
        self.in_front: set[Track] = set()
        # Those of them that hold blocks, because their KV was handed over; the first of `waiting`, in that order.
        self.holding: dict[Track, None] = {}
        # Admission order: cohorts, and prompts half done. One list for all, in flight or not; whoever changes it calls
        # `parts_changed`.
        self.parts: list[Cohort | Track] = []
        self._cohorts: list[Cohort] | None = None
        self._partial: list[Track] | None = None
        self.changes = 0
        self.num_running = 0
        self.running_by_slo: dict[str | None, int] = {}
        self.in_flight_batches = 0
        self.prefill_tokens = 0
        self.decode_tokens_promised = 0
        self._chase_chunks = host.chase_chunks or host.chase_decodes
        self._chase_decodes = host.chase_decodes
        self.in_host_memory: Mapping[int, object] = {}
        # Kept only once a policy has asked for it.
        self._by_class: dict[Any, deque[Track]] | None = None
        self._named: Collection[str | None] | None = None
        # The field of the requests by which they are grouped; none: by priority and SLO class.
        self._field = ""
        # A heap, with entries of those who have left until they come to its top, and who waits now.
        self._by_priority: list[tuple[Any, int, int, int, Track]] | None = None
        self._rank: Callable[[Track], Any] | None = None
        self._in_line: dict[Track, int] = {}
        self._lined_up = 0

    @property
    def running(self) -> list[Cohort | Track]:
        """A snapshot of what may be planned now, in admission order: cohorts, and prompts half done.

        Work in flight shows only where the host lets it be chased. A victim of `draft.preempt` stays in a snapshot
        taken before: its cohort is smaller, its own context 0.
        """
        if self._chase_decodes or not self.in_flight_batches:
            return self.parts[:]
        return [part for part in self.parts if not part.in_flight or (self._chase_chunks and isinstance(part, Track))]

    @property
    def cohorts(self) -> list[Cohort]:
        """The decodes of `running`."""
        if self.in_flight_batches and not self._chase_decodes:
            return [part for part in self.parts if isinstance(part, Cohort) and part.planned == len(part.times)]
        cohorts = self._cohorts
        if cohorts is None:
            cohorts = self._cohorts = [part for part in self.parts if isinstance(part, Cohort)]
        return cohorts

    @property
    def partial(self) -> list[Track]:
        """The prompts half done of `running`."""
        if self.in_flight_batches and not self._chase_chunks:
            return [part for part in self.parts if isinstance(part, Track) and not part.chunks_in_flight]
        partial = self._partial
        if partial is None:
            partial = self._partial = [part for part in self.parts if isinstance(part, Track)]
        return partial

    @property
    def swapped(self) -> list[Track]:
        """Those of `waiting` whose KV lies in host memory; admitting one brings it back (`draft.resume`)."""
        held = self.in_host_memory
        return [track for track in self.waiting if track.request.id in held] if held else []

    @property
    def anybody_decodes(self) -> bool:
        """Whether any admitted request is past its prompt, in flight or not."""
        return any(isinstance(part, Cohort) for part in self.parts)

    def running_tracks(self) -> Iterator[Track]:
        """Every admitted request, in flight or not; O(running)."""
        for part in self.parts:
            if isinstance(part, Cohort):
                yield from part.members()
            else:
                yield part

    @property
    def waiting_by_class(self) -> Mapping[tuple[int, str | None], deque[Track]]:
        """`waiting` by (priority, SLO class): what a policy needs to find the next of a class without looking through a
        long queue. Kept up to date from the first call on.

        In each class those who were put in front (`in_front`) come first, as in `waiting`; all others are sorted by
        arrival, so that they can be searched. `waiting` itself is in the order in which requests came to this replica:
        one that comes late, because another replica died or its prefix was fetched, stands at its end.
        """
        return self.waiting_by(None)

    def waiting_by(self, named: Collection[str | None] | None) -> Mapping[tuple[int, str | None], deque[Track]]:
        """`waiting_by_class` where only the classes in `named` (None: all) stand apart, and all others together under
        None: with a class for every tenant there would be as many as requests. Pass the same object each time."""
        if self._by_class is None or self._named is not named or self._field:
            self._named, self._field = named, ""
            self._put_all_in_classes()
        assert self._by_class is not None
        return self._by_class

    def waiting_of(self, field: str) -> Mapping[str | None, deque[Track]]:
        """`waiting` by a field of the requests (`tenant`, `program`, ...), as `waiting_by_class` has them by class.

        Names come in the order in which they began to wait; nobody waits for a name that is not there.
        """
        if self._by_class is None or self._field != field:
            self._field = field
            self._put_all_in_classes()
        assert self._by_class is not None
        return self._by_class

    @property
    def most_urgent(self) -> Track:
        """Of `waiting` (not empty) the lowest priority value, then the earliest arrival: the head of vLLM's priority
        queue, where preempted requests have no place of their own. Kept up to date from the first call on."""
        return self.first_by(_priority)

    def first_by(self, rank: Callable[[Track], Any]) -> Track:
        """Of `waiting` (not empty) the one with the least `rank(track)`, then the earliest arrival. Kept up to date
        from the first call on: pass the same function each time. A rank may not change while its request waits."""
        if self._by_priority is None or self._rank != rank:
            self._by_priority, self._rank = [], rank
            self._in_line.clear()
            for track in self.waiting:
                self._line_up(track)
        heap, in_line = self._by_priority, self._in_line
        while in_line.get(heap[0][4]) != heap[0][3]:
            heappop(heap)
        return heap[0][4]

    # Books kept by the scheduler

    def parts_changed(self) -> None:
        """Lists handed out before stay as they are: a plan may be walking through them."""
        self._cohorts = self._partial = None
        self.changes += 1

    def enqueue(self, track: Track) -> None:
        self.waiting.append(track)
        self.changes += 1
        if self._by_class is not None:
            self._put_in_class(track)
        if self._by_priority is not None:
            self._line_up(track)

    def enqueue_in_front(self, track: Track) -> None:
        """In front of all but those who hold blocks already, because their KV was handed over: these need no more room,
        and would only keep it from others."""
        self.changes += 1
        self.in_front.add(track)
        self.waiting.insert(len(self.holding), track)
        if track.blocks:
            self.holding[track] = None
        if self._by_class is not None:
            _put_in(self._class_of(track), track)
        if self._by_priority is not None:
            self._line_up(track)

    def dequeue(self, track: Track) -> None:
        _take_out(self.waiting, track)
        self.in_front.discard(track)
        self.holding.pop(track, None)
        self.changes += 1
        if self._by_class is not None:
            of_class = self._class_of(track)
            _take_out(of_class, track)
            if not of_class:
                del self._by_class[self._key_of(track)]
        self._in_line.pop(track, None)

    def count_running(self, track: Track, change: int) -> None:
        self.num_running += change
        self.changes += 1
        slo, by_slo = track.request.slo, self.running_by_slo
        count = by_slo.get(slo, 0) + change
        if count:
            by_slo[slo] = count
        else:
            del by_slo[slo]

    def _line_up(self, track: Track) -> None:
        assert self._by_priority is not None
        assert self._rank is not None
        request = track.request
        # Numbered, because a request that starts over after its replica died is another track with the same entry.
        self._lined_up += 1
        heappush(self._by_priority, (self._rank(track), request.arrival_ns, request.id, self._lined_up, track))
        self._in_line[track] = self._lined_up

    def _put_all_in_classes(self) -> None:
        self._by_class = {}
        for track in self.waiting:
            self._put_in_class(track)

    def _put_in_class(self, track: Track) -> None:
        """Behind all of its class that arrived before; nearly always that is at the end."""
        queue = self._class_of(track)
        at = len(queue)
        if track not in self.in_front:
            arrival_ns = track.request.arrival_ns
            while at and queue[at - 1] not in self.in_front and queue[at - 1].request.arrival_ns > arrival_ns:
                at -= 1
        queue.insert(at, track)

    def _class_of(self, track: Track) -> deque[Track]:
        assert self._by_class is not None
        return self._by_class.setdefault(self._key_of(track), deque())

    def _key_of(self, track: Track) -> Any:
        if self._field:
            return getattr(track.request, self._field)
        slo = track.request.slo
        return track.request.priority, slo if self._named is None or slo in self._named else None


def _priority(track: Track) -> int:
    return track.request.priority


def _put_in(queue: deque[Track], track: Track) -> None:
    at = 0
    for other in queue:
        if not other.blocks:
            break
        at += 1
    queue.insert(at, track)


def _take_out(queue: deque[Track], track: Track) -> None:
    if queue[0] is track:
        queue.popleft()
        return
    # Nearly all stand in order of arrival, at one moment of rows: looked up, not compared one by one.
    # Whoever was put in front, or came late from another replica, is not found that way and is looked for below.
    request = track.request
    at = bisect_left(queue, (request.arrival_ns, request.id), key=_by_arrival)
    if at < len(queue) and queue[at] is track:
        del queue[at]
    else:
        queue.remove(track)


def _by_arrival(track: Track) -> tuple[Ns, int]:
    request = track.request
    return request.arrival_ns, request.id
