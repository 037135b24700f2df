"""GEMMs that were not measured: what a learner may fill in, what stays as it was measured, and how noisy that is."""

from dataclasses import replace

import numpy as np
import pytest

from profiler.operators.fitting.learnt_gemms import ROWS, TABLE, WIDTHS, chosen, gemm_points, learnt_gemms
from profiler.operators.fitting.noise_floor import gemm_floor, summary
from profiler.operators.laws.gemm_law import BETWEEN, GemmLaw, composed_curve, gemm_grid, misses, without_noise
from profiler.operators.laws.row_curves import RowCurve

LAW = GemmLaw((0.8,) * 8, memory=0.8, launch_us=3.0, tile_us=0.0, sms=100, flops_per_us=300e6, bytes_per_us=2e6)
MEASURED = np.array([1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512, 768, 1024, 1536, 2048.0])
WIDTHS_SEEN = (512, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
DEPTHS = (1024, 2048, 4096, 8192)


def wasteful(rows: np.ndarray, n: float, k: float) -> np.ndarray:
    """The law, but a library that pays for the whole last wave of 128 x 128 tiles."""
    tiles = np.ceil(rows / 128) * np.ceil(n / 128) / LAW.sms
    return LAW.us(rows, n, k) * (np.ceil(tiles) / tiles) ** 0.2


def measured(time: object = wasteful) -> tuple[RowCurve, ...]:
    return tuple(RowCurve("gemm", n, k, MEASURED, time(MEASURED, n, k)) for n in WIDTHS_SEEN for k in DEPTHS)


def test_widths_and_row_counts_between_are_told_from_tiles_that_others_make() -> None:
    curves = learnt_gemms(LAW, measured())
    filled = [curve for curve in curves if curve.operator == BETWEEN]
    assert {1280, 3840, 5632} <= {curve.n for curve in filled}
    assert not {curve.n for curve in filled} & set(WIDTHS_SEEN)
    known = next(curve for curve in curves if (curve.n, curve.k) == (4096, 4096))
    assert np.isin(MEASURED, known.rows).all()
    assert {193, 320, 640, 641} <= set(known.rows)
    at = np.isin(known.rows, MEASURED)
    assert known.us[at] == pytest.approx(wasteful(MEASURED, 4096, 4096)), "what was measured stays"
    for curve in (known, composed_curve(LAW, curves, gemm_grid(LAW, curves), "qkv", 3840, 4096)):
        wanted = wasteful(curve.rows, curve.n, curve.k)
        straight = learnt_gemms(LAW, measured(), ())
        plain = composed_curve(LAW, straight, gemm_grid(LAW, straight), "qkv", curve.n, curve.k)
        told = np.abs(curve.us / wanted - 1)
        interpolated = np.abs(
            np.interp(curve.rows, plain.rows, misses(LAW, plain))
            - np.log(wanted / LAW.us(curve.rows, curve.n, curve.k))
        )
        assert told.mean() < interpolated.mean()


def test_a_law_that_misses_nothing_leaves_interpolation_alone() -> None:
    curves = measured(LAW.us)
    places = np.concatenate([np.column_stack(np.broadcast_arrays(c.rows, c.n, c.k)) for c in curves])
    assert [chosen(LAW, places, np.zeros(len(places)), axis) for axis in (ROWS, WIDTHS)] == [TABLE, TABLE]
    assert learnt_gemms(LAW, curves) == curves


def test_a_few_scattered_shapes_teach_nothing() -> None:
    few = measured()[:5]
    assert learnt_gemms(LAW, few) is few


def test_learners_see_how_much_of_a_last_wave_is_idle() -> None:
    # 128 x 128 tiles of 1024 x 2048: 128 of them on 100 processors are two waves, of which 72 are idle.
    points = 2.0 ** gemm_points(LAW, np.array([[1024.0, 2048.0, 4096.0]]))
    assert points[0, 3] == pytest.approx(1.28)
    assert points[0, 6 + 3] == pytest.approx(2 / 1.28)


def test_counts_of_one_tile_are_repeats_and_larger_ones_are_not() -> None:
    def flips(rows: np.ndarray, n: float, k: float) -> np.ndarray:
        return LAW.us(rows, n, k) * np.where(np.isin(rows, [4, 512]), 1.2, 1.0)

    calm = without_noise(measured(flips), LAW)
    for curve in calm:
        assert curve.us[MEASURED == 4].item() == pytest.approx(float(LAW.us(4, curve.n, curve.k))), (
            "2, 4 and 8 rows do equal work"
        )
        assert curve.us[MEASURED == 512].item() == pytest.approx(float(1.2 * LAW.us(512, curve.n, curve.k)))


def test_the_noise_floor_is_the_noise_that_was_put_in() -> None:
    rng = np.random.default_rng(0)
    shapes = [(n, k) for n in WIDTHS_SEEN for k in (1024, 1536, 2048, 2560, 3072, 4096, 5120)]
    noisy = [
        RowCurve("gemm", n, k, MEASURED, LAW.us(MEASURED, n, k) * np.exp(rng.normal(0, 0.03, len(MEASURED))))
        for n, k in shapes
    ]
    floor = summary({"gemm": gemm_floor(LAW, noisy), "decode": np.zeros(0)})
    assert set(floor) == {"gemm median", "gemm p95"}
    assert floor["gemm median"] == pytest.approx(0.03 * 0.674, rel=0.1)
    assert floor["gemm p95"] == pytest.approx(0.03 * 1.96, rel=0.1)
    silent = [replace(curve, us=LAW.us(MEASURED, curve.n, curve.k)) for curve in noisy]
    assert gemm_floor(LAW, silent).max() < 1e-9
