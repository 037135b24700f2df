"""Values on a grid with holes, and multilinear interpolation between them.

Fits keep what their physical law misses (the log of measured over law) on such a grid; the axes are stretched so that
equal ratios of a large coordinate, and equal differences of a small one, lie equally far apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

STRETCH = 8.0
"""Coordinates x are interpolated in log2(x + STRETCH)."""


def stretched(values: ArrayLike) -> Array:
    return np.log2(np.asarray(values, float) + STRETCH)


CLOSE = 0.15
"""A knot whose logarithm is nearer than this to another's adds nothing."""


def with_knots(axis: Array, more: Sequence[int]) -> Array:
    """An axis and those of `more` between its ends that are not close to one of its own."""
    apart = [at for at in more if axis[0] < at < axis[-1] and np.abs(np.log(axis / at)).min() > CLOSE]
    return np.unique(np.concatenate([axis, apart]))


class Lattice:
    """A value at every node of a grid: axes in ascending order, `values` with one dimension an axis, no NaN."""

    def __init__(self, axes: Sequence[ArrayLike], values: ArrayLike) -> None:
        self.axes = tuple(np.asarray(axis, float) for axis in axes)
        self.values = np.asarray(values, float)
        if self.values.shape != tuple(len(axis) for axis in self.axes):
            raise ValueError(f"lattice: shape {self.values.shape} does not fit its axes")

    @classmethod
    def from_points(cls, columns: Sequence[ArrayLike], values: ArrayLike, fill_order: Sequence[int] = ()) -> Lattice:
        """Nodes at every coordinate seen; repeated points are averaged (median), holes filled along `fill_order`.

        columns: one coordinate column an axis. Holes are filled by linear interpolation along one axis after another
        (the last axis first unless said otherwise), and by the nearest known node beyond the ends.
        """
        coordinates = [np.asarray(column, float) for column in columns]
        axes = [np.unique(column) for column in coordinates]
        index = tuple(np.searchsorted(axis, column) for axis, column in zip(axes, coordinates, strict=True))
        shape = tuple(len(axis) for axis in axes)
        flat = np.ravel_multi_index(index, shape)
        order = np.lexsort((np.asarray(values, float), flat))
        nodes, first, counts = np.unique(flat[order], return_index=True, return_counts=True)
        ranked = np.asarray(values, float)[order]
        grid = np.full(int(np.prod(shape)), np.nan)
        grid[nodes] = (ranked[first + (counts - 1) // 2] + ranked[first + counts // 2]) / 2
        return cls(axes, _filled(grid.reshape(shape), axes, fill_order or range(len(axes) - 1, -1, -1)))

    @classmethod
    def from_scatter(cls, axes: Sequence[ArrayLike], columns: Sequence[ArrayLike], values: ArrayLike) -> Lattice:
        """Nodes where `axes` say; each takes the mean of the points in the cells around it, weighted by nearness."""
        knots = [np.asarray(axis, float) for axis in axes]
        columns = [np.clip(np.asarray(c, float), axis[0], axis[-1]) for c, axis in zip(columns, knots, strict=True)]
        shape = tuple(len(axis) for axis in knots)
        total, mass = np.zeros(shape), np.zeros(shape)
        cells, weights = _cells(knots, columns)
        for corner in product((0, 1), repeat=len(knots)):
            weight = np.ones(columns[0].shape)
            for bit, part in zip(corner, weights, strict=True):
                weight = weight * (part if bit else 1.0 - part)
            last = [length - 1 for length in shape]
            index = tuple(np.minimum(cell + bit, end) for cell, bit, end in zip(cells, corner, last, strict=True))
            np.add.at(total, index, weight * values)
            np.add.at(mass, index, weight)
        with np.errstate(invalid="ignore"):
            grid = np.where(mass > 0.05, total / mass, np.nan)
        return cls(knots, _filled(grid, knots, range(len(knots) - 1, -1, -1)))

    def __call__(self, *columns: ArrayLike) -> Array:
        """Interpolated values; coordinates beyond the grid take the value of its edge."""
        points = np.broadcast_arrays(*[np.asarray(column, float) for column in columns])
        cells, weights = _cells(self.axes, points)
        total = np.zeros(points[0].shape)
        for corner in product((0, 1), repeat=len(self.axes)):
            if any(bit and len(axis) == 1 for bit, axis in zip(corner, self.axes, strict=True)):
                continue
            weight = np.ones(points[0].shape)
            for bit, part in zip(corner, weights, strict=True):
                weight = weight * (part if bit else 1.0 - part)
            total += weight * self.values[tuple(cell + bit for cell, bit in zip(cells, corner, strict=True))]
        return total


def _cells(axes: Sequence[Array], points: Sequence[Array]) -> tuple[list[NDArray[np.int64]], list[Array]]:
    """Index of the node below each point, and how far (0 to 1) the point lies towards the next node, per axis."""
    cells, weights = [], []
    for axis, point in zip(axes, points, strict=True):
        if len(axis) == 1:
            cells.append(np.zeros(point.shape, int))
            weights.append(np.zeros(point.shape))
            continue
        knots, at = stretched(axis), stretched(point)
        cell = np.clip(np.searchsorted(axis, point, side="right") - 1, 0, len(axis) - 2)
        cells.append(cell)
        weights.append(np.clip((at - knots[cell]) / (knots[cell + 1] - knots[cell]), 0.0, 1.0))
    return cells, weights


def _filled(grid: Array, axes: Sequence[Array], order: Sequence[int] | range) -> Array:
    """Interpolate along each axis in turn where a line has at least two known nodes; then spread single nodes."""
    for least in (2, 1):
        for axis in order:
            if np.isnan(grid).any():
                grid = np.moveaxis(_filled_lines(np.moveaxis(grid, axis, -1), stretched(axes[axis]), least), -1, axis)
    return grid


def _filled_lines(grid: Array, knots: Array, least: int) -> Array:
    lines = grid.reshape(-1, grid.shape[-1]).copy()
    holes = np.isnan(lines)
    known = (~holes).sum(axis=1)
    for row in np.flatnonzero(holes.any(axis=1) & (known >= least)):
        ok = ~holes[row]
        lines[row, ~ok] = np.interp(knots[~ok], knots[ok], lines[row, ok])
    return lines.reshape(grid.shape)
