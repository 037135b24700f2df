"""How far a fit is off where it has not measured, by structure and region: what random errors are drawn from.

Held-out errors of six GPUs say three things. One structure's error tells nothing of the next one's (correlation along
the axis that was left out: 0.0, next to it below 0), so an operator is not off by one factor. Along the other
coordinates it is alike over some octaves. And its size differs by ten times between regions, with tails far heavier
than normal. A `Spread` keeps just that of one operator and axis: quantiles of the error's size by region, and how far
it reaches along the other coordinates. `profiler.operators.drawn_errors` draws from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from profiler.operators.fitting.attention_fit import batch_columns
from profiler.operators.fitting.error_factors import IN_MEMORY

if TYPE_CHECKING:
    import pandas as pd

    from profiler.measurements.profile import Profile
    from profiler.operators.fitting.checked_json import Entry

Array = NDArray[np.float64]

COORDINATES = {
    "gemm": ("rows", "n", "k"),
    "decode": ("decodes", "context"),
    "prefill": ("tokens", "prefix"),
    "mixed": ("tokens", "prefix", "decodes", "context"),
}
AXES = {
    "gemm rows": "rows",
    "gemm widths": "n",
    "gemm depths": "k",
    "decode batch sizes": "decodes",
    "decode contexts": "context",
    "prefill chunk sizes": "tokens",
    "prefill prefixes": "prefix",
    "mixed chunk sizes": "tokens",
    "mixed prefixes": "prefix",
    "mixed batch sizes": "decodes",
    "mixed contexts": "context",
}
"""Tables of `profiler.judging.holdout.held_out`, and the coordinate whose values were left out."""

LEVELS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 1.0)
"""Quantiles of |log(predicted / measured)| that are kept."""
WINDOW = 0.75
LEAST = 19
LEAST_STRUCTURES = 8
"""A region: the structures within so many octaves of its centre, and as many more of the nearest as make 19 independent
errors, as many as a 90 % interval needs. Rows of one structure count by how alike their sizes are (`_worth`): four
linear layers of one row count as two, two hundred as a dozen. What a structure has in common it shows once, so that is
asked of so many structures."""
NEIGHBOURS = 4
"""Other structures that tell what size is usual for one."""
REACHES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Octaves between independent errors along a coordinate that was not left out; a fit takes what its errors show."""
LAGS = (0.05, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0)
MOST_PAIRED = 40
FARTHEST = 21.0
"""Octaves of the largest coordinate that a table has."""
MOST_NODES = 1 << 24
LARGEST = 5.0
"""Largest |log error| that a file may hold."""


