"""Which clock tells the processor time of a step.

Linux counts a process' time by the tick, 4 ms of it, as long as a limit or timer on that time is set (`ulimit -t`,
ITIMER_PROF): steps of a millisecond would take nothing or four. A thread's own time stays exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOK_NS = 200_000
"""Busy for so long, a clock that is exact has moved."""


def is_coarse(clock_ns: Callable[[], int]) -> bool:
    """Whether a clock of processor time stands still while this thread works for a fifth of a millisecond.

    A tick may fall into that time, one look of twenty, so there are three. The wait reads the wall clock: asking for
    the thread's time would bring the process' time up to date as well.
    """
    for _ in range(3):
        before, until = clock_ns(), time.perf_counter_ns() + _LOOK_NS
        while time.perf_counter_ns() < until:
            pass
        if clock_ns() == before:
            return True
    return False


def step_clock(clock_ns: Callable[[], int] = time.process_time_ns) -> Callable[[], int]:
    """The process' time in ns where it is exact, otherwise that of the thread that asks (a model's other threads are
    left out then)."""
    return time.thread_time_ns if is_coarse(clock_ns) else clock_ns
