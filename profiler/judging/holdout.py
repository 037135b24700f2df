"""Errors on structures that a fit has not seen: whole row counts, widths, chunk sizes, prefixes, batch sizes, contexts.

Along one axis at a time every second measured value is left out of the profile, the fit is made again, and the left-out
rows are predicted; then the other half. The outermost values stay: this measures interpolation, not extrapolation.
Random rows would flatter a fit, since each then has a twin that differs in one number only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from policies.work.batch import BatchShape
from profiler.errors import ProfileError
from profiler.measurements.profile import parse_chunks
from profiler.operators.fitting.attention_family import fit_families, nearest_family
from profiler.operators.fitting.attention_fit import batch_columns, fit_attention
from profiler.operators.fitting.device_fit import MANY_LAYOUTS
from profiler.operators.fitting.error_factors import IN_MEMORY
from profiler.operators.fitting.error_sizes import held_by_rows
from profiler.operators.fitting.folds import folds
from profiler.operators.fitting.learnt_gemms import ROWS, WIDTHS, learnt_gemms
from profiler.operators.fitting.noise_floor import USED_GROUPS, USED_HEAD, USED_ROWS, USED_WIDTHS
from profiler.operators.laws.gemm_law import composed_curve, curve_us, fit_gemm_law, gemm_grid, without_noise
from profiler.operators.laws.row_curves import RowCurve

if TYPE_CHECKING:
    import pandas as pd

    from profiler.measurements.profile import Profile
    from profiler.specs.hardware import Hardware

Array = NDArray[np.float64]

AIMS = {"median": 0.02, "p95": 0.08}
"""Errors aimed at on structures left out."""


def held_out(profile: Profile, hardware: Hardware, *, iterations: bool = True) -> dict[str, pd.DataFrame]:
    """Rows left out, by operator and axis ("gemm rows", "decode contexts", ...): their shape, us and predicted us; and
    where a profile has batches that no engine can run, those tables without them.

    iterations: whole steps of a profiled model too.
    """
    found: dict[str, pd.DataFrame] = {}
    gemms = profile.table[(profile.table["k"] > 0) & (profile.table["operator"] != "head")]
    if len(gemms):
        found |= _gemms(gemms, hardware)
    attention = profile.rows_of("attention")
    layouts = attention.groupby(["heads", "kv_heads", "head_dim"], sort=True)
    if len(layouts) > MANY_LAYOUTS:
        found |= _families(attention, hardware)
    elif len(attention):
        parts: dict[str, list[pd.DataFrame]] = {}
        for _, rows in layouts:
            room = _room(rows, hardware)
            for name, table in _attention(rows, hardware).items():
                parts.setdefault(name, []).append(table)
                parts.setdefault(name + IN_MEMORY, []).append(table[_keys(table) <= room])
        import pandas as pd

        whole = {name: pd.concat(tables, ignore_index=True) for name, tables in parts.items()}
        found |= {
            name: table
            for name, table in whole.items()
            if not name.endswith(IN_MEMORY) or len(table) < len(whole[name.removesuffix(IN_MEMORY)])
        }
    found |= _iterations(profile, hardware) if iterations else {}
    return {name: table for name, table in found.items() if len(table)}


def summary(tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[str, float]]:
    """Median, P90, P95 and mean of the relative error of each table of `held_out`, and its rows; how many rows of one
    half a 90 % interval of the other half's errors holds, and how wide it is."""
    rows = {}
    for name, table in tables.items():
        error = (table["predicted_us"] / table["us"] - 1).to_numpy(float)
        size = np.abs(error)
        coverage, width = held_by_rows(name, table)
        rows[name] = {
            "count": float(len(error)),
            "median": float(np.median(size)),
            "p90": float(np.quantile(size, 0.9)),
            "p95": float(np.quantile(size, 0.95)),
            "bias": float(np.mean(error)),
            "coverage": coverage,
            "width": width,
        }
    return rows


