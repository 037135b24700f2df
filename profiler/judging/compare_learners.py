"""Ways of predicting a structure that was not measured, held beside each other on the same left-out rows.

For every operator and axis the halves of `profiler.judging.holdout` are left out, and each way predicts them: the
law alone,
the law corrected by an interpolated table, by boosted trees, by a Gaussian process, and a random forest without any
law. "nested" chooses among these by halves left out of the *training* rows only, so its error is what somebody gets who
may not look at the answers; all others are chosen by whoever reads the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from profiler.judging.holdout import AIMS, KINDS, NAMES, curves_of, used_gemms
from profiler.operators.fitting.attention_family import fit_families, nearest_family
from profiler.operators.fitting.attention_fit import AttentionFit, batch_columns, fit_attention
from profiler.operators.fitting.device_fit import MANY_LAYOUTS
from profiler.operators.fitting.folds import folds
from profiler.operators.fitting.learners import Boosting, Forest, GaussianProcess, Learner
from profiler.operators.fitting.noise_floor import USED_ROWS
from profiler.operators.laws.gemm_law import composed_curve, curve_us, fit_gemm_law, gemm_grid, without_noise
from profiler.operators.laws.lattice import stretched

if TYPE_CHECKING:
    import pandas as pd

    from profiler.measurements.profile import Profile
    from profiler.specs.hardware import Hardware

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

LEARNERS: Mapping[str, Callable[[], Learner]] = {
    "law + boosting": Boosting,
    "law + Gaussian process": GaussianProcess,
    "forest, no law": Forest,
}
METHODS = ("law", "law + table", *LEARNERS)
NESTED = "nested"


@dataclass(frozen=True)
class Compared:
    """Errors of one method on one structure; `chosen`: for "nested", what each half chose."""

    structure: str
    method: str
    rows: int
    median: float
    p95: float
    chosen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Structure:
    """Rows of one operator with an axis to leave values of out.

    points: [rows, coordinates] for learners. scored: rows whose errors count. train: law and table of the rows that are
    known, both as microseconds of every row.
    """

    name: str
    values: Array
    us: Array
    points: Array
    scored: Mask
    train: Callable[[Mask], tuple[Array, Array]]
    most: float = np.inf

    def halves(self, known: Mask) -> Iterator[Mask]:
        """Rows that are left out of `known`, one half of the axis' values after the other."""
        for chosen in folds(self.values[known & self.scored], most=self.most):
            yield known & np.isin(self.values, chosen)

    def predicted(self, known: Mask, left: Mask) -> dict[str, Array]:
        """Relative errors of every method on the rows of `left` that count."""
        law, table = self.train(known)
        asked, taught = left & self.scored, known & self.scored
        times = {"law": law[asked], "law + table": table[asked]}
        for name, learner in LEARNERS.items():
            start = np.ones(len(law)) if learner is Forest else law
            miss = np.log(self.us / start)
            times[name] = start[asked] * np.exp(learner().fit(self.points[taught], miss[taught])(self.points[asked]))
        return {name: np.abs(us / self.us[asked] - 1.0) for name, us in times.items()}


def compare(profile: Profile, hardware: Hardware, only: str = "") -> list[Compared]:
    """Every method, and their nested choice, on every structure of a profile whose name contains `only`."""
    found = []
    for group in _by_name(s for s in structures(profile, hardware) if only in s.name).items():
        found += _compared(*group)
    return found


def _by_name(structures: Iterator[Structure]) -> dict[str, list[Structure]]:
    """Layouts of one profile are scored together."""
    found: dict[str, list[Structure]] = {}
    for one in structures:
        found.setdefault(one.name, []).append(one)
    return found


def _compared(name: str, layouts: list[Structure]) -> list[Compared]:
    errors: dict[str, list[Array]] = {method: [] for method in (*METHODS, NESTED)}
    chosen = []
    for one in layouts:
        everything = np.full(len(one.us), True)
        for left in one.halves(everything):
            known = everything & ~left
            outer = one.predicted(known, left)
            inner = [one.predicted(known & ~deeper, deeper) for deeper in one.halves(known)]
            best = min(METHODS, key=lambda method: _score(np.concatenate([half[method] for half in inner])))
            for method, error in (*outer.items(), (NESTED, outer[best])):
                errors[method].append(error)
            chosen.append(best)
    rows = []
    for method, parts in errors.items():
        if parts:
            size = np.concatenate(parts)
            picked = tuple(chosen) if method == NESTED else ()
            rows.append(
                Compared(name, method, len(size), float(np.median(size)), float(np.quantile(size, 0.95)), picked)
            )
    return rows


