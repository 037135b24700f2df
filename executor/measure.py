"""Measure planned batches as they would be served: the scheduler, loop and runner of a live run, a script for a policy.

A point is set up without computing its past: its requests say that their keys and values are here already (the pool is
filled with small random numbers once), join in one step, decode once, and then the step that the plan asks for is
measured, as warm as a step in the middle of a run. What is written down of it is what a live run writes down.
"""

from __future__ import annotations

import gc
import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch

from executor.engine import Flight, LiveEngine
from executor.errors import ExecutorError
from executor.loading import Loaded
from executor.operators import watching
from executor.runner import Result, Runner, Text
from executor.sampler import GREEDY
from metrics import Recorder
from policies import BatchShape, Ns, Policy, Request, make_scheduler
from profiler.plan import MeasurementPlan, Point, unsure_points
from profiler.profile import Profile, chunk_text, make_profile, write_profile
from workloads.trace import Trace

if TYPE_CHECKING:
    from policies.draft import Draft
    from policies.host import Host
    from policies.ledger import KVView
    from policies.queues import Queues

Progress = Callable[[float, float, str], None]
"""Called with (seconds spent, budget, what is being done)."""

WARM_STEPS = 1
UNSURE_PER_ROUND = 16
OPERATOR_POINTS = 10
TAKEN_AWAY = 0.92
"""A single-threaded step whose processor time is less than this share of its wall time was interrupted."""
FAR_OFF = 1.25
"""A step this much slower than the quickest of its shape in the round is an outlier."""


class Timing(NamedTuple):
    """One measured iteration, ns; as `LiveEngine` records it."""

    shape: BatchShape
    before_ns: Ns
    device_ns: Ns
    after_ns: Ns
    cpu_ns: int
    wall_ns: Ns


@dataclass(frozen=True)
class Scripted(Policy):
    """Decodes everybody and admits exactly whom the script names. Not a policy to serve with."""

    repeats: ClassVar[bool] = False
    wanted: dict[int, int] = field(default_factory=dict)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        draft.decode_all()
        for track in list(queues.waiting):
            tokens = self.wanted.get(track.request.id, 0)
            if tokens:
                draft.admit(track, tokens)


