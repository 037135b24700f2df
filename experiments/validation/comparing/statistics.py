"""Prediction against reality: statistics with intervals and spreads, rankings of policies, residuals of iterations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metrics.measures.statistics import interval_of_draws
from profiler.iterations.aftermath import in_order

if TYPE_CHECKING:
    from metrics import RunTables
    from profiler.cost_model import CostModel

Array = NDArray[np.float64]
Summary = Mapping[str, Any]

STATISTICS = (
    "ttft_s_mean",
    "ttft_s_p50",
    "ttft_s_p90",
    "tpot_s_mean",
    "tpot_s_p50",
    "tpot_s_p90",
    "tbt_s_p50",
    "tbt_s_p99",
    "e2e_s_mean",
    "e2e_s_p50",
    "e2e_s_p90",
    "iteration_s_mean",
    "output_tokens_per_s",
)
RANKED = ("ttft_s_mean", "ttft_s_p90", "tpot_s_mean", "tbt_s_p99", "e2e_s_mean", "e2e_s_p90")

AIMS = {
    "tpot_s_mean": 0.03,
    "tpot_s_p50": 0.03,
    "tpot_s_p90": 0.05,
    "e2e_s_mean": 0.03,
    "e2e_s_p50": 0.03,
    "e2e_s_p90": 0.05,
    "ttft_s_mean": 0.05,
}
"""Largest relative error aimed at; TTFT's mean only up to TTFT_UP_TO of the capacity."""
TTFT_UP_TO = 0.6

WITHIN_AIM, WITHIN_SPREAD, TOO_NOISY, OUTSIDE = "within aim", "within spread", "too noisy to tell", "outside"
NOISY = 0.25
"""A spread of live repeats beyond which an error within it is no agreement: such repeats would hide any effect."""


@dataclass(frozen=True)
class Comparison:
    """One statistic of one policy at one load. low, high: the prediction's interval, from an ensemble of cost models.
    live: mean of the repeats; live_low, live_high: their range. rescaled: the prediction at the speed that a gauge
    beside each live run told, or the drift probes around it, mean of the repeats. at_live_speed: the error that is
    left, on average over the repeats, when each is predicted at the speed that its own iterations had: no prediction
    any more, but it tells a wrong level of the costs from everything else."""

    policy: str
    load: float
    statistic: str
    simulated: float
    low: float
    high: float
    live: float
    live_low: float
    live_high: float
    rescaled: float
    at_live_speed: float
    repeats: int
    aim: float | None
    live_values: tuple[float, ...] = ()
    """The live repeats one by one."""
    expected: float = float("nan")
    """Mean of the ensemble: what a machine that is now slower, now faster makes of latencies on average (queues grow
    more in slow stretches than they shrink in fast ones)."""

    @property
    def inside(self) -> int:
        """How many of the live repeats lie in the prediction's interval."""
        return sum(self.low <= value <= self.high for value in self.live_values)

    @property
    def error(self) -> float:
        """Relative; above 0 where the prediction is larger."""
        return self.simulated / self.live - 1 if self.live else float("nan")

    @property
    def rescaled_error(self) -> float:
        return self.rescaled / self.live - 1 if self.live else float("nan")

    @property
    def spread(self) -> float:
        """Range of the live repeats over their mean."""
        return (self.live_high - self.live_low) / self.live if self.live else float("nan")

    @property
    def verdict(self) -> str:
        """Empty where nothing is aimed at."""
        return self._judged(self.error)

    @property
    def rescaled_verdict(self) -> str:
        """The same for the prediction at the told speed."""
        return self._judged(self.rescaled_error)

    def _judged(self, error: float) -> str:
        if self.aim is None or error != error:
            return ""
        if abs(error) <= self.aim:
            return WITHIN_AIM
        if abs(error) > self.spread:
            return OUTSIDE
        return WITHIN_SPREAD if self.spread <= NOISY else TOO_NOISY

    def as_dict(self) -> dict[str, Any]:
        derived = {"error": self.error, "spread": self.spread, "verdict": self.verdict}
        return {**asdict(self), **derived, "rescaled_error": self.rescaled_error}