def _score(error: Array) -> float:
    """Median and P95, each as a multiple of its aim."""
    return float(np.median(error) / AIMS["median"] + np.quantile(error, 0.95) / AIMS["p95"])


def text(found: list[Compared]) -> str:
    """A table for people: median / P95 in percent, a structure a line."""
    names = list(dict.fromkeys(row.structure for row in found))
    lines = [f"{'left out':24}" + "".join(f"{method:>24}" for method in (*METHODS, NESTED))]
    for name in names:
        mine = {row.method: row for row in found if row.structure == name}
        cells = [f"{mine[method].median:.1%} / {mine[method].p95:.1%}" for method in (*METHODS, NESTED)]
        lines.append(f"{name:24}" + "".join(f"{cell:>24}" for cell in cells))
        lines.append(f"{'':24}chosen inside: {', '.join(mine[NESTED].chosen)}")
    return "\n".join(lines)


# --- structures ------------------------------------------------------------------------------------------------------


def structures(profile: Profile, hardware: Hardware) -> Iterator[Structure]:
    """Everything that `profiler.judging.holdout` leaves out, whole iterations aside."""
    table = profile.table
    gemms = table[(table["k"] > 0) & (table["operator"] != "head")].reset_index(drop=True)
    if len(gemms):
        yield from _gemms(gemms, hardware)
    attention = profile.rows_of("attention")
    layouts = attention.groupby(["heads", "kv_heads", "head_dim"], sort=True)
    if len(layouts) > MANY_LAYOUTS:
        yield from _families(attention.reset_index(drop=True), hardware)
    else:
        for _, rows in layouts:
            yield from _layout(rows, hardware)


def _gemms(table: pd.DataFrame, hardware: Hardware) -> Iterator[Structure]:
    m, n, k = (table[key].to_numpy(float) for key in ("rows", "n", "k"))
    us = table["median_s"].to_numpy(float) * 1e6
    tiles = np.ceil(m / 128) * np.ceil(n / 128) / hardware.sms
    points = np.log2(np.stack([np.maximum(m, 1), n, k, tiles, np.ceil(tiles) / tiles], axis=1))
    shapes = table.groupby(["n", "k"]).indices

    def train(known: Mask, composed: bool) -> tuple[Array, Array]:
        law_us, table_us = np.ones(len(us)), np.ones(len(us))
        curves = curves_of(table[known])
        law = fit_gemm_law(curves, hardware)
        calm = without_noise(curves, law) if law is not None else curves
        grid = gemm_grid(law, calm) if composed else None
        own = {(curve.n, curve.k): curve for curve in calm}
        for (width, depth), at in shapes.items():
            shape = int(width), int(depth)
            curve = own.get(shape) if not composed else None
            if curve is None and composed:
                curve = composed_curve(law, calm, grid, "gemm", *shape)
            if curve is not None:
                table_us[at] = curve_us(law, curve, m[at])
            law_us[at] = law.us(m[at], *shape) if law is not None else table_us[at]
        return law_us, table_us

    scored = used_gemms(table).to_numpy()
    yield Structure("gemm rows", m, us, points, scored, lambda known: train(known, False), USED_ROWS)
    if len(shapes) > 100:
        yield Structure("gemm widths", n, us, points, scored, lambda known: train(known, True))
        yield Structure("gemm depths", k, us, points, scored, lambda known: train(known, True))


def _points(batches: pd.DataFrame, *more: Array) -> Array:
    """Coordinates of attention, stretched as in the tables; all decodes' tokens and the chunk's end beside them."""
    tokens, prefix, decodes, context = (
        batches[key].to_numpy(float) for key in ("tokens", "prefix", "decodes", "context")
    )
    columns = [*map(stretched, (tokens, prefix, decodes, context, decodes * context, tokens + prefix)), *more]
    return np.stack([column for column in columns if np.ptp(column) > 0], axis=1)


