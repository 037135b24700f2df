"""Where an operator was measured: nodes of a grid that have a measurement, and whether a point lies between them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

MOST_KNOTS = 160
"""Coordinates along an axis; of more, each goes to the nearest of GEOMETRIC knots an octave."""
GEOMETRIC = 8
MOST_LAYERS = 32
"""Grids in one; a profile of more is taken as a single one with holes."""


class MeasuredGrid:
    """A point was measured if all corners of its cell were: a bounding box knows nothing of holes.

    axes: coordinates in ascending order. known: one dimension an axis; whether a node was measured.
    """

    def __init__(self, axes: Sequence[ArrayLike], known: ArrayLike) -> None:
        self.axes = tuple(np.asarray(axis, float) for axis in axes)
        self.known = np.asarray(known, bool)
        if self.known.shape != tuple(len(axis) for axis in self.axes):
            raise ValueError(f"measured grid: shape {self.known.shape} does not fit its axes")

    @classmethod
    def of(cls, *columns: ArrayLike) -> MeasuredGrid:
        """The grid of these points, one coordinate column an axis."""
        points = [_snapped(np.asarray(column, float)) for column in columns]
        axes = [np.unique(column) for column in points]
        known = np.zeros([len(axis) for axis in axes], bool)
        known[tuple(np.searchsorted(axis, column) for axis, column in zip(axes, points, strict=True))] = True
        return cls(axes, known)

    def holds(self, *columns: ArrayLike) -> Mask:
        """Whether each point lies in a cell with measured corners; on a knot of an axis, between those on it alone.

        A profile may be several grids at once, whose knots lie between each other's: a cell of any of them counts.
        """
        inside = self._holds(*columns)
        for one in () if inside.all() else self._layers:
            inside |= one._holds(*columns)
        return inside

    @cached_property
    def _layers(self) -> list[MeasuredGrid]:
        """The grids of which this one is made: for every set of nodes that some knots of the first axis have in common,
        all knots that have these, and the axes without what they never have."""
        if self.known.all() or self.known.ndim < 2:
            return []
        flat = self.known.reshape(len(self.known), -1)
        patterns = np.unique(flat, axis=0)
        if len(patterns) > MOST_LAYERS:
            return []
        found = []
        for pattern in patterns:
            rows = np.flatnonzero((flat | ~pattern).all(axis=1))
            shared = np.broadcast_to(pattern.reshape(self.known.shape[1:]), (len(rows), *self.known.shape[1:]))
            axes = [self.axes[0][rows]]
            for dimension in range(1, self.known.ndim):
                others = tuple(one for one in range(self.known.ndim) if one != dimension)
                used = np.flatnonzero(shared.any(axis=others))
                axes.append(self.axes[dimension][used])
                shared = shared.take(used, axis=dimension)
            found.append(MeasuredGrid(axes, shared))
        return found

    def _holds(self, *columns: ArrayLike) -> Mask:
        points = np.broadcast_arrays(*[np.asarray(column, float) for column in columns])
        inside = np.ones(points[0].shape, bool)
        lower, upper = [], []
        for axis, point in zip(self.axes, points, strict=True):
            inside &= (point >= axis[0]) & (point <= axis[-1])
            below = np.clip(np.searchsorted(axis, point, side="right") - 1, 0, len(axis) - 1)
            lower.append(below)
            upper.append(np.where(axis[below] == point, below, np.minimum(below + 1, len(axis) - 1)))
        for corner in product((0, 1), repeat=len(self.axes)):
            inside &= self.known[
                tuple(high if bit else low for bit, low, high in zip(corner, lower, upper, strict=True))
            ]
        return inside


def _snapped(values: Array) -> Array:
    if len(np.unique(values)) <= MOST_KNOTS:
        return values
    return np.round(2.0 ** (np.round(np.log2(np.maximum(values, 1.0)) * GEOMETRIC) / GEOMETRIC))
