"""Batch agreement: does the scheduler plan the very batches that a live run had, once time is taken out of it?

The live run says when each request arrived, when each batch was planned and when it completed. Driven by these moments
alone, a scheduler of the simulator's making must plan every batch again: same requests in the same order, same tokens
and contexts, same preemptions, same free blocks, and in the end the same times of every token. What is left between
a prediction and a live run is then the costs' error and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.errors import ExperimentError
from metrics.recording.recorder import Recorder
from policies import Batch, Chunk, Ns, Scheduler, Track
from workloads.generating.shared_prefixes import with_prefix_hashes

if TYPE_CHECKING:
    from metrics import RunTables
    from workloads import Trace

COMPARED = (
    "chunks",
    "cohorts",
    "decodes",
    "decode_context_total",
    "decode_context_max",
    "dummy_tokens",
    "sampled",
    "preempted",
    "running",
    "waiting",
    "free_blocks",
    "cached_tokens",
)
"""Columns of an iteration that have to be equal."""

ENDS = ("status", "output_tokens", "admitted_s", "first_token_s", "finished_s", "preemptions", "cached_tokens")
"""Columns of a request that have to be equal."""


@dataclass(frozen=True)
class Agreement:
    """divergence: both sides of the first batch (or request, or table) that differs; None if nothing does."""

    iterations: int
    matched: int
    requests: int
    requests_matched: int
    tokens: int
    divergence: Mapping[str, Any] | None

    @property
    def exact(self) -> bool:
        return self.divergence is None

    @property
    def share(self) -> float:
        return self.matched / self.iterations if self.iterations else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "iterations": self.iterations,
            "matched": self.matched,
            "requests": self.requests,
            "requests_matched": self.requests_matched,
            "tokens": self.tokens,
            "exact": self.exact,
            "divergence": self.divergence,
        }


def agreement(live: RunTables, trace: Trace, scheduler: Scheduler) -> Agreement:
    """Plan a live run again with `scheduler`, a fresh one with the live run's policy and limits.

    trace: the requests as they were served; arrival times are the run's own. Raises ExperimentError where a run cannot
    be planned again: it was stopped, or clients gave up, or a batch failed.
    """
    _refuse(live)
    rows = live.iterations.select(["planned_s", "start_s", "end_s", *COMPARED]).to_pylist()
    planned, ends = live.column_ns("iterations", "planned_s").tolist(), live.column_ns("iterations", "end_s").tolist()
    again = _Again(live, trace, scheduler)
    matched = 0
    for number, row in enumerate(rows):
        again.complete_until(planned[number])
        again.arrive_until(planned[number])
        batch = scheduler.plan(planned[number])
        ours = None if batch is None else _columns(batch, scheduler)
        theirs = plain_row(row)
        if ours != theirs:
            divergence = {"iteration": number, "planned_s": row["planned_s"], "live": theirs, "simulated": ours}
            return Agreement(len(rows), matched, live.rows("requests"), 0, 0, divergence)
        assert batch is not None
        again.launch(batch, ends[number])
        matched += 1
    again.finish()
    return _compare_tables(live, again.recorder.tables(), matched)


class _Again:
    """The same run a second time, without a clock of its own."""

    def __init__(self, live: RunTables, trace: Trace, scheduler: Scheduler) -> None:
        self.recorder = Recorder()
        self._trace, self._scheduler = with_prefix_hashes(trace, scheduler.ledger.block_size), scheduler
        frame = live.frame("requests")
        arrivals = live.column_ns("requests", "arrival_s").tolist()
        ended = live.column_ns("requests", "finished_s").tolist()
        requests = frame["request"].tolist()
        self._arrivals = sorted(zip(arrivals, requests))
        # The idle engine's last resort: the head of a queue that nothing can be planned for.
        self._stuck = sorted(
            (end, request)
            for end, request, status, reason in zip(ended, requests, frame["status"], frame["reason"])
            if status in ("rejected", "failed") and "idle engine" in reason
        )
        self._next = 0
        self._flights: list[tuple[Ns, Batch]] = []

    def arrive_until(self, now_ns: Ns) -> None:
        """Everybody who had arrived by the moment of a plan; who was stuck before it is rejected on the way."""
        arrivals = self._arrivals
        while self._next < len(arrivals) and arrivals[self._next][0] <= now_ns:
            at_ns, row = arrivals[self._next]
            self._reject_stuck(at_ns - 1)
            self._next += 1
            self._add(row, at_ns)
        self._reject_stuck(now_ns)

    def _add(self, row: int, at_ns: Ns) -> None:
        request = self._trace.request(row)._replace(arrival_ns=at_ns)
        track = self._scheduler.add(request, at_ns, ends_after=int(self._trace.output_tokens[row]))
        if track.status == "rejected":
            self._end(track)

    def _reject_stuck(self, now_ns: Ns) -> None:
        while self._stuck and self._stuck[0][0] <= now_ns and not self._flights:
            at_ns, _ = self._stuck.pop(0)
            self._scheduler.plan(at_ns)
            track = self._scheduler.reject_stuck(at_ns)
            if track is not None:
                self._end(track)

    def launch(self, batch: Batch, end_ns: Ns) -> None:
        self._flights.append((end_ns, batch))

    def complete_until(self, now_ns: Ns) -> None:
        while self._flights and self._flights[0][0] <= now_ns:
            end_ns, batch = self._flights.pop(0)
            for track in self._scheduler.complete(batch, end_ns).finished:
                self._end(track)
            self._keep_times()

    def finish(self) -> None:
        never = 1 << 62
        self.complete_until(never)
        self.arrive_until(never)
        for part in self._scheduler.queues.parts:
            if not isinstance(part, Track):
                self.recorder.cohort_times(0, part.number, part.times)

    def _keep_times(self) -> None:
        for cohort in self._scheduler.take_retired():
            self.recorder.cohort_times(0, cohort.number, cohort.times)

    def _end(self, track: Track) -> None:
        self.recorder.request(
            track.request,
            0,
            track.status,
            track.reason,
            track.delivered,
            track.admitted_ns,
            track.first_token_ns,
            track.finished_ns,
            track.preemptions,
            track.cached_total,
            track.segments,
        )


def _columns(batch: Batch, scheduler: Scheduler) -> dict[str, Any]:
    """A batch just planned, as the iterations table has it."""
    chunks, cohorts = [], []
    for part in batch.parts:
        if isinstance(part, Chunk):
            chunks.append((part.track.request.id, part.tokens, part.prefix, part.samples))
        else:
            cohorts.append((part.cohort.number, part.step, part.size))
    _, decodes, total, largest, dummy, sampled, *_ = batch.shape
    return {
        "chunks": chunks,
        "cohorts": cohorts,
        "decodes": decodes,
        "decode_context_total": total,
        "decode_context_max": largest,
        "dummy_tokens": dummy,
        "sampled": sampled,
        "preempted": len(batch.preempted),
        "running": scheduler.queues.num_running,
        "waiting": len(scheduler.queues.waiting),
        "free_blocks": scheduler.ledger.free_blocks,
        "cached_tokens": batch.cached_tokens,
    }


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The compared columns of an iteration, lists of structs as lists of tuples."""
    return {
        name: [tuple(entry.values()) for entry in row[name]] if isinstance(row[name], list) else row[name]
        for name in COMPARED
    }


