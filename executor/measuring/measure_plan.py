"""Measure a plan: rounds of batches in random order until the time is up, each measurement on disk as it is made."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.errors import ExecutorError
from executor.measuring.batch_rig import FOLLOWERS, BatchRig, Timing
from executor.measuring.profile_rows import FAR_OFF, TAKEN_AWAY, iteration_rows, operator_rows, shape_of
from executor.model.loading import Loaded
from policies import BatchShape
from policies.edges.input_file import LOG_BYTES, parse_json, read_text
from policies.edges.output_file import write_text
from profiler.measurements.plan import MeasurementPlan, Point, unsure_points
from profiler.measurements.profile import Profile, make_profile, write_profile

Progress = Callable[[float, float, str], None]
"""Called with (seconds spent, budget, what is being done)."""

UNSURE_PER_ROUND = 16
OPERATOR_POINTS = 10
ONCE_ABOVE = 0.01
"""Share of the budget above which a batch is measured once and not repeated."""
REHEARSALS = 4
"""Most runs of a batch before the one that counts."""


def measure_plan(
    loaded: Loaded,
    plan: MeasurementPlan,
    out: str | Path,
    *,
    block_size: int = 16,
    operators: bool = True,
    progress: Progress | None = None,
    adapt: Callable[[Profile], Callable[[Sequence[BatchShape]], Any]] | None = None,
    note: Callable[[str], None] | None = None,
) -> Profile:
    """Measure a plan until its budget is used; writes `out` (.parquet or .csv) and returns the profile.

    Every measurement is on disk as soon as it is made (`out` + ".log"): an interrupted measurement goes on where it
    stopped when it is started again with the same plan. adapt: a profile so far -> how unsure a fit is at given shapes;
    with it the last part of the budget goes where that is largest. operators: also time a few points part by part.
    note: told once what of the plan the memory here does not hold.

    Where a first run may pay for compilation (`pays_first`) or is too long to be repeated, a batch runs until two runs
    agree; those before are kept, flagged, and never fitted.
    """
    out = Path(out)
    log = _Log(out.with_name(out.name + ".log"), plan, loaded)
    say = progress or (lambda spent, budget, doing: None)
    rig = BatchRig(
        loaded,
        most_tokens=plan.most_tokens,
        longest=plan.longest,
        most_requests=plan.most_requests,
        most_rows=plan.most_rows,
        block_size=block_size,
        seed=plan.seed,
    )
    _, clip = rig.fitting(plan.points)
    if clip and note is not None:
        note(clip)
    clock = _Clock(log.spent_s)
    gc.collect()
    gc.freeze()  # as a live run does
    try:
        _warm_up(rig, plan)
        planned_s = plan.budget_s * ((1 - plan.unsure_share) if adapt is not None else 1.0)
        round_number = 0
        for points in plan.rounds():
            if clock.spent_s >= planned_s:
                break
            _run_round(rig, points, round_number, plan, log, clock, planned_s, say)
            round_number += 1
        while adapt is not None and clock.spent_s < plan.budget_s:
            points = log.points_of(round_number)
            if not points:
                if not log.rows:
                    break
                profile = make_profile(_frame(iteration_rows(log.rows, loaded)), {})
                unsure = unsure_points(
                    plan, [shape_of(row) for row in log.rows], adapt(profile), UNSURE_PER_ROUND, round_number
                )
                if not unsure:
                    break
                points = [*unsure, *plan.noise]
                rig.warm(points)
                log.note_points(round_number, points)
            _run_round(rig, points, round_number, plan, log, clock, plan.budget_s, say)
            round_number += 1
        if all(row.get("first") for row in log.rows):
            raise ExecutorError(f"profile: nothing was measured within {plan.budget_s:g} s; give it longer (--budget)")
        rows = iteration_rows(log.rows, loaded)
        if operators:
            say(clock.spent_s, plan.budget_s, "operators")
            rows += operator_rows(rig, loaded, rig.fitting([*plan.noise, *plan.points[:OPERATOR_POINTS]])[0])
    finally:
        gc.unfreeze()
    profile = make_profile(_frame(rows), {**_provenance(plan, loaded, clock, clip), **rig.routing_facts()})
    write_profile(profile, out)
    return profile


def unsure_by_fit(profile: Profile) -> Callable[[Sequence[BatchShape]], Any]:
    """How far fits of resampled measurements lie apart at given shapes: what `adapt` takes."""
    from profiler.iterations.fit_iterations import disagreement, fit_iterations

    fit = fit_iterations(profile)
    return lambda shapes: disagreement(fit, shapes)


def _provenance(plan: MeasurementPlan, loaded: Loaded, clock: _Clock, clip: str) -> dict[str, Any]:
    return {
        **({"clipped": clip} if clip else {}),
        "source": "measured by this project's executor",
        "engine": {key: str(value) for key, value in loaded.describe().items()},
        "torch": torch.__version__,
        "measuring_s": round(clock.spent_s, 1),
        "plan": {"seed": plan.seed, "repeats": plan.repeats, "budget_s": plan.budget_s, **plan.provenance},
        "outliers": "runs that may have paid for compilation, processor time below "
        f"{TAKEN_AWAY:.0%} of wall time (one thread), or over {FAR_OFF} times the quickest of its shape in the round",
    }


def _frame(rows: list[dict[str, Any]]) -> Any:
    import pandas as pd

    return pd.DataFrame(rows)


def _run_round(
    rig: BatchRig,
    points: Sequence[Point],
    number: int,
    plan: MeasurementPlan,
    log: _Log,
    clock: _Clock,
    until_s: float,
    say: Progress,
) -> None:
    """Every point `repeats` times in random order (a long one once); a round is finished unless the time is up.

    A point that the memory does not hold, however short its contexts, is passed over.
    """
    long: set[int] = set()
    ran: set[int] = set()
    rng = np.random.default_rng([plan.seed, 1, number])
    order = [(at, repeat) for repeat in range(plan.repeats) for at in range(len(points))]
    # Repeats of a point lie apart: each pass over the points has an order of its own.
    for repeat in range(plan.repeats):
        part = order[repeat * len(points) : (repeat + 1) * len(points)]
        for at in rng.permutation(len(part)).tolist():
            key = (number, part[at][0], repeat)
            if key in log.done:
                continue
            if (clock.spent_s >= until_s and number) or part[at][0] in long:
                continue
            point = points[part[at][0]]
            if not rig.fitting([point])[0]:
                continue
            timings = _until_stable(rig, point, plan.budget_s, first=part[at][0] not in ran)
            ran.add(part[at][0])
            if timings[-1].wall_ns > ONCE_ABOVE * plan.budget_s * 1e9:
                long.add(part[at][0])
            for before, timing in enumerate(timings, 1 - len(timings)):
                # Runs before the one that counts have numbers of their own: a second start does not look for them.
                log.add(key if not before else (*key[:2], before), point.why, timing, clock.spent_s, first=before < 0)
            say(clock.spent_s, plan.budget_s, f"round {number + 1}, {len(log.rows)} measurements")


def pays_first(loaded: Loaded) -> bool:
    """Whether kernels are compiled or chosen when a batch first needs them, at that batch's cost."""
    model = loaded.model
    return loaded.device.type == "cuda" or model.kernels.name == "compiled" or model.attention.name == "flex"


