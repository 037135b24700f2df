"""What a GEMM costs, as physics: output tiles dealt to processors in waves, or bytes through memory, plus a launch.

A library picks the tile shape (and may split K) that finishes first; the law does the same over a few common shapes
with one efficiency each. It knows why 257 rows cost more than 256 and 272 the same as 257; what it misses is
interpolated between measured row counts and matrix shapes (`gemm_curve`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.errors import ProfileError
from profiler.operators.laws.lattice import Lattice
from profiler.operators.laws.row_curves import RowCurve
from profiler.specs.dtypes import dtype_bytes
from profiler.specs.number_format import FORMATS

if TYPE_CHECKING:
    from profiler.specs.hardware import Hardware

Array = NDArray[np.float64]

TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (256, 64), (64, 256), (128, 256), (256, 128))
SPLITS_OF_K = (1, 2, 4)
JOIN = 8.0
ELEMENT_BYTES = 2
"""Of outputs, which have 16 bits whatever the weights have."""


@dataclass(frozen=True)
class GemmLaw:
    """efficiency: of peak FLOPs, one for each of TILES. memory: share of peak bandwidth. launch_us, tile_us: fixed
    time.

    sms, flops_per_us, bytes_per_us: of the device. weight_bytes, input_bytes: of one weight with its scales, of one
    element of the input.
    """

    efficiency: tuple[float, ...]
    memory: float
    launch_us: float
    tile_us: float
    sms: int
    flops_per_us: float
    bytes_per_us: float
    weight_bytes: float = 2.0
    input_bytes: float = 2.0

    def us(self, rows: ArrayLike, n: ArrayLike, k: ArrayLike) -> Array:
        """Microseconds of [rows, k] x [k, n]."""
        m, n, k = (np.asarray(a, float) for a in (rows, n, k))
        moved = self.weight_bytes * n * k + self.input_bytes * m * k + ELEMENT_BYTES * m * n
        moved = moved / (self.bytes_per_us * self.memory)
        fastest = None
        for (tile_m, tile_n), share in zip(TILES, self.efficiency, strict=True):
            tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n)
            one = 2.0 * tile_m * tile_n * k * self.sms / (self.flops_per_us * share) + self.tile_us
            for split in SPLITS_OF_K:
                partial = 0.0 if split == 1 else 8.0 * split * m * n / self.bytes_per_us
                us = np.ceil(tiles * split / self.sms) * (one / split) + partial
                fastest = us if fastest is None else np.minimum(fastest, us)
        assert fastest is not None
        return np.asarray((fastest**JOIN + moved**JOIN) ** (1.0 / JOIN) + self.launch_us)


def stored_as(dtype: str) -> tuple[str, float, float]:
    """(dtype of the products, bytes of a weight with its scales, bytes of an input) of a 16-bit dtype or a format."""
    if dtype not in FORMATS:
        return "bfloat16", float(ELEMENT_BYTES), float(ELEMENT_BYTES)
    products, weight = FORMATS[dtype].products, FORMATS[dtype].bits / 8
    return products or "bfloat16", weight, float(dtype_bytes(products)) if products else float(ELEMENT_BYTES)


POINTS = 3000
LEAST_WIDTH = 512
"""Narrower matrices are of no language model's layer; they stay on the grid but do not shape the law."""


SAME_TILE = (2, 15)
"""Row counts of one tile, whichever is taken: they do the same work, and are repeats of each other."""
LEAST_REPEATS = 3
NOISY = 0.03

BETWEEN = "gemm between"
"""Operator of a curve that was not measured but filled in (`profiler.operators.fitting.learnt_gemms`)."""


