"""SimPy's environment, for engines that run ahead of its event queue.

An engine whose batch ends before anything else happens need not wait for an event: nobody can look at it in between.
It moves the clock itself and goes on. What it does then, and in which order, is what it would have done with an event
per iteration; the queue holds only what different parties have to hear of in turn.
"""

from __future__ import annotations

import gc
from typing import Any

from simpy import Environment

_GARBAGE_THRESHOLD = 200_000


class VirtualTime(Environment):
    """A clock that counts nanoseconds. sharers: engines that run on it."""

    def __init__(self, initial_time: int = 0) -> None:
        super().__init__(initial_time)
        self.sharers = 0

    def moved_to(self, at_ns: int) -> bool:
        """Move the clock to `at_ns`, unless something else is due by then: then False, and nothing has changed."""
        queue = self._queue
        if queue and queue[0][0] <= at_ns:
            return False
        self._now = at_ns
        return True

    def run(self, until: Any = None) -> Any:
        """SimPy's `run`, with Python's cyclic garbage collector all but stopped meanwhile.

        A run makes and drops millions of small objects without a cycle among them; reference counts free them at
        once, while the collector would walk all requests and records again and again. What it is left to do is for
        policies that make cycles of their own.
        """
        before = gc.get_threshold()
        gc.set_threshold(_GARBAGE_THRESHOLD, before[1], before[2])
        try:
            return super().run(until)
        finally:
            gc.set_threshold(*before)
