"""The experts of one card in one number format: a law of each kernel, and beside it what was measured of whole layers.

A layer that was measured as a device has it costs what the table says, for any spread of tokens corrected by what the
law makes of the difference. Others are the law, corrected as the nearest measured layers of the same kernel say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from profiler.errors import ProfileError
from profiler.experts.expert_law import ExpertLaw, ExpertShape, by_knots, fit_expert_law, least_us
from profiler.experts.routing import Spread
from profiler.specs.number_format import FORMATS

if TYPE_CHECKING:
    from profiler.specs.hardware import Hardware

Array = NDArray[np.float64]
NEAREST = 6
ALIKE = 0.05
"""Squared octaves between two layers that count as one."""
SAMPLE = 150
"""Layers that a law is fitted on; every one holds dozens of batches."""


@dataclass(frozen=True)
class ExpertTable:
    """One layer as one device has it. us: [spreads, tokens] microseconds."""

    kernel: str
    shape: ExpertShape
    spreads: tuple[str, ...]
    tokens: Array
    us: Array


@dataclass(frozen=True)
class ExpertTimes:
    """us: microseconds of batches of so many tokens. measured: whether this very layer was. most: tokens measured."""

    us: Callable[[Array], Array]
    measured: bool
    most: float


@dataclass(frozen=True)
class ExpertFit:
    """laws: by kernel. errors: on layers left out, by what was left out (median, p95, count)."""

    number_format: str
    laws: Mapping[str, ExpertLaw]
    tables: tuple[ExpertTable, ...]
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def times(self, shape: ExpertShape, spread: Spread) -> ExpertTimes:
        """Of a layer under a spread of tokens."""
        near = self._around(shape)
        kernel = near[0][1].kernel
        law, measured = self.laws[kernel], near[0][0] == 0.0
        used = near[:1] if measured else near
        parts = [(1.0 / (distance + ALIKE), *self._misses(table, spread)) for distance, table in used]
        total = sum(weight for weight, *_ in parts)

        def us(tokens: Array) -> Array:
            features = shape.features(spread, tokens.astype(int).tolist())
            miss = sum(w * np.interp(np.log(tokens), np.log(at), values) for w, at, values in parts) / total
            floor = least_us(shape, features, law.weight_bytes, law.flops_per_us, law.bytes_per_us)
            return np.asarray(np.maximum(law.us(shape, tokens, features) * np.exp(miss), floor))

        return ExpertTimes(by_knots(us), measured, float(near[0][1].tokens[-1]))

    def _misses(self, table: ExpertTable, spread: Spread) -> tuple[Array, Array]:
        """(tokens, log of measured over law): of the same spread where it was measured, else the mean of all."""
        law = self.laws[table.kernel]
        rows = [table.spreads.index(spread.name)] if spread.name in table.spreads else range(len(table.spreads))
        misses = []
        for row in rows:
            features = table.shape.features(Spread.parse(table.spreads[row]), table.tokens.astype(int).tolist())
            misses.append(np.log(table.us[row] / law.us(table.shape, table.tokens, features)))
        return table.tokens, np.asarray(np.mean(misses, axis=0))

    def _around(self, shape: ExpertShape) -> list[tuple[float, ExpertTable]]:
        """(squared distance in octaves, table) of the nearest measured layers, all of the nearest one's kernel."""
        alone = shape.ways == 1
        some = [one for one in self.tables if (one.shape.ways == 1) == alone] or list(self.tables)
        ranked = sorted(((_apart(shape, one.shape), at) for at, one in enumerate(some)))
        if not ranked:
            raise ProfileError(f"experts in {self.number_format}: nothing was measured")
        kernel = some[ranked[0][1]].kernel
        return [(distance, some[at]) for distance, at in ranked if some[at].kernel == kernel][:NEAREST]


def fit_experts(
    number_format: str, tables: Sequence[ExpertTable], hardware: Hardware, *, check: bool = True
) -> ExpertFit:
    """Laws of every kernel, and with `check` the errors on whole models, widths, device counts and tokens left out."""
    products = FORMATS[number_format].products if number_format in FORMATS else number_format
    weight = FORMATS[number_format].bits / 8 if number_format in FORMATS else 2.0
    laws = {}
    for kernel in sorted({table.kernel for table in tables}):
        own = [table for table in tables if table.kernel == kernel]
        picked = np.random.default_rng(0).permutation(len(own))[:SAMPLE]
        points = [point for at in picked for point in _points(own[at])]
        laws[kernel] = fit_expert_law(points, hardware, weight, products or "bfloat16")
    fit = ExpertFit(number_format, laws, tuple(tables))
    return replace(fit, errors=held_out(fit)) if check else fit