def worst_cases(tables: Mapping[str, pd.DataFrame], each: int = 2) -> tuple[str, ...]:
    """The largest errors of every table by name: what was left out, its shape, measured and predicted."""
    lines = []
    for name, table in tables.items():
        if name.endswith(IN_MEMORY):
            continue
        error = table["predicted_us"] / table["us"] - 1
        for index in error.abs().sort_values(ascending=False).index[:each]:
            row = table.loc[index]
            times = f"{row['us']:.1f} us, predicted {row['predicted_us']:.1f} ({error[index]:+.0%})"
            lines.append(f"{name}: {_named(row)}: {times}")
    return tuple(lines)


def _named(row: pd.Series) -> str:
    if row["operator"] not in ("attention", "iteration"):
        return f"{row['operator']} {row['n']:.0f} x {row['k']:.0f}, {row['rows']:.0f} rows"
    parts = [f"{row['heads']:.0f}/{row['kv_heads']:.0f} heads"] if row["heads"] else []
    parts += [f"chunks {row['chunks']}"] if row["chunks"] else []
    if row["decodes"]:
        parts.append(f"{row['decodes']:.0f} decodes of {row['decode_context_total'] / row['decodes']:.0f}")
    return ", ".join(parts)


# --- GEMMs -----------------------------------------------------------------------------------------------------------


def _gemms(table: pd.DataFrame, hardware: Hardware) -> dict[str, pd.DataFrame]:
    found = {"gemm rows": _left_out_rows(table, hardware)}
    if len(table[["n", "k"]].drop_duplicates()) > 100:
        for axis, name in (("n", "gemm widths"), ("k", "gemm depths")):
            found[name] = _left_out_shapes(table, hardware, axis)
    return found


def curves_of(table: pd.DataFrame) -> tuple[RowCurve, ...]:
    return tuple(
        RowCurve.from_points("gemm", int(n), int(k), rows["rows"], rows["median_s"] * 1e6)
        for (n, k), rows in table.groupby(["n", "k"])
    )


def _left_out_rows(table: pd.DataFrame, hardware: Hardware) -> pd.DataFrame:
    import pandas as pd

    parts = []
    for fold, chosen in enumerate(folds(table["rows"].to_numpy(float), most=USED_ROWS)):
        out = table["rows"].isin(chosen)
        curves = curves_of(table[~out])
        law = fit_gemm_law(curves, hardware)
        if law is None:
            continue
        by_shape = {(curve.n, curve.k): curve for curve in learnt_gemms(law, without_noise(curves, law), (ROWS,))}
        for (n, k), rows in table[out & used_gemms(table)].groupby(["n", "k"]):
            parts.append(_scored(rows, curve_us(law, by_shape[int(n), int(k)], rows["rows"]), fold))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _left_out_shapes(table: pd.DataFrame, hardware: Hardware, axis: str) -> pd.DataFrame:
    import pandas as pd

    parts = []
    for fold, chosen in enumerate(folds(table[axis].to_numpy(float), *USED_WIDTHS)):
        out = table[axis].isin(chosen)
        curves = curves_of(table[~out])
        law = fit_gemm_law(curves, hardware)
        if law is None:
            continue
        calm = learnt_gemms(law, without_noise(curves, law), (WIDTHS,) if axis == "n" else ())
        grid = gemm_grid(law, calm)
        for (n, k), rows in table[out & used_gemms(table)].groupby(["n", "k"]):
            composed = composed_curve(law, calm, grid, "gemm", int(n), int(k))
            parts.append(_scored(rows, curve_us(law, composed, rows["rows"]), fold))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def used_gemms(table: pd.DataFrame) -> pd.Series:
    many = len(table[["n", "k"]].drop_duplicates()) > 100
    if not many:
        return table["rows"] <= USED_ROWS
    return (
        table["n"].between(*USED_WIDTHS)
        & table["k"].between(*USED_WIDTHS)
        & (table["rows"] <= USED_ROWS)
        & (table["rows"] > 0)
    )