def _layout(table: pd.DataFrame, hardware: Hardware) -> Iterator[Structure]:
    batches = batch_columns(table)
    even = ((batches["longest"] <= np.ceil(batches["context"])) & ~batches["twin"]).to_numpy()
    table, batches = table[even].reset_index(drop=True), batches[even].reset_index(drop=True)
    for kind, (which, axes) in KINDS.items():
        mine = which(batches).to_numpy()
        b, others, own = batches[mine], table[~mine], table[mine]
        if not len(b):
            continue

        def train(
            known: Mask, kind: str = kind, b: pd.DataFrame = b, others: pd.DataFrame = others, own: pd.DataFrame = own
        ) -> tuple[Array, Array]:
            import pandas as pd

            fit = fit_attention(pd.concat([others, own[known]]) if kind == "mixed" else own[known], hardware.sms)
            return _asked(fit.by_law(), kind, b), _asked(fit, kind, b)

        for axis in axes:
            everyone = np.full(len(b), True)
            values = b[axis].to_numpy(float)
            yield Structure(f"{kind} {NAMES[axis]}", values, b["us"].to_numpy(float), _points(b), everyone, train)


def _asked(fit: AttentionFit, kind: str, b: pd.DataFrame) -> Array:
    if kind == "decode":
        return fit.decode_us(b["decodes"], b["context"])
    if kind == "prefill":
        return fit.prefill_us(b["tokens"], b["prefix"])
    return fit.batch_us(b["tokens"], b["prefix"], b["decodes"], b["context"])


def _families(table: pd.DataFrame, hardware: Hardware) -> Iterator[Structure]:
    batches = batch_columns(table)
    usual = ((table["heads"] / table["kv_heads"]).isin((1, 4, 8)) & (table["head_dim"] == 128)).to_numpy()
    decoding, single = (batches["tokens"] == 0).to_numpy(), (batches["chunks"] == 1).to_numpy()
    kernel = "fa3" if table["backend"].str.contains("fa3").any() else "fa2"
    heads, kv_heads = table["heads"].to_numpy(float), table["kv_heads"].to_numpy(float)
    streams = np.log2(np.maximum(batches["decodes"].to_numpy(float), 1) * kv_heads)
    blocks = np.log2(heads * np.maximum(np.ceil(batches["tokens"].to_numpy(float) / 128), 1))
    for kind, axes, mine in (
        ("decode", ("decodes", "context"), usual & decoding),
        ("prefill", ("tokens",), usual & single & ~decoding),
    ):
        alike = decoding if kind == "decode" else ~decoding
        own, b = table[alike], batches[alike]
        layouts = table[mine].groupby(["heads", "kv_heads"]).groups
        places = {layout: own.index.get_indexer(rows) for layout, rows in layouts.items()}
        chunks = np.log2(np.maximum(b["chunks"].to_numpy(float), 1))
        points = _points(b, np.log2(heads[alike]), np.log2(kv_heads[alike]), streams[alike], blocks[alike], chunks)

        def train(
            known: Mask,
            kind: str = kind,
            own: pd.DataFrame = own,
            b: pd.DataFrame = b,
            alike: Mask = alike,
            places: Mapping[tuple[float, float], NDArray[np.int64]] = places,
        ) -> tuple[Array, Array]:
            import pandas as pd

            rows = pd.concat([own[known], table[~alike]])
            families = fit_families(rows, hardware, kernel, learning=False)
            law_us, table_us = np.ones(len(own)), np.ones(len(own))
            for (h, kv), at in places.items():
                fit = nearest_family(families, int(h), int(kv), 128).for_layout(int(h), int(kv))
                rows = b.iloc[at]
                law_us[at], table_us[at] = _asked(fit.by_law(), kind, rows), _asked(fit, kind, rows)
            return law_us, table_us

        for axis in axes:
            values, us = b[axis].to_numpy(float), b["us"].to_numpy(float)
            yield Structure(f"{kind} {NAMES[axis]}", values, us, points, mine[alike], train)
