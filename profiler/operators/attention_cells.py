"""Multilinear interpolation as one polynomial a cell, so that a value is a look-up and a handful of products.

Between the knots of a grid the interpolated value is a polynomial with one coefficient for every subset of the
coordinates. These are computed once a cell; after that a table of four axes costs fifteen multiply-adds instead of
sixteen look-ups and as many weights. Coefficients belong to the coordinates themselves, not to their place within the
cell, so nothing has to be normalised first (float64 loses about a millionth of a nanosecond by that).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]


FAR = float(1 << 23)
"""The last knot of an axis with a cell beyond its table."""


class Axis:
    """Knots of one coordinate and, for every whole number up to the last knot, the cell it lies in.

    far: one more knot, at FAR: from the last of `knots` on everything lies in the cell before it, FAR itself and
    whatever is larger too.
    """

    def __init__(self, knots: ArrayLike, far: bool = False) -> None:
        self.near = np.unique(np.asarray(knots, float))
        self.knots = np.append(self.near, FAR) if far else self.near
        self.cells = len(self.knots) - 1
        cell = np.searchsorted(self.knots, np.arange(int(self.near[-1]) + 1), side="right") - 1
        self.cell = np.clip(cell, 0, self.cells - 1)
        self.last = len(self.cell) - 1

    def starts(self, stride: int) -> list[int]:
        """Cell times `stride` for every whole number in the table, as a list (equal entries share one int)."""
        return _starts(tuple(self.near.tolist()), len(self.knots) > len(self.near), stride)

    def of(self, values: Any) -> Index:
        """The cell of each value; beyond the last knot the last cell is continued."""
        return self.cell[np.minimum(values, self.last).astype(np.int64)]


@cache
def _starts(knots: tuple[float, ...], far: bool, stride: int) -> list[int]:
    axis = Axis(knots, far)
    counts = np.bincount(axis.cell, minlength=axis.cells)
    starts: list[int] = []
    for cell, count in enumerate(counts.tolist()):
        starts += [cell * stride] * count
    return starts


def polynomials(values: Array, axes: Sequence[Axis]) -> Array:
    """[cells, 2 ** axes] coefficients of the interpolation of `values`, which has one dimension an axis.

    Cells lie in C order. Coefficient b belongs to the product of the coordinates whose bit is set in b, the first axis
    having the highest bit.
    """
    table = values[..., None]
    for number, axis in enumerate(axes):
        table = np.moveaxis(table, number, -1)
        slope = np.diff(table, axis=-1) / np.diff(axis.knots)
        rest = table[..., :-1] - slope * axis.knots[:-1]
        # [other axes, coefficients so far, cells] -> coefficients of this axis beside those so far.
        table = np.moveaxis(np.stack([rest, slope], axis=-1), -2, number)
        table = table.reshape(*table.shape[:-2], -1)
    return np.ascontiguousarray(table.reshape(-1, 2 ** len(axes)))


def evaluated(table: Array, cells: Index, coordinates: Sequence[Any]) -> Array:
    """The polynomial of each cell at each point; the first coordinate is put in first."""
    # Coefficients by row: arithmetic then runs along memory, which halves its time.
    found = np.ascontiguousarray(table.take(cells, axis=0).T)
    for coordinate in coordinates:
        half = len(found) // 2
        upper = found[half:]
        upper *= coordinate
        found = found[:half]
        found += upper
    return found[0]
