"""What was learned about one device: curves of row operators, attention fits, collectives, and where they come from.

This is what a model file holds (`profiler.operators.fitting.model_file`) and what `profiler.operators.compose` turns
into a cost model of any dense model on that device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from profiler.errors import ProfileError
from profiler.operators.fitting.attention_family import AttentionFamily, fit_families, nearest_family
from profiler.operators.fitting.attention_fit import AttentionFit, fit_attention, transferred
from profiler.operators.fitting.error_sizes import Spread
from profiler.operators.fitting.learnt_gemms import learnt_gemms
from profiler.operators.fitting.noise_floor import attention_floors, gemm_floor, summary
from profiler.operators.fitting.tabled_mixed import tabled
from profiler.operators.laws.gemm_law import (
    GemmLaw,
    composed_curve,
    curve_us,
    fit_gemm_law,
    gemm_grid,
    gemm_noise,
    stored_as,
    without_noise,
)
from profiler.operators.laws.lattice import Lattice
from profiler.operators.laws.physical_floor import GemmFloor
from profiler.operators.laws.row_curves import RowCurve
from profiler.specs.number_format import FORMATS

if TYPE_CHECKING:
    import pandas as pd

    from profiler.measurements.profile import Profile
    from profiler.specs.hardware import Hardware


@dataclass(frozen=True)
class Collective:
    """All-reduce among `participants` devices over bytes (`curve.rows`)."""

    participants: int
    curve: RowCurve


@dataclass(frozen=True)
class DeviceFit:
    """Everything fitted from one profile.

    attention: head layouts with fits of their own; families: where a kernel table has dozens of layouts.
    gpu: its name in the hardware table. curves: row operators; several GEMMs carry the operator name "gemm". profiled:
    the models that were measured themselves, as (model, tensor_parallel). terms: `EngineTerms` that differ from their
    defaults, after a calibration on a live run. errors: held-out errors by operator (see
    `profiler.judging.holdout`), worst: their worst cases by name; spreads: what is drawn from them
    (`profiler.operators.fitting.error_sizes`).
    noise: relative spread of repeats by operator, or where a profile keeps none its floor
    (`profiler.operators.fitting.noise_floor`).
    """

    gpu: str
    dtype: str
    curves: tuple[RowCurve, ...]
    attention: tuple[AttentionFit, ...] = ()
    families: tuple[AttentionFamily, ...] = ()
    gemm_law: GemmLaw | None = None
    collectives: tuple[Collective, ...] = ()
    profiled: tuple[tuple[str, int], ...] = ()
    terms: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    worst: tuple[str, ...] = ()
    spreads: Mapping[str, Spread] = field(default_factory=dict)

    def curve(self, operator: str, n: int, k: int) -> RowCurve | None:
        """The curve measured for this operator and width, or for a GEMM of no particular model with it."""
        for curve in self.curves:
            if curve.n == n and curve.k == k and (curve.operator == operator or (k and curve.operator == "gemm")):
                return curve
        return None

    def nearest(self, operator: str, n: int) -> RowCurve | None:
        """The curve of a row operator whose width is nearest to `n`, restated for it."""
        found = [curve for curve in self.curves if curve.operator == operator]
        if not found:
            return None
        return min(found, key=lambda curve: max(curve.n, n) / min(curve.n, n)).widened(n)

    def gemm(self, name: str, n: int, k: int) -> tuple[RowCurve, bool]:
        """The curve of a GEMM, and whether it was measured in this shape."""
        found = self.curve(name, n, k)
        if found is not None:
            return found, True
        return composed_curve(self.gemm_law, self.curves, self._gemm_grid, name, n, k), False

    def between_gemms(self, n: int, k: int) -> bool:
        """Whether a GEMM of this shape is interpolated on the grid of measured ones."""
        grid = self._gemm_grid
        return grid is not None and all(
            axis[0] <= size <= axis[-1] for axis, size in zip(grid.axes[1:], (n, k), strict=True)
        )

    def gemms_around(self, n: int, k: int) -> list[RowCurve]:
        """Measured GEMMs at the corners of the cell of widths and depths that this shape lies in; none where one of
        them is missing."""
        known = {(curve.n, curve.k): curve for curve in self.curves if curve.k and curve.operator == "gemm"}
        sides = []
        for size, values in ((n, {one for one, _ in known}), (k, {one for _, one in known})):
            below, above = [one for one in values if one <= size], [one for one in values if one >= size]
            if not below or not above:
                return []
            sides.append((max(below), min(above)))
        corners = [(width, depth) for width in dict.fromkeys(sides[0]) for depth in dict.fromkeys(sides[1])]
        return [known[corner] for corner in corners] if all(corner in known for corner in corners) else []

    @cached_property
    def _gemm_grid(self) -> Lattice | None:
        return gemm_grid(self.gemm_law, self.curves)

    def gemm_us(self, curve: RowCurve, rows: Any) -> Any:
        """Microseconds of a GEMM at any row count."""
        return curve_us(self.gemm_law, curve, rows)

    def attention_of(self, heads: int, kv_heads: int, head_dim: int) -> tuple[AttentionFit, bool]:
        """The fit of a head layout, and whether it was measured itself; raises ProfileError where none can serve."""
        for fit in self.attention:
            if (fit.heads, fit.kv_heads, fit.head_dim) == (heads, kv_heads, head_dim):
                return fit, True
        family = nearest_family(self.families, heads, kv_heads, head_dim)
        if family is not None:
            measured = family.group * kv_heads == heads and f"decode:{kv_heads}" in family.misses
            return family.for_layout(heads, kv_heads), measured
        near = [family.for_layout(heads, kv_heads) for family in self.families] or list(self.attention)
        if not near:
            raise ProfileError(f"fitted model {self.gpu}: no attention was measured")
        closest = min(near, key=lambda fit: abs(fit.heads / fit.kv_heads - heads / kv_heads))
        rate = self.gemm_law.bytes_per_us if self.gemm_law is not None else None
        return transferred(closest, heads, kv_heads, head_dim, rate), False


def fit_device(profile: Profile, hardware: Hardware) -> DeviceFit:
    """Fit every operator of a profile of one device and dtype; raises ProfileError."""
    table = profile.table
    devices, dtypes = table["device"].unique(), table["dtype"].unique()
    if len(devices) != 1 or len(dtypes) != 1:
        raise ProfileError(f"profile: found devices {list(devices)} and dtypes {list(dtypes)}, expected one of each")
    rowwise = table[~table["operator"].isin(("attention", "all_reduce", "send", "iteration", "after_chunks"))]
    if (rowwise["n"] < 1).any():
        operator = rowwise.loc[rowwise["n"] < 1, "operator"].iloc[0]
        raise ProfileError(f"profile: operator {operator}: n: found less than 1, expected the width of its rows")
    dtype = str(dtypes[0])
    plain = dtype not in FORMATS
    warm = cache_warm(rowwise, hardware, stored_as(dtype)[1])
    rowwise = rowwise[~warm]
    curves = tuple(
        RowCurve.from_points(str(operator), int(n), int(k), group["rows"], group["median_s"] * 1e6)
        for (operator, n, k), group in rowwise.groupby(["operator", "n", "k"], sort=True)
    )
    rows = profile.rows_of("attention")
    layouts = rows.groupby(["heads", "kv_heads", "head_dim"], sort=True)
    attention: tuple[AttentionFit, ...] = ()
    families: tuple[AttentionFamily, ...] = ()
    if len(layouts) > MANY_LAYOUTS:
        kernel = "fa3" if rows["backend"].str.contains("fa3").any() else "fa2"
        families = fit_families(rows, hardware, kernel, learning=plain)
    else:
        attention = tuple(tabled(fit_attention(group, hardware.sms)) for _, group in layouts)
    collectives = tuple(
        Collective(int(tp), RowCurve.from_points("all_reduce", 0, 0, group["bytes"], group["median_s"] * 1e6))
        for tp, group in profile.rows_of("all_reduce").groupby("tensor_parallel", sort=True)
    )
    if not curves and not attention and not families:
        raise ProfileError("profile: no operator that can be fitted")
    models = table.loc[table["model"] != "", ["model", "tensor_parallel"]].drop_duplicates()
    profiled = tuple((str(model), int(tp)) for model, tp in models.itertuples(index=False))
    provenance = {**profile.provenance, "rows": len(table)}
    if warm.any():
        provenance["cache_warm_gemms_not_fitted"] = int(warm.sum())
    law = fit_gemm_law(curves, hardware, dtype)
    noise = _noise(table)
    if law is not None:
        floors = {"gemm": gemm_floor(law, curves), **attention_floors(rows, families)}
        noise |= summary(floors)
        scatter = None if len(floors["gemm"]) else gemm_noise(curves, law)
        noise |= {} if scatter is None else {"gemm, counts of one tile, p90": scatter}
        # Formats of fewer bits keep the counts and widths that were measured: they are many, and files stay small.
        curves = learnt_gemms(law, without_noise(curves, law)) if plain else without_noise(curves, law)
    return DeviceFit(
        gpu=hardware.name,
        dtype=dtype,
        curves=curves,
        attention=attention,
        families=families,
        gemm_law=law,
        collectives=collectives,
        profiled=profiled,
        provenance=provenance,
        noise=noise,
    )


def cache_warm(rows: pd.DataFrame, hardware: Hardware, weight_bytes: float = 2.0) -> NDArray[np.bool_]:
    """Which GEMMs of a kernel table took less than their weights need at full bandwidth: repeated calls found them in
    a cache, where no engine that runs one layer after another finds them."""
    streams = GemmFloor(np.inf, hardware.memory_bandwidth / 1e6, weight_bytes)
    n, k = rows["n"].to_numpy(float), rows["k"].to_numpy(float)
    return np.asarray((k > 0) & (rows["median_s"].to_numpy() * 1e6 < streams.us(rows["rows"].to_numpy(), n, k)))


MANY_LAYOUTS = 8
"""With more head layouts than this a profile is a kernel table of a device rather than the profile of a model."""


def _noise(table: Any) -> dict[str, float]:
    """Median half-spread (max - min) / 2 / median of each operator's repeats, where a profile tells them."""
    known = table[table["min_s"].notna() & table["max_s"].notna()]
    spread = (known["max_s"] - known["min_s"]) / 2 / known["median_s"]
    return {str(key): float(value) for key, value in spread.groupby(known["operator"]).median().items()}
