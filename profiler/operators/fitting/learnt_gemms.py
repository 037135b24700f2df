"""GEMMs of widths and row counts between the measured ones, as a learner tells them that has seen all shapes.

Which kernel a library picks follows from how the output tiles of each candidate would fill the processors. It jumps
from one width or row count to the next, so a line between two measured ones says little; but it repeats wherever other
rows and widths make as many tiles. A learner is shown these fills. It is asked where tiles begin, and only along an
axis on which it was right about values left out of the curves themselves (`chosen`). What was measured stays as it is,
and depths, along which kernels do not change, are interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.operators.fitting.folds import folds
from profiler.operators.fitting.learners import Boosting, Learner, Trees
from profiler.operators.fitting.learnt_grids import TABLE, score
from profiler.operators.laws.gemm_law import BETWEEN, LEAST_WIDTH, TILES, GemmLaw, is_grid, misses
from profiler.operators.laws.lattice import Lattice
from profiler.operators.laws.row_curves import RowCurve

Array = NDArray[np.float64]
Predict = Callable[[Array], Array]

ROWS, WIDTHS = 0, 1
"""Axes along which values may be filled in: columns of a place (rows, n, k)."""
LEARNERS: Mapping[str, type[Learner]] = {"boosting": Boosting, "trees": Trees}
METHODS = {
    TABLE: (TABLE,),
    "boosting": ("boosting",),
    "boosting and trees": ("boosting", "trees"),
    "table, boosting and trees": (TABLE, "boosting", "trees"),
}
"""Whose mean is taken."""
MOST_WIDTH = 16384
MOST_ROWS = 8192
"""Beyond these nothing is learnt: they are the vocabulary's widths, and rows that no batch has."""
LEAST_PLACES = 200
_EDGES = ((16, 128), (32, 256), (64, 512), (128, 2048), (256, MOST_ROWS))
"""Row counts where a tile may end: multiples of the first up to the second."""
_WIDTHS = ((256, 4096), (512, MOST_WIDTH))


def learnt_gemms(
    law: GemmLaw, curves: tuple[RowCurve, ...], axes: tuple[int, ...] = (ROWS, WIDTHS)
) -> tuple[RowCurve, ...]:
    """The curves with more row counts, and curves of widths between theirs (operator BETWEEN), if learners know better
    than interpolation. Shapes that make no grid come back as they are."""
    known = [curve for curve in curves if curve.k]
    inside = [curve for curve in known if _wide(curve.n) and _wide(curve.k)]
    if not is_grid(known) or sum(len(curve.rows) for curve in inside) < LEAST_PLACES:
        return curves
    places, miss = _seen(law, inside)
    found = dict.fromkeys((ROWS, WIDTHS), TABLE) | {axis: chosen(law, places, miss, axis) for axis in axes}
    fitted = {method: learnt(law, places, miss, method) for method in set(found.values()) if method != TABLE}
    if not fitted:
        return curves
    if found[ROWS] != TABLE:
        edges = _steps(_EDGES, one_more=True)
        denser = {(curve.n, curve.k): _with_rows(law, curve, edges, fitted[found[ROWS]]) for curve in inside}
        curves = tuple(denser.get((curve.n, curve.k), curve) for curve in curves)
    if found[WIDTHS] != TABLE:
        # Depths change slowly: every second one of the learner's is interpolated as well as told.
        widths, depths = np.unique(places[:, 1]), np.unique(places[:, 2])[::2]
        rows = np.unique(np.concatenate([curve.rows for curve in curves if curve.k]))
        curves += _between(law, widths, depths, rows[rows <= MOST_ROWS], fitted[found[WIDTHS]])
    return curves


def gemm_points(law: GemmLaw, places: Array) -> Array:
    """What learners are shown of places (rows, n, k): sizes, tiles, and how much of its last wave each tile leaves."""
    m, n, k = places.T
    tiles = np.ceil(m / 128) * np.ceil(n / 128) / law.sms
    columns = [m, n, k, tiles, m * n, n * k]
    for tile_m, tile_n in TILES:
        dealt = np.ceil(m / tile_m) * np.ceil(n / tile_n) / law.sms
        columns.append(np.ceil(dealt) / dealt)
    return np.log2(np.stack(columns, axis=1))


