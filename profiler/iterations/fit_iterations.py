"""Fit whole iterations: non-negative prices on physically shaped amounts, relative errors, outliers held down.

What is fitted is the median of each shape's undisturbed measurements at the machine's average speed. What disturbances
cost on average is kept apart (`disturbance`), and so is how far the speed wanders (`drift`; neighbours share caches and
clocks): a mean over thousands of live iterations pays the one and inherits the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.work.batch import BatchShape
from profiler.errors import ProfileError
from profiler.iterations.aftermath import after, fit_aftermath
from profiler.iterations.expert_layers import ExpertLayers
from profiler.iterations.flicker import flicker_of
from profiler.iterations.iteration_model import (
    AMOUNTS,
    ROW_TERMS,
    Bounds,
    IterationFit,
    IterationModel,
    amounts,
    host_amounts,
    row_basis,
)
from profiler.iterations.machine_speed import LEAST_SHAPES, gauge_of, levels_of, phases_of, slowness_of
from profiler.measurements.profile import Profile, parse_chunks
from profiler.specs.shape_columns import ShapeColumns

Array = NDArray[np.float64]

RESAMPLES = 24
FOLDS = 5
ALTERNATIONS = 4


@dataclass(frozen=True)
class Measured:
    """One distinct shape: median device seconds of what was not disturbed, and how many measurements that is. touched:
    experts of all layers together that it went to; measurements of one shape that differ in it are held apart."""

    shape: BatchShape
    device_s: float
    count: int
    touched: float = 0.0


def shapes_of(table: Any) -> list[BatchShape]:
    """The shape of every row of a profile's table."""
    parsed = {text: parse_chunks(text) for text in table["chunks"].unique()}
    return [
        BatchShape(parsed[chunks], int(d), int(total), int(largest), int(dummy), int(sampled))
        for chunks, d, total, largest, dummy, sampled in zip(
            table["chunks"],
            table["decodes"],
            table["decode_context_total"],
            table["decode_context_max"],
            table["dummy_tokens"],
            table["sampled"],
        )
    ]


def fit_iterations(profile: Profile, *, seed: int = 0, resamples: int = RESAMPLES) -> IterationFit:
    """Fit the `iteration` rows of one device, model, dtype and backend; raises ProfileError if there are too few."""
    table = profile.rows_of("iteration").reset_index(drop=True)
    everything = shapes_of(table)
    layers = ExpertLayers.of_provenance(profile.provenance.get("routing"))
    touched = table["experts"].to_numpy(float) if layers is not None else None
    calm = table["outlier"].to_numpy() == 0
    own_s = own_seconds(table)
    slowness = np.ones(len(table))
    for _ in range(ALTERNATIONS):
        # The machine's speed while it measured, and the prices at its average speed: one after the other.
        measured = grouped(everything, own_s / slowness, calm, touched)
        if len(measured) < LEAST_SHAPES:
            found = f"profile: found {len(measured)} distinct iterations, expected at least {LEAST_SHAPES}"
            raise ProfileError(f"{found}; measure for longer (--budget)")
        shapes = [item.shape for item in measured]
        design = _design(shapes, None if touched is None else np.array([item.touched for item in measured]))
        seconds = np.array([item.device_s for item in measured])
        weights = np.sqrt(np.minimum([item.count for item in measured], 9)) / 3.0
        prices = _solve(design, seconds, weights)
        fitted = np.maximum(_design(everything, touched) @ prices, 1.0)
        excess = np.log(own_s * 1e9 / fitted)
        slowness = slowness_of(table["at_s"].to_numpy(), excess, table["gauge_s"].to_numpy(float))
    rng = np.random.default_rng(seed)
    ensemble = []
    for _ in range(resamples):
        rows = rng.integers(len(shapes), size=len(shapes))
        ensemble.append(tuple(_solve(design[rows], seconds[rows], weights[rows]).tolist()))
    at_s, logs = table["at_s"].to_numpy(), np.log(slowness)
    observed = table["median_s"].to_numpy() * 1e9
    if layers is not None:
        layers = replace(layers, price_ns=float(prices[-1]))
    prices_after = _aftermath(profile, prices, at_s, slowness, layers)
    before, after = _host(table, everything, calm, slowness)
    held_out = _held_out(design, seconds, weights, shapes)
    inside = np.abs(design @ prices / (seconds * 1e9) - 1)
    return IterationFit(
        device=_only(table, "device"),
        model=_only(table, "model"),
        dtype=_only(table, "dtype"),
        backend=_only(table, "backend"),
        row_prices=tuple(prices[: len(ROW_TERMS)].tolist()),
        prices=tuple(prices[len(ROW_TERMS) : len(ROW_TERMS) + len(AMOUNTS)].tolist()),
        experts=layers,
        host_before=before,
        host_after=after,
        bounds=_bounds(shapes),
        resampled=tuple(ensemble),
        aftermath=tuple(prices_after),
        disturbance=max(0.0, float(observed.sum() / (fitted * slowness).sum()) - 1.0),
        drift=float(np.std(logs)),
        phases=phases_of(at_s, logs),
        seen_s=float(np.ptp(at_s)) if logs.any() else 0.0,
        flicker=flicker_of(levels_of(at_s, logs)),
        errors={
            "shapes": float(len(shapes)),
            "fit_median": float(np.median(inside)),
            "fit_p95": float(np.quantile(inside, 0.95)),
            "held_out_median": float(np.median(held_out)),
            "held_out_p95": float(np.quantile(held_out, 0.95)),
        },
        noise=_noise(everything, observed / slowness, calm, touched),
        provenance={"measured": dict(profile.provenance), "gauge": gauge_of(table, np.log(observed / fitted))},
    )