def verdict_of(comparisons: Sequence[Comparison]) -> str:
    """How many of the statistics that are aimed at agree, in one sentence, and the largest error that does not."""
    aimed = [row for row in comparisons if row.verdict]
    if not aimed:
        return ""
    count = {
        name: sum(row.verdict == name for row in aimed) for name in (WITHIN_AIM, WITHIN_SPREAD, TOO_NOISY, OUTSIDE)
    }
    told = f"{count[WITHIN_AIM]} of {len(aimed)} statistics are predicted within their aim"
    if count[WITHIN_SPREAD]:
        told += f", {count[WITHIN_SPREAD]} more within the spread of the live repeats"
    if count[TOO_NOISY]:
        told += f"; {count[TOO_NOISY]} cannot be told, since the live repeats differ by more than {NOISY:.0%}"
    missed = [row for row in aimed if row.verdict == OUTSIDE]
    if missed:
        worst = max(missed, key=lambda row: abs(row.error))
        told += f"; {len(missed)} miss, the most {worst.statistic} of {worst.policy} ({worst.error:+.0%})"
    return f"{told}."


def aim_of(statistic: str, load: float) -> float | None:
    """The relative error that is aimed at, None where none is."""
    return None if statistic == "ttft_s_mean" and load > TTFT_UP_TO + 1e-9 else AIMS.get(statistic)


def compare(
    policy: str,
    load: float,
    simulated: Summary,
    ensemble: Sequence[Summary],
    at_probed_speed: Sequence[Summary],
    live: Sequence[Summary],
    at_live_speed: Sequence[Summary] = (),
    statistics: Sequence[str] = STATISTICS,
) -> list[Comparison]:
    """Every statistic that both worlds have. at_probed_speed, at_live_speed: one simulated summary per live one, or
    none."""
    found = []
    for statistic in statistics:
        values = [float(run[statistic]) for run in live if _number(run.get(statistic))]
        if not values or not _number(simulated.get(statistic)):
            continue
        draws = [float(run[statistic]) for run in ensemble] or [float(simulated[statistic])]
        low, high = interval_of_draws(draws)
        aim = aim_of(statistic, load)
        probed = [float(run[statistic]) for run in at_probed_speed]
        left = [
            float(one[statistic]) / float(run[statistic]) - 1
            for one, run in zip(at_live_speed, live)
            if _number(run.get(statistic)) and run[statistic]
        ]
        found.append(
            Comparison(
                policy,
                load,
                statistic,
                float(simulated[statistic]),
                float(low),
                float(high),
                float(np.mean(values)),
                min(values),
                max(values),
                float(np.mean(probed)) if probed else float("nan"),
                float(np.mean(left)) if left else float("nan"),
                len(values),
                aim,
                tuple(values),
                float(np.mean(draws)),
            )
        )
    return found


def pooled_error(
    comparisons: Sequence[Comparison], statistic: str, predicted: str = "simulated"
) -> tuple[float, float, int] | None:
    """Geometric mean of predicted (`simulated` or `expected`) over live, minus 1, over all live runs of all policies
    and loads; its standard error (each live run counted as a draw of its own); how many. What a shared machine does to
    single runs averages out here, a wrong cost model does not. None below three runs."""
    logs = [
        math.log(getattr(row, predicted) / value)
        for row in comparisons
        if row.statistic == statistic and getattr(row, predicted) > 0
        for value in row.live_values
        if value > 0
    ]
    if len(logs) < 3:
        return None
    return math.expm1(float(np.mean(logs))), float(np.std(logs, ddof=1)) / math.sqrt(len(logs)), len(logs)


