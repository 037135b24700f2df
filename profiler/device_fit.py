"""What was learned about one device: curves of row operators, attention fits, collectives, and where they come from.

This is what a model file holds (`profiler.model_file`) and what `profiler.compose` turns into a cost model of any dense
model on that device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from profiler.attention_fit import AttentionFit, fit_attention
from profiler.errors import ProfileError
from profiler.row_curves import RowCurve

if TYPE_CHECKING:
    from profiler.hardware import Hardware
    from profiler.profile import Profile


@dataclass(frozen=True)
class Collective:
    """All-reduce among `participants` devices over bytes (`curve.rows`)."""

    participants: int
    curve: RowCurve


@dataclass(frozen=True)
class DeviceFit:
    """Everything fitted from one profile.

    gpu: its name in the hardware table. curves: row operators; several GEMMs carry the operator name "gemm". profiled:
    the models that were measured themselves, as (model, tensor_parallel). errors: held-out errors by operator (see
    `profiler.holdout`). noise: relative spread of repeats by operator.
    """

    gpu: str
    dtype: str
    curves: tuple[RowCurve, ...]
    attention: tuple[AttentionFit, ...]
    collectives: tuple[Collective, ...] = ()
    profiled: tuple[tuple[str, int], ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)

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

    def attention_of(self, heads: int, kv_heads: int, head_dim: int) -> AttentionFit | None:
        for fit in self.attention:
            if (fit.heads, fit.kv_heads, fit.head_dim) == (heads, kv_heads, head_dim):
                return fit
        return None


def fit_device(profile: Profile, hardware: Hardware) -> DeviceFit:
    """Fit every operator of a profile of one device and dtype; raises ProfileError."""
    table = profile.table
    devices, dtypes = table["device"].unique(), table["dtype"].unique()
    if len(devices) != 1 or len(dtypes) != 1:
        raise ProfileError(f"profile: found devices {list(devices)} and dtypes {list(dtypes)}, expected one of each")
    rowwise = table[~table["operator"].isin(("attention", "all_reduce", "send", "iteration"))]
    curves = tuple(
        RowCurve.from_points(str(operator), int(n), int(k), group["rows"], group["median_s"] * 1e6)
        for (operator, n, k), group in rowwise.groupby(["operator", "n", "k"], sort=True)
    )
    layouts = ["heads", "kv_heads", "head_dim"]
    attention = tuple(
        fit_attention(group, hardware.sms) for _, group in profile.rows_of("attention").groupby(layouts, sort=True)
    )
    collectives = tuple(
        Collective(int(tp), RowCurve.from_points("all_reduce", 0, 0, group["bytes"], group["median_s"] * 1e6))
        for tp, group in profile.rows_of("all_reduce").groupby("tensor_parallel", sort=True)
    )
    if not curves and not attention:
        raise ProfileError("profile: no operator that can be fitted")
    models = table.loc[table["model"] != "", ["model", "tensor_parallel"]].drop_duplicates()
    profiled = tuple((str(model), int(tp)) for model, tp in models.itertuples(index=False))
    provenance = {**profile.provenance, "rows": len(table)}
    return DeviceFit(
        hardware.name, str(dtypes[0]), curves, attention, collectives, profiled, provenance, noise=_noise(table)
    )


def _noise(table: Any) -> dict[str, float]:
    """Median half-spread (max - min) / 2 / median of each operator's repeats, where a profile tells them."""
    known = table[table["min_s"].notna() & table["max_s"].notna()]
    spread = (known["max_s"] - known["min_s"]) / 2 / known["median_s"]
    return {str(key): float(value) for key, value in spread.groupby(known["operator"]).median().items()}
