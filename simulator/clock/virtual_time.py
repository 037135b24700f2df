"""SimPy's environment, for engines that run ahead of its event queue.

An engine whose batch ends before anything else happens need not wait for an event: nobody can look at it in between.
It moves the clock itself and goes on. An engine that is alone with the arrivals need not even go back to the queue for
those: it lets them happen and goes on. What it does then, and in which order, is what it would have done with an event
per iteration; the queue holds only what different parties have to hear of in turn. Engines that feel nothing of each
other for a while may keep queues of their own, played up to the moment at which somebody looks
(simulator/cluster/in_own_time.py).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from simpy import Environment, Event

from policies.work.request import Ns

if TYPE_CHECKING:

    class Nanoseconds(Environment):
        """SimPy's environment as this project uses it: its clock shows whole nanoseconds."""

        @property
        def now(self) -> Ns: ...

else:
    Nanoseconds = Environment

FAR: Ns = (1 << 62) - 1
"""Later than anything that happens."""

_GARBAGE_THRESHOLD = 1_000_000


class VirtualTime(Nanoseconds):
    """A clock that counts nanoseconds. sharers: engines that run on it. limit: nobody knows yet what happens then and
    later; an engine may neither plan nor complete anything there.

    turn_ns, turn: the moment at which an engine last completed something that others may hear of, and its number.
    Whoever looks at a leap in that moment has to know whether an iteration that ends just then came before: engines
    have their turns by number.
    """

    def __init__(self, initial_time: int = 0) -> None:
        super().__init__(initial_time)
        self._began = initial_time
        self.sharers = 0
        self.limit = FAR
        self.turn_ns: Ns = -1
        self.turn = 0

    def take_turn(self, number: int) -> None:
        """Engine `number` completes something now."""
        self.turn_ns, self.turn = self._now, number  # type: ignore[assignment]  # whole numbers

    def rewind(self) -> None:
        """Back to the beginning, for another engine's turn; whatever was to happen has happened."""
        assert not self._queue, "events are left"
        self._now = self._began
        self.turn_ns = -1

    def next_ns(self) -> Ns:
        """When the next event is due, or may be; as late as can be where there is none."""
        queue, limit = self._queue, self.limit
        return queue[0][0] if queue and queue[0][0] < limit else limit  # type: ignore[return-value]  # whole numbers

    def moved_to(self, at_ns: int) -> bool:
        """Move the clock to `at_ns`, unless something else is due by then: then False, and nothing has changed."""
        queue = self._queue
        if (queue and queue[0][0] <= at_ns) or at_ns >= self.limit:
            return False
        self._now = at_ns
        return True

    def reserve(self, at_ns: int, rank: int) -> tuple[int, int, int]:
        """The place in the queue of an event scheduled now, without one."""
        return at_ns, rank, next(self._eid)

    def take(self, place: tuple[int, int, int], event: Event) -> None:
        """Put an event in a reserved place."""
        heappush(self._queue, (*place, event))  # type: ignore[misc]

    def passed(self, place: tuple[int, int, int], flights: Sequence[object]) -> bool:
        """Let everything happen that comes before a reserved place, then move the clock there.

        For the only engine, whose oldest flight completes in that place. False as soon as it is no longer the only one
        or the flight has gone, or nothing is known of that moment: that place is then still to come.
        """
        queue, step, oldest = self._queue, self.step, flights[0]
        if place[0] >= self.limit:
            return False
        while queue and queue[0] < place:
            step()
            if self.sharers != 1 or not flights or flights[0] is not oldest:
                return False
        self._now = place[0]
        return True

    def play(self, queue: list[Any], until_ns: Ns) -> None:
        """Let everything in another queue happen that is due before `until_ns`; the clock itself does not move."""
        outer, now = self._queue, self._now
        self._queue, self.limit = queue, until_ns
        try:
            # SimPy's own step, for events that cannot fail.
            while queue and queue[0][0] < until_ns:
                self._now, _, _, event = heappop(queue)
                callbacks, event.callbacks = event.callbacks, None
                for callback in callbacks:
                    callback(event)
        finally:
            self._queue, self._now, self.limit = outer, now, FAR

    def schedule_in(self, queue: list[Any]) -> list[Any]:
        """Events made from now on stand in another queue; returns the one in which they stood, to be given back."""
        outer, self._queue = self._queue, queue
        return outer

    def run(self, until: Any = None) -> Any:
        """SimPy's `run`, with Python's cyclic garbage collector all but stopped meanwhile."""
        with collecting_rarely():
            return super().run(until)


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Python's cyclic garbage collector all but stopped.

    A run makes and drops millions of small objects without a cycle among them; reference counts free them at once,
    while the collector would walk all requests and records again and again. What it is left to do is for policies that
    make cycles of their own.
    """
    before = gc.get_threshold()
    gc.set_threshold(_GARBAGE_THRESHOLD, before[1], before[2])
    try:
        yield
    finally:
        gc.set_threshold(*before)
