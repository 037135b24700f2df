"""The cost model fitted from whole iterations: what a step costs by its rows, its attention and its samples.

Every term is an amount that the shape gives (rows, query-key pairs, contexts, sampled rows) times a price that was
fitted, rounded to whole nanoseconds by itself, so that terms add up exactly and the scalar and vector forms agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.work.batch import BatchShape
from policies.work.request import Ns
from profiler.errors import ProfileError
from profiler.iterations.aftermath import extra_ns
from profiler.iterations.expert_layers import ExpertLayers
from profiler.iterations.flicker import Later, deviation
from profiler.roofline.row_table import RowTable
from profiler.specs.shape_columns import ShapeColumns, attended_pairs

Column = NDArray[np.int64]
Array = NDArray[np.float64]

CONTEXT_LEVELS = (4096, 16384, 65536)
"""Contexts of all decodes, in tokens, beyond which each further one may cost more: they no longer fit a cache."""
PAIR_LEVELS = (2048, 8192, 32768)
"""Contexts of a prompt, in tokens, beyond which the query-key pairs of each further one may cost more, likewise."""
AMOUNTS = (
    "steps",
    "sampled",
    "chunks",
    "chunk_pairs",
    "chunk_context",
    "decodes",
    "decode_context",
    "decode_context_max",
    "mixed",
    *(f"decode_context_over_{size}" for size in CONTEXT_LEVELS),
    *(f"chunk_pairs_over_{size}" for size in PAIR_LEVELS),
)
"""What a shape is charged for beside its rows. steps: 1. chunk_pairs: query-key pairs of all chunks. chunk_context:
prefix + tokens of every chunk, added up. decode_context: contexts of all decodes. mixed: 1 with chunks and decodes.
chunk_pairs_over_N: of the pairs those whose key lies N tokens or more before its query."""

ROW_TERMS = tuple(
    [("rows", 0)]
    + [("most", size) for size in (2, 4, 8, 16, 32, 64, 128, 256)]
    + [("over", size) for size in (8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)]
    + [("tiles", size) for size in (8, 16, 64, 128)]
)
"""How time may grow with rows: all of them; up to a size alone (it flattens); beyond a size (it steepens, where weights
stop being what is waited for, and again where activations outgrow the caches); whole tiles of a size."""

HOST_AMOUNTS = ("steps", "chunks", "decodes", "chunk_tokens")


@dataclass(frozen=True)
class Bounds:
    """The measured region: largest value of each, over all measured shapes."""

    rows: int
    sampled: int
    chunks: int
    tokens: int
    prefix: int
    decodes: int
    context: int
    context_total: int


@dataclass(frozen=True)
class IterationFit:
    """Prices in nanoseconds a unit, and how sure they are.

    row_prices: one per ROW_TERMS; prices: one per AMOUNTS. experts: of a model that has some. resampled: rows of
    [row_prices, prices, and the price of an expert where there are any] fitted to resampled shapes. host_before: one
    price per HOST_AMOUNTS; host_after: (a step, a sampled row). aftermath: what batches with chunks leave to the steps
    after them (`profiler.iterations.aftermath`), empty where nothing was seen.
    disturbance: mean time
    lost to whatever else the machine did while measuring, as a share. drift: standard deviation of the machine's speed
    between stretches of the measurement; phases: how many independent values of it were seen; seen_s: how long the
    measurement took, flicker: what its stretches' speeds tell of a later one (`profiler.iterations.flicker`); 0
    where these are not known. errors: of held-out structures and of the fit itself; noise: of repeats.
    """

    device: str
    model: str
    dtype: str
    backend: str
    row_prices: tuple[float, ...]
    prices: tuple[float, ...]
    host_before: tuple[float, ...]
    host_after: tuple[float, ...]
    bounds: Bounds
    resampled: tuple[tuple[float, ...], ...] = ()
    aftermath: tuple[float, ...] = ()
    experts: ExpertLayers | None = None
    disturbance: float = 0.0
    drift: float = 0.0
    phases: float = 0.0
    seen_s: float = 0.0
    flicker: float = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


class IterationModel:
    """CostModel of one engine, fitted from its own whole iterations; no pipeline and no tensor parallelism.

    speed: factor on every time, 1 as measured (drift probes give others).
    """

    kind = "fitted"
    calibrated = True
    stages = 1
    tile = 128
    drafts_are_decodes = True
    """This project's executor verifies drafts as decodes of their own (`profiler.speculation_cost`)."""

    def __init__(self, fit: IterationFit, *, speed: float = 1.0) -> None:
        if not 0 < speed < 1e3:
            raise ProfileError(f"speed: found {speed}, expected a factor above 0")
        self.fit, self.speed = fit, speed
        self.name = f"fitted {fit.model} {fit.device} {fit.dtype}" + (f" x{speed:.3f}" if speed != 1.0 else "")
        factor = speed * (1.0 + fit.disturbance)
        self._prices = tuple(price * factor for price in fit.prices)
        self._context_prices = self._prices[9 : 9 + len(CONTEXT_LEVELS)]
        pair_prices = zip(PAIR_LEVELS, self._prices[9 + len(CONTEXT_LEVELS) :])
        self._pair_prices = [(size, price) for size, price in pair_prices if price]
        self._row_prices = tuple(price * factor for price in fit.row_prices)
        self._host_before = tuple(price * factor for price in fit.host_before)
        self._host_after = tuple(price * factor for price in fit.host_after)
        self._factor = factor
        self._experts, self._expert_price = fit.experts, fit.experts.price_ns * factor if fit.experts else 0.0
        of_sampled = fit.experts is not None and fit.experts.trimmed
        self._last_layer = RowTable(self._sampled_terms, 256) if of_sampled else None
        self._rows = RowTable(self._row_terms, 2048)
        self._rows_ns: list[int] = self._rows.ns

    def _row_terms(self, rows: Column) -> dict[str, Column]:
        total = np.zeros(len(rows))
        for column, price in zip(row_basis(rows).T, self._row_prices):
            total += column * price
        terms = {"rows": (total + 0.5).astype(np.int64)}
        if self._experts is not None:
            terms["experts"] = (self._experts.by_rows(rows) * self._expert_price + 0.5).astype(np.int64)
        return terms

    def _sampled_terms(self, sampled: Column) -> dict[str, Column]:
        assert self._experts is not None
        return {"experts": (self._experts.by_sampled(sampled) * self._expert_price + 0.5).astype(np.int64)}

    # --- CostModel ---------------------------------------------------------------------------------------------------

    def host_ns(self, shape: BatchShape) -> tuple[Ns, Ns]:
        """Completing and recording the last step, planning and packing this one; then handing over its tokens."""
        step, chunk, decode, token = self._host_before
        chunks = shape[0]
        before = step + len(chunks) * chunk + shape[1] * decode + sum([tokens for tokens, _ in chunks]) * token
        return int(before + 0.5), int(self._host_after[0] + shape[5] * self._host_after[1] + 0.5)

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> Ns:
        """Device time in ns; the simulator's inner loop, `predict_ns` is its vector twin."""
        chunks, decodes, total, largest, dummy, sampled, executed, _, _, _ = shape
        step, p_sampled, p_chunk, p_pairs, p_context, p_decode, p_total, p_largest, p_mixed = self._prices[:9]
        rows = decodes
        ns = int(step + 0.5) + int(sampled * p_sampled + 0.5)
        if chunks:
            pairs = held = 0
            for tokens, prefix in chunks:
                rows += tokens
                pairs += tokens * prefix + tokens * (tokens + 1) // 2
                held += tokens + prefix
            ns += int(len(chunks) * p_chunk + 0.5) + int(pairs * p_pairs + 0.5) + int(held * p_context + 0.5)
            for size, price in self._pair_prices:
                ns += int(sum([_pairs_over(size, tokens, prefix) for tokens, prefix in chunks]) * price + 0.5)
            if decodes:
                ns += int(p_mixed + 0.5)
        if decodes:
            ns += int(decodes * p_decode + 0.5) + int(total * p_total + 0.5) + int(largest * p_largest + 0.5)
            for size, price in zip(CONTEXT_LEVELS, self._context_prices):
                if total <= size:
                    break
                ns += int((total - size) * price + 0.5)
        rows += dummy
        if executed > rows:
            rows = executed
        if not rows:
            return 0
        if self._last_layer is not None:
            ns += self._last_layer.at(sampled)
        return ns + (self._rows_ns[rows] if rows < len(self._rows_ns) else self._rows.at(rows))

    def send_ns(self, shape: BatchShape, stage: int) -> Ns:
        return 0

    def aftermath(self, shape: BatchShape) -> list[Ns]:
        """Extra device time of the steps after a batch with chunks, the first of them last; empty where there is
        none."""
        return extra_ns(self.fit.aftermath, shape, self._factor)

    def repeat_ns(self, shape: BatchShape, steps: int, stage: int = 0) -> Column:
        """stage_ns of `steps` iterations in which every decode's context grows by one a step."""
        ahead = np.arange(steps, dtype=np.int64)
        decodes = shape.decodes
        total, largest = shape.decode_context_total + ahead * decodes, shape.decode_context_max + ahead * (decodes > 0)
        grown = _rounded(total, self._prices[6]) + _rounded(largest, self._prices[7])
        for size, price in zip(CONTEXT_LEVELS, self._context_prices):
            grown += _rounded(np.maximum(total - size, 0), price)
        return np.asarray(grown + (self.stage_ns(shape) - grown[:1]))

    def predict_ns(self, shapes: object, stage: int = 0) -> Column:
        """stage_ns of many shapes: a sequence of BatchShape, or ShapeColumns (faster), in; int64 nanoseconds out."""
        columns = ShapeColumns.of(shapes)
        if not len(columns):
            return np.zeros(0, np.int64)
        rows = columns.rows
        ns = self._rows.each(rows)
        for column, price in zip(amounts(columns).T, self._prices):
            ns += _rounded(column, price)
        if self._last_layer is not None:
            ns += self._last_layer.each(columns.sampled)
        return np.where(rows > 0, ns, 0)

    def breakdown(self, shape: BatchShape) -> Mapping[str, Ns]:
        """Terms by name; sums exactly to host_ns + stage_ns."""
        before, after = self.host_ns(shape)
        parts = {"host_before": before}
        rows = shape.rows
        if rows:
            of_rows = self._row_terms(np.array([rows], np.int64))
            parts |= {name: int(column[0]) for name, column in of_rows.items()}
            if self._last_layer is not None:
                parts["experts"] += self._last_layer.at(shape.sampled)
            row = amounts(ShapeColumns.of([shape]))[0]
            parts |= {name: int(value * price + 0.5) for name, value, price in zip(AMOUNTS, row.tolist(), self._prices)}
        parts["host_after"] = after
        return {name: ns for name, ns in parts.items() if ns}

    def activated_experts(self, shapes: object) -> Array:
        """Experts that each batch is expected to touch, the mean over layers with experts; NaN for a dense model."""
        columns = ShapeColumns.of(shapes)
        if self._experts is None:
            return np.full(len(columns), np.nan)
        return self._experts.mean(columns.rows, columns.sampled)

    def inside(self, shape: BatchShape) -> bool:
        bounds = self.fit.bounds
        return (
            shape.rows <= bounds.rows
            and shape.sampled <= bounds.sampled
            and len(shape.chunks) <= bounds.chunks
            and shape.decodes <= bounds.decodes
            and shape.decode_context_max <= bounds.context
            and shape.decode_context_total <= bounds.context_total
            and all(tokens <= bounds.tokens and prefix <= bounds.prefix for tokens, prefix in shape.chunks)
        )

    def provenance(self) -> Mapping[str, object]:
        fit = self.fit
        return {
            "kind": self.kind,
            "calibrated": self.calibrated,
            "name": self.name,
            "speed": self.speed,
            "backend": fit.backend,
            "disturbance": fit.disturbance,
            "drift": fit.drift,
            "errors": dict(fit.errors),
            "noise": dict(fit.noise),
            "region": asdict(fit.bounds),
            **fit.provenance,
        }

    # --- how sure ----------------------------------------------------------------------------------------------------

    def perturbed(self, seed: int, later: Later | None = None) -> IterationModel:
        """Another model that the measurements would allow: prices of a resampled fit, at a speed from the machine's own
        drift: of a stretch of the profile, or of a run whose time after it is known (`later`). Seed 0, 1, ... give an
        ensemble whose predictions spread as far as the costs are unsure. Speeds are the quantiles 1/2, 1/4, 3/4, 1/8,
        ... (van der Corput), so that few draws are spread evenly about the fit's own."""
        fit = self.fit
        at, scale, left = 0.0, 0.5, seed + 1
        while left:
            at, scale, left = at + scale * (left & 1), scale / 2, left >> 1
        apart = fit.drift * _deviations(at, fit.phases)
        if later is not None and fit.flicker and fit.seen_s:
            apart = deviation(fit.flicker, fit.seen_s, later) * _student(at, fit.phases)
        speed = self.speed * math.exp(apart)
        if not fit.resampled:
            return IterationModel(fit, speed=speed)
        prices = fit.resampled[seed % len(fit.resampled)]
        rows, both = len(ROW_TERMS), len(ROW_TERMS) + len(AMOUNTS)
        experts = replace(fit.experts, price_ns=prices[both]) if fit.experts else None
        drawn = replace(fit, row_prices=prices[:rows], prices=prices[rows:both], experts=experts, resampled=())
        return IterationModel(drawn, speed=speed)


