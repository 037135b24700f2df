"""Operators whose cost depends on the number of rows: GEMMs, norms, activations, output head, sampler, all-reduces.

A curve keeps what was measured, steps included: nothing here forces time to grow with rows. Between measured counts a
GEMM follows its law of tiles (`profiler.operators.laws.gemm_law`), everything else a straight line.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RowCurve:
    """Measured microseconds over rows (bytes for collectives): `rows` ascending, one time each.

    operator: as in a profile. n, k: width out and in; k is 0 where there is no matrix.
    """

    operator: str
    n: int
    k: int
    rows: Array
    us: Array

    @classmethod
    def from_points(cls, operator: str, n: int, k: int, rows: ArrayLike, us: ArrayLike) -> RowCurve:
        """Repeated row counts take their median."""
        rows, us = np.asarray(rows, float), np.asarray(us, float)
        knots = np.unique(rows)
        return cls(operator, n, k, knots, np.array([np.median(us[rows == knot]) for knot in knots]))

    def smooth_us(self, rows: ArrayLike) -> Array:
        """Time of an operator without tiles: straight lines between measured counts."""
        wanted = np.asarray(rows, float)
        inside = np.interp(wanted, self.rows, self.us)
        return np.where(wanted > self.rows[-1], self._beyond(wanted), inside)

    def _beyond(self, rows: Array) -> Array:
        last, end = self.rows[-1], self.us[-1]
        half = int(np.searchsorted(self.rows, last / 2))
        run = last - self.rows[half]
        slope = (end - self.us[half]) / run if run > 0 else end / last
        return np.asarray(end + np.maximum(slope, 0.0) * (rows - last))

    def widened(self, n: int) -> RowCurve:
        """The same kernel over rows of `n` elements instead of `self.n`: equal bytes cost equal time."""
        return self if n == self.n else RowCurve(self.operator, n, self.k, self.rows * (self.n / n), self.us)
