"""When rows reach a live engine: open ones by the clock, followers a think time after the answer before them."""

from __future__ import annotations

import numpy as np

from executor.serving.arrivals import NEVER, Arrivals
from workloads import Trace


def session() -> Trace:
    """Row 1 follows row 0 after 2 s; row 2 arrives by itself at 3 s."""
    lengths = np.ones(3, np.int64)
    return Trace(
        "session",
        np.array([0, 0, 3]) * 10**9,
        lengths,
        lengths,
        lengths,
        after_row=np.array([-1, 0, -1]),
        think_ns=np.array([0, 2, 0]) * 10**9,
    )


def test_a_follower_arrives_a_scaled_think_time_after_the_answer_before_it() -> None:
    arrivals = Arrivals(session(), time_scale=0.5, at_once=False)
    assert list(arrivals.due(10**9)) == [(0, 0)]
    assert arrivals.next_ns == 1_500_000_000
    arrivals.ended(0, 400_000_000)
    assert arrivals.rest() == [(1_500_000_000, 2), (1_400_000_000, 1)]
    assert list(arrivals.due(2 * 10**9)) == [(1_400_000_000, 1), (1_500_000_000, 2)]
    assert (arrivals.next_ns, arrivals.outstanding) == (NEVER, 2)


def test_at_once_means_that_nobody_waits_for_the_clock_but_followers_still_for_their_answer() -> None:
    arrivals = Arrivals(session(), time_scale=1.0, at_once=True)
    assert list(arrivals.due(0)) == [(0, 0), (0, 2)]
    assert arrivals.next_ns == NEVER
    arrivals.ended(0, 77)
    assert list(arrivals.due(77)) == [(77, 1)]
