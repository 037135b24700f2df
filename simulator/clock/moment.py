"""One future moment at which something is called: SimPy's timeout with a chosen rank among events of that moment.

Ranks make a run a function of its config: at one instant requests arrive first, then controllers look, then batches
complete, then idle engines look whether there is something to plan; engine after engine, by number, whenever the
events were made (a leap makes fewer, and earlier).
"""

from __future__ import annotations

from collections.abc import Callable

from simpy import Event

from simulator.clock.virtual_time import Nanoseconds

ARRIVAL, LOOK, COMPLETION, WAKE = 0, 1, 2, 1 << 40
"""Ranks; an engine adds its number to the last two."""


class Moment(Event):
    """Calls `callback(event)` after `delay_ns`; `void` (settable) tells the callback that the plan has changed."""

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