class Bench(LiveEngine):
    """A live engine without arrivals: it serves one planned batch at a time."""

    def __init__(self, loaded: Loaded, *, most_tokens: int, longest: int, block_size: int = 16, seed: int = 0) -> None:
        self._script: dict[int, int] = {}
        if longest > loaded.max_tokens:
            raise ExecutorError(
                f"the plan holds contexts of {longest} tokens, {loaded.spec.name} reaches {loaded.max_tokens}: plan with "
                f"--max-model-len {loaded.max_tokens}"
            )
        longest = min(longest + WARM_STEPS + 4, loaded.max_tokens)
        # A block more for every request: contexts do not fill their last one.
        blocks = most_tokens // block_size + 4096
        room = -(-longest // block_size)
        scheduler = make_scheduler(
            Scripted(wanted=self._script), num_blocks=max(blocks, room), block_size=block_size, max_model_len=longest,
            by_id=True,
        )  # fmt: skip
        cache = loaded.new_cache(scheduler.ledger.total_blocks, block_size)
        generator = torch.Generator(device=cache.pool.device).manual_seed(seed)
        cache.pool.normal_(0.0, 0.5, generator=generator)
        runner = Runner(loaded, cache, scheduler.ledger, longest, rows=256)
        super().__init__(
            scheduler, runner, Recorder(), _no_arrivals(), lambda row: np.zeros(1, np.int64), sampling=lambda row: GREEDY
        )
        self._rng = np.random.default_rng(seed)
        self._vocab = loaded.spec.vocab
        self._next_request = 0
        self._origin = time.perf_counter_ns()
        self._timing: Timing | None = None

    def measure(self, point: Point, before_step: Callable[[], Any] | None = None) -> Timing:
        """Set the point's requests up, lead them in, and run the step it asks for (`before_step` right before it)."""
        most = self.scheduler.max_model_len - WARM_STEPS - 3
        decodes = [self._enter(max(1, min(context, most) - WARM_STEPS), 1, 1 << 12) for context in point.contexts]
        try:
            if decodes:
                self._step(dict.fromkeys(decodes, 1))
                for _ in range(WARM_STEPS):
                    self._step({})
            sampling = point.shape.sampled - point.shape.decodes
            chunks = {}
            for number, (tokens, prefix) in enumerate(point.shape.chunks):
                # A chunk that samples ends its prompt; any other leaves one token of it.
                rest = 0 if number < sampling else 1
                prefix = min(prefix, most - tokens)
                chunks[self._enter(prefix + tokens + rest, tokens + rest, 8)] = tokens
            if before_step is not None:
                before_step()
            return self._step(chunks)
        finally:
            self._withdraw(list(self.scheduler.tracks), "measured", "aborted")
            for cohort in self.scheduler.take_retired():
                self.recorder.cohort_times(0, cohort.number, cohort.times)
            self._idle = True

    def _enter(self, prompt: int, lacking: int, most_output: int) -> int:
        """Queue a request of which all but `lacking` prompt tokens are computed; returns its id."""
        number = self._next_request
        self._next_request += 1
        request = Request(number, self.now_ns(), prompt, min(most_output, self.scheduler.max_model_len - prompt))
        track = self.scheduler.add(request, request.arrival_ns, computed=max(0, prompt - lacking))
        if track.status == "rejected":
            raise ExecutorError(f"a planned batch cannot be set up: {track.reason}")
        ids = self._rng.integers(0, self._vocab, prompt)
        self.runner.texts[number] = Text.of(ids, request.max_output_tokens, GREEDY, ())
        return number

    def _step(self, wanted: Mapping[int, int]) -> Timing:
        self._script.clear()
        self._script.update(wanted)
        batch = self.scheduler.plan(self._admit())
        if batch is None:
            raise ExecutorError("a planned batch cannot be set up: nothing was granted")
        self._launch(batch, None)
        self._complete(self._flights.popleft())
        assert self._timing is not None
        return self._timing

    def _record(self, flight: Flight, result: Result, now: Ns) -> None:
        since, cpu_since = self._since_ns, self._cpu_since_ns
        super()._record(flight, result, now)
        start, end = result.start_ns - self._origin, result.end_ns - self._origin
        self._timing = Timing(
            flight.prepared.batch.shape, max(0, start - since), end - start, now - end, self._cpu_since_ns - cpu_since,
            now - since,
        )  # fmt: skip


def measure_plan(
    loaded: Loaded,
    plan: MeasurementPlan,
    out: str | Path,
    *,
    block_size: int = 16,
    operators: bool = True,
    progress: Progress | None = None,
    adapt: Callable[[Profile], Callable[[Sequence[BatchShape]], Any]] | None = None,
) -> Profile:
    """Measure a plan until its budget is used; writes `out` (.parquet or .csv) and returns the profile.

    Every measurement is on disk as soon as it is made (`out` + ".log"): an interrupted measurement goes on where it
    stopped when it is started again with the same plan. adapt: a profile so far -> how unsure a fit is at given shapes;
    with it the last part of the budget goes where that is largest. operators: also time a few points part by part.
    """
    out = Path(out)
    log = _Log(out.with_name(out.name + ".log"), plan, loaded)
    say = progress or (lambda spent, budget, doing: None)
    bench = Bench(loaded, most_tokens=plan.most_tokens, longest=plan.longest, block_size=block_size, seed=plan.seed)
    clock = _Clock(log.spent_s)
    gc.collect()
    gc.freeze()  # as a live run does
    try:
        _warm_up(bench, plan)
        planned_s = plan.budget_s * ((1 - plan.unsure_share) if adapt is not None else 1.0)
        round_number = 0
        for points in plan.rounds():
            if clock.spent_s >= planned_s:
                break
            _run_round(bench, points, round_number, plan, log, clock, planned_s, say)
            round_number += 1
        while adapt is not None and clock.spent_s < plan.budget_s:
            points = log.points_of(round_number)
            if not points:
                profile = make_profile(_frame(iteration_rows(log.rows, loaded)), {})
                unsure = unsure_points(
                    plan, [_shape_of(row) for row in log.rows], adapt(profile), UNSURE_PER_ROUND, round_number
                )
                if not unsure:
                    break
                points = [*unsure, *plan.noise]
                log.note_points(round_number, points)
            _run_round(bench, points, round_number, plan, log, clock, plan.budget_s, say)
            round_number += 1
        rows = iteration_rows(log.rows, loaded)
        if operators:
            say(clock.spent_s, plan.budget_s, "operators")
            rows += operator_rows(bench, loaded, [*plan.noise, *plan.points[:OPERATOR_POINTS]])
    finally:
        gc.unfreeze()
    profile = make_profile(_frame(rows), _provenance(plan, loaded, clock))
    write_profile(profile, out)
    return profile


def probe(bench: Bench, points: Sequence[Point], repeats: int) -> list[Timing]:
    """Each point `repeats` times, interleaved: what drift is told by."""
    return [bench.measure(point) for _ in range(repeats) for point in points]


def iteration_rows(measured: Sequence[Mapping[str, Any]], loaded: Loaded) -> list[dict[str, Any]]:
    """Rows of a profile, one a measurement; outliers flagged by rule (TAKEN_AWAY, FAR_OFF) and kept."""
    quickest: dict[tuple[BatchShape, int], int] = {}
    shapes = [_shape_of(entry) for entry in measured]
    for shape, entry in zip(shapes, measured):
        group = (shape, entry["key"][0])
        quickest[group] = min(quickest.get(group, entry["device_ns"]), entry["device_ns"])
    alone = loaded.device.type == "cpu" and torch.get_num_threads() == 1
    rows = []
    for shape, entry in zip(shapes, measured):
        interrupted = alone and entry["cpu_ns"] < TAKEN_AWAY * entry["wall_ns"]
        far_off = entry["device_ns"] > FAR_OFF * quickest[shape, entry["key"][0]]
        seconds = entry["device_ns"] / 1e9
        rows.append(
            {
                **_engine_columns(loaded), "operator": "iteration", "rows": shape.rows,
                "chunks": chunk_text(shape.chunks), "decodes": shape.decodes,
                "decode_context_total": shape.decode_context_total, "decode_context_max": shape.decode_context_max,
                "dummy_tokens": shape.dummy_tokens, "sampled": shape.sampled, "repeats": 1,
                "outlier": int(interrupted or far_off), "median_s": seconds, "min_s": seconds, "max_s": seconds,
                "host_before_s": entry["before_ns"] / 1e9, "host_after_s": entry["after_ns"] / 1e9,
                "cpu_s": entry["cpu_ns"] / 1e9, "at_s": entry["at_s"],
            }
        )  # fmt: skip
    return rows


def operator_rows(bench: Bench, loaded: Loaded, points: Sequence[Point], repeats: int = 3) -> list[dict[str, Any]]:
    """The same points with a stopwatch on every operator: per layer the median over layers and repeats."""
    spec = loaded.spec
    widths = {
        "qkv": (spec.q_size + 2 * spec.kv_size, spec.hidden), "attention_out": (spec.hidden, spec.q_size),
        "ffn_up": (2 * spec.intermediate, spec.hidden), "ffn_down": (spec.hidden, spec.intermediate),
        "head": (spec.vocab, spec.hidden),
    }  # fmt: skip
    rows = []
    with watching(loaded.model) as watch:
        for point in points:
            times: dict[str, list[float]] = {}
            for _ in range(repeats):
                bench.measure(point, watch.take)
                for name, seconds in watch.take().items():
                    times.setdefault(name, []).extend(seconds)
            shape = point.shape
            for name, seconds in times.items():
                n, k = widths.get(name, (spec.hidden if name == "norm" else 0, 0))
                of_attention = name == "attention"
                rows.append(
                    {
                        **_engine_columns(loaded), "operator": name,
                        "rows": shape.sampled if name in ("head", "sampler") else shape.rows, "n": n, "k": k,
                        "heads": spec.heads if of_attention else 0, "kv_heads": spec.kv_heads if of_attention else 0,
                        "head_dim": spec.head_dim if of_attention else 0, "chunks": chunk_text(shape.chunks),
                        "decodes": shape.decodes, "decode_context_total": shape.decode_context_total,
                        "decode_context_max": shape.decode_context_max, "sampled": shape.sampled,
                        "repeats": len(seconds), "median_s": float(np.median(seconds)), "min_s": min(seconds),
                        "max_s": max(seconds),
                    }
                )  # fmt: skip
    return rows


def _engine_columns(loaded: Loaded) -> dict[str, Any]:
    described = loaded.describe()
    return {
        "device": device_name(loaded.device), "model": loaded.spec.name, "dtype": str(described["dtype"]),
        "tensor_parallel": 1, "backend": f"{described['attention']} {described['kernels']}",
    }  # fmt: skip


def device_name(device: torch.device) -> str:
    """What the device calls itself; a CPU with the threads that run on it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the architecture has to do
    return platform.processor() or platform.machine()


def _provenance(plan: MeasurementPlan, loaded: Loaded, clock: _Clock) -> dict[str, Any]:
    return {
        "source": "measured by this project's executor",
        "engine": {key: str(value) for key, value in loaded.describe().items()},
        "torch": torch.__version__,
        "measuring_s": round(clock.spent_s, 1),
        "plan": {"seed": plan.seed, "repeats": plan.repeats, "budget_s": plan.budget_s, **plan.provenance},
        "outliers": f"processor time below {TAKEN_AWAY:.0%} of wall time (one thread), or more than "
        f"{FAR_OFF} times the quickest of its shape in the round",
    }


def _frame(rows: list[dict[str, Any]]) -> Any:
    import pandas as pd

    return pd.DataFrame(rows)


def _no_arrivals() -> Trace:
    none = np.zeros(0, np.int64)
    return Trace("nothing", none, none, none, none)


def _run_round(
    bench: Bench,
    points: Sequence[Point],
    number: int,
    plan: MeasurementPlan,
    log: _Log,
    clock: _Clock,
    until_s: float,
    say: Progress,
) -> None:
    """Every point `repeats` times in random order; a round begun is finished unless the time is up."""
    rng = np.random.default_rng([plan.seed, 1, number])
    order = [(at, repeat) for repeat in range(plan.repeats) for at in range(len(points))]
    # Repeats of a point lie apart: each pass over the points has an order of its own.
    for repeat in range(plan.repeats):
        part = order[repeat * len(points) : (repeat + 1) * len(points)]
        for at in rng.permutation(len(part)).tolist():
            key = (number, part[at][0], repeat)
            if key in log.done:
                continue
            if clock.spent_s >= until_s and number:
                return
            timing = bench.measure(points[part[at][0]])
            log.add(key, points[part[at][0]].why, timing, clock.spent_s)
            say(clock.spent_s, plan.budget_s, f"round {number + 1}, {len(log.rows)} measurements")


def _warm_up(bench: Bench, plan: MeasurementPlan) -> None:
    for point in plan.noise:
        bench.measure(point)


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
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def _read(self, head: Mapping[str, Any]) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        try:
            entries = [json.loads(line) for line in lines]
        except ValueError:
            entries = [json.loads(line) for line in lines[:-1]]  # the last line was cut off in the middle
            self.path.write_text("".join(line + "\n" for line in lines[:-1]), encoding="utf-8")
        if not entries or entries[0] != head:
            raise ExecutorError(f"{self.path}: belongs to another plan or model; remove it or choose another --out")
        for entry in entries[1:]:
            if "points" in entry:
                self._points[entry["round"]] = [_point(row) for row in entry["points"]]
                continue
            self.rows.append(entry)
            self.done.add(tuple(entry["key"]))
            self.spent_s = max(self.spent_s, entry["at_s"])

    def points_of(self, round_number: int) -> list[Point]:
        return self._points.get(round_number, [])

    def note_points(self, round_number: int, points: Sequence[Point]) -> None:
        self._points[round_number] = list(points)
        self._write({"round": round_number, "points": [[point.why, point.shape] for point in points]})

    def add(self, key: tuple[int, int, int], why: str, timing: Timing, at_s: float) -> None:
        entry = {
            "key": key, "why": why, "shape": timing.shape, "before_ns": timing.before_ns, "device_ns": timing.device_ns,
            "after_ns": timing.after_ns, "cpu_ns": timing.cpu_ns, "wall_ns": timing.wall_ns, "at_s": round(at_s, 6),
        }  # fmt: skip
        self.rows.append(entry)
        self.done.add(key)
        self._write(entry)

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _point(row: Sequence[Any]) -> Point:
    return Point(_shape_of({"shape": row[1]}), row[0])


def _shape_of(row: Mapping[str, Any]) -> BatchShape:
    chunks, *numbers = row["shape"]
    return BatchShape(tuple((tokens, prefix) for tokens, prefix in chunks), *numbers)
