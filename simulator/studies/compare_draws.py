"""Comparisons that know chance: the same policies over several draws of the workload, differences taken pair by pair.

Every policy sees the same draws (common random numbers), so what differs between two policies is the policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from metrics.measures.summary_keys import BASIS
from simulator.config import ReplayConfig
from simulator.simulation import replay as replay_trace
from workloads import Trace

KEYS = (
    "ttft_s_p50",
    "ttft_s_p99",
    "tbt_s_p50",
    "tbt_s_p99",
    "e2e_s_p50",
    "goodput_requests_per_s",
    "output_tokens_per_s",
    "stalls",
)

_COST_KEYS = ("cost_model", *BASIS)

# Two-sided 95 % quantiles of Student's t by degrees of freedom (a table, so that a replay does not load SciPy).
_T95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)


def _t95(freedom: int) -> float:
    """Student's t at 97.5 %: the table, and beyond it the normal quantile with two terms of Cornish and Fisher."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class Spread:
    """Mean over draws, their standard deviation, and half the 95 % confidence interval of the mean (Student's t)."""

    mean: float
    deviation: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        count = len(values)
        mean = float(np.mean(values))
        if count < 2:
            return cls(mean, math.nan, math.nan)
        deviation = float(np.std(values, ddof=1))
        return cls(mean, deviation, _t95(count - 1) * deviation / math.sqrt(count))


@dataclass(frozen=True)
class SeededComparison:
    """values[policy][key]: one number a draw; the first policy is the one that others are compared with.

    costs: of each run, which costs it used and how far they can be trusted (keys of its summary).
    """

    draws: int
    values: Mapping[str, Mapping[str, list[float]]]
    costs: Sequence[Mapping[str, Any]] = ()

    def spread(self, policy: str, key: str) -> Spread:
        return Spread.of(self.values[policy][key])

    def difference(self, policy: str, key: str) -> Spread:
        """Of `policy` to the first policy, pair by pair."""
        first = next(iter(self.values))
        return Spread.of([b - a for a, b in zip(self.values[first][key], self.values[policy][key])])

    def as_dict(self) -> dict[str, Any]:
        first = next(iter(self.values))
        return {
            "draws": self.draws,
            "compared_with": first,
            "cost_models": list(dict.fromkeys(costs["cost_model"] for costs in self.costs)),
            "cost_basis": list(dict.fromkeys(str(costs["cost_basis"]) for costs in self.costs)),
            "policies": {
                policy: {
                    key: {
                        **vars(self.spread(policy, key)),
                        "values": values[key],
                        **({"difference": vars(self.difference(policy, key))} if policy != first else {}),
                    }
                    for key in values
                }
                for policy, values in self.values.items()
            },
        }


def compare_over_draws(
    draw: Callable[[int], Trace],
    settings: Mapping[str, ReplayConfig],
    draws: int,
    *,
    progress: Callable[[int, str], None] | None = None,
) -> SeededComparison:
    """Replay every setting over `draws` draws; draw(k) gives the k-th trace, the same one to every setting."""
    values: dict[str, dict[str, list[float]]] = {name: {key: [] for key in KEYS} for name in settings}
    costs = []
    for number in range(draws):
        trace = draw(number)
        for name, config in settings.items():
            if progress is not None:
                progress(number, name)
            summary = replay_trace(trace, config).summary
            costs.append({key: summary[key] for key in _COST_KEYS})
            for key in KEYS:
                value = summary[key]
                values[name][key].append(math.nan if value is None else float(value))
    return SeededComparison(draws, values, costs)


def comparison_rows(result: SeededComparison) -> Any:
    """A rich table: mean and its 95 % interval, and below it the paired difference to the first policy."""
    from rich.table import Table

    first = next(iter(result.values))
    table = Table(title=f"{result.draws} draws: mean ± half the 95 % interval; Δ pair by pair against {first}")
    table.add_column("policy")
    shown = [key for key in KEYS if not all(math.isnan(v) for row in result.values.values() for v in row[key])]
    for key in shown:
        table.add_column(key, justify="right")
    for policy in result.values:
        table.add_row(policy, *(_cell(result.spread(policy, key), key) for key in shown))
        if policy != first:
            table.add_row("  Δ", *(_cell(result.difference(policy, key), key, sign="+") for key in shown), style="dim")
    return table


def _cell(spread: Spread, key: str, sign: str = "") -> str:
    if math.isnan(spread.mean):
        return "-"
    scale, unit = (1e3, " ms") if "_s_" in key and not key.endswith("per_s") else (1.0, "")
    mean, half_width = spread.mean * scale, spread.half_width * scale
    # Both to the digit that the second of the half width stands at: more of the mean would be noise.
    digits = min(6, max(0, 1 - math.floor(math.log10(half_width)))) if half_width > 0 else 1
    return f"{mean:{sign},.{digits}f} ± {half_width:,.{digits}f}{unit}"