@dataclass(frozen=True)
class Spread:
    """Errors of one operator where one axis lies between measured values.

    knots: those values. centres: of the regions, in octaves of the axis. sizes: a row a region, the quantiles LEVELS of
    |log error|. common: by region, share of their variance that is the same at all other coordinates. reach: octaves by
    these. floor: what is left of the error at a measured value, where repeats scatter too.
    """

    name: str
    knots: Array
    centres: Array
    sizes: Array
    common: Array
    reach: Mapping[str, float]
    floor: float = 0.0

    @property
    def operator(self) -> str:
        return self.name.split(" ")[0]

    @property
    def axis(self) -> str:
        return AXES[self.name]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Independent values by coordinate: one a gap between knots, and one a reach."""
        return tuple(
            len(self.knots) + 1 if name == self.axis else int(FARTHEST / self.reach[name]) + 3
            for name in COORDINATES[self.operator]
        )


def octaves(values: Any) -> Array:
    """Where a coordinate lies; a prefix or context of 0 lies at 0."""
    return np.asarray(np.log2(np.asarray(values, float) + 1.0))


def measured_spreads(
    tables: Mapping[str, pd.DataFrame], profile: Profile, noise: Mapping[str, float] | None = None
) -> dict[str, Spread]:
    """Spreads of all tables of `held_out` (batches that an engine can run, where those were told apart).

    profile: what is measured, and so where no error is drawn. noise: `DeviceFit.noise`; its medians over those of the
    errors are what is left at measured values.
    """
    found = {}
    for name, axis in AXES.items():
        table = tables.get(name + IN_MEMORY, tables.get(name))
        if table is None or not len(table):
            continue
        operator = name.split(" ")[0]
        places = {one: octaves(values) for one, values in _coordinates(table, operator).items()}
        error = np.log(table["predicted_us"].to_numpy(float) / table["us"].to_numpy(float))
        centres, sizes = _regions(places[axis], np.abs(error))
        scaled = _scaled(places[axis], error)
        everywhere = _common(places[axis], scaled)
        common = np.array([_common(places[axis], scaled, centre) for centre in centres])
        others = [one for one in COORDINATES[operator] if one != axis]
        reach = {one: _reach(table, places, scaled, everywhere, one) for one in others}
        floor = (noise or {}).get(f"{operator} median", 0.0) / max(float(np.median(np.abs(error))), 1e-9)
        found[name] = Spread(name, _measured(profile, name), centres, sizes, common, reach, min(floor, 1.0))
    return found


def held_by_rows(name: str, table: pd.DataFrame) -> tuple[float, float]:
    """Share of one half's rows whose error lies within 90 % of what the other half shows in their region, and the mean
    of these half-widths; both halves in turn. A table that is no operator's is one region."""
    error = np.abs(np.log(table["predicted_us"].to_numpy(float) / table["us"].to_numpy(float)))
    axis = AXES.get(name.removesuffix(IN_MEMORY))
    place = np.zeros(len(error))
    if axis is not None:
        place = octaves(_coordinates(table, name.split(" ")[0])[axis])
    fold = table["fold"].to_numpy()
    shares, widths = [], []
    for one, other in ((0, 1), (1, 0)):
        if not (fold == one).any() or not (fold == other).any():
            continue
        centres, sizes = _regions(place[fold == other], error[fold == other])
        region = np.abs(place[fold == one][:, None] - centres).argmin(axis=1)
        limit = sizes[region, LEVELS.index(0.9)]
        shares.append(float((error[fold == one] <= limit).mean()))
        widths.append(float(np.expm1(limit).mean()))
    return (float(np.mean(shares)), float(np.mean(widths))) if shares else (float("nan"), float("nan"))


def _coordinates(table: pd.DataFrame, operator: str) -> dict[str, Any]:
    if operator == "gemm":
        return {name: table[name].to_numpy(float) for name in COORDINATES["gemm"]}
    batches = batch_columns(table.assign(median_s=table["us"], decode_context_max=0.0, backend=""))
    return {name: batches[name].to_numpy(float) for name in COORDINATES[operator]}


def _measured(profile: Profile, name: str) -> Array:
    """Values of the axis that a profile holds."""
    table, axis = profile.table, AXES[name]
    if name.startswith("gemm"):
        return np.unique(table.loc[(table["k"] > 0) & (table["operator"] != "head"), axis].to_numpy(float))
    batches = batch_columns(profile.rows_of("attention"))
    chunk, decodes = batches["tokens"] > 0, batches["decodes"] > 0
    mine = {"decode": ~chunk, "prefill": chunk & ~decodes, "mixed": chunk & decodes}[name.split(" ")[0]]
    even = (batches["longest"] <= np.ceil(batches["context"])) & ~batches["twin"]
    return np.unique(batches.loc[mine & even, axis].to_numpy(float))


def _regions(place: Array, size: Array) -> tuple[Array, Array]:
    """Centres an octave apart, and the quantiles of the errors around each."""
    structures, structure = np.unique(np.round(place, 4), return_inverse=True)
    worth = _worth(structures, structure, size)
    centres = np.unique(np.round(structures))
    rows = [np.quantile(size[_near(structures, centre, worth, LEAST)[structure]], LEVELS) for centre in centres]
    return centres, np.array(rows)


