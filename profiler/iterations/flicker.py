"""How far the speed of a machine may have moved when something runs on it later, from how it moved during a profile.

A machine that others share does not scatter about one speed: the means of long stretches differ as much as those of
short ones. That is flicker noise (a spectrum of h / f), whose statistics are known from clocks: the variance of N
stretches in a row grows with ln N, and the means of two windows differ the more, the further apart they lie (D. W.
Allan, Statistics of Atomic Frequency Standards, Proc. IEEE 54, 1966). White noise would promise that a run of a minute
is as fast as the profile was, to a fraction of what single seconds differ by.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Later(NamedTuple):
    """When something will run: seconds between the profile's end and its start, and how many seconds it lasts."""

    after_s: float
    lasting_s: float


def flicker_of(levels: NDArray[np.float64]) -> float:
    """h of stretches of equal length in a row, from the variance of their levels (logarithms of speed)."""
    return float(np.var(levels)) / math.log(len(levels)) if len(levels) > 2 else 0.0


def deviation(flicker: float, seen_s: float, later: Later) -> float:
    """Standard deviation of the difference between the mean level of the `seen_s` seconds that were measured and that
    of the later run. 0 without flicker; ValueError for a length of 0 or less, or a run before the profile's end."""
    seen, lasting, start = seen_s, later.lasting_s, seen_s + later.after_s
    if not (seen > 0 and lasting > 0 and start >= seen):
        raise ValueError(f"found {seen} s measured, then {later}, expected lengths above 0 and no overlap")
    # Covariance of two moments is -h ln |t - s| and a constant that cancels.
    between = (_twice(start + lasting) + _twice(start - seen) - _twice(start) - _twice(start + lasting - seen)) / (
        seen * lasting
    )
    return math.sqrt(max(0.0, flicker * (3.0 - math.log(seen) - math.log(lasting) + 2.0 * between)))


def _twice(x: float) -> float:
    """ln |x| integrated twice."""
    return x * x * (math.log(abs(x)) / 2 - 0.75) if x else 0.0