@dataclass(frozen=True)
class Ranking:
    """Pairs of policies by one statistic: decided where the ranges of the live repeats do not meet (one repeat decides
    nothing), and of these how many the prediction puts in the same order."""

    statistic: str
    load: float
    pairs: int
    decided: int
    agreed: int
    live_order: tuple[str, ...]
    simulated_order: tuple[str, ...]
    wrong: tuple[tuple[str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rank(
    comparisons: Sequence[Comparison], statistics: Sequence[str] = RANKED, predicted: str = "simulated"
) -> list[Ranking]:
    """One ranking per statistic and load, by `simulated` or `rescaled`; nothing to rank below two policies."""
    found = []
    for load in sorted({row.load for row in comparisons}):
        for statistic in statistics:
            rows = [row for row in comparisons if row.load == load and row.statistic == statistic]
            if len(rows) < 2:
                continue
            decided, wrong = 0, []
            for one, other in combinations(rows, 2):
                if one.repeats < 2 or (one.live_low <= other.live_high and other.live_low <= one.live_high):
                    continue
                decided += 1
                if (one.live < other.live) != (getattr(one, predicted) < getattr(other, predicted)):
                    wrong.append((one.policy, other.policy))
            pairs = len(rows) * (len(rows) - 1) // 2
            live_order = tuple(row.policy for row in sorted(rows, key=lambda row: row.live))
            simulated_order = tuple(row.policy for row in sorted(rows, key=lambda row: getattr(row, predicted)))
            found.append(
                Ranking(
                    statistic, load, pairs, decided, decided - len(wrong), live_order, simulated_order, tuple(wrong)
                )
            )
    return found


@dataclass(frozen=True)
class Iterations:
    """Predicted and measured whole times of live iterations, seconds, and what they were made of.

    expected_experts, counted_experts: touched ones, the mean over layers with experts; NaN for a dense model.
    """

    predicted_s: Array
    measured_s: Array
    cpu_s: Array
    prefill_tokens: NDArray[np.int64]
    decodes: NDArray[np.int64]
    inside: NDArray[np.bool_]
    expected_experts: Array
    counted_experts: Array

    @classmethod
    def none(cls) -> Iterations:
        return cls(*(np.zeros(0) for _ in fields(cls)))

    @classmethod
    def of(cls, run: RunTables, cost: CostModel) -> Iterations:
        """Of one live run; `cost` predicts host and device of every iteration's shape."""
        shapes = shapes_of_run(run)
        device = np.sum([cost.predict_ns(shapes, stage) for stage in range(cost.stages)], axis=0)
        device = device + in_order(cost, shapes)
        host = np.array([sum(cost.host_ns(shape)) for shape in shapes], np.int64)
        return cls(
            (device + host) / 1e9,
            # A pipeline's batches overlap and queue: what each was worked on, then.
            run.column("iterations", "wall_s")
            if cost.stages == 1
            else sum(run.column("iterations", name) for name in ("host_before_s", "device_s", "host_after_s")),
            run.column("iterations", "cpu_s"),
            run.column("iterations", "chunk_tokens"),
            run.column("iterations", "decodes"),
            np.array([cost.inside(shape) for shape in shapes], bool),
            expect(shapes) if (expect := getattr(cost, "activated_experts", None)) else np.full(len(shapes), np.nan),
            run.column("iterations", "activated_experts"),
        )

    @classmethod
    def joined(cls, parts: Sequence[Iterations]) -> Iterations:
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    def experts_of(self, rows: NDArray[np.bool_]) -> dict[str, float]:
        """Touched experts of some iterations, mean expected and mean counted; nothing where either is not known."""
        both = rows & ~np.isnan(self.expected_experts) & ~np.isnan(self.counted_experts)
        if not both.any():
            return {}
        expected, counted = self.expected_experts[both], self.counted_experts[both]
        return {
            "experts_expected": float(expected.mean()),
            "experts_counted": float(counted.mean()),
            "experts_median_error": float(np.median(np.abs(expected / np.maximum(counted, 1e-9) - 1))),
        }

    @property
    def slowness(self) -> float:
        """Time that all iterations took over what was predicted for them."""
        return float(self.measured_s.sum() / self.predicted_s.sum())

    def groups(self) -> list[dict[str, Any]]:
        """Residuals by kind of batch and size; share: of the time that all iterations took."""
        chunks, decodes = self.prefill_tokens, self.decodes
        kinds = {
            "decode, 1-3": (chunks == 0) & (decodes <= 3),
            "decode, 4-15": (chunks == 0) & (decodes >= 4) & (decodes < 16),
            "decode, 16 and more": (chunks == 0) & (decodes >= 16),
            "prefill alone": (chunks > 0) & (decodes == 0),
            "mixed, up to 64 prefill tokens": (chunks > 0) & (chunks <= 64) & (decodes > 0),
            "mixed, more": (chunks > 64) & (decodes > 0),
            "all": np.ones(len(chunks), bool),
        }
        total = float(self.measured_s.sum())
        found = []
        for name, rows in kinds.items():
            if not rows.any():
                continue
            ratio = self.predicted_s[rows] / self.measured_s[rows]
            found.append(
                {
                    "kind": name,
                    "iterations": int(rows.sum()),
                    "share": float(self.measured_s[rows].sum() / total),
                    "median_error": float(np.median(np.abs(ratio - 1))),
                    "p95_error": float(np.quantile(np.abs(ratio - 1), 0.95)),
                    "bias_of_sum": float(self.predicted_s[rows].sum() / self.measured_s[rows].sum() - 1),
                    "bias_of_median": float(np.median(ratio) - 1),
                    "inside": float(self.inside[rows].mean()),
                    **self.experts_of(rows),
                }
            )
        return found


def shapes_of_run(run: RunTables) -> list[Any]:
    """The BatchShape of every iteration of a run."""
    from policies.work.batch import BatchShape

    names = ["decodes", "decode_context_total", "decode_context_max", "dummy_tokens", "sampled", "executed_rows"]
    rows = run.iterations.select(["chunks", *names]).to_pylist()
    return [
        BatchShape(tuple((chunk["tokens"], chunk["prefix"]) for chunk in row["chunks"]), *(row[name] for name in names))
        for row in rows
    ]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
