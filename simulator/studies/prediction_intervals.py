"""How unsure a prediction is: the same replay under cost models drawn from the fitted one's own error.

A fitted model knows its error on structures it has not seen. `perturbed(seed)` draws a model that it allows: every
operator off by another error between any two measured structures, as held-out ones are, and the host by one factor.
Policies that plan by time keep planning by the fitted model: an engine does not know its residual. The spread of a
statistic over such draws is what the costs leave open; it says nothing of the workload's chance (`compare --seeds`
does).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from metrics.measures.statistics import interval_of_draws
from metrics.measures.summary_keys import BASIS
from simulator.cluster.pools import make_cluster_plan
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.simulation import replay as replay_trace
from workloads import Trace


class Interval(NamedTuple):
    """A statistic as the fitted costs predict it, the ends of its 90 % interval over the draws, and their median.

    The prediction is no draw. Where errors push one way only (a queue grows by slow steps more than it shrinks by fast
    ones), or draws are few, it lies away from their median, at times outside of the interval.
    """

    value: float
    low: float
    high: float
    median: float

    @property
    def outside(self) -> bool:
        return not self.low <= self.value <= self.high


class Prediction(NamedTuple):
    """What the fitted costs predict (a run's summary, which names them), and the interval of every number in it."""

    summary: dict[str, Any]
    intervals: dict[str, Interval]


def predict(
    trace: Trace, config: ReplayConfig, runs: int, *, progress: Callable[[int], None] | None = None
) -> Prediction:
    """A replay and 90 % intervals over `runs` draws, seeded by the config's seed.

    Raises SimulationError for a cost model that does not know its own error (the roofline: nothing was measured).
    """
    if runs < 2:
        raise SimulationError(f"--runs: found {runs}, expected at least 2 draws for an interval")
    limited = trace if config.limit is None else trace.head(config.limit)
    scaled = limited if config.rate_scale == 1.0 else limited.scaled(config.rate_scale)
    plan = make_cluster_plan(config, scaled)
    plan.drawn(0)  # fails at once where costs know no error
    summary = replay_trace(trace, config, plan=plan).summary
    draws = []
    for number in range(runs):
        if progress is not None:
            progress(number)
        draws.append(replay_trace(trace, config, plan=plan.drawn(config.seed * 1_000_003 + number)).summary)
    intervals = {
        key: _interval(value, [_number(draw[key]) for draw in draws])
        for key, value in summary.items()
        if key not in BASIS and isinstance(value, int | float) and not isinstance(value, bool) and value == value
    }
    return Prediction(summary, intervals)


def predict_intervals(trace: Trace, config: ReplayConfig, runs: int) -> dict[str, Interval]:
    """The intervals of `predict` alone."""
    return predict(trace, config, runs).intervals


def _interval(value: float, draws: list[float]) -> Interval:
    known = [draw for draw in draws if not math.isnan(draw)]
    return Interval(float(value), *interval_of_draws(known), median(known) if known else math.nan)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
