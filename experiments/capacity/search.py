"""Capacity: the highest rate of arrivals at which an objective holds in steady state, with a stated confidence.

One draw of the workload is a fixed list of requests and of gaps; a rate only stretches the gaps. Within a draw the
answer "does the objective hold?" then changes once, and bracketing finds where. Every setting sees the same draws
(common random numbers), so two settings are compared draw by draw; the spread over draws gives Student's 95 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import ExperimentError
from policies.scheduling.overload_ladder import OVERLOADED

if TYPE_CHECKING:
    from metrics import RunTables
    from metrics.measures.slo import Bound
    from profiler.cost_model import CostModel
    from workloads import Trace

WARMUP_SHARE, TAIL_SHARE = 0.2, 0.1
"""Shares of the requests, first and last to arrive, that fill and drain the system and are not measured."""

QUEUE_DELAY_S = 2.0
"""Sarathi-Serve (Sec. 5.1) calls a rate sustainable while the median scheduling delay stays within 2 s."""

LOST = "requests that did not finish"
MOST_LOST = 0.01
"""Share of measured requests that may fail or be given up by their clients."""

LONGEST_S = 86_400.0
"""Longest bound: a search has to simulate many times as long."""

SPAN_OVER_BOUND = 30
"""Length of a run over the bound on waiting in it: overload of 1 / 30 and more is always seen."""

MOST_STEPS = 60


@dataclass(frozen=True)
class Objective:
    """What has to hold. slo: bounds such as "ttft_p99=2,tbt_p99=0.2" (any percentile of ttft, tbt, tpot, e2e).

    attainment: the bounds are then asked of each request by itself, and this share of requests has to meet them.
    queue_delay_s: most median scheduling delay; None for no such rule. By default 2 s where no bound limits queueing
    (an objective on gaps between tokens alone holds at any rate, since a queue that grows for ever delays no token).
    """

    slo: str
    attainment: float | None = None
    queue_delay_s: float | None = None

    @classmethod
    def of(cls, slo: str, attainment: float | None = None, queue_delay_s: float | None = None) -> Objective:
        """The objective with the default rule for queues; MetricsError or ExperimentError for one that is wrong."""
        from metrics import parse_slo

        bounds = parse_slo(slo)
        if attainment is not None and not 0 < attainment <= 1:
            raise ExperimentError(f"--attainment: found {attainment:g}, expected a share above 0 and at most 1")
        if queue_delay_s is None and not any(bound.metric in ("ttft", "e2e") for bound in bounds):
            queue_delay_s = QUEUE_DELAY_S
        if queue_delay_s is not None and not 0 < queue_delay_s <= LONGEST_S:
            raise ExperimentError(
                f"--queue-delay: found {queue_delay_s:g}, expected seconds above 0, at most {LONGEST_S:g}"
            )
        for bound in bounds:
            if bound.bound_s > LONGEST_S:
                raise ExperimentError(f"--slo: found {bound.bound_s:g} s in {slo!r}, expected at most {LONGEST_S:g} s")
        return cls(slo, attainment, queue_delay_s)

    def span_s(self) -> float:
        """How long a run has to last so that a queue that never ends breaks a bound before load is a few per cent above
        capacity: at a load of 1 + x the delay grows by x seconds a second."""
        from metrics import parse_slo

        waits = [SPAN_OVER_BOUND * bound.bound_s for bound in parse_slo(self.slo) if bound.metric in ("ttft", "e2e")]
        # A median feels only half of what the last request waits.
        waits += [2 * SPAN_OVER_BOUND * self.queue_delay_s] if self.queue_delay_s is not None else []
        return max(waits, default=0.0)

    def spoken(self) -> str:
        """As people say it."""
        text = self.slo.replace(",", ", ").replace("=", " <= ")
        if self.attainment is not None:
            text = f"{self.attainment:.0%} of requests meet {text}"
        if self.queue_delay_s is not None:
            text += f", median scheduling delay <= {self.queue_delay_s:g} s"
        return text


@dataclass(frozen=True)
class Probe:
    """What one rate came to. tightness: statistic over bound of each requirement (at most 1: met).

    measured: requests to arrive in the steady part; of those, finished and rejected (too long for the engine at any
    rate). output_tokens: delivered to the measured requests, whatever became of them.
    """

    rate: float
    tightness: Mapping[str, float]
    measured: int = 0
    finished: int = 0
    rejected: int = 0
    output_tokens: int = 0

    @property
    def holds(self) -> bool:
        return all(value <= 1.0 for value in self.tightness.values())

    @property
    def tightest(self) -> str:
        """The requirement that is nearest to failing, or fails by most."""
        return max(self.tightness, key=lambda name: self.tightness[name])


@dataclass(frozen=True)
class Bracket:
    """The objective holds at `low` and fails at `high`; every probe on the way. low is 0 where it never holds."""

    low: float
    high: float
    probes: tuple[Probe, ...]

    @property
    def rate(self) -> float:
        return math.sqrt(self.low * self.high)

    def at(self, rate: float) -> Probe | None:
        return next((probe for probe in self.probes if probe.rate == rate), None)


def find_rate(probe: Callable[[float], Probe], guess: float, *, tolerance: float = 0.01, least: float = 0.0) -> Bracket:
    """Bracket the highest rate at which a probe holds, from a guess. tolerance: most relative width of the bracket.

    least: below this rate nothing changes any more; an objective that fails there never holds (a bracket from 0).
    """
    if not 0 < guess < math.inf:
        raise ExperimentError(f"capacity: found a first guess of {guess}, expected a rate above 0")
    probes: list[Probe] = []

    def holds(rate: float) -> bool:
        if len(probes) >= MOST_STEPS:
            raise ExperimentError(
                f"capacity: no end after {MOST_STEPS} rates ({probes[0].rate:g} to {rate:g} requests/s); does the "
                "objective depend on the rate at all?"
            )
        probes.append(probe(rate))
        return probes[-1].holds

    step = 1.25
    low, high = (guess, 0.0) if holds(guess) else (0.0, guess)
    while not high:
        if holds(low * step):
            low, step = low * step, min(step * step, 4.0)
        else:
            high = low * step
    while not low:
        lower = max(high / step, least)
        if holds(lower):
            low = lower
        elif lower <= least:
            return Bracket(0.0, lower, tuple(probes))
        else:
            high, step = lower, min(step * step, 4.0)
    while high / low - 1 > tolerance:
        middle = math.sqrt(low * high)
        if holds(middle):
            low = middle
        else:
            high = middle
    return Bracket(low, high, tuple(probes))


def measure(trace: Trace, rate: float, config: Any, objective: Objective, cost: CostModel | None = None) -> Probe:
    """Replay a draw at a rate (requests per second, its own mean rate stretched) and hold it against the objective.

    What is measured are the requests of the steady part: after the first 20 % and before the last 10 % to arrive.
    """
    return _measured(trace, rate, config, objective, cost)[0]


def _measured(
    trace: Trace, rate: float, config: Any, objective: Objective, cost: CostModel | None
) -> tuple[Probe, dict[str, Any]]:
    """`measure`, and what the costs of the run rest on."""
    from metrics.measures.summary_keys import BASIS
    from simulator import replay

    run = replay(trace.scaled(rate / mean_rate(trace)), config, cost=cost)
    rank = run.tables.column("requests", "request")
    count = len(trace)
    steady = (rank >= count * WARMUP_SHARE) & (rank < count * (1 - TAIL_SHARE))
    return judge(run.tables, objective, steady, rate), {key: run.summary[key] for key in BASIS}


def judge(tables: RunTables, objective: Objective, wanted: Any, rate: float) -> Probe:
    """A finished run held against an objective. wanted: one flag per row of its requests: those that are measured."""
    from metrics import parse_slo, summarise

    summary = summarise(tables, slo=objective.slo, wanted=wanted)
    # Those that are too long for the engine are rejected at any rate, and only counted; who is turned away because the
    # engine is overloaded is not.
    status, reason = (tables.column("requests", name)[wanted] for name in ("status", "reason"))
    turned_away = np.array([str(text).startswith(OVERLOADED) for text in reason], dtype=bool)
    rejected = int(((status == "rejected") & ~turned_away).sum())
    measured, finished = summary["measured"], summary["measured_finished"]
    counts = (measured, finished, rejected, int(tables.column("requests", "output_tokens")[wanted].sum()))
    if not finished:
        return Probe(rate, {LOST: math.inf}, *counts)
    tightness: dict[str, float] = {}
    if objective.attainment is None:
        for bound in parse_slo(objective.slo):
            tightness[f"{bound.metric}_{bound.statistic}"] = _statistic(bound, summary, tables, wanted) / bound.bound_s
    else:
        # Counted, because a share times a count may fall short of a whole number, and all is all.
        able = measured - rejected
        missed, allowed = (able - round(summary["slo_attainment"] * measured)) / able, 1 - objective.attainment
        tightness["attainment"] = missed / allowed if allowed else (math.inf if missed else 0.0)
    if objective.queue_delay_s is not None:
        tightness["queue delay"] = summary["scheduling_delay_s_p50"] / objective.queue_delay_s
    # Requests that ended otherwise have no latency that could be too long; many of them must not count as met.
    lost = 1 - (finished + rejected) / measured
    if lost > MOST_LOST:
        tightness[LOST] = lost / MOST_LOST
    return Probe(rate, tightness, *counts)


def _statistic(bound: Bound, summary: Mapping[str, Any], tables: RunTables, wanted: Any) -> float:
    """The statistic that a bound is about, in seconds; 0 where no request has such a value (no gaps, no tokens)."""
    from metrics.measures.statistics import percentiles

    if bound.key in summary:
        value = float(summary[bound.key])
    else:
        assert bound.percentile is not None
        if bound.metric == "tbt":
            from metrics.measures.token_times import TokenTimes

            gaps = TokenTimes(tables).gaps(wanted & (tables.column("requests", "status") == "finished"))
            value = percentiles(gaps.ns / 1e9, [bound.percentile], gaps.count)[0]
        else:
            from metrics.measures.latencies import finished_latencies

            value = percentiles(finished_latencies(tables, wanted)[bound.metric], [bound.percentile])[0]
    return 0.0 if math.isnan(value) else value


def mean_rate(trace: Trace) -> float:
    """Requests per second of a draw: gaps over the time from first to last arrival."""
    span = int(trace.arrival_ns[-1] - trace.arrival_ns[0]) if len(trace) else 0
    if not span:
        raise ExperimentError(f"{trace.name}: all requests arrive at once, expected arrivals over time")
    return (len(trace) - 1) / span * 1e9


def saturated_rate(trace: Trace, config: Any, cost: CostModel | None = None) -> float:
    """Requests served per second when all of them wait from the start: where a search begins."""
    from simulator import replay
    from workloads.generating.arrival_processes import retimed

    run = replay(retimed(trace, "burst"), config, cost=cost)
    if not run.summary["finished"]:
        reasons = run.tables.column("requests", "reason")
        why = next((str(reason) for reason in reasons if reason), "no reason given")
        raise ExperimentError(f"capacity: none of {len(trace)} requests can be served, the first: {why}")
    return max(1e-6, float(run.summary["requests_per_s"]))


def run_task(task: Mapping[str, Any]) -> dict[str, Any]:
    """Find the rate of one draw under one setting; plain data in and out, for worker processes."""
    from experiments.sweeps.point import replay_config

    return search_draw(task, replay_config(task))


def search_draw(task: Mapping[str, Any], config: Any, cost: CostModel | None = None) -> dict[str, Any]:
    """The search of `run_task`. cost: a cost model object to use instead of the config's."""
    from experiments.capacity.draws import draw_of

    trace = draw_of(task["draws"], task["draw"])
    objective = Objective(**task["objective"])
    guess = task.get("guess") or 0.8 * saturated_rate(trace, config, cost)
    bases: dict[float, dict[str, Any]] = {}

    def probe(rate: float) -> Probe:
        found, bases[rate] = _measured(trace, rate, config, objective, cost)
        return found

    bracket = find_rate(
        probe,
        guess,
        tolerance=task["tolerance"],
        least=guess / 1000,
    )
    at_high = bracket.at(bracket.high)
    # What is served does not grow with the rate's last per cent: shares of the highest rate that holds are good enough.
    served = bracket.at(bracket.low) or bracket.probes[0]
    return {
        "low": bracket.low,
        "high": bracket.high,
        "rate": bracket.rate,
        "limited_by": at_high.tightest if at_high else None,
        "served_requests_per_s": bracket.rate * served.finished / served.measured,
        "output_tokens_per_s": bracket.rate * served.output_tokens / served.measured,
        "measured": served.measured,
        "rejected": served.rejected,
        "probes": [asdict(probe) for probe in bracket.probes],
        **_engine_facts(trace, config, cost),
        **bases[served.rate],
    }


def run_saturated(task: Mapping[str, Any]) -> dict[str, Any]:
    """The saturated rate of one draw under one setting; plain data in and out, for worker processes."""
    from experiments.capacity.draws import draw_of
    from experiments.sweeps.point import replay_config

    return {"rate": saturated_rate(draw_of(task["draws"], task["draw"]), replay_config(task))}


def _engine_facts(trace: Trace, config: Any, cost: CostModel | None) -> dict[str, Any]:
    """Devices and cost model of a setting, as a row reports them."""
    from simulator.simulation import make_cluster_plan

    plan = make_cluster_plan(config, trace, cost)
    cost = plan.engine.cost
    return {"devices": plan.devices, "cost_model": cost.name}
