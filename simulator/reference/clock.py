"""SimPy's clock in whole nanoseconds, and in which order things happen that happen at one moment.

SimPy orders the events of one moment by their priority, then as they were asked for. First come devices, links and
stores; then requests arrive and clients give up; then batches complete, replica by replica, and each replica plans at
once; last, idle replicas look for work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simpy import Environment, Event
from simpy.events import EventPriority

from policies.work.request import Ns

NORMAL = 1
"""SimPy's own priority, and the one of devices, links and stores."""


class Clock(Environment):
    """ARRIVE, complete(replica), plan(replica): the turns of a moment."""

    ARRIVE = 2

    def __init__(self, replicas: int) -> None:
        super().__init__(0)
        self.replicas = replicas
        self._turn = NORMAL

    def complete(self, replica: int) -> int:
        return 3 + replica

    def plan(self, replica: int) -> int:
        return 3 + self.replicas + replica

    @property
    def now_ns(self) -> Ns:
        return int(self.now)

    def until(self, at_ns: Ns, turn: int = NORMAL) -> Event:
        """What a process waits for: the turn of a moment, or the next such turn where that is over."""
        self._turn = turn
        timeout = self.timeout(max(0, at_ns - self.now_ns))
        self._turn = NORMAL
        return timeout

    def call(self, at_ns: Ns, turn: int, what: Callable[[], None]) -> None:
        """Call something once, in a turn of a moment."""
        callbacks = self.until(at_ns, turn).callbacks
        assert callbacks is not None
        callbacks.append(lambda event: what())

    def schedule(self, event: Event, priority: Any = NORMAL, delay: float = 0) -> None:
        """SimPy asks for this whenever an event is to happen; a timeout asked for by `until` has its turn."""
        super().schedule(event, EventPriority(priority if self._turn == NORMAL else self._turn), delay)
