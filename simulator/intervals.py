"""How unsure a prediction is: the same replay under cost models drawn from the fitted one's own error.

A fitted model knows its error on structures it has not seen. `perturbed(seed)` draws a model that it allows:
one factor per operator (one that is 3 % slow is so at every shape) and one for the host. Policies that plan by time
keep planning by the fitted model: an engine does not know its residual. The spread of a statistic
over such draws is what the costs leave open; it says nothing of the workload's chance (`compare --seeds` does).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from metrics.statistics import interval_of_draws
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.pools import make_cluster_plan
from simulator.simulation import replay as replay_trace
from workloads import Trace


class Interval(NamedTuple):
    """A statistic as predicted, and the ends of its 90 % interval over the draws."""

    value: float
    low: float
    high: float


def predict_intervals(
    trace: Trace, config: ReplayConfig, runs: int, *, progress: Callable[[int], None] | None = None
) -> dict[str, Interval]:
    """90 % intervals of every number in the summary over `runs` draws, seeded by the config's seed.

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
    return {
        key: Interval(float(value), *interval_of_draws([_number(draw[key]) for draw in draws]))
        for key, value in summary.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