def _compare_tables(live: RunTables, ours: RunTables, matched: int) -> Agreement:
    """Ends of the requests, then every token's time."""
    order = ["request"]
    left = live.frame("requests").sort_values(order).reset_index(drop=True)
    right = ours.frame("requests").sort_values(order).reset_index(drop=True)
    total, tokens = live.rows("requests"), live.rows("tokens")
    if left["request"].tolist() != right["request"].tolist():
        missing = sorted(set(left["request"]) ^ set(right["request"]))
        divergence: dict[str, Any] = {"request": missing[0], "live": "ended", "simulated": "never ended"}
        return Agreement(matched, matched, total, 0, tokens, divergence)
    for row in range(len(left)):
        one = {name: _shown(left.at[row, name]) for name in ENDS}
        other = {name: _shown(right.at[row, name]) for name in ENDS}
        if one != other:
            divergence = {"request": int(left.at[row, "request"]), "live": one, "simulated": other}
            return Agreement(matched, matched, total, row, tokens, divergence)
    for name, keys in (("segments", ["request", "from_step"]), ("tokens", ["cohort", "step"])):
        one, other = (run.frame(name).sort_values(keys).reset_index(drop=True) for run in (live, ours))
        if not one.equals(other):
            divergence = {"table": name, "live": f"{len(one)} rows", "simulated": f"{len(other)} rows, not the same"}
            return Agreement(matched, matched, total, len(left), tokens, divergence)
    return Agreement(matched, matched, total, len(left), tokens, None)


def _shown(value: Any) -> Any:
    return None if value != value else value.item() if hasattr(value, "item") else value


def _refuse(live: RunTables) -> None:
    statuses, reasons = live.column("requests", "status").tolist(), live.column("requests", "reason").tolist()
    for status, reason in zip(statuses, reasons):
        if status == "aborted" or (status == "failed" and "idle engine" not in reason):
            raise ExperimentError(f"live run: a request {status} ({reason}): such a run cannot be planned again")


def scheduler_of(live: RunTables, cost: Any = None) -> Scheduler:
    """A fresh scheduler with a live run's policy and limits, by its config. cost: for policies that plan by time."""
    from policies import make_policy, make_scheduler

    config = live.config
    policy = make_policy(str(config["policy"]), config["knobs"])
    known: dict[str, Any] = {}
    if cost is not None:

        def estimate_ns(shape: Any) -> int:
            """As the live run's engine estimates."""
            stages = [int(cost.stage_ns(shape, s)) + int(cost.send_ns(shape, s)) for s in range(cost.stages)]
            return sum(cost.host_ns(shape)) + sum(stages)

        known = {"estimator": estimate_ns, "tile": cost.tile}
    return make_scheduler(
        policy,
        num_blocks=int(config["num_blocks"]),
        block_size=int(config["block_size"]),
        max_model_len=int(config["max_model_len"]),
        token_budget=config["token_budget"],
        max_num_seqs=config["max_num_seqs"],
        watermark=config["live"].get("watermark"),
        ahead=bool(config.get("ahead")),
        micro_batches=int(config.get("pp") or 1),
        chase_chunks=bool(config["live"].get("chase_chunks")),
        prefix_caching=bool(config["live"].get("prefix_caching")),
        **known,
    )