def _near(structures: Array, centre: float, worth: Array, least: float) -> NDArray[np.bool_]:
    """Which structures a region takes: those within WINDOW, and the nearest whose worth adds up to `least`."""
    apart = np.abs(structures - centre)
    order = np.argsort(apart, kind="stable")
    last = min(int(np.searchsorted(np.cumsum(worth[order]), least - 1e-9)), len(order) - 1)
    return np.asarray(apart <= max(WINDOW, float(apart[order[last]])) + 1e-9)


def _worth(structures: Array, structure: NDArray[np.int64], size: Array) -> Array:
    """Independent errors that each structure is worth: n / (1 + (n - 1) x correlation) of its n rows (Kish's design
    effect). Correlation: of the errors' sizes over what is usual next to a structure, so that a structure which its
    neighbours do not foretell counts as alike in itself."""
    rows, square = np.bincount(structure), np.bincount(structure, size**2)
    usual = np.ones(len(structures))
    for one, place in enumerate(structures):
        others = np.arange(max(one - NEIGHBOURS, 0), min(one + NEIGHBOURS + 1, len(structures)))
        others = others[others != one]
        others = others[np.argsort(np.abs(structures[others] - place), kind="stable")][:NEIGHBOURS]
        if len(others):
            usual[one] = max(float(np.sqrt(square[others].sum() / rows[others].sum())), 1e-9)
    scaled = np.minimum(size / usual[structure], 3.0)
    scaled -= scaled.mean()
    total, pairs = np.bincount(structure, scaled), float(np.sum(rows * (rows - 1)))
    product = float(np.sum(total**2) - np.sum(scaled**2)) / pairs if pairs else 0.0
    alike = min(max(product / max(float(np.mean(scaled**2)), 1e-18), 0.0), 1.0)
    return np.asarray(rows / (1.0 + (rows - 1) * alike))


def _scaled(place: Array, error: Array) -> Array:
    """Errors over what is usual within an octave of their place, the largest cut: they tell likeness, not size."""
    near = np.round(place)
    sizes = {one: max(float(np.sqrt(np.mean(error[near == one] ** 2))), 1e-9) for one in np.unique(near)}
    scaled = np.clip(error / np.array([sizes[one] for one in near]), -3.0, 3.0)
    return np.asarray(scaled / max(float(np.sqrt(np.mean(scaled**2))), 1e-9))


def _common(place: Array, scaled: Array, centre: float | None = None) -> float:
    """Correlation of the errors of one structure, over all pairs of its rows; around `centre`, over LEAST_STRUCTURES.

    1 where no structure has two rows: alike is cautious.
    """
    structures, structure = np.unique(np.round(place, 4), return_inverse=True)
    rows, total, square = (np.bincount(structure, one) for one in (np.ones(len(scaled)), scaled, scaled**2))
    taken = np.ones(len(structures), bool)
    if centre is not None:
        taken = _near(structures, centre, (rows > 1).astype(float), LEAST_STRUCTURES)
    pairs = float(np.sum((rows * (rows - 1.0))[taken]))
    if not pairs:
        return 1.0
    mean = max(float(square[taken].sum() / rows[taken].sum()), 1e-18)
    return min(max(float(np.sum((total**2 - square)[taken])) / pairs / mean, 0.0), 1.0)