def _student(share: float, phases: float) -> float:
    """Quantile in standard deviations that `phases` values told: the fewer they are, the wider."""
    if phases < 2:
        return NormalDist().inv_cdf(share)
    from scipy.special import stdtrit

    return float(stdtrit(phases - 1, share))


def _deviations(share: float, phases: float) -> float:
    """Quantile of a value yet to come, in standard deviations of the `phases` independent values that are known."""
    return _student(share, phases) * (math.sqrt((phases + 1) / (phases - 1)) if phases >= 2 else 1.0)


def amounts(columns: ShapeColumns) -> Column:
    """[shapes, AMOUNTS], whole numbers."""
    pairs = columns.per_batch(attended_pairs(columns.chunk_tokens, columns.chunk_prefix, None))
    held = columns.per_batch(columns.chunk_tokens + columns.chunk_prefix)
    chunks = np.diff(columns.chunk_offsets)
    decodes = columns.decodes
    return np.stack(
        [
            np.ones(len(columns), np.int64),
            columns.sampled,
            chunks,
            pairs,
            held,
            decodes,
            columns.decode_context_total,
            columns.decode_context_max,
            ((chunks > 0) & (decodes > 0)).astype(np.int64),
            *(np.maximum(columns.decode_context_total - size, 0) for size in CONTEXT_LEVELS),
            *(columns.per_batch(_pairs_over(size, columns.chunk_tokens, columns.chunk_prefix)) for size in PAIR_LEVELS),
        ],
        axis=1,
    )


