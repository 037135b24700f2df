"""Where a run settles, and whether it ever does: the warm-up to leave out, and overload.

Warm-up by MSER-5 (White, Cobb & Spratt 2000: truncate where the standard error of the rest's mean is smallest) on the
number of requests in the system. Overload by the trend of the queueing delay: in an engine that serves less than
arrives, each second of trace adds rho - 1 seconds of delay for a load of rho; in a stable one the delay has no trend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from metrics.run_folder.tables import RunTables

Floats = NDArray[np.float64]

SAMPLES = 1000
BATCHES = 20
GROWTH_BOUND = 0.01
"""Seconds of delay gained per second of trace below which a trend is no overload (a load of about 101 %)."""


@dataclass(frozen=True)
class SteadyState:
    """warmup_s: from the first arrival, -1 where no steady part was found. overloaded: the queue grows without end.

    delay_growth: seconds of queueing delay gained per second of trace, with its standard error. load: arrivals over
    service as the growth implies it (loads of 1.0 and less cannot be told apart).
    """

    warmup_s: float
    overloaded: bool
    delay_growth: float
    delay_growth_error: float

    @property
    def load(self) -> float:
        return 1.0 + max(0.0, self.delay_growth)


def steady_state(run: RunTables) -> SteadyState:
    """Find the warm-up of a run and whether it is overloaded; from the requests table alone."""
    arrival = run.column("requests", "arrival_s")
    if len(arrival) < 4 * BATCHES:
        return SteadyState(-1.0, False, 0.0, math.inf)
    admitted, finished = run.column("requests", "admitted_s"), run.column("requests", "finished_s")
    first, last = float(arrival.min()), float(arrival.max())
    growth, error = _trend(arrival, np.where(np.isnan(admitted), finished, admitted) - arrival)
    overloaded = growth - 3 * error > GROWTH_BOUND
    at = np.linspace(first, last, SAMPLES)
    present = np.searchsorted(np.sort(arrival), at, "right") - np.searchsorted(np.sort(finished), at, "right")
    cut = mser5(present.astype(np.float64))
    warmup_s = -1.0 if overloaded or cut is None else (last - first) * cut / (SAMPLES - 1)
    return SteadyState(warmup_s, overloaded, growth, error)


def mser5(series: Floats) -> int | None:
    """Observations to leave out of a series so that the standard error of the rest's mean is smallest.

    Means of five are looked at; None where the best cut lies in the second half (the series has not settled).
    """
    means = series[: len(series) // 5 * 5].reshape(-1, 5).mean(axis=1)
    count = len(means)
    if count < 4:
        return None
    # Sums over every tail, from the end backwards.
    tail = np.arange(count, 0, -1)
    total = np.cumsum(means[::-1])[::-1]
    square = np.cumsum((means**2)[::-1])[::-1]
    error = (square - total**2 / tail) / tail.astype(np.float64) ** 2
    # The last few tails are too short to mean anything.
    cut = int(np.argmin(error[: max(1, count - 5)]))
    return None if cut > count // 2 else cut * 5


def _trend(arrival: Floats, delay: Floats) -> tuple[float, float]:
    """Slope of delay over arrival time and its standard error, from means of equal batches.

    The first fifth is left out: an empty system that fills up is no trend.
    """
    order = np.argsort(arrival, kind="stable")
    order = order[len(order) // 5 :]
    batches = np.array_split(order, BATCHES)
    x = np.array([arrival[batch].mean() for batch in batches])
    y = np.array([delay[batch].mean() for batch in batches])
    spread = float(((x - x.mean()) ** 2).sum())
    if spread == 0:
        return 0.0, math.inf
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    residual = y - y.mean() - slope * (x - x.mean())
    return slope, math.sqrt(float((residual**2).sum()) / (BATCHES - 2) / spread)