def own_seconds(table: Any) -> Array:
    """Device time of every row without what others had the processor for.

    A disturbed measurement is cut to its processor's share of the wall time; on several threads the share is mostly
    above 1 and changes nothing. A share of nothing is no share, but a clock that did not move.
    """
    wall = table["median_s"] + table["host_before_s"] + table["host_after_s"]
    share = (table["cpu_s"] / wall).fillna(1.0)
    share = np.fmin(1.0, share.where(share > 0, 1.0))
    return np.asarray(table["median_s"] * np.where(table["outlier"] == 0, 1.0, share), float)


def grouped(shapes: Sequence[BatchShape], own_s: Array, calm: Any, touched: Array | None = None) -> list[Measured]:
    """Distinct shapes with the median of their undisturbed times; the least time where all were disturbed."""
    found = []
    for (shape, _), rows in _by_shape(shapes, touched).items():
        times = [float(own_s[row]) for row in rows if calm[row]] or [float(min(own_s[row] for row in rows))]
        mean = 0.0 if touched is None else float(np.mean(touched[rows]))
        found.append(Measured(shape, float(np.median(times)), len(times), mean))
    return found


def _by_shape(shapes: Sequence[BatchShape], touched: Array | None) -> dict[tuple[BatchShape, int], list[int]]:
    """Rows of each shape, those apart that touch more or fewer experts by some 5 %."""
    sizes = [0] * len(shapes) if touched is None else np.round(20 * np.log(np.maximum(touched, 1))).astype(int).tolist()
    rows: dict[tuple[BatchShape, int], list[int]] = {}
    for row, key in enumerate(zip(shapes, sizes)):
        rows.setdefault(key, []).append(row)
    return rows


def disagreement(fit: IterationFit, shapes: Sequence[BatchShape]) -> Array:
    """Standard deviation of the logarithm of the resampled fits' predictions, one number a shape."""
    if len(fit.resampled) < 2:
        return np.zeros(len(shapes))
    predicted = _expected_design(fit, shapes) @ np.array(fit.resampled).T
    return np.asarray(np.log(np.maximum(predicted, 1.0)).std(axis=1))


def predicted_device_s(fit: IterationFit, shapes: Sequence[BatchShape]) -> Array:
    """Seconds on an undisturbed machine: what medians of a probe are compared with."""
    experts = [fit.experts.price_ns] if fit.experts else []
    prices = np.array([*fit.row_prices, *fit.prices, *experts])
    return np.asarray(_expected_design(fit, shapes) @ prices / 1e9)


def crude_model(shapes: Sequence[BatchShape], seconds: Array, *, device: str, model: str) -> IterationModel:
    """A model from any run's iterations (their whole times), good enough to find out where a run would go."""
    design, seconds = _design(shapes), np.asarray(seconds, float)
    prices = _solve(design, seconds, np.ones(len(shapes)))
    count = len(ROW_TERMS)
    return IterationModel(
        IterationFit(
            device,
            model,
            "",
            "",
            tuple(prices[:count].tolist()),
            tuple(prices[count:].tolist()),
            (0.0,) * 4,
            (0.0, 0.0),
            _bounds(shapes),
        )
    )


# Inside


def _design(shapes: Sequence[BatchShape], touched: Array | None = None) -> Array:
    """[shapes, ROW_TERMS + AMOUNTS], and a column of touched experts where they are known."""
    columns = ShapeColumns.of(shapes)
    parts = [row_basis(columns.rows), amounts(columns).astype(np.float64)]
    return np.concatenate(parts if touched is None else [*parts, touched[:, None]], axis=1)


def _expected_design(fit: IterationFit, shapes: Sequence[BatchShape]) -> Array:
    return _design(shapes, _expected(fit.experts, shapes))


def _expected(layers: ExpertLayers | None, shapes: Sequence[BatchShape]) -> Array | None:
    """Experts that these shapes are expected to touch; None without any."""
    if layers is None:
        return None
    columns = ShapeColumns.of(shapes)
    return layers.touched(columns.rows, columns.sampled)


def _solve(design: Array, seconds: Array, weights: Array) -> Array:
    """Non-negative prices (ns) by least squares on relative errors, reweighted so that far-off points count less."""
    from sklearn.linear_model import LinearRegression

    target = seconds * 1e9
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = design / scale
    trust = weights / target
    prices = np.zeros(design.shape[1])
    for _ in range(4):
        solver = LinearRegression(positive=True, fit_intercept=False)
        solver.fit(scaled * trust[:, None], target * trust)
        prices = solver.coef_ / scale
        miss = np.abs(design @ prices / target - 1)
        bound = max(3 * float(np.median(miss)), 1e-4)
        trust = weights / target * np.sqrt(np.minimum(1.0, bound / np.maximum(miss, 1e-12)))
    return np.asarray(prices)