def _until_stable(rig: BatchRig, point: Point, budget_s: float, *, first: bool) -> list[Timing]:
    """The point's runs; only the last counts. One run, unless it may have paid for something that later ones do not."""
    timings = [rig.measure(point, followers=FOLLOWERS, vary_experts=True)]
    too_long = timings[0].wall_ns > ONCE_ABOVE * budget_s * 1e9
    if not first or not (too_long or pays_first(rig.loaded)):
        return timings
    while len(timings) <= REHEARSALS:
        timings.append(rig.measure(point, followers=FOLLOWERS, vary_experts=True))
        if timings[-2].device_ns <= FAR_OFF * timings[-1].device_ns:
            break
    return timings


def _warm_up(rig: BatchRig, plan: MeasurementPlan) -> None:
    rig.warm([*plan.noise, *plan.points])
    for point in rig.fitting(plan.noise)[0]:
        rig.measure(point)


class _Clock:
    """Seconds spent on measuring, those of earlier sessions included."""

    def __init__(self, spent_s: float) -> None:
        self._before, self._since = spent_s, time.monotonic()

    @property
    def spent_s(self) -> float:
        return self._before + time.monotonic() - self._since


class _Log:
    """Measurements as they are made, one JSON line each; what makes a measurement go on where it was stopped."""

    def __init__(self, path: Path, plan: MeasurementPlan, loaded: Loaded) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.done: set[tuple[int, int, int]] = set()
        self._points: dict[int, list[Point]] = {}
        self.spent_s = 0.0
        mark = hashlib.sha256(repr((plan.points, plan.noise, plan.seed, plan.repeats, loaded.describe())).encode())
        head = {"plan": mark.hexdigest()[:16]}
        if path.exists():
            self._read(head)
        else:
            write_text(path, json.dumps(head) + "\n", ExecutorError)

    def _read(self, head: Mapping[str, Any]) -> None:
        text = read_text(self.path, ExecutorError, LOG_BYTES)
        whole, _, cut = text.rpartition("\n")
        if cut:  # the last line was cut off in the middle
            write_text(self.path, whole + "\n" if whole else "", ExecutorError)
        entries = [
            parse_json(line, f"{self.path}, line {number}", ExecutorError)
            for number, line in enumerate(whole.split("\n"), 1)
            if line
        ]
        if not entries or entries[0] != head:
            raise ExecutorError(f"{self.path}: belongs to another plan or model; remove it or choose another --out")
        for number, entry in enumerate(entries[1:], 2):
            try:
                self._take(entry)
            except (KeyError, TypeError, ValueError):
                raise ExecutorError(f"{self.path}, line {number}: found no measurement; remove the file") from None

    def _take(self, entry: dict[str, Any]) -> None:
        if "points" in entry:
            self._points[entry["round"]] = [_point(row) for row in entry["points"]]
            return
        key, spent_s = tuple(int(part) for part in entry["key"]), float(entry["at_s"])
        self.rows.append(entry)
        self.done.add(key)
        self.spent_s = max(self.spent_s, spent_s)

    def points_of(self, round_number: int) -> list[Point]:
        return self._points.get(round_number, [])

    def note_points(self, round_number: int, points: Sequence[Point]) -> None:
        self._points[round_number] = list(points)
        self._write({"round": round_number, "points": [[point.why, point.shape] for point in points]})

    def add(self, key: tuple[int, int, int], why: str, timing: Timing, at_s: float, *, first: bool = False) -> None:
        entry = {
            "key": key,
            "why": why,
            "shape": timing.shape,
            "before_ns": timing.before_ns,
            "device_ns": timing.device_ns,
            "after_ns": timing.after_ns,
            "cpu_ns": timing.cpu_ns,
            "wall_ns": timing.wall_ns,
            "at_s": round(at_s, 6),
            "executed_rows": timing.executed_rows,
            "gauge_ns": timing.gauge_ns,
            "followers": timing.followers,
            **({"experts": timing.experts} if timing.experts else {}),
            **({"first": True} if first else {}),
        }
        self.rows.append(entry)
        self.done.add(key)
        self._write(entry)

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _point(row: Sequence[Any]) -> Point:
    return Point(shape_of({"shape": row[1]}), row[0])
