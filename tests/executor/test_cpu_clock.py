"""The processor time of a step is exact, whatever else counts the process' time."""

from __future__ import annotations

import signal
import time

import pytest

from executor.machine.cpu_clock import is_coarse, step_clock


def test_a_clock_that_ticks_is_told_from_one_that_runs() -> None:
    assert is_coarse(lambda: time.thread_time_ns() // 4_000_000)
    assert not is_coarse(time.thread_time_ns)
    assert step_clock(time.perf_counter_ns) is time.perf_counter_ns


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
def test_a_limit_on_the_process_does_not_make_steps_take_nothing() -> None:
    before = signal.signal(signal.SIGPROF, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_PROF, 1000)
    try:
        assert is_coarse(time.process_time_ns) == (step_clock() is time.thread_time_ns)
        clock_ns, took = step_clock(), []
        for _ in range(20):
            since, until = clock_ns(), time.perf_counter_ns() + 1_000_000
            while time.perf_counter_ns() < until:
                pass
            took.append(clock_ns() - since)
        assert 0 < min(took) <= max(took) < 2_000_000  # a tick is 4 ms, or nothing
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