def _scored(rows: pd.DataFrame, predicted: Array, fold: int) -> pd.DataFrame:
    columns = ["operator", "rows", "n", "k", "chunks", "decodes", "decode_context_total", "heads", "kv_heads"]
    scored = rows[columns].copy()
    scored["fold"] = fold
    scored["us"], scored["predicted_us"] = rows["median_s"] * 1e6, predicted
    return scored


# --- attention -------------------------------------------------------------------------------------------------------

NAMES = {"tokens": "chunk sizes", "prefix": "prefixes", "decodes": "batch sizes", "context": "contexts"}
KINDS: dict[str, tuple[Callable[[pd.DataFrame], pd.Series], tuple[str, ...]]] = {
    "decode": (lambda b: b["tokens"] == 0, ("decodes", "context")),
    "prefill": (lambda b: (b["tokens"] > 0) & (b["decodes"] == 0), ("tokens", "prefix")),
    "mixed": (lambda b: (b["tokens"] > 0) & (b["decodes"] > 0), ("tokens", "prefix", "decodes", "context")),
}


def _attention(table: pd.DataFrame, hardware: Hardware) -> dict[str, pd.DataFrame]:
    """One head layout: every axis of every kind of batch, uneven batches aside."""
    import pandas as pd

    batches = batch_columns(table)
    even = ((batches["longest"] <= np.ceil(batches["context"])) & ~batches["twin"]).to_numpy()
    table, batches = table[even].reset_index(drop=True), batches[even].reset_index(drop=True)
    found = {}
    for kind, (which, axes) in KINDS.items():
        mine = which(batches).to_numpy()
        for axis in axes:
            parts = []
            for fold, chosen in enumerate(folds(batches[axis].to_numpy()[mine])):
                out = mine & batches[axis].isin(chosen).to_numpy()
                # Chunks beside decodes are told from all that has a chunk; the others from themselves.
                others = mine if kind != "mixed" else (batches["tokens"] > 0).to_numpy()
                fit = fit_attention(table[others & ~out], hardware.sms)
                b = batches[out]
                if kind == "decode":
                    predicted = fit.decode_us(b["decodes"], b["context"])
                elif kind == "prefill":
                    predicted = fit.prefill_us(b["tokens"], b["prefix"])
                else:
                    predicted = fit.batch_us(b["tokens"], b["prefix"], b["decodes"], b["context"])
                parts.append(_scored(table[out], predicted, fold))
            if parts:
                found[f"{kind} {NAMES[axis]}"] = pd.concat(parts, ignore_index=True)
    return found


def _room(table: pd.DataFrame, hardware: Hardware) -> float:
    """Tokens of keys and values that fit on the card beside the model of these rows; any where the model is unknown."""
    from profiler.specs.memory_plan import plan_memory
    from profiler.specs.model_config import load_model_spec

    model, tp = str(table["model"].iloc[0]), int(table["tensor_parallel"].iloc[0])
    try:
        return float(plan_memory(load_model_spec(model), hardware, tp=max(tp, 1)).kv_tokens)
    except ProfileError:
        return float("inf")


def _keys(table: pd.DataFrame) -> pd.Series:
    """Tokens that each batch holds once it has run."""
    chunks = {text: sum(tokens + prefix for tokens, prefix in parse_chunks(text)) for text in table["chunks"].unique()}
    return table["decode_context_total"] + table["decodes"] + table["chunks"].map(chunks)


