"""One engine in virtual time: a scheduler, a pipeline of stages, and a cost model that says how long things take.

A batch costs one event: its stage times follow from a recurrence (a stage starts when it is free and its input is
there), so only its completion has to be waited for. Equal iterations are crossed in one leap; whoever needs to see the
replica in the middle of one (an arrival, a withdrawal, a router) settles it first, at the right iteration boundary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from simpy import Environment, Event

from metrics import Recorder
from policies import Batch, Ns, Request, Scheduler, Track
from simulator.moment import COMPLETION, WAKE, Moment

if TYPE_CHECKING:
    from profiler.cost_model import CostModel

# Below this a vectorised leap costs more than the plain steps it replaces.
LEAST_LEAP = 4

_NAN = float("nan")


# A batch between plan and completion, a plain tuple because one is made per iteration: batch, start_ns, end_ns,
# host_before_ns, host_after_ns, device_ns, stages, running, waiting, free_blocks (as `Recorder.iteration` takes them),
# and the moment it completes.
Flight = tuple[Batch, Ns, Ns, Ns, Ns, Ns, tuple[tuple[Ns, Ns, Ns], ...], int, int, int, Moment]


class Leap(NamedTuple):
    """Equal iterations in flight at once: iteration i of them ends at ends_ns[i], the last one as any batch does."""

    batch: Batch
    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    device_ns: NDArray[np.int64]
    host_before_ns: Ns
    host_after_ns: Ns
    completion: Moment


class Replica:
    """TP x PP devices that share a scheduler.

    on_end(track, replica): called once for every request that ends here, whatever its end.
    overlap_sends: a stage may start its next batch while the last one's output is still on the link.
    leaps: cross equal iterations in one step (False keeps the plain path, the reference of the tests).
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
        self.on_end = on_end
        self.overlap_sends = overlap_sends
        self.leaps = leaps and scheduler.depth == 1
        self.busy_ns = 0
        self._flights: deque[Flight] = deque()
        self._leap: Leap | None = None
        self._free_ns = [0] * cost.stages
        self._twins = twin_stages(cost)
        self._last_end_ns = 0
        self._host_free_ns = 0
        self._wake: Moment | None = None
        self._look_ns = 0

    # Requests come and go

    def submit(self, request: Request, ends_after: int | None, *, produced: int = 0, hands_over: bool = False) -> Track:
        """Queue a request now. produced, hands_over: as `Scheduler.add` takes them."""
        self.settle()
        track = self.scheduler.add(
            request, self.env.now, ends_after=ends_after, produced=produced, hands_over=hands_over
        )
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
        for flight in self._flights:
            flight[-1].void = True
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
        done = int(np.searchsorted(leap.ends_ns, self.env.now, side="left"))
        last = len(leap.ends_ns) - 1
        if done < last:
            leap.completion.void = True
            completion = Moment(self.env, int(leap.ends_ns[done]) - self.env.now, self._complete, COMPLETION)
            leap = leap._replace(completion=completion)
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

    @property
    def decode_tokens_promised(self) -> int:
        promised = self.scheduler.queues.decode_tokens_promised
        leap = self._leap
        if leap is not None:
            # A leap answers for this moment without being stopped.
            promised -= leap.batch.shape.decodes * int(np.searchsorted(leap.ends_ns, self.env.now, side="left"))
        return promised

    @property
    def total_blocks(self) -> int:
        return self.scheduler.ledger.total_blocks

    @property
    def free_blocks(self) -> int:
        self.settle()
        return self.scheduler.ledger.free_blocks

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
        self._plan()

    def _plan(self) -> None:
        scheduler, flights = self.scheduler, self._flights
        depth = scheduler.depth
        while len(flights) < depth and self._leap is None:
            now = self.env.now
            batch = scheduler.plan(now)
            if batch is not None:
                self._launch(batch)
                continue
            if scheduler.alarm_ns is not None:
                self._plan_at(max(now + 1, scheduler.alarm_ns))
                return
            if flights:
                return
            stuck = scheduler.reject_stuck(now)
            if stuck is None:
                return
            self._end(stuck)

    def _plan_at(self, at_ns: Ns) -> None:
        if not self.env.now < self._look_ns <= at_ns:
            self._look_ns = at_ns
            Moment(self.env, at_ns - self.env.now, self._on_wake, WAKE)

    def _launch(self, batch: Batch) -> None:
        cost, env = self.cost, self.env
        now = env.now
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
                scheduler.ledger.free_blocks, Moment(env, completes - now, self._complete, COMPLETION),
            )
        )  # fmt: skip

    def _through_stages(self, batch: Batch, ready_ns: Ns) -> tuple[Ns, Ns, Ns, tuple[tuple[Ns, Ns, Ns], ...]]:
        """Stage times of a batch: a stage starts when it is free and its input has arrived."""
        cost, shape, free, overlap = self.cost, batch.shape, self._free_ns, self.overlap_sends
        known: list[tuple[Ns, Ns]] = []
        stages = []
        device = 0
        arrived = ready_ns
        for stage, twin in enumerate(self._twins):
            if twin == stage:
                times = cost.stage_ns(shape, stage), cost.send_ns(shape, stage)
            else:
                times = known[twin]
            known.append(times)
            busy, send = times
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
        device = self.cost.repeat_ns(batch.shape, quiet + 1)
        ends = now + np.cumsum(device + (before + after))
        starts = ends - after - device
        completion = Moment(self.env, int(ends[-1]) - now, self._complete, COMPLETION)
        self._leap = Leap(batch, starts, ends, device, before, after, completion)

    def _cross(self, leap: Leap, done: int) -> None:
        """The first `done` iterations of a leap are complete; the next one is in flight as a plain batch."""
        scheduler, batch = self.scheduler, leap.batch
        queues = scheduler.queues
        running, waiting = queues.num_running, len(queues.waiting)
        free_blocks = scheduler.ledger.free_blocks
        if done:
            shape, first_number = batch.shape, batch.number
            cohort, first_step, size = batch.grown[0]
            last_shape = shape._replace(
                decode_context_total=shape.decode_context_total + (done - 1) * size,
                decode_context_max=shape.decode_context_max + done - 1,
            )
            inside: Any = self._inside(shape)
            if inside != self._inside(last_shape):
                inside = self._inside_each(batch, done)
            self.busy_ns += int(leap.device_ns[:done].sum())
            taken = scheduler.leap(batch, leap.ends_ns[:done].tolist())
            free_each = [free_blocks]
            for blocks in taken:
                free_blocks -= blocks
                free_each.append(free_blocks)
            free_each.pop()
            self.recorder.leap(
                self.number, first_number, shape, leap.starts_ns[:done], leap.ends_ns[:done], cohort.number,
                first_step, running, waiting, free_each, leap.host_before_ns, leap.host_after_ns,
                leap.device_ns[:done], inside,
            )  # fmt: skip
        end = int(leap.ends_ns[done])
        self._free_ns[0] = end - leap.host_after_ns
        self._last_end_ns = end
        self._flights.append(
            (
                batch, int(leap.starts_ns[done]), end, leap.host_before_ns, leap.host_after_ns,
                int(leap.device_ns[done]), (), running, waiting, free_blocks, leap.completion,
            )
        )  # fmt: skip

    def _inside_each(self, batch: Batch, steps: int) -> NDArray[np.bool_]:
        shape = batch.shape
        return np.array(
            [
                self._inside(
                    shape._replace(
                        decode_context_total=shape.decode_context_total + step * shape.decodes,
                        decode_context_max=shape.decode_context_max + step,
                    )
                )
                for step in range(steps)
            ]
        )

    # Completion

    def _complete(self, event: Event) -> None:
        if event.void:  # type: ignore[attr-defined]
            return
        leap = self._leap
        if leap is not None:
            self._leap = None
            self._cross(leap, len(leap.ends_ns) - 1)
        batch, start, end, before, after, device, stages, running, waiting, free_blocks, _ = self._flights.popleft()
        scheduler = self.scheduler
        outcome = scheduler.complete(batch, end)
        self.busy_ns += device
        shape = batch.shape
        self.recorder.iteration(
            self.number, batch.number, batch.planned_ns, start, end, shape,
            [(chunk[0].request.id, chunk[1], chunk[2], chunk[3]) for chunk in batch.chunks],
            [(cohort.number, step, size) for cohort, step, size in batch.grown if size],
            len(batch.preempted), running, waiting, free_blocks, batch.cached_tokens, before, after, device,
            self._inside(shape), _NAN, _NAN, stages,
        )  # fmt: skip
        for track in outcome.finished:
            self._end(track)
        self._record_retired()
        self._plan()

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
