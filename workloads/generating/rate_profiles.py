"""How the rate of arrivals changes over time: profiles, written as short texts such as `diurnal:86400,0.8`.

    constant                      the process's own rate throughout
    step:AT_S,FACTOR              FACTOR times the rate from AT_S on
    spike:AT_S,LENGTH_S,FACTOR    FACTOR times the rate for LENGTH_S seconds
    diurnal:PERIOD_S,SWING        rate * (1 - SWING * cos(2 pi t / PERIOD_S)): from trough to peak and back, mean kept

A profile stretches time: a process with one request per tick is laid along a clock that ticks at the profile's rate.
So its gaps keep their distribution, whatever it is, and the number of requests follows the profile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workloads.trace import TraceError

FORMS = "constant, step:AT_S,FACTOR, spike:AT_S,LENGTH_S,FACTOR or diurnal:PERIOD_S,SWING (SWING from 0 to 1)"
_POINTS_PER_PERIOD = 4096


@dataclass(frozen=True)
class RateProfile:
    """A rate over time, relative to the process's own.

    times, ticks: points of the clock (ascending, from 0, 0); lines between them. After the last point it goes on at
    `slope`, or, where period_s is set, from the beginning again.
    """

    times: NDArray[np.float64]
    ticks: NDArray[np.float64]
    slope: float = 1.0
    period_s: float = 0.0

    def ticks_at(self, time_s: float) -> float:
        """How many seconds' worth of arrivals at rate 1 have come by time_s."""
        if self.period_s:
            periods, rest = divmod(time_s, self.period_s)
            return periods * float(self.ticks[-1]) + float(np.interp(rest, self.times, self.ticks))
        beyond = max(time_s - float(self.times[-1]), 0.0)
        return float(np.interp(time_s, self.times, self.ticks)) + beyond * self.slope

    def times_at(self, ticks: NDArray[np.float64]) -> NDArray[np.float64]:
        """When so many ticks have come: the inverse of ticks_at, for a whole column."""
        if self.period_s:
            periods, rest = np.divmod(ticks, self.ticks[-1])
            times: NDArray[np.float64] = periods * self.period_s + np.interp(rest, self.ticks, self.times)
        else:
            beyond = np.maximum(ticks - self.ticks[-1], 0.0)
            times = np.interp(ticks, self.ticks, self.times) + beyond / self.slope
        return times


def parse(text: str) -> RateProfile:
    """A rate profile from its text form; raises TraceError."""
    kind, _, rest = text.strip().partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")] if rest else []
    except ValueError:
        numbers = [math.nan]
    if all(0 <= number <= 1e9 for number in numbers):
        match kind, numbers:
            case "constant", []:
                return RateProfile(np.zeros(1), np.zeros(1))
            case "step", [at_s, factor] if factor > 0:
                return RateProfile(np.array([0, at_s]), np.array([0, at_s]), slope=factor)
            case "spike", [at_s, length_s, factor]:
                return RateProfile(np.array([0, at_s, at_s + length_s]), np.array([0, at_s, at_s + length_s * factor]))
            case "diurnal", [period_s, swing] if period_s > 0 and swing <= 1:
                times = np.linspace(0, period_s, _POINTS_PER_PERIOD + 1)
                angle = 2 * math.pi / period_s
                return RateProfile(times, times - swing * np.sin(angle * times) / angle, period_s=period_s)
    raise TraceError(f"rate profile: found {text[:80]!r}, expected {FORMS}")
