"""How fast the machine was while it was measured, from the measurements themselves and from a gauge beside them.

One speed is told for every stretch of measurements and taken out of them, so that a slow minute does not bend the law
of costs; how much stretches differ is what intervals of later runs rest on (`profiler.iterations.flicker`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEAST_SHAPES = 8
"""Fewer distinct measurements than so many are no profile."""
STRETCH = 28
"""Measurements by which the machine's speed is told, a few seconds of them."""
LEAST_STRETCHES = 10
"""Fewer than so many tell no law between gauge and iterations: a short profile is cut into shorter ones."""
SHORTEST_STRETCH = 10
GAUGED = 5
"""Measurements over which the gauge's samples are averaged; of 1 to 31 it left the least error on held-out batches."""
POWERS = (0.5, 2.5)
"""What a gauge's power may be at least and at most: beyond it the fit has seen something else."""
STEADY = 0.015
"""Standard deviation of the speed below which the machine is taken to be the same all the time."""


def slowness_of(at_s: Array, excess: Array, gauge_s: Array) -> Array:
    """How slow the machine was at each measurement, 1 on average, from the logarithm of measured over fitted.

    One value for every stretch of so many measurements as tell it to about a per cent; all 1 where the stretches
    differ by no more than that. Inside a stretch the gauge tells, where there is one: phases last a second or less.
    """
    order = np.argsort(np.where(np.isnan(at_s), 0.0, at_s), kind="stable")
    count = len(order) // STRETCH
    if np.isnan(at_s).any() or count < 3:
        return np.ones(len(at_s))
    told = _told(order, excess, gauge_s)
    found = np.zeros(len(at_s))
    for rows in np.array_split(order, count):
        found[rows] = np.median((excess - told)[rows])
    found += told
    found -= found.mean()
    return np.exp(found) if float(np.std(found)) > STEADY else np.ones(len(at_s))


def running_mean(values: Array, window: int) -> Array:
    """Means over an odd number of neighbours; beyond the ends the last value stands for what is not there."""
    return np.convolve(np.pad(values, window // 2, mode="edge"), np.ones(window) / window, mode="valid")


def _told(order: NDArray[np.int64], excess: Array, gauge_s: Array) -> Array:
    """The part of the excess that the gauge tells, zeros without one; over GAUGED measurements, as single samples are
    as noisy as what they measure."""
    if not (gauge_s > 0).all():
        return np.zeros(len(order))
    told = np.empty(len(order))
    told[order] = running_mean(np.log(gauge_s)[order], GAUGED)
    told -= told.mean()
    if float(told.std()) <= STEADY:
        return np.zeros(len(order))
    return told * float(np.clip(np.polyfit(told, excess, 1)[0], *POWERS))


def phases_of(at_s: Array, logs: Array) -> float:
    """How many independent values the stretches' speeds are worth, from how much each resembles the one before; 0 where
    the machine kept its speed."""
    if not logs.any():
        return 0.0
    series = levels_of(at_s, logs)
    apart = series - series.mean()
    alike = float((apart[1:] * apart[:-1]).sum() / (apart**2).sum())
    return float(np.clip(len(series) * (1 - alike) / (1 + alike), 3.0, len(series)))


def levels_of(at_s: Array, logs: Array) -> Array:
    """Mean speed of each stretch, in order; none where the machine kept its speed."""
    if not logs.any():
        return np.zeros(0)
    parts = np.array_split(logs[np.argsort(at_s, kind="stable")], len(logs) // STRETCH)
    return np.array([part.mean() for part in parts])


def gauge_of(table: Any, excess: Array) -> dict[str, float]:
    """What tells the machine's speed from a speed gauge: its geometric mean while measuring (`typical_s`), and by which
    power of a change of it iterations change (`power`), over stretches; empty without a gauge.

    The gauge's parts mix calls, products and memory as they come; an iteration mixes them in its own way, and the
    slower kind counts for more in it.
    """
    gauge, at_s = (table[name].to_numpy(float) for name in ("gauge_s", "at_s"))
    known = (gauge > 0) & ~np.isnan(at_s)
    if known.sum() < LEAST_SHAPES:
        return {}
    logs, excess = np.log(gauge[known]), excess[known]
    found = {"typical_s": float(np.exp(logs.mean())), "power": 1.0}
    count = max(len(logs) // STRETCH, min(LEAST_STRETCHES, len(logs) // SHORTEST_STRETCH))
    if count >= LEAST_SHAPES:
        parts = np.array_split(np.argsort(at_s[known], kind="stable"), count)
        told = np.array([logs[part].mean() for part in parts])
        paid = np.array([excess[part].mean() for part in parts])
        if float(told.std()) > STEADY:
            found["power"] = float(np.clip(np.polyfit(told, paid, 1)[0], *POWERS))
    return found
