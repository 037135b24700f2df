"""Whole engines as others measured them, predicted: mean TTFT, TPOT and E2E of closed loops, and of rates over HTTP.

Rows and their halves are facts (`profiler.measurements.engine_runs`): terms of named engines were fitted on half "a"
alone, half "b" judges. A closed loop leaves one thing open, how its first requests spread: with equal lengths they stay
in step for ever. So each row is predicted twice, with first arrivals all at once and spread over one E2E; E2E and TPOT
are judged spread, TTFT as the band between both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiler.measurements.engine_runs import ClosedLoopRun, RateRun, closed_loop_runs, corrected, rate_runs
from profiler.specs.model_config import load_model_spec
from simulator import ReplayConfig, replay
from simulator.cluster.pools import make_cluster_plan
from workloads import Trace

ROUNDS = 4
"""Requests of each client of a closed loop; the first of each is left out."""
STREAMS = 440
"""Requests that the HTTP client keeps in flight at most (44 processes of 10 streams)."""
UNNAMED = "0.11"
"""Version of vLLM at the end of October 2025, when the rows without one were measured."""
SATURATED = 0.95
"""A run that answered less than this share of the rate asked for is of a saturated engine."""


@dataclass(frozen=True)
class Variant:
    """One effect of an engine switched off. options: of the replay."""

    name: str
    terms: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


ABLATION = (
    Variant("as the engine is"),
    Variant("no process for each device", {"host_tp_step_us": 0.0, "host_tp_sequence_us": 0.0}),
    Variant("no host time a sequence", {"host_before_sequence_us": 0.0, "host_after_sample_us": 0.0}),
    Variant("clocks as in kernel tables", {"sustained_clocks": False}),
    Variant("no front end", {"front_before_us": 0.0, "front_after_us": 0.0}),
    Variant("planned ahead (asynchronous)", options={"async_scheduling": True}),
)
NO_ENGINE = Variant("kernels and scheduler alone", options={"engine": "none"})


@dataclass(frozen=True)
class Predicted:
    """One row: measured and predicted, in seconds (rates in requests/s), by name of the statistic.

    ttft_band: lowest and highest predicted mean TTFT over spreads of first arrivals; None where arrivals are known.
    intervals: from P5 to P95 over draws of kernels, host, clocks and front end, where draws were asked for.
    """

    id: str
    half: str
    group: str
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    ttft_band: tuple[float, float] | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def inside(self, name: str) -> bool:
        """Whether what was measured lies within the interval."""
        low, high = self.intervals[name]
        return low <= self.measured[name] <= high

    def error(self, name: str) -> float:
        return self.predicted[name] / self.measured[name] - 1

    @property
    def ttft_in_band(self) -> bool:
        assert self.ttft_band is not None
        return self.ttft_band[0] <= self.measured["ttft"] <= self.ttft_band[1]


def known_loops(half: str = "both") -> list[ClosedLoopRun]:
    """Closed loops whose kernels a fitted model knows (vLLM's), copies left out, labels as they have to be."""
    return [
        corrected(run)
        for run in closed_loop_runs()
        if run.engine == "vllm" and not run.same_as and half in ("both", run.half)
    ]


def known_models() -> list[str]:
    """Models of all rows, each once."""
    return list(dict.fromkeys(run.model for run in (*known_loops(), *known_rates())))


def known_rates(half: str = "both") -> list[RateRun]:
    """Rates over HTTP, of one half or both."""
    return [run for run in rate_runs() if half in ("both", run.half)]


def predict_loop(run: ClosedLoopRun, variant: Variant, engine: str | None = None, draws: int = 0) -> Predicted:
    """A closed loop, first arrivals at once and spread over one E2E; draws: of the costs, for intervals."""
    config = _config(run, variant, engine)
    burst = _means(replay(_loop(run, 0.0), config), run.concurrency)
    trace = _loop(run, burst["e2e"])
    spread = _means(replay(trace, config), run.concurrency)
    # As the row has it: of an answer of the stated length, whatever lengths were drawn.
    spread["e2e"] = spread["ttft"] + spread["tpot"] * (run.output_tokens - 1)
    intervals = _intervals(trace, config, run.concurrency, draws)
    measured = {"ttft": run.ttft_ms / 1e3, "tpot": run.tpot_ms / 1e3, "e2e": run.e2e_ms / 1e3}
    band = sorted((burst["ttft"], spread["ttft"]))
    whole = " ep" if run.experts_ep > 1 else ""
    group = f"{run.model} {run.dtype} {run.gpu} tp{run.tp}{whole}, {run.engine} {run.version or UNNAMED + '?'}"
    return Predicted(run.id, run.half, group, measured, spread, (band[0], band[1]), intervals)


def predict_rate(run: RateRun, variant: Variant, engine: str | None = None, draws: int = 0, seed: int = 0) -> Predicted:
    """A rate over HTTP: Poisson arrivals below saturation; beyond it as many in flight as the client keeps."""
    config = _config(run, variant, engine)
    saturated = run.achieved_rate < SATURATED * run.requested_rate
    trace = _saturated(run) if saturated else _open(run, seed)
    result = replay(trace, config)
    left_out = STREAMS if saturated else 0
    predicted = _means(result, left_out)
    measured = {"ttft": run.ttft_mean_s, "e2e": run.e2e_mean_s}
    measured["tpot"] = (run.e2e_mean_s - run.ttft_mean_s) / (run.output_mean - 1)
    if saturated:
        finished = result.tables.column("requests", "finished_s")
        predicted["rate"] = len(finished) / float(finished.max())
        measured["rate"] = run.requests_per_s
    kind = "saturated" if saturated else "below saturation"
    group = f"{run.model} {run.gpu} over HTTP, {run.engine} {run.version}, {kind}"
    intervals = _intervals(trace, config, left_out, draws)
    return Predicted(run.id, run.half, group, measured, predicted, None, intervals)


def _intervals(trace: Trace, config: ReplayConfig, left_out: int, draws: int) -> dict[str, tuple[float, float]]:
    """P5 and P95 of the means over draws of the costs; empty without draws."""
    if not draws:
        return {}
    plan = make_cluster_plan(config, trace)
    drawn = [_means(replay(trace, config, plan=plan.drawn(seed)), left_out) for seed in range(draws)]
    found = {}
    for name in drawn[0]:
        low, high = np.percentile([one[name] for one in drawn], [5, 95])
        found[name] = (float(low), float(high))
    return found


def _config(run: ClosedLoopRun | RateRun, variant: Variant, engine: str | None) -> ReplayConfig:
    own: dict[str, Any] = {"model": run.model, "gpu": run.gpu, "engine": engine or _engine_of(run)}
    if isinstance(run, ClosedLoopRun):
        own |= {"tp": run.tp, "dp": run.attention_dp, "ep": run.experts_ep > 1}
        if run.gemm_dtype == "fp8" and load_model_spec(run.model).weight_bits is None:
            own["weight_dtype"] = "fp8"
    else:
        own |= {"max_num_seqs": run.max_num_seqs, "knobs": {"prefix_caching": bool(run.prefix_caching)}}
    options = dict(variant.options)
    if "engine" in options:
        own |= {"engine": options.pop("engine"), "token_budget": 8192, "max_num_seqs": own.get("max_num_seqs", 1024)}
    if "async_scheduling" in options:
        own["knobs"] = {**own.get("knobs", {}), "async_scheduling": options.pop("async_scheduling")}
    terms = variant.terms if own["engine"] != "none" else {}
    return ReplayConfig(policy="vllm_v1", terms=terms, **own, **options)


def _engine_of(run: ClosedLoopRun | RateRun) -> str:
    """Rows without a version take that of their date."""
    return f"{run.engine}:{run.version or UNNAMED}"


def _loop(run: ClosedLoopRun, spread_s: float) -> Trace:
    """`ROUNDS` requests for each client, whose first ones come evenly over `spread_s`."""
    rng = np.random.default_rng(0)
    clients, count = run.concurrency, run.concurrency * ROUNDS
    drawn = [
        rng.integers(max(1, round(tokens * run.shortest_share)), tokens + 1, count)
        for tokens in (run.prompt_tokens, run.output_tokens)
    ]
    first_ns = np.rint(np.arange(clients) / clients * spread_s * 1e9).astype(np.int64)
    return _closed(run.id, clients, *drawn, first_ns)


def _saturated(run: RateRun) -> Trace:
    prompts, outputs = _lengths(run, np.random.default_rng(0))
    first_ns = np.rint(np.arange(STREAMS) / run.requested_rate * 1e9).astype(np.int64)
    return _closed(run.id, STREAMS, prompts, outputs, first_ns)


def _closed(name: str, clients: int, prompts: Any, outputs: Any, first_ns: Any) -> Trace:
    count = len(prompts)
    after = np.maximum(np.arange(count) - clients, -1)
    arrival_ns = np.concatenate([first_ns, np.full(count - clients, first_ns[-1])])
    return Trace(name, arrival_ns, prompts, outputs, outputs, after_row=after, think_ns=np.zeros(count, np.int64))


def _open(run: RateRun, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    arrival_ns = np.rint(np.cumsum(rng.exponential(1 / run.requested_rate, run.requests)) * 1e9).astype(np.int64)
    prompts, outputs = _lengths(run, rng)
    return Trace(run.id, arrival_ns, prompts, outputs, outputs)


def _lengths(run: RateRun, rng: np.random.Generator) -> tuple[Any, Any]:
    """Two neighbouring whole lengths around each mean: the run's E2E hardly varies where nothing waits."""
    drawn = []
    for mean in (run.prompt_mean, run.output_mean):
        drawn.append(int(mean) + (rng.uniform(size=run.requests) < mean % 1).astype(np.int64))
    return drawn[0], drawn[1]


def _means(run: Any, leave_out: int) -> dict[str, float]:
    """Mean TTFT, TPOT and E2E of the requests after the first `leave_out`."""
    from metrics.measures.latencies import COLUMNS, own_latencies

    columns = {name: run.tables.column("requests", name) for name in COLUMNS}
    counted = (columns["status"] == "finished") & (run.tables.column("requests", "request") >= leave_out)
    found = own_latencies(columns, counted)
    return {name: float(np.nanmean(found[name])) for name in ("ttft", "tpot", "e2e")}


def median_errors(rows: Sequence[Predicted], names: Sequence[str] = ("ttft", "tpot", "e2e")) -> dict[str, float]:
    """Median absolute relative error by statistic."""
    return {name: float(np.median([abs(row.error(name)) for row in rows])) for name in names}
