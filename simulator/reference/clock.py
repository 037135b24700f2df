"""SimPy's clock in nanoseconds, each of which is cut into turns, so that what happens at one moment has a stated order.

First devices and links finish; then requests arrive and clients give up; then batches complete, replica by replica, and
each replica plans at once; last, idle replicas look for work. SimPy's time counts turns, so its own queue keeps that
order; whatever is late for its turn comes next, in the order in which it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from simpy import Environment, Event

from policies.work.request import Ns


class Clock:
    """DEVICES, ARRIVE, complete(replica), plan(replica): the turns of a nanosecond."""

    DEVICES = 0
    ARRIVE = 1

    def __init__(self, replicas: int) -> None:
        self.env = Environment(0)
        self.replicas = replicas
        self.turns = 2 + 2 * replicas

    def complete(self, replica: int) -> int:
        return 2 + replica

    def plan(self, replica: int) -> int:
        return 2 + self.replicas + replica

    @property
    def now_ns(self) -> Ns:
        return int(self.env.now) // self.turns

    def until(self, at_ns: Ns, turn: int = DEVICES) -> Event:
        """What a process waits for to go on in a turn of a nanosecond, or at once if that is over."""
        return self.env.timeout(max(0, at_ns * self.turns + turn - int(self.env.now)))

    def call(self, at_ns: Ns, turn: int, what: Callable[[], None]) -> None:
        """Call something once, in a turn of a nanosecond."""
        callbacks = self.until(at_ns, turn).callbacks
        assert callbacks is not None
        callbacks.append(lambda event: what())
