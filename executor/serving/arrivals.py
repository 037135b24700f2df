"""When the rows of a trace reach a live engine: at their times, or once the answer that they wait for has ended."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from policies import Ns
from workloads.follow_ups import FollowUps
from workloads.trace import Trace

NEVER = 1 << 62


class Arrivals:
    """Rows of a trace by the moment at which they reach the engine, closed-loop ones once their predecessor ended.

    outstanding: rows that have not ended yet, whether they have arrived or not.
    """

    def __init__(self, trace: Trace, time_scale: float, at_once: bool) -> None:
        self._followers = FollowUps(trace)
        self._think = trace.think_ns
        self._scale = 0.0 if at_once else time_scale
        waits = self._followers.waiting()
        self._due = [
            (round(int(at) * self._scale), row) for row, at in enumerate(trace.arrival_ns.tolist()) if row not in waits
        ]
        self._due.sort()
        self._next = 0
        self._later: list[tuple[Ns, int]] = []
        self.outstanding = len(trace)

    def due(self, now_ns: Ns) -> Iterator[tuple[Ns, int]]:
        """(arrival, row) of everything that has arrived by now, in order."""
        while self.next_ns <= now_ns:
            if self._later and (self._next >= len(self._due) or self._later[0] < self._due[self._next]):
                yield heappop(self._later)
            else:
                self._next += 1
                yield self._due[self._next - 1]

    @property
    def next_ns(self) -> Ns:
        first = self._due[self._next][0] if self._next < len(self._due) else NEVER
        return min(first, self._later[0][0]) if self._later else first

    def ended(self, row: int, now_ns: Ns) -> None:
        self.outstanding -= 1
        for follower in self._followers.free(row):
            assert self._think is not None
            heappush(self._later, (now_ns + round(int(self._think[follower]) * self._scale), follower))

    def rest(self) -> list[tuple[Ns, int]]:
        """Everything that has not arrived: with its time, or -1 for rows that still wait for another's answer."""
        return [*self._due[self._next :], *sorted(self._later)]
