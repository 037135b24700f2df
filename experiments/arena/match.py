"""What is contested: traces cut into a part to tune on and slices to judge by, an objective, loads, and one replay.

Load 1 is the knee: the highest rate at which `slo_aware`, told the objective, keeps nine of ten requests of the tuning
piece within it. Every other piece is stretched to the same load, so that policies meet the same pressure in each. The
score of a replay is the share of its requests that finish and meet every bound by themselves; times the offered rate it
is the goodput. It is not goods over the length of the run: a late tail would then count against a policy twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.errors import ExperimentError
from experiments.running.workload import load_workload
from policies.edges.input_digests import digests_of

if TYPE_CHECKING:
    from workloads import Trace

DEFAULT_SLO = "ttft_p99=2,tbt_p99=0.2"
LEAST_SLICE = 40
"""Requests of a slice; fewer say nothing of a share."""

KNEE_POLICY, KNEE_SCORE, KNEE_WIDTH = "slo_aware", 0.9, 0.02

FACTS = ("ttft_s_p50", "ttft_s_p99", "tbt_s_p99", "e2e_s_p50", "output_tokens_per_s", "cost_model", "cost_basis")


@dataclass(frozen=True)
class Workload:
    """name: as the page has it. settings: as `load_workload` takes them. slo: bounds that each request has to meet."""

    name: str
    settings: Mapping[str, Any]
    slo: str


@dataclass(frozen=True)
class Part:
    """Rows [start, end) of a workload."""

    start: int
    end: int


def parse_objective(text: str) -> str | None:
    """The bounds of `goodput@BOUNDS`; None for `goodput`, which takes a preset's own and DEFAULT_SLO elsewhere."""
    from metrics import parse_slo

    name, at, bounds = text.partition("@")
    if name != "goodput" or (at and not bounds):
        raise ExperimentError(
            f"--objective: found {text!r}, expected goodput@BOUNDS such as goodput@{DEFAULT_SLO}, or goodput"
        )
    if not at:
        return None
    parse_slo(bounds)
    return bounds


def workload_of(text: str, slo: str | None, requests: int, seed: int, reading: Mapping[str, Any]) -> Workload:
    """A trace file, or a preset, from which `requests` requests are drawn; behind an @ bounds of its own."""
    from metrics import parse_slo
    from workloads import PRESETS

    name, at, own_bounds = text.rpartition("@")
    if at and not Path(text).exists():
        parse_slo(own_bounds)
        text, slo = name, own_bounds

    if text in PRESETS and not Path(text).exists():
        own = ",".join(f"{name}={bound:g}" for name, bound in PRESETS[text].slo.items())
        return Workload(text, {"preset": text, "requests": requests, "seed": seed}, slo or own)
    if not Path(text).is_file():
        raise ExperimentError(f"{text}: found no such trace file, expected one or a preset ({', '.join(PRESETS)})")
    return Workload(Path(text).stem, {"file": text, **reading, "limit": requests}, slo or DEFAULT_SLO)


def trace_of(settings: Mapping[str, Any]) -> Trace:
    """The requests of a workload's settings."""
    if "preset" not in settings:
        return load_workload(settings)
    from workloads import PRESETS

    preset, count = PRESETS[settings["preset"]], int(settings["requests"])
    # Longer than needed, since a bursty process may fall behind its rate.
    return preset.trace(duration_s=2.0 * count / preset.rate, seed=settings["seed"]).head(count)


def parts_of(workload: Workload, slices: int) -> tuple[Part, tuple[Part, ...]]:
    """The first piece to tune on, `slices` others of the same length to judge by: a queue grows as long in each.

    ExperimentError where these get too short.
    """
    count = len(trace_of(workload.settings))
    piece = count // (slices + 1)
    if piece < LEAST_SLICE:
        raise ExperimentError(
            f"{workload.name}: {count} requests are too few for {slices + 1} pieces of at least {LEAST_SLICE}; give a "
            "longer trace, or fewer --slices"
        )
    first, *others = (Part(at * piece, (at + 1) * piece) for at in range(slices + 1))
    return first, tuple(others)


def piece_of(settings: Mapping[str, Any], part: Part) -> Trace:
    """The requests of a part, from its own time 0."""
    return _piece(tuple(sorted(settings.items())), part, tuple(digests_of(dict(settings)).items()))


@lru_cache(maxsize=64)
def _piece(settings: tuple[tuple[str, Any], ...], part: Part, inputs: tuple[tuple[str, str], ...]) -> Trace:
    piece = trace_of(dict(settings)).take(slice(part.start, part.end))
    start = int(piece.arrival_ns[0])
    abort = piece.abort_ns
    if abort is not None:
        abort = abort - (abort >= 0) * start
    return replace(piece, arrival_ns=piece.arrival_ns - start, abort_ns=abort)


def own_rate(trace: Trace) -> float:
    """Requests/s at which a trace arrives by itself."""
    span_s = float(trace.arrival_ns[-1] - trace.arrival_ns[0]) / 1e9
    if span_s <= 0:
        raise ExperimentError(
            f"{trace.name}: found requests of one moment only, expected arrivals that a load can pace"
        )
    return (len(trace) - 1) / span_s


def run_knee(task: Mapping[str, Any]) -> dict[str, Any]:
    """{"rate": requests/s at the knee}: bracketed by doubling, then halved to KNEE_WIDTH.

    task: workload, part, config. ExperimentError where the objective holds or fails at any rate.
    """
    from experiments.arena.knob_space import told_by

    trace = piece_of(task["workload"], Part(*task["part"]))
    config = {**task["config"], "policy": KNEE_POLICY, "knobs": told_by(KNEE_POLICY, task["config"]["slo"])}

    def holds(rate: float) -> bool:
        match = {**task, "config": config, "share": 1.0, "rate": rate, "draw": None}
        return bool(run_match(match)["score"] >= KNEE_SCORE)

    low = high = own_rate(trace)
    if holds(low):
        while holds(high):
            low, high = high, 2 * high
            if high > 1e6:
                raise ExperimentError(f"{trace.name}: found the objective kept at any rate, expected a tighter one")
    else:
        while not holds(low):
            low, high = low / 2, low
            if low < 1e-4:
                raise ExperimentError(f"{trace.name}: found the objective broken at any rate, expected a wider one")
    while high > (1 + KNEE_WIDTH) * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return {"rate": low}


def run_match(task: Mapping[str, Any]) -> dict[str, Any]:
    """One replay of one part at one rate: its score and a few statistics.

    task: workload, part, share (of the part that is played, from its start), rate (requests/s), config, draw (of the
    costs' own error; None for the costs themselves).
    """
    from profiler.errors import ProfileError
    from simulator import ReplayConfig, replay
    from simulator.cluster.pools import make_cluster_plan
    from simulator.errors import SimulationError

    trace = piece_of(task["workload"], Part(*task["part"]))
    trace = trace.head(max(LEAST_SLICE, round(len(trace) * task["share"])))
    trace = trace.scaled(task["rate"] / own_rate(trace))
    config = ReplayConfig.from_dict(task["config"])
    plan = make_cluster_plan(config, trace)
    drawn = False
    if task["draw"] is not None:
        try:
            plan, drawn = plan.drawn(task["draw"]), True
        except (ProfileError, SimulationError):
            pass  # costs that know no error: every draw is the same
    summary = replay(trace, config, plan=plan).summary
    score = summary["slo_attainment"]
    return {
        "score": 0.0 if score is None or math.isnan(score) else score,
        "rate": task["rate"],
        "drawn": drawn,
        **{name: summary.get(name) for name in FACTS},
    }