def _held_out(design: Array, seconds: Array, weights: Array, shapes: Sequence[BatchShape]) -> Array:
    """Relative errors where whole structures (chunk size and batch size, to a doubling) were left out of the fit."""
    names = [
        (round(np.log2(1 + shape.prefill_tokens)), round(np.log2(1 + shape.decodes)), min(len(shape.chunks), 2))
        for shape in shapes
    ]
    distinct = sorted(set(names))
    rng = np.random.default_rng(0)
    fold_of = dict(zip(distinct, rng.permutation(len(distinct)) % FOLDS))
    folds = np.array([fold_of[name] for name in names])
    errors = np.full(len(shapes), np.nan)
    for fold in range(FOLDS):
        out = folds == fold
        if not out.any() or (~out).sum() < LEAST_SHAPES // 2:
            continue
        prices = _solve(design[~out], seconds[~out], weights[~out])
        errors[out] = np.abs(design[out] @ prices / (seconds[out] * 1e9) - 1)
    known = errors[~np.isnan(errors)]
    return known if len(known) else np.array([np.nan])


def _host(
    table: Any, shapes: Sequence[BatchShape], calm: Any, slowness: Array
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Prices of host time before and after an iteration, ns."""
    from sklearn.linear_model import LinearRegression

    columns = ShapeColumns.of(shapes)
    known = calm & table["host_before_s"].notna().to_numpy() & table["host_after_s"].notna().to_numpy()
    if known.sum() < LEAST_SHAPES:
        return (0.0,) * 4, (0.0, 0.0)

    def solve(design: Any, seconds: Any) -> tuple[float, ...]:
        target = (seconds / slowness)[known].to_numpy() * 1e9
        # The upper tail is the machine's doing, and counted in `disturbance`.
        keep = target <= 3 * np.median(target)
        solver = LinearRegression(positive=True, fit_intercept=False)
        solver.fit(design[known][keep], target[keep])
        return tuple(float(price) for price in solver.coef_)

    before = solve(host_amounts(columns).astype(float), table["host_before_s"])
    after = solve(np.stack([np.ones(len(columns)), columns.sampled], axis=1).astype(float), table["host_after_s"])
    return before, after


def _aftermath(
    profile: Profile, prices: Array, at_s: Array, slowness: Array, layers: ExpertLayers | None
) -> list[float]:
    """Prices of what chunks leave to the steps after them; the machine's speed is that of the step before."""
    table = profile.rows_of("after_chunks")
    table = table[table["outlier"] == 0]
    if not len(table):
        return []
    led = shapes_of(table)
    order = np.argsort(at_s, kind="stable")
    at = order[np.clip(np.searchsorted(at_s[order], table["at_s"].to_numpy()), 0, len(order) - 1)]
    steps = table["steps_since"].to_numpy()
    shapes = [after(shape) for shape in led]
    grown = [
        shape._replace(
            decode_context_total=shape.decode_context_total + shape.decodes * (step - 1),
            decode_context_max=shape.decode_context_max + step - 1,
        )
        for shape, step in zip(shapes, steps.tolist())
    ]
    base = np.maximum(_design(grown, _expected(layers, grown)) @ prices, 1.0)
    return fit_aftermath(led, steps, table["median_s"].to_numpy() * 1e9 / slowness[at], base)


def _noise(shapes: Sequence[BatchShape], observed: Array, calm: Any, touched: Array | None = None) -> dict[str, float]:
    """Relative deviation of repeats of one shape from their median: what no fit can get below."""
    groups = [[float(observed[row]) for row in rows if calm[row]] for rows in _by_shape(shapes, touched).values()]
    repeats = [times for times in groups if len(times) >= 3]
    deviations = [abs(time / float(np.median(times)) - 1) for times in repeats for time in times]
    share = {"outlier_share": float(1 - calm.mean())}
    if not deviations:
        return share
    return {
        "repeat_median": float(np.median(deviations)),
        "repeat_p95": float(np.quantile(deviations, 0.95)),
        **share,
    }


def _bounds(shapes: Sequence[BatchShape]) -> Bounds:
    chunks = [chunk for shape in shapes for chunk in shape.chunks]
    return Bounds(
        rows=max(shape.rows for shape in shapes),
        sampled=max(shape.sampled for shape in shapes),
        chunks=max(len(shape.chunks) for shape in shapes),
        tokens=max([tokens for tokens, _ in chunks], default=0),
        prefix=max([prefix for _, prefix in chunks], default=0),
        decodes=max(shape.decodes for shape in shapes),
        context=max(shape.decode_context_max for shape in shapes),
        context_total=max(shape.decode_context_total for shape in shapes),
    )


def _only(table: Any, column: str) -> str:
    values = table[column].unique()
    if len(values) != 1:
        raise ProfileError(f"profile: column {column}: found {', '.join(map(str, values[:3]))}, expected one value")
    return str(values[0])