def _reach(table: pd.DataFrame, places: Mapping[str, Array], scaled: Array, common: float, along: str) -> float:
    """Octaves along `along` after which errors have no more than `common` in common: the likest of REACHES to what
    pairs of errors show that differ in this coordinate alone."""
    group = np.zeros(len(scaled), np.int64)
    for column in (
        *(place for name, place in places.items() if name != along),
        *(table[name].to_numpy(float) for name in ("fold", "heads", "kv_heads")),
    ):
        _, code = np.unique(np.round(column, 2), return_inverse=True)
        _, group = np.unique(group * (int(code.max()) + 1) + code, return_inverse=True)
    order = np.argsort(group, kind="stable")
    cuts = np.flatnonzero(np.diff(group[order])) + 1
    random = np.random.default_rng(0)
    apart, product = [], []
    for rows in np.split(order, cuts):
        rows = random.choice(rows, MOST_PAIRED, replace=False) if len(rows) > MOST_PAIRED else rows
        one, other = np.triu_indices(len(rows), 1)
        apart.append(np.abs(places[along][rows[one]] - places[along][rows[other]]))
        product.append(scaled[rows[one]] * scaled[rows[other]])
    distance, alike = np.concatenate(apart), np.concatenate(product)
    bins = np.digitize(distance, LAGS)
    used = [place for place in range(1, len(LAGS)) if (bins == place).any()]
    if not used:
        return REACHES[-1]  # nothing to tell by: alike everywhere is the cautious reading
    count = np.array([(bins == place).sum() for place in used], float)
    mean = np.array([alike[bins == place].mean() for place in used])
    lag = np.array([distance[bins == place].mean() for place in used])

    def miss(reach: float) -> float:
        return float(np.sum(count * (mean - common - (1.0 - common) * likeness(lag / reach)) ** 2))

    return min(REACHES, key=miss)


def likeness(apart: Any) -> Array:
    """Correlation of `profiler.operators.drawn_errors` at distances in units of its reach: a lattice of independent
    values at whole numbers and a random place, with straight lines between (a cubic B-spline over its height)."""
    d = np.abs(np.asarray(apart, float))
    near = 1.0 - 1.5 * d**2 + 0.75 * d**3
    return np.asarray(np.where(d < 1.0, near, np.where(d < 2.0, 0.25 * np.maximum(2.0 - d, 0.0) ** 3, 0.0)))


# --- on disk ---------------------------------------------------------------------------------------------------------


def as_document(spread: Spread, keep: Callable[[Any], list[int]]) -> dict[str, Any]:
    """As JSON; keep: puts an array into the file of arrays and says where it lies."""
    arrays = {key: keep(getattr(spread, key)) for key in ("knots", "centres", "sizes", "common")}
    return {"name": spread.name, **arrays, "reach": dict(spread.reach), "floor": spread.floor}


def read_spread(entry: Entry, arrays: Array) -> Spread:
    """Of a file that nobody vouches for: every value is checked."""
    name = entry.text("name")
    if name not in AXES:
        entry.fail("name", name, f"one of {', '.join(AXES)}")
    knots, centres, sizes, common = (entry.array(key, arrays) for key in ("knots", "centres", "sizes", "common"))
    for key, values in (("knots", knots), ("centres", centres)):
        if values.ndim != 1 or (np.diff(values) <= 0).any() or values[0] < 0:
            entry.fail(key, "descending or negative values", "ascending values")
    if sizes.shape != (len(centres), len(LEVELS)):
        entry.fail("sizes", sizes.shape, f"shape {(len(centres), len(LEVELS))}")
    if (np.diff(sizes, axis=1) < 0).any() or sizes.min() < 0 or sizes.max() > LARGEST:
        entry.fail("sizes", "quantiles out of order or bounds", f"ascending from 0 to {LARGEST:g}")
    if common.shape != centres.shape or common.min() < 0 or common.max() > 1:
        entry.fail("common", f"shape {common.shape}", f"shape {centres.shape}, from 0 to 1")
    reach = type(entry)(entry.path, f"{entry.where}.reach", entry.values.get("reach"))
    others = [one for one in COORDINATES[name.split(" ")[0]] if one != AXES[name]]
    if set(reach.values) != set(others):
        entry.fail("reach", sorted(reach.values), f"{', '.join(others)}")
    floor = entry.number("floor", 0.0, 1.0)
    octaves_by = {one: reach.number(one, min(REACHES), max(REACHES)) for one in others}
    spread = Spread(name, knots, centres, sizes, common, octaves_by, floor)
    if math.prod(spread.nodes) > MOST_NODES:
        entry.fail("knots", f"{len(knots)} values", f"at most {MOST_NODES} independent errors, found {spread.nodes}")
    return spread
