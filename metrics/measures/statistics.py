"""Means and percentiles, exact, over values that may carry a multiplicity.

The percentile is numpy's default ("linear"): with n values in order, v[0] to v[n-1], the q-quantile lies at position
q * (n - 1), between its two neighbours. A value of multiplicity w counts as w values; no list is ever expanded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PERCENTILES = (50, 90, 95, 99)
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def percentiles(values: NDArray[np.generic], q: Sequence[float], weights: Ints | None = None) -> list[float]:
    """The q-th percentiles (0 to 100) of `values`, each counted `weights` times; NaN where there is no value."""
    total = len(values) if weights is None else int(weights.sum())
    if not total:
        return [math.nan] * len(q)
    wanted = [percent / 100 * (total - 1) for percent in q]
    places = sorted({min(math.floor(position) + more, total - 1) for position in wanted for more in (0, 1)})
    if weights is None:
        ordered = np.sort(values)
        at = {place: float(ordered[place]) for place in places}
    else:
        at = dict(zip(places, _counted_at(values, weights, places)))
    found = []
    for position in wanted:
        below = math.floor(position)
        low, high = at[below], at[min(below + 1, total - 1)]
        share = position - below
        # The side that numpy interpolates from, so that the results are equal to the last bit.
        found.append(high - (high - low) * (1 - share) if share >= 0.5 else low + (high - low) * share)
    return found


MANY, BINS = 100_000, 1 << 16


def _counted_at(values: NDArray[np.generic], weights: Ints, places: Sequence[int]) -> list[float]:
    """What stands at these places where every value stands in order, as often as it counts.

    Of many values only those near a place are sorted: the others are counted in bins of equal width.
    """
    span = float(values.max() - values.min()) if len(values) > MANY else 0.0
    if not 0 < span < math.inf:
        order = np.argsort(values, kind="stable")
        ordered, cumulative = values[order], np.cumsum(weights[order])
        return [float(ordered[np.searchsorted(cumulative, place, side="right")]) for place in places]
    bins = ((values - values.min()) * ((BINS - 1) / span)).astype(np.int64)
    held = np.bincount(bins, weights, BINS).astype(np.int64)
    reached = np.cumsum(held)
    own = np.searchsorted(reached, places, side="right")
    near = np.zeros(BINS, np.bool_)
    near[own] = True
    near_places = near[bins].nonzero()[0]
    bins, values, weights = bins[near_places], values[near_places], weights[near_places]
    found = []
    for place, number in zip(places, own.tolist()):
        inside = bins == number
        before = int(reached[number] - held[number])
        order = np.argsort(values[inside], kind="stable")
        cumulative = np.cumsum(weights[inside][order])
        found.append(float(values[inside][order][np.searchsorted(cumulative, place - before, side="right")]))
    return found


def interval_of_draws(draws: Sequence[float] | Floats, level: float = 0.9) -> tuple[float, float]:
    """(low, high) between which one more draw lies with probability `level`; NaN where there is no draw.

    Of n draws in order the k-th exceeds a further one with probability k / (n + 1), so the ends lie at positions
    (1 +- level) / 2 of n + 1 (Hyndman and Fan, 1996, definition 6). The default percentile would hold 82 % where 90 %
    of 20 draws are asked for. Less than 19 draws do not reach that far: the extremes of n hold (n - 1) / (n + 1).
    """
    known = np.asarray(draws, np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2], method="weibull")
    return float(low), float(high)


def level_held(draws: int, level: float = 0.9) -> float:
    """What `interval_of_draws` of so many draws really holds: `level`, or less where they are too few."""
    return min(level, (draws - 1) / (draws + 1))


def statistics(values: Floats, weights: Ints | None = None) -> dict[str, float]:
    """mean, p50, p90, p95, p99 and max; all NaN where there is no value."""
    if not len(values):
        return dict.fromkeys(STATISTICS, math.nan)
    mean = np.mean(values) if weights is None else np.average(values, weights=weights)
    return {
        "mean": float(mean),
        **{f"p{q}": value for q, value in zip(PERCENTILES, percentiles(values, PERCENTILES, weights))},
        "max": float(np.max(values if weights is None else values[weights > 0])),
    }


def jain_index(shares: Floats) -> float:
    """Jain's fairness index, (sum x)^2 / (n sum x^2): 1 when all get the same, 1/n when one gets everything."""
    squares = float(np.sum(np.square(shares)))
    return float(np.sum(shares)) ** 2 / (len(shares) * squares) if squares else math.nan
