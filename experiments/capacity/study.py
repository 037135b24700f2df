"""Capacity across settings: every policy, chunk size and GPU asked for, over the same draws, on any engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from experiments.capacity.draws import OWN
from experiments.capacity.search import Objective
from experiments.errors import ExperimentError
from experiments.running.task_runners import Engine, ThisProcess
from experiments.sweeps.axes import SweepSpec, Values, enumerate_points, task_of
from metrics.measures.summary_keys import BASIS

CONFIDENCE = 0.95

MOST_REQUESTS = 20_000
"""Of a draw that is made longer."""


@dataclass(frozen=True)
class SettingCapacity:
    """The capacity of one setting. rates: arrivals per second, one a draw. values: what makes the setting.

    half_width: of the 95 % interval of the mean over draws (Student's t), the width of the brackets included.
    served_requests_per_s, output_tokens_per_s: delivered at that rate; who is rejected arrives but is not served.
    """

    label: str
    values: Values
    rates: tuple[float, ...]
    half_width: float
    limited_by: str
    devices: int
    served_requests_per_s: float
    output_tokens_per_s: float
    cost_model: str
    basis: Mapping[str, Any]
    measured: int
    rejected_share: float = 0.0
    draws: tuple[Mapping[str, Any], ...] = field(repr=False, default=())
    error: str = ""

    @property
    def cost_basis(self) -> str:
        """What the costs rest on, in words (of the first draw, at the rate found)."""
        return str(self.basis.get("cost_basis"))

    @property
    def rate(self) -> float:
        return fmean(self.rates) if self.rates else math.nan

    @property
    def gpu_seconds_per_request(self) -> float:
        return self.devices / self.served_requests_per_s if self.served_requests_per_s else math.inf

    @property
    def gpu_seconds_per_million_output_tokens(self) -> float:
        return self.devices / self.output_tokens_per_s * 1e6 if self.output_tokens_per_s else math.inf

    def ratio_to(self, other: SettingCapacity) -> tuple[float, float, float]:
        """Capacity over another's, draw by draw: geometric mean and its 95 % interval, widened by both brackets."""
        from simulator.studies.compare_draws import Spread

        if not self.rates or not other.rates or min(self.rates) == 0 or min(other.rates) == 0:
            return math.nan, math.nan, math.nan
        if self is other:
            return 1.0, 1.0, 1.0
        spread = Spread.of([math.log(a / b) for a, b in zip(self.rates, other.rates)])
        width = spread.half_width + self._bracket() + other._bracket()
        return math.exp(spread.mean), math.exp(spread.mean - width), math.exp(spread.mean + width)

    def _bracket(self) -> float:
        """Half the mean width of the brackets in the logarithm: a rate is the middle of its bracket there."""
        return fmean(math.log(draw["high"] / draw["low"]) / 2 for draw in self.draws)


@dataclass(frozen=True)
class CapacityStudy:
    """The capacities of all settings; the first that can be run is what the others are compared with."""

    objective: Objective
    draws: Mapping[str, Any]
    tolerance: float
    settings: tuple[SettingCapacity, ...]

    @property
    def reference(self) -> SettingCapacity:
        return next((setting for setting in self.settings if not setting.error), self.settings[0])

    def rows(self) -> list[dict[str, Any]]:
        """One flat row per setting."""
        rows = []
        for setting in self.settings:
            ratio, low, high = setting.ratio_to(self.reference)
            rows.append(
                {
                    "setting": setting.label,
                    **setting.values,
                    "requests_per_s": setting.rate,
                    "requests_per_s_low": max(0.0, setting.rate - setting.half_width),
                    "requests_per_s_high": setting.rate + setting.half_width,
                    "ratio": ratio,
                    "ratio_low": low,
                    "ratio_high": high,
                    "limited_by": setting.limited_by,
                    "served_requests_per_s": setting.served_requests_per_s,
                    "output_tokens_per_s": setting.output_tokens_per_s,
                    "devices": setting.devices,
                    "gpu_seconds_per_request": setting.gpu_seconds_per_request,
                    "gpu_seconds_per_million_output_tokens": setting.gpu_seconds_per_million_output_tokens,
                    "cost_model": setting.cost_model,
                    **{key: setting.basis.get(key) for key in ("calibrated", "measured_share", "cost_basis")},
                    "measured_per_probe": setting.measured,
                    "rejected_share": setting.rejected_share,
                    "rates": list(setting.rates),
                    "error": setting.error,
                }
            )
        return rows

    def as_dict(self) -> dict[str, Any]:
        return {
            "objective": asdict(self.objective),
            "confidence": CONFIDENCE,
            "tolerance": self.tolerance,
            "draws": dict(self.draws),
            "settings": self.rows(),
        }


def find_capacities(
    axes: Mapping[str, Sequence[Any]],
    base: Values,
    draws: Mapping[str, Any],
    objective: Objective,
    *,
    count: int = 5,
    tolerance: float = 0.01,
    engine: Engine | None = None,
    report: Callable[[int, int, int], None] | None = None,
) -> CapacityStudy:
    """The capacity of every combination of `axes` on top of `base` (names as in a sweep), over `count` draws.

    draws: a plan of experiments.capacity.draws.draw_plan; draws get longer where a run would otherwise be too short to
    tell a long queue from an endless one (not pieces of a trace, which are as long as they are). The first draw of each
    setting searches from afar, the others from what it found. Raises ExperimentError if no setting can be run at all.
    """
    if not 1e-4 <= tolerance <= 0.5:
        raise ExperimentError(f"--tolerance: found {tolerance:g}, expected 0.0001 to 0.5")
    engine = engine or ThisProcess()
    settings = combinations(axes, base)
    draws = _long_enough([task for _, _, task in settings], draws, objective, engine)
    tasks = [
        {**task, "kind": "capacity", "draws": dict(draws), "objective": asdict(objective), "tolerance": tolerance}
        for _, _, task in settings
    ]
    total = len(tasks) * count
    results: dict[int, Mapping[str, Any]] = {}

    def run(batch: dict[int, dict[str, Any]]) -> None:
        for number, result in engine.run(batch) if batch else ():
            results[number] = result
            if report is not None:
                report(len(results), total, sum(done["status"] == "failed" for done in results.values()))

    try:
        run({index * count: {**task, "draw": 0} for index, task in enumerate(tasks)})
        rest = {}
        for index, task in enumerate(tasks):
            first = results[index * count]
            if first["status"] == "ok":
                guess = first["result"]["rate"] or first["result"]["high"]
                rest.update({index * count + d: {**task, "draw": d, "guess": guess} for d in range(1, count)})
        run(rest)
    finally:
        engine.close()
    found = tuple(
        _setting(label, values, [results[n] for n in range(index * count, (index + 1) * count) if n in results])
        for index, (label, values, _) in enumerate(settings)
    )
    if all(setting.error for setting in found):
        raise ExperimentError(found[0].error)
    return CapacityStudy(objective, draws, tolerance, found)


def _long_enough(
    tasks: list[dict[str, Any]], draws: Mapping[str, Any], objective: Objective, engine: Engine
) -> Mapping[str, Any]:
    """The same plan with as many requests as the fastest setting serves in the objective's span."""
    if draws["arrivals"] == OWN:
        return draws
    short = {**draws, "requests": min(draws["requests"], 200)}
    if "file" not in draws["workload"]:
        short["workload"] = {**draws["workload"], "requests": short["requests"]}
    probes = {number: {**task, "kind": "saturated", "draws": short, "draw": 0} for number, task in enumerate(tasks)}
    rates = [done["result"]["rate"] for _, done in engine.run(probes) if done["status"] == "ok"]
    # A short burst fills and drains for much of its time, so it understates the rate.
    needed = min(MOST_REQUESTS, math.ceil(1.25 * max(rates, default=0.0) * objective.span_s()))
    if needed <= draws["requests"]:
        return draws
    longer = {**draws, "requests": needed}
    if "file" not in draws["workload"]:
        longer["workload"] = {**draws["workload"], "requests": needed}
    return longer


def combinations(axes: Mapping[str, Sequence[Any]], base: Values) -> list[tuple[str, Values, dict[str, Any]]]:
    """Every combination once: its label, its values, and the task of one replay."""
    from experiments.sweeps.axes import parse_sweep

    if not axes:
        axes = {"policy": [base.get("policy", "chunked")]}
    spec: SweepSpec = parse_sweep({"base": dict(base), "space": {name: list(values) for name, values in axes.items()}})
    varying = [name for name, values in axes.items() if len(values) > 1] or [next(iter(axes))]
    found = []
    for values in enumerate_points(spec):
        task = task_of(spec, values)
        task.pop("trace")
        label = " ".join(f"{values[name]}" for name in varying if name in values)
        found.append((label, values, task))
    return found


def _setting(label: str, values: Values, results: list[Mapping[str, Any]]) -> SettingCapacity:
    from simulator.studies.compare_draws import Spread

    failed = next((result["error"] for result in results if result["status"] == "failed"), "")
    if failed:
        return SettingCapacity(label, values, (), math.nan, "", 0, 0.0, 0.0, "", {}, 0, error=failed)
    draws = [result["result"] for result in results]
    rates = tuple(float(draw["rate"]) for draw in draws)
    bracket = fmean((draw["high"] - draw["low"]) / 2 for draw in draws)
    limits = Counter(draw["limited_by"] for draw in draws)
    return SettingCapacity(
        label,
        values,
        rates,
        Spread.of(rates).half_width + bracket,
        limits.most_common(1)[0][0],
        draws[0]["devices"],
        fmean(draw["served_requests_per_s"] for draw in draws),
        fmean(draw["output_tokens_per_s"] for draw in draws),
        draws[0]["cost_model"],
        {key: draws[0][key] for key in BASIS},
        draws[0]["measured"],
        fmean(draw["rejected"] / draw["measured"] for draw in draws),
        tuple(draws),
    )
