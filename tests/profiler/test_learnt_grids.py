"""Grids with knots between the measured ones: what a learner may fill, and when it may."""

import numpy as np
import pytest

from profiler.operators.fitting.folds import folds
from profiler.operators.fitting.learnt_grids import TABLE, Misses, chosen, densified, learnt, with_midpoints

POWERS = 2.0 ** np.arange(10)


def layouts(miss: object) -> Misses:
    """Eight layouts over powers of two by powers of two; what is missed follows from the streams alone, or does not."""
    heads, decodes, context = (
        axis.ravel() for axis in np.meshgrid(np.arange(1.0, 9.0), POWERS, POWERS[:6] * 64, indexing="ij")
    )
    streams = np.log2(heads * decodes)
    hints = np.stack([np.log2(heads), streams], axis=1)
    return Misses(heads.astype(int), np.stack([decodes, context], axis=1), hints, miss(streams))


def of_layout(heads: float) -> object:
    return lambda places: np.stack([np.full(len(places), np.log2(heads)), np.log2(places[:, 0] * heads)], axis=1)


def test_a_wave_that_other_layouts_show_is_learnt() -> None:
    """A wave along the streams, too short for the grid of one layout; the others measured it between its knots."""
    rows = layouts(lambda streams: 0.2 * np.sin(2.5 * streams))
    method = chosen(rows, lambda values: list(folds(values)))
    assert method != TABLE
    mine = rows.some(rows.layout == 3)
    grid = densified(mine, learnt(rows, method), of_layout(3.0))
    assert grid(*mine.coordinates.T) == pytest.approx(mine.miss, abs=1e-12)
    between = np.array([6.0, 11.0, 23.0])
    wanted = 0.2 * np.sin(2.5 * np.log2(3 * between))
    assert grid(between, np.full(3, 256.0)) == pytest.approx(wanted, abs=0.06)


def test_only_cells_that_were_measured_are_filled() -> None:
    rows = layouts(lambda streams: 0.1 * streams)
    assert learnt(rows, TABLE) is None
    mine = rows.some((rows.layout == 1) & ~((rows.coordinates[:, 0] > 64) & (rows.coordinates[:, 1] > 512)))
    grid = densified(mine, lambda points: np.full(len(points), 9.0), of_layout(1.0))
    assert grid(3.0, 91.0) == pytest.approx(9.0)
    assert abs(grid(181.0, 1448.0)) < 1.0, "a hole of the grid stays interpolated"


def test_knots_halve_gaps_and_quarter_wide_ones() -> None:
    assert with_midpoints([0, 1, 2, 16]).tolist() == [0, 1, 2, 3, 6, 10, 16]
    assert with_midpoints([100, 120]).tolist() == [100, 120]
