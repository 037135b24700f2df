"""One engine as SimPy processes: a host that prepares batches, stages with a store before each, and a completion.

Every batch waits out every one of its stages by a timeout, and whoever is busy takes the next from its store.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from simpy import Event, Store

from policies.work.request import Ns, Request
from profiler.cost_model import CostModel
from profiler.iterations.aftermath import merged
from simulator.reference.books import Batch, Books, Job
from simulator.reference.clock import Clock
from simulator.reference.recording import Recording
from simulator.replica.fast_costs import refuse

Process = Generator[Event, Any, None]


@dataclass
class Flight:
    """A batch on its way through the engine. running, waiting, free_blocks: as its plan left them. stages: start, end
    and send of each."""

    batch: Batch
    before_ns: Ns
    after_ns: Ns
    busy_ns: list[Ns]
    send_ns: list[Ns]
    running: int
    waiting: int
    free_blocks: int
    stages: list[tuple[Ns, Ns, Ns]] = field(default_factory=list)


class Engine:
    """Whoever has requests and a plan to make: a replica, or one rank of it. on_end(job, engine) is called for every
    request that ends here.

    Its properties are what a router sees (`simulator.routers.ReplicaView`).
    """

    def __init__(
        self,
        clock: Clock,
        number: int,
        books: Books,
        cost: CostModel,
        recording: Recording,
        on_end: Callable[[Job, Engine], None],
    ) -> None:
        self.clock, self.number, self.books, self.cost = clock, number, books, cost
        self.recording, self.on_end = recording, on_end
        self.jobs: dict[int, Job] = {}
        self._left_over: list[Ns] = []

    # Requests come and go

    def submit(self, request: Request, output: int) -> None:
        job = self.books.add(request, output, self.clock.now_ns)
        if job.status == "waiting":
            self.jobs[request.id] = job
            self.call()
        else:
            self.on_end(job, self)

    def cancel(self, row: int, reason: str) -> None:
        job = self.jobs[row]
        self.books.end(job, "aborted", reason, self.clock.now_ns)
        self.call()
        for ended in (job, *self.books.return_answers(self.clock.now_ns)):
            self.has_ended(ended)

    def has_ended(self, job: Job) -> None:
        del self.jobs[job.request.id]
        self.on_end(job, self)

    def call(self) -> None:
        """Something has changed: look for work at the end of this moment, if there is room for a batch."""
        raise NotImplementedError

    def aftermath_ns(self, batch: Batch) -> Ns:
        """What batches with chunks leave to the decodes after them, where the cost model knows of such a thing."""
        extra = self._left_over.pop() if self._left_over else 0
        leaves = getattr(self.cost, "aftermath", None)
        if leaves is None or not batch.shape.chunks:
            return extra
        self._left_over = merged(self._left_over, leaves(batch.shape))
        return 0

    # What a router sees

    @property
    def num_requests(self) -> int:
        return len(self.jobs)

    @property
    def num_running(self) -> int:
        return self.books.num_running

    @property
    def num_waiting(self) -> int:
        return len(self.books.waiting)

    @property
    def prefill_tokens(self) -> int:
        return self.books.prefill_tokens

    @property
    def decode_tokens_promised(self) -> int:
        return self.books.promised_tokens

    @property
    def total_blocks(self) -> int:
        return self.books.blocks.total

    @property
    def free_blocks(self) -> int:
        return self.books.blocks.num_free

    @property
    def block_size(self) -> int:
        return self.books.blocks.size


class Replica(Engine):
    """An engine as processes of its own. overlap: a stage may start its next batch while the last one's output is still
    on the link.
    """

    def __init__(
        self,
        clock: Clock,
        number: int,
        books: Books,
        cost: CostModel,
        recording: Recording,
        overlap: bool,
        on_end: Callable[[Job, Engine], None],
    ) -> None:
        super().__init__(clock, number, books, cost, recording, on_end)
        self.overlap = overlap
        self.depth = books.limits.micro_batches + books.limits.ahead
        self._looks_at_ns: Ns = 0
        self.called = clock.event()
        self.planned, self.done = Store(clock), Store(clock)
        self.inboxes = [Store(clock) for _ in range(cost.stages)]
        self.links = [Store(clock) for _ in range(cost.stages)]
        for stage in range(cost.stages):
            clock.process(self._stage(stage))
            clock.process(self._link(stage))
        for process in (self._host(), self._completion(), self._planner()):
            clock.process(process)

    # Planning

    def call(self) -> None:
        if self.books.batches_in_flight < self.depth and not self.called.triggered:
            self.called.succeed()

    def _planner(self) -> Process:
        while True:
            yield self.called
            yield self.clock.until(self.clock.now_ns, self.clock.plan(self.number))
            self.called = self.clock.event()
            self._plan()

    def _plan(self) -> None:
        books, now_ns = self.books, self.clock.now_ns
        while books.batches_in_flight < self.depth:
            batch = books.plan(now_ns)
            if batch is not None:
                self._launch(batch)
            elif books.alarm_ns is not None:
                self._look_at(max(now_ns + 1, books.alarm_ns))
                return
            else:
                stuck = books.reject_stuck(now_ns)
                if stuck is None:
                    return
                self.has_ended(stuck)

    def _look_at(self, at_ns: Ns) -> None:
        if not self.clock.now_ns < self._looks_at_ns <= at_ns:
            self._looks_at_ns = at_ns
            self.clock.call(at_ns, self.clock.plan(self.number), self._plan)

    def _launch(self, batch: Batch) -> None:
        cost, shape, books = self.cost, batch.shape, self.books
        before, after = cost.host_ns(shape)
        stages = range(cost.stages)
        busy = [cost.stage_ns(shape, stage) for stage in stages]
        for stage, busy_ns in enumerate(busy):
            refuse(cost, shape, busy_ns, stage)
        if cost.stages == 1:
            busy[0] += self.aftermath_ns(batch)
        send = [cost.send_ns(shape, stage) for stage in stages]
        waiting, free = len(books.waiting), books.blocks.num_free
        self.planned.put(Flight(batch, before, after, busy, send, books.num_running, waiting, free))

    # The way of a batch

    def _host(self) -> Process:
        while True:
            flight = yield self.planned.get()
            yield self.clock.until(self.clock.now_ns + flight.before_ns)
            yield self.inboxes[0].put(flight)

    def _stage(self, stage: int) -> Process:
        while True:
            flight = yield self.inboxes[stage].get()
            start_ns = self.clock.now_ns
            yield self.clock.until(start_ns + flight.busy_ns[stage])
            end_ns, send_ns = self.clock.now_ns, flight.send_ns[stage]
            flight.stages.append((start_ns, end_ns, send_ns))
            yield self.links[stage].put((flight, end_ns + send_ns))
            if not self.overlap:
                yield self.clock.until(end_ns + send_ns)

    def _link(self, stage: int) -> Process:
        """Outputs arrive at the next stage in order; that of the last stage is what the host waits for."""
        following = self.inboxes[stage + 1] if stage + 1 < self.cost.stages else self.done
        while True:
            flight, arrives_ns = yield self.links[stage].get()
            if following is not self.done:
                yield self.clock.until(arrives_ns)
            yield following.put(flight)

    def _completion(self) -> Process:
        while True:
            flight = yield self.done.get()
            end_ns = flight.stages[-1][1]
            yield self.clock.until(end_ns + flight.after_ns, self.clock.complete(self.number))
            finished = self.books.complete(flight.batch, self.clock.now_ns)
            self.recording.iteration(self.number, flight, self.clock.now_ns, self.cost.inside(flight.batch.shape))
            for job in finished:
                self.has_ended(job)
            self._plan()