def held_out(fit: ExpertFit) -> dict[str, dict[str, float]]:
    """Median, P95 and number of relative errors with structures left out of the tables; laws stay, since a dozen
    coefficients over tens of thousands of points do not follow any one of them."""
    found: dict[str, dict[str, float]] = {}
    models = {_model(table.shape) for table in fit.tables}
    groups: dict[str, list[set[int]]] = {"whole models": [], "widths": [], "devices": []}
    for model in sorted(models):
        groups["whole models"].append({at for at, one in enumerate(fit.tables) if _model(one.shape) == model})
    for name, key in (("widths", lambda s: s.width), ("devices", lambda s: s.ways)):
        for model in sorted(models):
            own = [(at, one.shape) for at, one in enumerate(fit.tables) if _model(one.shape) == model]
            values = sorted({key(shape) for _, shape in own})
            groups[name] += [{at for at, shape in own if key(shape) == value} for value in values[1:-1]]
    for name, lefts in groups.items():
        errors = [error for left in lefts if 0 < len(left) < len(fit.tables) for error in _missed(fit, left)]
        if errors:
            found[name] = _summary(np.concatenate(errors))
    halves = []
    for table in fit.tables:
        for keep in (0, 1):
            at = np.arange(len(table.tokens))
            known = (at % 2 == keep) | (at == 0) | (at == at[-1])
            part = replace(table, tokens=table.tokens[known], us=table.us[:, known])
            halves += _errors_at(replace(fit, tables=(part,)), table, ~known)
    if halves:
        found["tokens"] = _summary(np.concatenate(halves))
    return found


def _missed(fit: ExpertFit, left: set[int]) -> Iterable[Array]:
    rest = replace(fit, tables=tuple(one for at, one in enumerate(fit.tables) if at not in left))
    for at in sorted(left):
        yield from _errors_at(rest, fit.tables[at], np.ones(len(fit.tables[at].tokens), bool))


def _errors_at(fit: ExpertFit, table: ExpertTable, which: NDArray[np.bool_]) -> list[Array]:
    errors = []
    for row, spread in enumerate(table.spreads):
        parts = fit._around(table.shape)
        weights = [1.0 / (distance + ALIKE) for distance, _ in parts]
        tokens = table.tokens[which]
        miss = np.zeros(len(tokens))
        for weight, (_, near) in zip(weights, parts, strict=True):
            at, values = fit._misses(near, Spread.parse(spread))
            miss += weight / sum(weights) * np.interp(np.log(tokens), np.log(at), values)
        features = table.shape.features(Spread.parse(spread), tokens.astype(int).tolist())
        said = fit.laws[parts[0][1].kernel].us(table.shape, tokens, features) * np.exp(miss)
        errors.append(said / table.us[row][which] - 1.0)
    return errors


def _summary(errors: Array) -> dict[str, float]:
    size = np.abs(errors)
    return {
        "count": float(len(size)),
        "median": round(float(np.median(size)), 4),
        "p90": round(float(np.quantile(size, 0.9)), 4),
        "p95": round(float(np.quantile(size, 0.95)), 4),
        "bias": round(float(np.mean(errors)), 4),
    }


def _points(table: ExpertTable) -> list[tuple[ExpertShape, Array, Array, Array]]:
    points = []
    for row, spread in enumerate(table.spreads):
        features = table.shape.features(Spread.parse(spread), table.tokens.astype(int).tolist())
        points.append((table.shape, table.tokens, features, table.us[row]))
    return points


def _model(shape: ExpertShape) -> tuple[int, int, int]:
    """What tells models apart; widths and devices are how one is cut."""
    return shape.hidden, shape.experts, shape.top_k


def _apart(one: ExpertShape, other: ExpertShape) -> float:
    sizes = (
        (one.hidden, other.hidden),
        (one.width, other.width),
        (one.experts / one.ways, other.experts / other.ways),
        (one.top_k, other.top_k),
        (one.experts, other.experts),
    )
    return float(sum(np.log2(a / b) ** 2 for a, b in sizes))