def _families(table: pd.DataFrame, hardware: Hardware) -> dict[str, pd.DataFrame]:
    """A kernel table: layouts of a model's size, one prompt or one batch of decodes at a time."""
    import pandas as pd

    table = table[table["head_dim"] == USED_HEAD].reset_index(drop=True)
    batches = batch_columns(table)
    usual = (table["heads"] / table["kv_heads"]).isin(USED_GROUPS).to_numpy()
    decoding, single = (batches["tokens"] == 0).to_numpy(), (batches["chunks"] == 1).to_numpy()
    kernel = "fa3" if table["backend"].str.contains("fa3").any() else "fa2"
    found = {}
    whole = fit_families(table[usual], hardware, kernel, learning=False)
    for kind, axes in (("decode", ("decodes", "context")), ("prefill", ("tokens",))):
        mine = usual & (decoding if kind == "decode" else ~decoding)
        scored = mine if kind == "decode" else mine & single
        for axis in axes:
            parts = []
            for fold, chosen in enumerate(folds(batches[axis].to_numpy()[scored])):
                left = batches[axis].isin(chosen).to_numpy()
                families = fit_families(table[mine & ~left], hardware, kernel, beside=whole)
                for (heads, kv_heads), rows in table[left & scored].groupby(["heads", "kv_heads"]):
                    family = nearest_family(families, int(heads), int(kv_heads), USED_HEAD)
                    fit = family.for_layout(int(heads), int(kv_heads))
                    b = batches.loc[rows.index]
                    if kind == "decode":
                        parts.append(_scored(rows, fit.decode_us(b["decodes"], b["context"]), fold))
                    else:
                        parts.append(_scored(rows, fit.prefill_us(b["tokens"], b["prefix"]), fold))
            if parts:
                found[f"{kind} {NAMES[axis]}"] = pd.concat(parts, ignore_index=True)
    return found


# --- whole iterations ------------------------------------------------------------------------------------------------

SAMPLE = 400


def _iterations(profile: Profile, hardware: Hardware) -> dict[str, pd.DataFrame]:
    """Whole steps of a profiled model: a fit that lacks chunk sizes, batch sizes or contexts, and every second row
    count of the GEMMs, against the fit that has them."""
    import pandas as pd

    from profiler.operators.compose import compose
    from profiler.operators.fitting.device_fit import fit_device
    from profiler.specs.model_config import load_model_spec

    table = profile.table
    if "qkv" not in set(table["operator"]) or "attention" not in set(table["operator"]):
        return {}
    tp = int(table["tensor_parallel"].min())
    own = profile.only(tensor_parallel=tp)
    spec = load_model_spec(str(own.table["model"].iloc[0]))
    batches = batch_columns(own.table)
    attention = (own.table["operator"] == "attention").to_numpy()
    even = attention & ((batches["longest"] <= np.ceil(batches["context"])) & ~batches["twin"]).to_numpy()
    gemms = ((own.table["k"] > 0) & (own.table["operator"] != "head")).to_numpy()
    whole = compose(fit_device(own, hardware), spec, hardware, tp=tp)
    rows = list(folds(own.table["rows"].to_numpy(float)[gemms], most=USED_ROWS))
    room = _room(own.table, hardware)
    found = {}
    for axis in ("tokens", "decodes", "context"):
        parts = []
        for fold, chosen in enumerate(folds(batches[axis].to_numpy()[even])):
            out = even & batches[axis].isin(chosen).to_numpy()
            left = out | (gemms & own.table["rows"].isin(rows[fold % len(rows)]).to_numpy())
            part = compose(fit_device(type(own)(own.table[~left], own.provenance), hardware), spec, hardware, tp=tp)
            picked = np.random.default_rng(fold).permutation(np.flatnonzero(out))[:SAMPLE]
            shapes = [_shape(row) for _, row in batches.iloc[picked].iterrows()]
            scored = own.table.iloc[picked].copy()
            scored["operator"], scored["median_s"] = "iteration", whole.predict_ns(shapes) * 1e-9
            parts.append(_scored(scored, part.predict_ns(shapes) * 1e-3, fold))
        if parts:
            name = f"iteration {NAMES[axis]}"
            found[name] = pd.concat(parts, ignore_index=True)
            fitting = found[name][_keys(found[name]) <= room]
            if len(fitting) < len(found[name]):
                found[name + IN_MEMORY] = fitting
    return found


def _shape(row: pd.Series) -> BatchShape:
    decodes, tokens = int(row["decodes"]), int(row["tokens"])
    chunks = ((tokens, int(row["prefix"])),) if tokens else ()
    total = round(float(row["context"]) * decodes)
    return BatchShape(chunks, decodes, total, int(np.ceil(row["context"])) if decodes else 0, 0, decodes + len(chunks))
