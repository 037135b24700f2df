"""How nearly a GEMM can be told when only single shapes are missing: a ceiling for whole rows, widths and depths.

A tenth of a kernel table's GEMMs is left out at random, so that nearly every one has measured neighbours on both sides
of all three axes, and learners are shown the rest. What they still miss is not for want of neighbours: it is kernels
that the library picks, or times that came out, without any order that another shape betrays. A second card with the
same processors can be asked as well: its time of the very same shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from profiler.errors import ProfileError
from profiler.judging.compare_learners import Compared
from profiler.judging.holdout import curves_of, used_gemms
from profiler.operators.fitting.learners import Boosting, Trees
from profiler.operators.fitting.learnt_gemms import gemm_points
from profiler.operators.laws.gemm_law import LEAST_WIDTH, fit_gemm_law, is_grid
from profiler.operators.laws.lattice import Lattice

if TYPE_CHECKING:
    import pandas as pd

    from profiler.measurements.profile import Profile
    from profiler.specs.hardware import Hardware

Array = NDArray[np.float64]

PARTS, TAKEN = 10, 3
"""Into how many parts the shapes are dealt, and how many of them are left out, one after another."""
STRUCTURE = "gemm, a tenth of all shapes"
BANDS = ((1, 15), (16, 128), (129, 257), (258, 1279), (1280, 8192))
"""Rows that errors are told apart by."""


def scattered(profile: Profile, hardware: Hardware, beside: Profile | None = None) -> list[Compared]:
    """Errors of each learner on left-out shapes, over all rows and by BANDS. beside: the other card's profile.

    ProfileError where GEMMs make no grid.
    """
    table = _gemms(profile)
    if not is_grid(curves_of(table)):
        raise ProfileError("profile: its GEMMs make no grid of widths and depths to leave single shapes out of")
    other = None if beside is None else _gemms(beside).groupby(["rows", "n", "k"])["median_s"].median()
    counted = np.flatnonzero(used_gemms(table))
    dealt = np.random.default_rng(0).permutation(len(counted)) % PARTS
    errors: dict[str, list[Array]] = {}
    rows: list[Array] = []
    for part in range(TAKEN):
        out = np.zeros(len(table), bool)
        out[counted[dealt == part]] = True
        rows.append(table["rows"].to_numpy(float)[out])
        for name, error in _errors(table, out, hardware, other).items():
            errors.setdefault(name, []).append(error)
    asked = np.concatenate(rows)
    bands = {STRUCTURE: np.full(len(asked), True)}
    bands |= {f"{low} to {high} rows": (asked >= low) & (asked <= high) for low, high in BANDS}
    return [
        Compared(band, name, int(mine.sum()), float(np.median(size)), float(np.quantile(size, 0.95)))
        for band, mine in bands.items()
        for name, parts in errors.items()
        if len(size := np.concatenate(parts)[mine])
    ]


def text(found: list[Compared]) -> str:
    """Median / P95 in percent: a line for each learner, a column for each band of rows."""
    bands = list(dict.fromkeys(row.structure for row in found))
    lines = [f"{'':34}" + "".join(f"{band:>30}" for band in bands)]
    for method in dict.fromkeys(row.method for row in found):
        mine = {row.structure: f"{row.median:.1%} / {row.p95:.1%}" for row in found if row.method == method}
        lines.append(f"{method:34}" + "".join(f"{mine.get(band, ''):>30}" for band in bands))
    return "\n".join(lines)


def _gemms(profile: Profile) -> pd.DataFrame:
    table = profile.table
    wide = (table["n"] >= LEAST_WIDTH) & (table["k"] >= LEAST_WIDTH) & (table["rows"] > 0)
    return table[wide & (table["operator"] != "head")].reset_index(drop=True)


def _errors(
    table: pd.DataFrame, out: NDArray[np.bool_], hardware: Hardware, other: pd.Series | None
) -> dict[str, Array]:
    import pandas as pd

    law = fit_gemm_law(curves_of(table[~out]), hardware)
    assert law is not None
    places = table[["rows", "n", "k"]].to_numpy(float)
    miss = np.log(table["median_s"].to_numpy(float) * 1e6 / law.us(*places.T))
    known, asked = places[~out], places[out]
    points = gemm_points(law, places)
    said = {"law": np.zeros(len(asked))}
    for axis, name in enumerate(("rows", "widths", "depths")):
        order = [axis, *(at for at in range(3) if at != axis)]
        said[f"line between {name}"] = Lattice.from_points(list(known.T), miss[~out], fill_order=order)(*asked.T)
    boosting = Boosting().fit(points[~out], miss[~out])(points[out])
    trees = Trees().fit(points[~out], miss[~out])(points[out])
    said |= {"boosting": boosting, "trees": trees, "their mean": (boosting + trees) / 2.0}
    said["and the line between depths"] = (boosting + trees + said["line between depths"]) / 3.0
    if other is not None:
        theirs = other.reindex(pd.MultiIndex.from_arrays(places.T)).to_numpy(float) * 1e6
        shown = np.log(theirs / law.us(*places.T))
        known_too = ~out & ~np.isnan(shown)
        said["the other card's time"] = np.nan_to_num(shown - _offset(places[:, 0], shown - miss, known_too))[out]
        both = np.column_stack([points, np.nan_to_num(shown)])
        said["boosting, shown that time"] = Boosting().fit(both[known_too], miss[known_too])(both[out])
    return {name: np.abs(np.expm1(value - miss[out])) for name, value in said.items()}


def _offset(rows: Array, apart: Array, known: NDArray[np.bool_]) -> Array:
    """How far two cards lie apart at each row count: memory of another speed counts where rows are few."""
    found = np.zeros(len(rows))
    for count in np.unique(rows[known]):
        found[rows == count] = np.median(apart[known & (rows == count)])
    return found