def gemm_noise(curves: tuple[RowCurve, ...], law: GemmLaw) -> float | None:
    """P90 of |time / median - 1| among row counts that fill one tile (2 to 15); None where too few were measured."""
    spreads = []
    for curve in curves:
        same = _same_tile(curve)
        if curve.k and min(curve.n, curve.k) >= LEAST_WIDTH and same.sum() >= LEAST_REPEATS:
            miss = misses(law, curve)[same]
            spreads.append(np.abs(np.expm1(miss - np.median(miss))))
    return float(np.quantile(np.concatenate(spreads), 0.9)) if spreads else None


def without_noise(curves: tuple[RowCurve, ...], law: GemmLaw) -> tuple[RowCurve, ...]:
    """Curves whose counts of one tile are corrected as their median says, where these scatter more than NOISY.

    The kernel tables of H100, H200 and A100 have two modes 10 to 18 % apart, hit at random from one count to the next.
    Larger counts stay as measured: each may have a kernel of its own.
    """
    noise = gemm_noise(curves, law)
    if noise is None or noise < NOISY:
        return curves
    calm = []
    for curve in curves:
        same = _same_tile(curve)
        if curve.k and same.sum() >= LEAST_REPEATS:
            us = curve.us.copy()
            us[same] = law.us(curve.rows[same], curve.n, curve.k) * np.exp(np.median(misses(law, curve)[same]))
            curve = RowCurve(curve.operator, curve.n, curve.k, curve.rows, us)
        calm.append(curve)
    return tuple(calm)


def _same_tile(curve: RowCurve) -> NDArray[np.bool_]:
    return np.asarray((curve.rows >= SAME_TILE[0]) & (curve.rows <= SAME_TILE[1]))


def fit_gemm_law(curves: tuple[RowCurve, ...], hardware: Hardware, dtype: str = "bfloat16") -> GemmLaw | None:
    """Efficiencies that minimise the log error over (a sample of) all measured GEMMs; None where there is none.

    dtype: of the weights, or a format of `profiler.specs.number_format.FORMATS`.
    """
    from scipy.optimize import least_squares

    points = [
        (curve.rows, np.full(len(curve.rows), float(curve.n)), np.full(len(curve.rows), float(curve.k)), curve.us)
        for curve in curves
        if curve.k
    ]
    if not points:
        return None
    m, n, k, us = (np.concatenate(column) for column in zip(*points, strict=True))
    wide = (n >= LEAST_WIDTH) & (k >= LEAST_WIDTH)
    if wide.any():
        m, n, k, us = m[wide], n[wide], k[wide], us[wide]
    keep = np.random.default_rng(0).permutation(len(m))[:POINTS]
    m, n, k, us = m[keep], n[keep], k[keep], us[keep]
    products, weight_bytes, input_bytes = stored_as(dtype)
    device = (hardware.sms, hardware.peak(products) / 1e6, hardware.memory_bandwidth / 1e6, weight_bytes, input_bytes)

    def law_of(x: Array) -> GemmLaw:
        share = 1.0 / (1.0 + np.exp(-x[:-2]))
        launch, tile = np.exp(x[-2:])
        return GemmLaw(tuple(float(e) for e in share[:-1]), float(share[-1]), float(launch), float(tile), *device)

    start = np.array([1.0] * len(TILES) + [1.2, 1.0, 0.0])
    found = least_squares(
        lambda x: np.log(law_of(x).us(m, n, k) / us),
        start,
        loss="soft_l1",
        f_scale=0.05,
        diff_step=1e-2,
        max_nfev=60,
        bounds=(start - 6.0, start + 6.0),
    )
    return law_of(found.x)


SMALLEST_TILE = 16
"""Rows of the smallest matrix product of a tensor core (m16n8k16): no kernel's tile is lower."""
CLOSE_ROWS = 16
"""Counts this close fill the same tiles: those between two measured ones are corrected as the upper one. (On a profile
of every row count, P95 of the error between every 16th falls from 8.6 to 2.3 %.)"""