def _pairs_over(size: int, tokens: Any, prefix: Any) -> Any:
    """Query-key pairs of a chunk whose key lies `size` tokens or more before its query; of numbers or of columns."""
    last, first = (tokens + prefix - size), (prefix - size)
    if isinstance(tokens, int):
        last, first = (last if last > 0 else 0), (first if first > 0 else 0)
    else:
        last, first = np.maximum(last, 0), np.maximum(first, 0)
    return (last * (last + 1) - first * (first + 1)) // 2


def row_basis(rows: Column) -> Array:
    """[shapes, ROW_TERMS] of row counts."""
    columns = []
    for kind, size in ROW_TERMS:
        if kind == "rows":
            columns.append(rows)
        elif kind == "most":
            columns.append(np.minimum(rows, size))
        elif kind == "over":
            columns.append(np.maximum(rows - size, 0))
        else:
            columns.append(-(-rows // size) * size)
    return np.stack(columns, axis=1).astype(np.float64)


def host_amounts(columns: ShapeColumns) -> Column:
    """[shapes, HOST_AMOUNTS], whole numbers."""
    tokens = columns.per_batch(columns.chunk_tokens)
    ones = np.ones(len(columns), np.int64)
    return np.stack([ones, np.diff(columns.chunk_offsets), columns.decodes, tokens], axis=1)


def _rounded(amount: Column, price: float) -> Column:
    return np.asarray((amount * price + 0.5).astype(np.int64))
