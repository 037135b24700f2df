"""Real time: requests arrive on the wall clock, the policy plans, the runner executes, the records are the simulator's.

The loop is the simulator's replica with the cost model replaced by the machine: the same scheduler object, the same
two moments of a batch, the same columns. With `ahead` the next batch is planned while one runs in a worker thread.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

import torch

from executor.machine.cpu_clock import step_clock
from executor.model.loading import use_device
from executor.model.sampler import INVALID, Sampling
from executor.serving.arrivals import NEVER, Arrivals
from executor.serving.prompts import Prompts
from executor.serving.request_text import Text
from executor.serving.runner import Prepared, Result, Runner
from metrics import Recorder
from policies import Batch, Chunk, Decodes, Ns, Request, Scheduler, Track
from policies.work.batch import drafts_of
from workloads.trace import Trace

Progress = Callable[[int, int], None]


class Flight(NamedTuple):
    """A batch between plan and completion, with what the records say of it."""

    prepared: Prepared
    future: Future[Result] | None
    planned_ns: Ns
    since_ns: Ns
    cpu_since_ns: int
    running: int
    waiting: int
    free_blocks: int


@dataclass
class Outcome:
    """How a live run went, beyond its records.

    answers: row -> output ids, for whatever was delivered. stopped_by: name of the signal that ended the run early.
    host_ns: time between batches (completion, records, arrivals, planning, packing) of every batch that did not wait.
    """

    answers: dict[int, list[int]] = field(default_factory=dict)
    stopped_by: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    host_ns: list[int] = field(default_factory=list)


class LiveEngine:
    """One scheduler and one runner in real time.

    sampling: row -> how it samples. pinned: outputs have the trace's lengths; otherwise they end at the declared limit
    or at a stop id. on_ended: told of every request that has reached the engine and ended, however it did.
    inside(shape): whether a shape lies in a cost model's measured region (for the records only). between: called after
    every completed batch (of one process only); its time is host time of the next.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        recorder: Recorder,
        trace: Trace,
        prompts: Prompts,
        *,
        sampling: Callable[[int], Sampling],
        stop_ids: tuple[int, ...] = (),
        pinned: bool = True,
        time_scale: float = 1.0,
        at_once: bool = False,
        progress: Progress | None = None,
        on_token: Callable[[int, int], None] | None = None,
        on_end: Callable[[int, Text], None] | None = None,
        on_ended: Callable[[Track], None] | None = None,
        inside: Callable[[Any], bool] | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:
        self.scheduler, self.runner, self.recorder = scheduler, runner, recorder
        self.trace, self.prompts, self.sampling = trace, prompts, sampling
        self.stop_ids, self.pinned, self.progress, self.on_token = stop_ids, pinned, progress, on_token
        self.inside, self.on_end, self.on_ended, self.between = inside, on_end, on_ended, between
        self.arrivals = Arrivals(trace, time_scale, at_once)
        self.outcome = Outcome()
        self._ahead = scheduler.depth > 1
        self._flights: deque[Flight] = deque()
        self._give_up: list[tuple[Ns, int]] = []
        self._ended: set[int] = set()
        self._origin = 0
        self._since_ns = 0
        self._cpu_since_ns = 0
        self._cpu_ns = step_clock()
        self._idle = True

    def now_ns(self) -> Ns:
        return time.perf_counter_ns() - self._origin

    def run(self, origin_ns: int | None = None) -> Outcome:
        """Serve the whole trace; returns early, with everything recorded, on SIGINT or SIGTERM.

        origin_ns: moment 0 on `perf_counter_ns`; now unless given.
        """
        with self._signals():
            if self.progress is not None:
                self.progress(0, len(self.trace))
            self._origin = time.perf_counter_ns() if origin_ns is None else origin_ns
            cpu = time.process_time_ns()
            worker = None
            try:
                if self._ahead:
                    worker = ThreadPoolExecutor(1, "executor", _as_here(self.runner.cache.device))
                self._loop(worker)
            finally:
                if worker is not None:
                    worker.shutdown(wait=True)
            self._close()
            self.outcome.wall_s = self.now_ns() / 1e9
            self.outcome.cpu_s = (time.process_time_ns() - cpu) / 1e9
        return self.outcome

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM ends the run after the batch in flight; a second SIGINT interrupts at once."""

        def stop(number: int, frame: object) -> None:
            if self.outcome.stopped_by and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.outcome.stopped_by = signal.Signals(number).name

        import threading

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # The loop

    def _loop(self, worker: ThreadPoolExecutor | None) -> None:
        flights, outcome = self._flights, self.outcome
        while self.arrivals.outstanding and not outcome.stopped_by:
            # Who has arrived by the moment of a plan, and nobody else, is known to it: so a run can be planned again.
            stuck = self._fill(self._admit(), worker)
            if flights:
                self._complete(flights.popleft())
                if self.between is not None:
                    self.between()
            elif stuck:
                self._wait()
        while flights:
            self._complete(flights.popleft())

    def _fill(self, now: Ns, worker: ThreadPoolExecutor | None) -> bool:
        """Plan and launch while there is room for a batch in flight; says whether none is and none can be planned."""
        flights, scheduler = self._flights, self.scheduler
        while len(flights) < scheduler.depth:
            batch = scheduler.plan(now)
            if batch is None:
                return not flights
            self._launch(batch, worker)
        return False

    def _admit(self) -> Ns:
        """Take in what has arrived by now, and say when that was."""
        now = self.now_ns()
        while self._give_up and self._give_up[0][0] <= now:
            _, row = heappop(self._give_up)
            self._withdraw([row], "client gave up waiting", "aborted")
        if self.arrivals.next_ns <= now:
            for at, row in self.arrivals.due(now):
                self._arrive(at, row)
        return now

    def _arrive(self, at_ns: Ns, row: int) -> None:
        trace = self.trace
        request = _arriving(trace, row, at_ns)
        track = self.scheduler.add(request, at_ns, ends_after=int(trace.output_tokens[row]) if self.pinned else None)
        if track.status == "rejected":
            self._end(track)
            return
        stop_ids = () if self.pinned else self.stop_ids
        self.runner.texts[row] = Text.of(self.prompts(row), request.max_output_tokens, self.sampling(row), stop_ids)
        patience = trace.timeout_ns(row)
        if patience >= 0:
            heappush(self._give_up, (at_ns + patience, row))

    def _wait(self) -> None:
        """Nothing can be planned: sleep until something arrives, gives up or an alarm rings, or end who is stuck."""
        scheduler = self.scheduler
        alarm = scheduler.alarm_ns
        if (alarm is None and self.arrivals.next_ns == NEVER) or (scheduler.queues.waiting and alarm is None):
            ended = scheduler.reject_stuck(self.now_ns())
            if ended is not None:
                if ended.status == "finished":
                    self.runner.release(ended)
                self._end(ended)
                return
        until = min(self.arrivals.next_ns, alarm or NEVER, self._give_up[0][0] if self._give_up else NEVER)
        self._idle = True
        # Short naps keep signals and client time-outs prompt.
        self._sleep(min(max(until - self.now_ns(), 0) / 1e9, 0.05))

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _launch(self, batch: Batch, worker: ThreadPoolExecutor | None) -> None:
        if self._idle:
            self._idle = False
            self._since_ns, self._cpu_since_ns = batch.planned_ns, self._cpu_ns()
        queues = self.scheduler.queues
        prepared = self.runner.prepare(batch)
        future = worker.submit(self.runner.execute, prepared) if worker is not None else None
        self._flights.append(
            Flight(
                prepared,
                future,
                batch.planned_ns,
                self._since_ns,
                self._cpu_since_ns,
                queues.num_running,
                len(queues.waiting),
                self.scheduler.ledger.free_blocks,
            )
        )

    # Completion

    def _complete(self, flight: Flight) -> None:
        prepared, runner = flight.prepared, self.runner
        started = time.perf_counter_ns()
        try:
            result = flight.future.result() if flight.future is not None else runner.execute(prepared)
        except (RuntimeError, MemoryError) as error:
            self._fail_batch(prepared, started, error)
            result = Result([INVALID] * len(prepared.wanted), started, time.perf_counter_ns())
        now = self.now_ns()
        stopped = self._deliver(prepared, result.ids)
        outcome = self.scheduler.complete(prepared.batch, now, stopped)
        self._record(flight, result, now)
        for track in outcome.finished:
            runner.release(track)
            self._end(track)
        for cohort in self.scheduler.take_retired():
            self.recorder.cohort_times(0, cohort.number, cohort.times)

    def _deliver(self, prepared: Prepared, ids: list[int]) -> list[int]:
        """Append sampled tokens to their requests; returns the ids of requests that a stop token ended."""
        stopped = []
        failed = []
        on_token = self.on_token
        for (track, epoch, text), token in zip(prepared.wanted, ids):
            if track.epoch != epoch:
                continue
            if token == INVALID:
                failed.append(track.request.id)
                continue
            text.append(token)
            if on_token is not None:
                on_token(track.request.id, token)
            if text.stop_ids and token in text.stop_ids:
                stopped.append(track.request.id)
        if failed:
            self._withdraw(failed, "the model's logits held NaN", "failed")
        return stopped

    def _fail_batch(self, prepared: Prepared, started: int, error: Exception) -> None:
        """A batch that could not be run takes its own requests with it, and nobody else."""
        message = str(error).strip().splitlines()
        text = message[0] if message else type(error).__name__
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "memory" not in text.lower():
            raise error
        members = [part.track for part in prepared.batch.parts if isinstance(part, Chunk)]
        members += [track for track, epoch, _ in prepared.wanted if track.epoch == epoch]
        rows = list(dict.fromkeys(track.request.id for track in members))
        self._withdraw(rows, f"out of memory in a batch of {prepared.step.rows} rows: {text}", "failed")

    def _withdraw(self, rows: list[int], reason: str, status: str) -> None:
        for track in self.scheduler.withdraw(rows, reason, self.now_ns(), status=status):
            self.runner.release(track)
            self._end(track)

    def _record(self, flight: Flight, result: Result, now: Ns) -> None:
        batch = flight.prepared.batch
        chunks = []
        cohorts = []
        for part in batch.parts:
            if isinstance(part, Chunk):
                chunks.append((part.track.request.id, part.tokens, part.prefix, part.samples))
            elif isinstance(part, Decodes):
                cohorts.append((part.cohort.number, part.step, part.size))
        for verified, (first, delivered) in zip(batch.verified, batch.delivered):
            if delivered:
                cohorts.append((verified.cohort.number, first, 1))
        start, end = result.start_ns - self._origin, result.end_ns - self._origin
        cpu = self._cpu_ns()
        # A batch is busy from the end of the last one on (or from its plan, after a pause): host time before it runs
        # includes completing and recording the last. With `ahead`, only what the running batch did not hide.
        since = self._since_ns
        before = max(0, start - since)
        shape = batch.shape
        if result.executed_rows:
            shape = shape._replace(executed_rows=result.executed_rows)
        if shape.drafting:
            self.recorder.speculated(shape, drafts_of(batch))
        self.recorder.iteration(
            0,
            batch.number,
            flight.planned_ns,
            start,
            now,
            shape,
            chunks,
            cohorts,
            len(batch.preempted),
            flight.running,
            flight.waiting,
            flight.free_blocks,
            batch.cached_tokens,
            before,
            now - end,
            end - start,
            self.inside is not None and self.inside(shape),
            (now - since) / 1e9,
            (cpu - self._cpu_since_ns) / 1e9,
            activated_experts=result.activated,
        )
        self.outcome.host_ns.append(now - since - (end - start))
        self._since_ns, self._cpu_since_ns = now, cpu

    def _end(self, track: Track) -> None:
        row = track.request.id
        self._ended.add(row)
        text = self.runner.texts.pop(row, None)
        if text is not None:
            self.outcome.answers[row] = text.output
            if self.on_end is not None:
                self.on_end(row, text)
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
        if self.on_ended is not None:
            self.on_ended(track)
        self.arrivals.ended(row, track.finished_ns)
        if self.progress is not None:
            self.progress(len(self.trace) - self.arrivals.outstanding, len(self.trace))

    def _close(self) -> None:
        """Record everything that did not come to its end, and the token times of cohorts still alive."""
        if self.outcome.stopped_by:
            reason = f"the run was stopped by {self.outcome.stopped_by}"
            self._withdraw(list(self.scheduler.tracks), reason, "aborted")
            now = self.now_ns()
            recorded = self._ended | {row for _, row in self.arrivals.rest()}
            for at, row in self.arrivals.rest():
                self._never_arrived(row, at, reason, now)
            for row in {f for fs in self.trace.followers().values() for f in fs} - recorded:
                self._never_arrived(row, int(self.trace.arrival_ns[row]), reason, now)
        for part in self.scheduler.queues.parts:
            if not isinstance(part, Track):
                self.recorder.cohort_times(0, part.number, part.times)
        for cohort in self.scheduler.take_retired():
            self.recorder.cohort_times(0, cohort.number, cohort.times)

    def _never_arrived(self, row: int, at_ns: Ns, reason: str, now: Ns) -> None:
        request = _arriving(self.trace, row, at_ns)
        self.recorder.request(request, -1, "aborted", reason, 0, -1, -1, max(now, at_ns), 0, 0, ())


def _as_here(device: torch.device) -> Callable[[], None]:
    """What a thread has to do so that PyTorch works in it as in this one: both settings are a thread's own."""
    threads = torch.get_num_threads()

    def begin() -> None:
        torch.set_num_threads(threads)
        use_device(device)

    return begin


def _arriving(trace: Trace, row: int, at_ns: Ns) -> Request:
    """The trace's request with the moment at which it really reaches the engine."""
    r = trace.request(row)
    if r.arrival_ns == at_ns:
        return r
    return r._replace(arrival_ns=at_ns)
