"""Ranks of one replica that step together: each a host and a device process, which meet twice in every step.

A device waits until all hosts are ready, computes its part, and waits until all devices are done. Ranks without work
take part with a dummy row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simpy import AllOf, Event, Store

from policies.work.batch import BatchShape
from policies.work.request import Ns
from profiler.cost_model import CostModel
from simulator.reference.books import Batch, Books, Job
from simulator.reference.clock import Clock
from simulator.reference.recording import Recording
from simulator.reference.replica import Engine, Flight, Process
from simulator.replica.fast_costs import refuse


@dataclass
class Step:
    """A step in flight: a flight of every rank. ready: every host has prepared it; done: every device has computed it.
    has_work: whose flight holds a batch."""

    flights: list[Flight]
    has_work: list[bool]
    ready: list[Event]
    done: list[Event]


class Rank(Engine):
    """One rank: books and requests of its own. Its group plans when it does."""

    group: RankGroup

    def call(self) -> None:
        self.group.call()

    def plan(self, now_ns: Ns) -> Batch | None:
        """The next batch; a rank without requests is not asked."""
        while self.jobs:
            batch = self.books.plan(now_ns)
            if batch is not None:
                return batch
            if self.books.alarm_ns is not None:
                self.group.look_at(max(now_ns + 1, self.books.alarm_ns), self)
                return None
            stuck = self.books.reject_stuck(now_ns)
            if stuck is None:
                return None
            self.has_ended(stuck)
        return None


class RankGroup:
    """The ranks of a replica, in rank order."""

    def __init__(
        self,
        clock: Clock,
        first: int,
        books: Sequence[Books],
        cost: CostModel,
        recording: Recording,
        on_end: Callable[[Job, Engine], None],
    ) -> None:
        self.clock, self.number, self.cost, self.recording = clock, first, cost, recording
        self.ranks = [Rank(clock, first + at, own, cost, recording, on_end) for at, own in enumerate(books)]
        for rank in self.ranks:
            rank.group = self
        self.depth = 1 + books[0].limits.ahead
        self.called = clock.event()
        self.in_flight = self.steps = 0
        self._looks_at_ns: dict[int, Ns] = {}
        self.hosts, self.devices = [Store(clock) for _ in books], [Store(clock) for _ in books]
        self.completing = Store(clock)
        for at in range(len(books)):
            clock.process(self._host(at))
            clock.process(self._device(at))
        clock.process(self._completion())
        clock.process(self._planner())

    # Planning

    def call(self) -> None:
        if self.in_flight < self.depth and not self.called.triggered:
            self.called.succeed()

    def look_at(self, at_ns: Ns, rank: Rank) -> None:
        """A rank has named a moment at which to plan again."""
        if not self.clock.now_ns < self._looks_at_ns.get(rank.number, 0) <= at_ns:
            self._looks_at_ns[rank.number] = at_ns
            self.clock.call(at_ns, self.clock.plan(rank.number), self._plan)

    def _planner(self) -> Process:
        while True:
            yield self.called
            yield self.clock.until(self.clock.now_ns, self.clock.plan(self.number))
            self.called = self.clock.event()
            self._plan()

    def _plan(self) -> None:
        while self.in_flight < self.depth:
            batches = [rank.plan(self.clock.now_ns) for rank in self.ranks]
            if all(batch is None for batch in batches):
                return
            self._launch(batches)

    def _launch(self, batches: list[Batch | None]) -> None:
        now_ns = self.clock.now_ns
        shapes = self._padded([BatchShape(dummy_tokens=1) if batch is None else batch.shape for batch in batches])
        device_ns = self._device_ns(shapes)
        flights = []
        for rank, batch, shape, busy_ns in zip(self.ranks, batches, shapes, device_ns):
            refuse(self.cost, shape, busy_ns)
            if batch is not None:
                busy_ns += rank.aftermath_ns(batch)
            before, after = self.cost.host_ns(shape)
            own = batch or Batch(0, now_ns, [], shape, [], 0, 0)
            books = rank.books
            state = (books.num_running, len(books.waiting), books.blocks.num_free)
            flights.append(Flight(own._replace(number=self.steps, shape=shape), before, after, [busy_ns], [0], *state))
        events = [[self.clock.event() for _ in self.ranks] for _ in range(2)]
        step = Step(flights, [batch is not None for batch in batches], *events)
        self.steps += 1
        self.in_flight += 1
        for queue in (*self.hosts, *self.devices, self.completing):
            queue.put(step)

    def _padded(self, shapes: list[BatchShape]) -> list[BatchShape]:
        """Where the largest batch fits a captured graph, every rank replays the graph of that size."""
        largest = max(shape.rows for shape in shapes)
        if largest > getattr(self.cost, "graph_rows", 0):
            return shapes
        return [shape._replace(executed_rows=largest) if shape.rows < largest else shape for shape in shapes]

    def _device_ns(self, shapes: list[BatchShape]) -> list[Ns]:
        if getattr(self.cost, "ranks", 1) > 1:
            return list(self.cost.ranks_ns(shapes))  # type: ignore[attr-defined]  # as a RankedCostModel has it
        return [self.cost.stage_ns(shape) for shape in shapes]

    # The way of a step

    def _host(self, at: int) -> Process:
        while True:
            step = yield self.hosts[at].get()
            yield self.clock.until(self.clock.now_ns + step.flights[at].before_ns)
            step.ready[at].succeed()

    def _device(self, at: int) -> Process:
        while True:
            step = yield self.devices[at].get()
            yield AllOf(self.clock, step.ready)
            flight, start_ns = step.flights[at], self.clock.now_ns
            yield self.clock.until(start_ns + flight.busy_ns[0])
            flight.stages.append((start_ns, self.clock.now_ns, 0))
            step.done[at].succeed()
            yield AllOf(self.clock, step.done)

    def _completion(self) -> Process:
        while True:
            step = yield self.completing.get()
            yield AllOf(self.clock, step.done)
            done_ns = max(flight.stages[0][1] for flight in step.flights)
            after_ns = max(flight.after_ns for flight in step.flights)
            yield self.clock.until(done_ns + after_ns, self.clock.complete(self.number))
            self._complete(step)
            self._plan()

    def _complete(self, step: Step) -> None:
        """Every rank delivers its tokens; then whoever has all of them ends, rank by rank."""
        now_ns = self.clock.now_ns
        self.in_flight -= 1
        finished = []
        for rank, flight, has_work in zip(self.ranks, step.flights, step.has_work):
            finished.append(rank.books.complete(flight.batch, now_ns) if has_work else [])
            self.recording.iteration(rank.number, flight, now_ns, self.cost.inside(flight.batch.shape))
        for rank, jobs in zip(self.ranks, finished):
            for job in jobs:
                rank.has_ended(job)
