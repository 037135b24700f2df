"""One engine in virtual time: a scheduler, a pipeline of stages, and a cost model that says how long things take.

A batch costs at most one event: its stage times follow from a recurrence (a stage starts when it is free and its input
is there), so only its completion has to be waited for, and not even that where nothing else happens before it
(simulator/clock.py). Equal iterations are crossed in one leap; whoever needs to see the replica in the middle of one
(an arrival, a withdrawal, a router) settles it first, at the right iteration boundary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from operator import sub
from typing import TYPE_CHECKING, Any, NamedTuple

from simpy import Environment, Event

from metrics import Recorder
from metrics.events import pack_row
from policies import Batch, BatchShape, Ns, Request, Scheduler, Track
from simulator.clock import VirtualTime
from simulator.leaping import ends_until
from simulator.moment import COMPLETION, WAKE, Moment

if TYPE_CHECKING:
    from profiler.cost_model import CostModel

# Below this a leap costs more than the plain steps it replaces.
LEAST_LEAP = 2

INFINITY = float("inf")

# A batch between plan and completion, a plain tuple because one is made per iteration: batch, start_ns, end_ns,
# host_before_ns, host_after_ns, device_ns, stages, running, waiting, free_blocks (as `Recorder.iteration` takes them).
Flight = tuple[Batch, Ns, Ns, Ns, Ns, Ns, tuple[tuple[Ns, Ns, Ns], ...], int, int, int]


class Leap(NamedTuple):
    """Equal iterations in flight at once, back to back from planned_ns on: iteration i of them ends at ends_ns[i]."""

    batch: Batch
    planned_ns: Ns
    ends_ns: list[Ns]
    host_before_ns: Ns
    host_after_ns: Ns


class Replica:
    """TP x PP devices that share a scheduler.

    on_end(track, replica): called once for every request that ends here, whatever its end.
    overlap_sends: a stage may start its next batch while the last one's output is still on the link.
    leaps: cross equal iterations in one step, and run ahead of the event queue where `env` is a VirtualTime (False
        keeps the plain path of one event per iteration, the reference of the tests).
    """

    def __init__(
        self,
        env: Environment,
        number: int,
        scheduler: Scheduler,
        cost: CostModel,
        recorder: Recorder,
        *,
        on_end: Callable[[Track, Replica], None] | None = None,
        overlap_sends: bool = True,
        leaps: bool = True,
    ) -> None:
        self.env = env
        self.number = number
        self.scheduler = scheduler
        self.cost = cost
        self.recorder = recorder
        self._inside = cost.inside
        self._row = recorder.row
        self._repeat_terms = getattr(cost, "repeat_terms", None)
        self._stages_ns = getattr(cost, "stages_ns", self._plain_stages_ns)
        self._iteration_ns = getattr(cost, "iteration_ns", self._plain_iteration_ns)
        self.on_end = on_end
        self.overlap_sends = overlap_sends
        self.leaps = leaps and scheduler.depth == 1
        # Nothing but this loop's own steps to take: see _run_ahead.
        self._straight = self.leaps and cost.stages == 1 and type(self)._launch is Replica._launch
        self._ahead: VirtualTime | None = None
        if leaps and isinstance(env, VirtualTime):
            self._ahead = env
            env.sharers += 1
        self.busy_ns = 0
        self._flights: deque[Flight] = deque()
        self._leap: Leap | None = None
        # The event at which the oldest flight (or the leap's last iteration) completes.
        self._completion: Moment | None = None
        self._free_ns = [0] * cost.stages
        self._twins = twin_stages(cost)
        self._last_end_ns = 0
        self._host_free_ns = 0
        self._wake: Moment | None = None
        self._look_ns = 0

    # Requests come and go

    def submit(
        self, request: Request, ends_after: int | None, *, produced: int = 0, hands_over: bool = False,
        computed: int = 0,
    ) -> Track:
        """Queue a request now. produced, hands_over, computed: as `Scheduler.add` takes them."""
        self.settle()
        track = self.scheduler.add(
            request, self.env.now, ends_after=ends_after, produced=produced, hands_over=hands_over, computed=computed
        )  # fmt: skip
        if track.status == "rejected":
            self._end(track)
        else:
            self.wake()
        return track

    def withdraw(self, ids: list[int], reason: str, *, status: str = "aborted") -> list[Track]:
        """End requests now; their blocks are free for the next plan."""
        gone = self.take_out(ids, reason, status=status)
        for track in gone:
            self._end(track)
        return gone

    def take_out(self, ids: list[int], reason: str, *, status: str = "aborted") -> list[Track]:
        """Withdraw requests without reporting their end: they go on elsewhere."""
        self.settle()
        gone = self.scheduler.withdraw(ids, reason, self.env.now, status=status)
        if gone:
            self.wake()
        return gone

    def abandon(self, reason: str) -> list[Track]:
        """The replica dies: batches in flight never complete. Returns its requests, whose end is not reported."""
        self.settle()
        if self._completion is not None:
            self._completion.void = True
            self._completion = None
        self._flights.clear()
        self._free_ns = [0] * self.cost.stages
        self._last_end_ns = self._host_free_ns = 0
        gone = self.scheduler.abandon(reason, self.env.now)
        self._record_retired()
        return gone

    def settle(self) -> None:
        """Bring a leap up to now: iterations that ended before this moment are complete, one is in flight."""
        leap = self._leap
        if leap is None:
            return
        self._leap = None
        ends = leap.ends_ns
        done = bisect_left(ends, self.env.now)
        if done < len(ends) - 1:
            assert self._completion is not None
            self._completion.void = True
            self._complete_at(ends[done])
        self._cross(leap, done)

    # What a router sees (simulator.routers.ReplicaView)

    @property
    def num_running(self) -> int:
        return self.scheduler.queues.num_running

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.tracks) - self.scheduler.queues.num_running

    @property
    def prefill_tokens(self) -> int:
        return self.scheduler.queues.prefill_tokens

    # A leap answers for this moment without being stopped.

    @property
    def decode_tokens_promised(self) -> int:
        promised = self.scheduler.queues.decode_tokens_promised
        leap = self._leap
        if leap is not None:
            promised -= leap.batch.shape.decodes * bisect_left(leap.ends_ns, self.env.now)
        return promised

    @property
    def free_blocks(self) -> int:
        free = self.scheduler.ledger.free_blocks
        leap = self._leap
        if leap is not None:
            free -= leap.batch.grown[0][0].growth_within(bisect_left(leap.ends_ns, self.env.now))
        return free

    @property
    def total_blocks(self) -> int:
        return self.scheduler.ledger.total_blocks

    @property
    def block_size(self) -> int:
        return self.scheduler.ledger.block_size

    # Planning

    def wake(self) -> None:
        """Look for something to plan at this moment, once everything else that happens in it has happened."""
        if self._wake is None and len(self._flights) < self.scheduler.depth and self._leap is None:
            self._wake = Moment(self.env, 0, self._on_wake, WAKE)

    def _on_wake(self, event: Event) -> None:
        if event is self._wake:
            self._wake = None
        self._run()

    def _run(self) -> None:
        """Plan; then go from completion to completion as long as nothing else happens before the next one."""
        flights, ahead = self._flights, self._ahead
        if self._straight and ahead is not None:
            if not flights and self._leap is None:
                self._run_ahead(ahead)
            return
        while True:
            self._plan()
            if not flights or self._completion is not None:
                return
            end = flights[0][2]
            if ahead is None or not ahead.moved_to(end):
                self._complete_at(end)
                return
            self._complete()

    def _run_ahead(self, ahead: VirtualTime) -> None:
        """The plain `_run` for one stage and one batch at a time, unrolled into one loop: its hot path.

        With one batch at a time whatever was in flight is over when the next one is planned, so host and stage are
        free and times follow each other. Nobody looks at the clock meanwhile: it is moved for those alone who may. The
        tests hold it against the plain path.
        """
        scheduler = self.scheduler
        queues, ledger, waiting = scheduler.queues, scheduler.ledger, scheduler.queues.waiting
        plan, deliver, iteration_ns = scheduler.plan, scheduler.deliver, self._iteration_ns
        now, horizon = ahead.now, ahead.peek()
        while True:
            batch = plan(now)
            if batch is None:
                ahead.moved_to(now)
                if not self._idle(now):
                    return
                horizon = ahead.peek()
                continue
            shape = batch.shape
            chunks = batch.chunks
            before, after, device, inside = iteration_ns(shape)
            quiet = 0 if chunks else scheduler.quiet_steps(batch)
            if quiet >= LEAST_LEAP:
                ahead.moved_to(now)
                self._launch_leap(batch, quiet, before, after)
                if not self._flights:
                    return
                batch, start, end, before, after, device, _, running, waits, free_blocks = self._flights.pop()
                shape = batch.shape
                inside = self._inside(shape)
            else:
                start = now + before
                end = start + device + after
                running, waits, free_blocks = queues.num_running, len(waiting), ledger.free_blocks
            if end >= horizon:
                ahead.moved_to(now)
                self._free_ns[0] = end - after
                self._last_end_ns = end
                self._flights.append((batch, start, end, before, after, device, (), running, waits, free_blocks))
                self._complete_at(end)
                return
            now = end
            finished = deliver(batch, end)
            self.busy_ns += device
            self._record(batch, start, end, before, after, device, (), running, waits, free_blocks, inside)
            if finished:
                # Whoever hears of an end may look at the clock, or have something happen soon.
                ahead.moved_to(now)
                for track in finished:
                    self._end(track)
                horizon = ahead.peek()
            if scheduler.retired:
                self._record_retired()

    def _complete_at(self, end_ns: Ns) -> None:
        self._completion = Moment(self.env, end_ns - self.env.now, self._on_completion, COMPLETION)

    def _plan(self) -> None:
        scheduler, flights = self.scheduler, self._flights
        depth = scheduler.depth
        while len(flights) < depth and self._leap is None:
            now = self.env.now
            batch = scheduler.plan(now)
            if batch is not None:
                self._launch(batch)
                continue
            if not self._idle(now):
                return

    def _idle(self, now: Ns) -> bool:
        """Nothing could be planned: whether it is worth asking again at once."""
        scheduler = self.scheduler
        if scheduler.alarm_ns is not None:
            self._plan_at(max(now + 1, scheduler.alarm_ns))
            return False
        if self._flights:
            return False
        stuck = scheduler.reject_stuck(now)
        if stuck is None:
            return False
        self._end(stuck)
        return True

    def _plan_at(self, at_ns: Ns) -> None:
        if not self.env.now < self._look_ns <= at_ns:
            self._look_ns = at_ns
            Moment(self.env, at_ns - self.env.now, self._on_wake, WAKE)

    def _launch(self, batch: Batch) -> None:
        cost, now = self.cost, self.env.now
        shape = batch.shape
        before, after = cost.host_ns(shape)
        if self.leaps and not batch.chunks:
            quiet = self.scheduler.quiet_steps(batch)
            if quiet >= LEAST_LEAP:
                self._launch_leap(batch, quiet, before, after)
                return
        free = self._free_ns
        # One process prepares batch after batch: hidden behind stage 0 wherever planning runs ahead of it.
        self._host_free_ns = ready = max(now, self._host_free_ns) + before
        if cost.stages == 1:
            device = cost.stage_ns(shape)
            start = ready
            if start < free[0]:
                start = free[0]
            free[0] = end = start + device
            stages: tuple[tuple[Ns, Ns, Ns], ...] = ()
        else:
            start, end, device, stages = self._through_stages(batch, ready)
        completes = max(end + after, self._last_end_ns)
        self._last_end_ns = completes
        scheduler = self.scheduler
        queues = scheduler.queues
        self._flights.append(
            (
                batch, start, completes, before, after, device, stages, queues.num_running, len(queues.waiting),
                scheduler.ledger.free_blocks,
            )
        )  # fmt: skip

    def _plain_iteration_ns(self, shape: BatchShape) -> tuple[Ns, Ns, Ns, bool]:
        cost = self.cost
        before, after = cost.host_ns(shape)
        return before, after, cost.stage_ns(shape), cost.inside(shape)

    def _plain_stages_ns(self, shape: BatchShape) -> list[tuple[Ns, Ns]]:
        cost = self.cost
        times: list[tuple[Ns, Ns]] = []
        for stage, twin in enumerate(self._twins):
            times.append((cost.stage_ns(shape, stage), cost.send_ns(shape, stage)) if twin == stage else times[twin])
        return times

    def _through_stages(self, batch: Batch, ready_ns: Ns) -> tuple[Ns, Ns, Ns, tuple[tuple[Ns, Ns, Ns], ...]]:
        """Stage times of a batch: a stage starts when it is free and its input has arrived."""
        free, overlap = self._free_ns, self.overlap_sends
        stages = []
        device = end = 0
        arrived = ready_ns
        for stage, (busy, send) in enumerate(self._stages_ns(batch.shape)):
            start = free[stage]
            if arrived > start:
                start = arrived
            end = start + busy
            arrived = end + send
            free[stage] = end if overlap else arrived
            device += busy
            stages.append((start, end, send))
        return stages[0][0], end, device, tuple(stages)

    # Leaps

    def _launch_leap(self, batch: Batch, quiet: int, before: Ns, after: Ns) -> None:
        now = self.env.now
        ahead = self._ahead
        # Alone with the arrivals, whatever comes next concerns this replica: no use in looking beyond.
        horizon = ahead.peek() if ahead is not None and ahead.sharers == 1 else INFINITY
        ends = ends_until(self.cost, self._repeat_terms, batch.shape, quiet + 1, now, before + after, horizon)
        leap = Leap(batch, now, ends, before, after)
        if ahead is not None and (ahead.sharers == 1 or ends[-1] < ahead.peek()):
            self._cross(leap, len(ends) - 1)
        else:
            self._leap = leap
            self._complete_at(ends[-1])

    def _cross(self, leap: Leap, done: int) -> None:
        """The first `done` iterations of a leap are complete; the next one is in flight as a plain batch."""
        batch, planned, ends, before, after = leap
        scheduler = self.scheduler
        queues = scheduler.queues
        running, waiting = queues.num_running, len(queues.waiting)
        free_blocks = scheduler.ledger.free_blocks
        if done:
            shape, first_number = batch.shape, batch.number
            cohort, first_step, _, _, _ = batch.grown[0]
            crossed = ends[:done]
            taken = scheduler.leap(batch, crossed)
            inside: Any = self._inside(shape)
            if inside != self._inside(batch.shape):
                inside = self._inside_each(shape, done)
            free_each = list(accumulate(taken, sub, initial=free_blocks))
            free_blocks = free_each.pop()
            self.recorder.back_to_back(
                self.number, first_number, shape, planned, crossed, cohort.number, first_step, running, waiting,
                free_each, before, after, inside,
            )  # fmt: skip
            self.busy_ns += crossed[-1] - planned - done * (before + after)
            planned = crossed[-1]
        end = ends[done]
        start = planned + before
        self._free_ns[0] = end - after
        self._last_end_ns = end
        self._flights.append(
            (batch, start, end, before, after, end - after - start, (), running, waiting, free_blocks)
        )

    def _inside_each(self, shape: BatchShape, steps: int) -> list[bool]:
        return [
            self._inside(
                shape._replace(
                    decode_context_total=shape.decode_context_total + step * shape.decodes,
                    decode_context_max=shape.decode_context_max + step,
                )
            )
            for step in range(steps)
        ]

    # Completion

    def _on_completion(self, event: Event) -> None:
        if event.void:  # type: ignore[attr-defined]
            return
        self._completion = None
        leap = self._leap
        if leap is not None:
            self._leap = None
            self._cross(leap, len(leap.ends_ns) - 1)
        self._complete()
        self._run()

    def _complete(self) -> None:
        """Deliver the oldest flight, now."""
        batch, start, end, before, after, device, stages, running, waiting, free_blocks = self._flights.popleft()
        scheduler = self.scheduler
        finished = scheduler.deliver(batch, end)
        self.busy_ns += device
        inside = self._inside(batch.shape)
        self._record(batch, start, end, before, after, device, stages, running, waiting, free_blocks, inside)
        for track in finished:
            self._end(track)
        if scheduler.retired:
            self._record_retired()

    def _record(
        self,
        batch: Batch,
        start: Ns,
        end: Ns,
        before: Ns,
        after: Ns,
        device: Ns,
        stages: tuple[tuple[Ns, Ns, Ns], ...],
        running: int,
        waiting: int,
        free_blocks: int,
        inside: bool,
    ) -> None:
        """`Recorder.iteration` in numbers alone."""
        _, decodes, context_total, context_max, dummy_tokens, sampled, executed_rows = batch.shape
        chunks = batch.chunks
        num_chunks = len(chunks)
        request = tokens = prefix = num_cohorts = number = step = size = 0
        samples = False
        more_chunks: list[int] = []
        more_cohorts: list[int] = []
        if num_chunks:
            track, tokens, prefix, samples = chunks[0]
            request = track.request.id
            if num_chunks > 1:
                for track, *fields in chunks[1:]:
                    more_chunks += (track.request.id, *fields)
        for cohort, at, members, _, _ in batch.grown:
            # A cohort that begins with this batch has decoded nobody in it.
            if members:
                if num_cohorts:
                    more_cohorts += (cohort.number, at, members)
                else:
                    number, step, size = cohort.number, at, members
                num_cohorts += 1
        self._row(
            pack_row(
                self.number, batch.number, batch.planned_ns, start, end, decodes, context_total, context_max,
                dummy_tokens, sampled, executed_rows, len(batch.preempted), running, waiting, free_blocks,
                batch.cached_tokens, before, after, device, inside, num_chunks, num_cohorts, len(stages),
                request, tokens, prefix, samples, number, step, size,
            ),
            more_chunks, more_cohorts, [time for stage in stages for time in stage] if stages else (),
        )  # fmt: skip

    def _record_retired(self) -> None:
        for cohort in self.scheduler.take_retired():
            self.recorder.cohort_times(self.number, cohort.number, cohort.times)

    def _end(self, track: Track) -> None:
        if self.on_end is not None:
            self.on_end(track, self)

    def close(self) -> None:
        """Hand the token times of cohorts still alive to the recorder (a run that was cut short)."""
        self.settle()
        for part in self.scheduler.queues.parts:
            if not isinstance(part, Track):
                self.recorder.cohort_times(self.number, part.number, part.times)


def twin_stages(cost: CostModel) -> list[int]:
    """For each stage, the first one that costs the same: stages between first and last with as many layers.

    Only a cost model that says how its layers are split is taken at its word.
    """
    split = getattr(cost, "layer_split", None) or range(cost.stages)
    middle = range(1, cost.stages - 1)
    return [
        next((twin for twin in middle if split[twin] == layers), stage) if stage in middle else stage
        for stage, layers in enumerate(split)
    ]