def learnt(law: GemmLaw, places: Array, miss: Array, method: str) -> Predict:
    """What a method predicts that the law misses at places, having seen some."""
    taught = [_taught(law, places, miss, one) for one in METHODS[method]]
    return lambda asked: np.asarray(np.mean([one(asked) for one in taught], axis=0))


def _taught(law: GemmLaw, places: Array, miss: Array, name: str) -> Predict:
    if name == TABLE:
        grid = Lattice.from_points(list(places.T), miss)
        return lambda asked: grid(*asked.T)
    learner = LEARNERS[name]().fit(gemm_points(law, places), miss)
    return lambda asked: learner(gemm_points(law, asked))


def chosen(law: GemmLaw, places: Array, miss: Array, axis: int) -> str:
    """The method with the least error on every second value of an axis, left out of these places in turn."""
    errors: dict[str, list[Array]] = {method: [] for method in METHODS}
    for left in folds(places[:, axis]):
        out = np.isin(places[:, axis], left)
        single = {name: _taught(law, places[~out], miss[~out], name)(places[out]) for name in (TABLE, *LEARNERS)}
        for method, names in METHODS.items():
            said = np.mean([single[name] for name in names], axis=0)
            errors[method].append(np.abs(np.expm1(said - miss[out])))
    if not errors[TABLE]:
        return TABLE
    return min(METHODS, key=lambda method: score(np.concatenate(errors[method])))


def _wide(size: int) -> bool:
    return LEAST_WIDTH <= size <= MOST_WIDTH


def _seen(law: GemmLaw, curves: list[RowCurve]) -> tuple[Array, Array]:
    columns = [
        np.column_stack(np.broadcast_arrays(curve.rows, curve.n, curve.k, misses(law, curve))) for curve in curves
    ]
    every = np.concatenate(columns)
    every = every[(every[:, 0] >= 1) & (every[:, 0] <= MOST_ROWS)]
    return every[:, :3], every[:, 3]


def _steps(ranges: tuple[tuple[int, int], ...], one_more: bool = False) -> Array:
    found: set[int] = set()
    for step, end in ranges:
        start = max(found, default=0)
        found |= set(range((start // step + 1) * step, end + 1, step))
    return np.array(sorted(found | {size + 1 for size in found} if one_more else found), float)


def _with_rows(law: GemmLaw, curve: RowCurve, wanted: Array, predict: Predict) -> RowCurve:
    """The curve with row counts between its own."""
    more = wanted[(wanted > curve.rows[0]) & (wanted < curve.rows[-1]) & ~np.isin(wanted, curve.rows)]
    if not len(more):
        return curve
    us = _told(law, curve.n, curve.k, more, predict)
    order = np.argsort(np.concatenate([curve.rows, more]))
    return RowCurve(
        curve.operator,
        curve.n,
        curve.k,
        np.concatenate([curve.rows, more])[order],
        np.concatenate([curve.us, us])[order],
    )


def _between(law: GemmLaw, widths: Array, depths: Array, rows: Array, predict: Predict) -> tuple[RowCurve, ...]:
    wanted = _steps(_WIDTHS)
    wanted = wanted[(wanted > widths[0]) & (wanted < widths[-1]) & ~np.isin(wanted, widths)]
    return tuple(
        RowCurve(BETWEEN, int(n), int(k), rows, _told(law, int(n), int(k), rows, predict))
        for n in wanted
        for k in depths
    )


def _told(law: GemmLaw, n: int, k: int, rows: ArrayLike, predict: Predict) -> Array:
    rows = np.asarray(rows, float)
    places = np.column_stack(np.broadcast_arrays(rows, float(n), float(k)))
    return _rounded(law.us(rows, n, k) * np.exp(predict(places)))


def _rounded(us: ArrayLike, digits: int = 10) -> Array:
    """Binary digits that a prediction is good for: fewer make smaller files."""
    share, power = np.frexp(us)
    return np.ldexp(np.round(share * 2**digits) / 2**digits, power)
