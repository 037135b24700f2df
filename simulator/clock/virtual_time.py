"""SimPy's environment, for engines that run ahead of its event queue.

An engine whose batch ends before anything else happens need not wait for an event: nobody can look at it in between.
It moves the clock itself and goes on. An engine that is alone with the arrivals need not even go back to the queue for
those: it lets them happen and goes on. What it does then, and in which order, is what it would have done with an event
per iteration; the queue holds only what different parties have to hear of in turn. Engines that feel nothing of each
other for a while may keep queues of their own, played up to the moment at which somebody looks
(simulator/cluster/in_own_time.py).

This is the only file that uses SimPy's private names: the queue, its entries (time, rank, number, event), the counter
of these numbers, the clock, and what makes an event a happened one. `tests/simulator/test_clock.py` fails when one of
them changes; the reference simulator (simulator/reference) uses none.

Ranks make a run a function of its config: at one instant requests arrive first, then controllers look, then batches
complete, then idle engines look whether there is something to plan; engine after engine, by number, whenever the events
were made (a leap makes fewer, and earlier).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
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

ARRIVAL, LOOK, COMPLETION, WAKE = 0, 1, 2, 1 << 40
"""Ranks of what happens at one moment; an engine adds its number to the last two."""

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


class Moment(Event):
    """One future moment at which something is called: SimPy's timeout with a chosen rank among events of that moment.

    Calls `callback(event)` after `delay_ns`; `void` (settable) tells the callback that the plan has changed."""

    __slots__ = ("void",)

    def __init__(
        self, env: Nanoseconds, delay_ns: int, callback: Callable[[Event], None], rank: int = COMPLETION
    ) -> None:
        self.env = env
        self.callbacks = [callback]
        self._value = None
        self._ok = True
        self._defused = False
        self.void = False
        env.schedule(self, rank, delay_ns)  # type: ignore[arg-type]  # ranks are all that SimPy asks of a priority

    def again(self, delay_ns: int, callback: Callable[[Event], None], rank: int) -> None:
        """The same event once more, after it has happened."""
        self.callbacks = [callback]
        self.env.schedule(self, rank, delay_ns)  # type: ignore[arg-type]

    @classmethod
    def unscheduled(cls, env: Nanoseconds, callback: Callable[[Event], None]) -> Moment:
        """One that somebody else puts in its place (`VirtualTime.take`)."""
        moment = cls.__new__(cls)
        moment.env = env
        moment.callbacks = [callback]
        moment._value = None
        moment._ok = True
        moment._defused = False
        moment.void = False
        return moment


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