def curve_us(law: GemmLaw | None, curve: RowCurve, rows: ArrayLike) -> Array:
    """A measured GEMM at any row count: the law, corrected as the nearest measured counts say."""
    wanted = np.maximum(np.asarray(rows, float), 1.0)
    if law is None:
        return curve.smooth_us(wanted)
    miss = misses(law, curve)
    between = np.interp(np.log(wanted), np.log(np.maximum(curve.rows, 1)), miss)
    above = np.minimum(np.searchsorted(curve.rows, wanted), len(miss) - 1)
    below = np.maximum(above - 1, 0)
    gap = curve.rows[above] - curve.rows[below]
    # Up to a whole number of the smallest tiles the lower count fills the same ones, the upper one a tile more.
    tile = np.ceil(wanted / SMALLEST_TILE)
    lower = (tile == np.ceil(curve.rows[below] / SMALLEST_TILE)) & (tile < np.ceil(curve.rows[above] / SMALLEST_TILE))
    step = np.where(lower, miss[below], miss[above])
    return law.us(wanted, curve.n, curve.k) * np.exp(np.where(gap <= CLOSE_ROWS, step, between))


def is_grid(curves: Iterable[RowCurve]) -> bool:
    """Whether measured GEMMs make a grid of widths and depths, or are a few scattered ones."""
    shapes = {(curve.n, curve.k) for curve in curves if curve.k and curve.operator != BETWEEN}
    full = len({n for n, _ in shapes}) * len({k for _, k in shapes})
    return len(shapes) > 20 and len(shapes) >= 0.5 * full


def gemm_grid(law: GemmLaw | None, curves: tuple[RowCurve, ...]) -> Lattice | None:
    """Corrections over (rows, n, k) where the measured shapes make a grid; None where they are a few scattered ones."""
    if law is None or not is_grid(curves):
        return None
    known = tuple(curve for curve in curves if curve.k)
    columns = [
        (curve.rows, np.full(len(curve.rows), curve.n), np.full(len(curve.rows), curve.k), misses(law, curve))
        for curve in known
    ]
    m, n, k, miss = (np.concatenate(column).astype(float) for column in zip(*columns, strict=True))
    # Curves that were filled in lack depths and rows that others have; along depths least changes.
    filled_in = any(curve.operator == BETWEEN for curve in known)
    return Lattice.from_points([m, n, k], miss, fill_order=(2, 0, 1) if filled_in else (1, 2, 0))


def composed_curve(
    law: GemmLaw | None, curves: tuple[RowCurve, ...], grid: Lattice | None, name: str, n: int, k: int
) -> RowCurve:
    """A GEMM of a shape that was not measured: the law, corrected as the nearest measured shapes say.

    Between the shapes of a `gemm_grid` the correction is interpolated, among a few scattered shapes it is their mean
    weighted by nearness.
    """
    known = tuple(curve for curve in curves if curve.k)
    if law is None or not known:
        raise ProfileError(f"fitted model: no GEMM to compose {name} ({n} x {k}) from")
    rows = np.unique(np.concatenate([curve.rows for curve in known]))
    miss = grid(rows, float(n), float(k)) if grid is not None else _nearest(law, known, rows, n, k)
    return RowCurve(name, n, k, rows, law.us(rows, n, k) * np.exp(miss))


def misses(law: GemmLaw, curve: RowCurve) -> Array:
    """log(measured / law) at the curve's row counts."""
    return np.log(curve.us / law.us(curve.rows, curve.n, curve.k))


def _nearest(law: GemmLaw, known: tuple[RowCurve, ...], rows: Array, n: int, k: int) -> Array:
    total, mass = np.zeros(len(rows)), 0.0
    for curve in known:
        distance = np.hypot(np.log2(curve.n / n), np.log2(curve.k / k))
        weight = 1.0 / (distance**2 + 0.01)
        total += weight * np.interp(np.log(np.maximum(rows, 1)), np.log(np.maximum(curve.rows, 1)), misses(law, curve))
        mass += weight
    return total / mass
