"""Grids of what a law misses, with knots between the measured ones where a learner says what it misses there.

A kernel table measures tens of head layouts at powers of two. What the law misses at one of them tells what it misses
at another, so a learner shown all of them knows more about a batch between two powers than its two neighbours do. Grids
keep what was measured; between, they take the learner's word where it was right on structures left out of the rows
themselves (`chosen`), and interpolate where it was not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.operators.fitting.learners import Boosting, GaussianProcess, Learner
from profiler.operators.laws.lattice import Lattice, stretched

Array = NDArray[np.float64]
Predict = Callable[[Array], Array]

TABLE = "table"
METHODS: Mapping[str, tuple[type[Learner], ...]] = {
    TABLE: (),
    "boosting": (Boosting,),
    "process": (GaussianProcess,),
    "boosting and process": (Boosting, GaussianProcess),
}
AIMS = {"median": 0.02, "p95": 0.08}
"""Errors aimed at on structures left out; a method's score is the sum of both as multiples of these."""
APART = 1.3
"""Measured knots further apart than this factor have room for one more."""
WIDE = 3.0
"""And from this factor on for three."""
LEAST_ROWS = 60
"""Fewer rows do not teach a learner anything that their grid does not know."""


@dataclass(frozen=True)
class Misses:
    """What a law misses at measured batches of many layouts.

    layout: a number for every row; rows of one layout make a grid. coordinates: [rows, axes] of that grid. hints:
    [rows, more] what a learner sees besides. miss: log(measured / law).
    """

    layout: NDArray[np.int64]
    coordinates: Array
    hints: Array
    miss: Array

    def some(self, which: NDArray[np.bool_]) -> Misses:
        return Misses(self.layout[which], self.coordinates[which], self.hints[which], self.miss[which])

    @property
    def points(self) -> Array:
        return points_of(self.coordinates, self.hints)

    def grids(self) -> dict[int, Lattice]:
        return {
            int(one): Lattice.from_points(list(self.coordinates[self.layout == one].T), self.miss[self.layout == one])
            for one in np.unique(self.layout)
        }


def points_of(coordinates: Array, hints: Array) -> Array:
    """What learners are shown: coordinates stretched as the grids stretch them, and their product."""
    columns = [stretched(column) for column in coordinates.T]
    if len(columns) > 1:
        columns.append(stretched(coordinates.prod(axis=1)))
    return np.stack([*columns, *hints.T], axis=1)


def learnt(rows: Misses, method: str) -> Predict | None:
    """What a method predicts at points, having seen `rows`; None for the table."""
    if method == TABLE or len(rows.miss) < LEAST_ROWS:
        return None
    taught = [learner().fit(rows.points, rows.miss) for learner in METHODS[method]]
    return lambda points: np.asarray(np.mean([one(points) for one in taught], axis=0))


def chosen(rows: Misses, halves: Callable[[Array], list[Array]]) -> str:
    """The method with the least error on structures left out of `rows`: every second value of each axis in turn.

    halves: values of a coordinate to leave out, one set after another (`profiler.judging.holdout.folds`).
    """
    if len(rows.miss) < LEAST_ROWS:
        return TABLE
    errors: dict[str, list[Array]] = {method: [] for method in METHODS}
    for axis in range(rows.coordinates.shape[1]):
        for left in halves(rows.coordinates[:, axis]):
            out = np.isin(rows.coordinates[:, axis], left)
            known, asked = rows.some(~out), rows.some(out)
            if not len(asked.miss) or len(known.miss) < LEAST_ROWS:
                continue
            grids = known.grids()
            table = np.zeros(len(asked.miss))
            for one in np.unique(asked.layout):
                mine = asked.layout == one
                if int(one) in grids:
                    table[mine] = grids[int(one)](*asked.coordinates[mine].T)
            single = {kind: kind().fit(known.points, known.miss)(asked.points) for kind in (Boosting, GaussianProcess)}
            for method, kinds in METHODS.items():
                said = np.mean([single[kind] for kind in kinds], axis=0) if kinds else table
                errors[method].append(np.abs(np.expm1(said - asked.miss)))
    if not errors[TABLE]:
        return TABLE
    return min(METHODS, key=lambda method: score(np.concatenate(errors[method])))


def score(error: Array) -> float:
    """Median and P95, each as a multiple of its aim."""
    return float(np.median(error) / AIMS["median"] + np.quantile(error, 0.95) / AIMS["p95"])


def with_midpoints(axis: ArrayLike) -> Array:
    """Knots and, between those apart, whole numbers that halve the gap by ratio, or quarter a wide one."""
    knots = np.asarray(axis, float)
    found = set(knots.tolist())
    for low, high in zip(knots[:-1], knots[1:], strict=True):
        if low >= 1 and high / low > APART:
            shares = (0.25, 0.5, 0.75) if high / low > WIDE else (0.5,)
            between = {float(round(low * (high / low) ** share)) for share in shares}
            found |= {at for at in between if low < at < high}
    return np.array(sorted(found))


def densified(rows: Misses, predict: Predict, hints: Callable[[Array], Array]) -> Lattice:
    """The grid of one layout's rows with knots between. Between knots that were all measured stands what `predict` says
    of the points there (`hints` of their coordinates beside them); elsewhere the interpolation stays."""
    grid = Lattice.from_points(list(rows.coordinates.T), rows.miss)
    axes = [with_midpoints(axis) for axis in grid.axes]
    nodes = np.stack([one.ravel() for one in np.meshgrid(*axes, indexing="ij")], axis=1)
    values = grid(*nodes.T)
    known = np.zeros([len(axis) for axis in grid.axes], bool)
    columns = list(zip(grid.axes, rows.coordinates.T, strict=True))
    known[tuple(np.searchsorted(axis, column) for axis, column in columns)] = True
    places = list(zip(grid.axes, nodes.T, strict=True))
    exact = [np.isin(column, axis) for axis, column in places]
    above = [np.searchsorted(axis, column) for axis, column in places]
    between = ~np.all(exact, axis=0)
    for corner in product((0, 1), repeat=len(axes)):
        at = tuple(np.where(on, knot, knot - bit) for on, knot, bit in zip(exact, above, corner, strict=True))
        between &= known[at]
    if between.any():
        values[between] = predict(points_of(nodes[between], hints(nodes[between])))
    return Lattice(axes, values.reshape([len(axis) for axis in axes]))
