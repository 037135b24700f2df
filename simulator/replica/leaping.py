"""A replica that crosses equal iterations in one leap, and what stands for many iterations while it does.

Whoever needs to see the replica in the middle of a leap (an arrival, a withdrawal) settles it first, at the right
iteration boundary; a router gets its answer without that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from operator import sub
from typing import TYPE_CHECKING, Any

from simpy import Event

from metrics import Recorder
from policies import Batch, BatchShape, Ns, Scheduler, Track
from policies.edges.compiling import mypyc_attr
from simulator.clock.virtual_time import FAR, WAKE, Moment, Nanoseconds, VirtualTime
from simulator.replica.fast_costs import refuse
from simulator.replica.leap_ends import LEAST_LEAP, Leap, ends_until
from simulator.replica.plain import PlainReplica
from simulator.replica.promise_checks import PromiseChecks, is_own

if TYPE_CHECKING:
    from profiler.cost_model import CostModel
    from simulator.replica.running_ahead import Replica


@mypyc_attr(allow_interpreted_subclasses=True)
class LeapingReplica(PlainReplica):
    """TP x PP devices that share a scheduler; on_end and overlap_sends as `PlainReplica` has them.

    leaps: cross equal iterations in one step (False keeps the plain path of one event per iteration).
    """

    def __init__(
        self,
        env: Nanoseconds,
        number: int,
        scheduler: Scheduler,
        cost: CostModel,
        recorder: Recorder,
        *,
        on_end: Callable[[Track, Replica], None] | None = None,
        overlap_sends: bool = True,
        leaps: bool = True,
    ) -> None:
        super().__init__(env, number, scheduler, cost, recorder, on_end=on_end, overlap_sends=overlap_sends)
        # Promises of others' policies are held against plans, now and then.
        self._checks = None if is_own(scheduler.policy) else PromiseChecks(scheduler, number)
        self.leaps = leaps and scheduler.depth == 1
        self._ahead = env if leaps and isinstance(env, VirtualTime) else None
        if self._ahead is not None:
            self._ahead.sharers += 1
        self._leap: Leap | None = None

    # What others see of it

    def settle(self) -> None:
        """Bring a leap up to now: iterations that ended before this moment are complete, one is in flight."""
        leap = self._leap
        if leap is None:
            return
        self._leap = None
        ends = leap.ends_ns
        done = self._steps_done(ends)
        if done < len(ends) - 1:
            assert self._completion is not None
            self._completion.void = True
            self._complete_at(ends[done])
        self._cross_to_flight(leap, done)

    def _steps_done(self, ends_ns: list[Ns]) -> int:
        """Iterations of a leap that are complete; one that ends this very moment is if a later engine has its turn."""
        # Each iteration lasts, so their ends are sorted.
        ahead, now = self._ahead, self.now_ns
        if ahead is not None and ahead.turn_ns == now and ahead.turn > self.number:
            return bisect_right(ends_ns, now)
        return bisect_left(ends_ns, now)

    # A leap answers for this moment without being stopped.

    @property
    def decode_tokens_promised(self) -> int:
        promised = self.scheduler.queues.decode_tokens_promised
        leap = self._leap
        if leap is not None:
            promised -= leap.batch.shape.decodes * self._steps_done(leap.ends_ns)
        return promised

    @property
    def free_blocks(self) -> int:
        free = self.scheduler.ledger.free_blocks
        leap = self._leap
        if leap is not None:
            free -= leap.batch.grown[0][0].growth_within(self._steps_done(leap.ends_ns))
        return free

    # What a fleet may know without looking (simulator/cluster/in_own_time.py)

    def falls_by(self) -> tuple[int, int, Ns]:
        """Promised tokens that each iteration of the leap plans, how many these are, the shortest time between two."""
        leap = self._leap
        if leap is None:
            return 0, 0, 0
        ends = leap.ends_ns
        return leap.batch.shape.decodes, len(ends), min(map(sub, ends[1:], ends), default=0)

    def wake(self) -> None:
        if self._wake is None and len(self._flights) < self._depth and self._leap is None:
            self._wake = Moment(self.env, 0, self._on_wake, WAKE + self.number)

    def _on_wake(self, event: Event) -> None:
        if self._ahead is not None:
            # Whatever completes in this moment has had its turn.
            self._ahead.take_turn(FAR)
        super()._on_wake(event)

    # Leaps

    def _plan(self) -> None:
        scheduler, flights = self.scheduler, self._flights
        depth = self._depth
        while len(flights) < depth and self._leap is None:
            batch = scheduler.plan(self.now_ns)
            if scheduler.handover.gave_back:
                self._tell_of_room()
            if batch is not None:
                self._launch(batch)
            elif not self._idle(self.now_ns):
                return

    def _launch(self, batch: Batch) -> None:
        # What chunks have left to the next iterations is paid one by one.
        if self.leaps and not batch.chunks and not self._owed:
            quiet = self.scheduler.quiet_steps(batch)
            if quiet >= LEAST_LEAP:
                shape = batch.shape
                self._launch_leap(batch, quiet, *self._host_ns(shape), self._inside(shape))
                return
        super()._launch(batch)

    def _launch_leap(self, batch: Batch, quiet: int, before: Ns, after: Ns, inside: bool) -> None:
        now, shape = self.now_ns, batch.shape
        ahead = self._ahead
        # Alone with the arrivals, whatever comes next concerns this replica: no use in looking beyond.
        alone = ahead is not None and ahead.sharers == 1 and ahead.next_ns() < ahead.limit
        horizon = ahead.next_ns() if ahead is not None and alone else FAR
        device = self._stage_ns(shape)
        if device <= 0:
            refuse(self.cost, shape, device)
        ends = ends_until(self._costs, shape, quiet + 1, now, before + after, device, horizon)
        leap = Leap(batch, now, ends, before, after, inside)
        if ahead is not None and (alone or ends[-1] < ahead.next_ns()):
            self._cross_to_flight(leap, len(ends) - 1)
        else:
            self._leap = leap
            self._complete_at(ends[-1])

    def _cross_to_flight(self, leap: Leap, done: int) -> None:
        """The first `done` iterations of a leap are complete; the next one is in flight as a plain batch."""
        batch, planned, ends, before, after, _ = leap
        scheduler = self.scheduler
        queues = scheduler.queues
        if done:
            self._cross(batch, planned, ends[:done], before, after, leap.inside)
            planned = ends[done - 1]
        end = ends[done]
        start = planned + before
        self._free_ns[0] = end - after
        self._last_end_ns = end
        self._flights.append(
            (
                batch,
                start,
                end,
                before,
                after,
                end - after - start,
                [],
                queues.num_running,
                len(queues.waiting),
                scheduler.ledger.free_blocks,
            )
        )

    def _cross(self, batch: Batch, planned: Ns, ends: list[Ns], before: Ns, after: Ns, first_inside: bool) -> None:
        """So many equal iterations are complete and recorded; `batch` is the one planned after them."""
        scheduler = self.scheduler
        queues = scheduler.queues
        free_blocks = scheduler.ledger.free_blocks
        shape, first_number = batch.shape, batch.number
        cohort, first_step, _, _, _ = batch.grown[0]
        taken = scheduler.leap(batch, ends) if self._checks is None else self._checks.leap(batch, ends)
        inside: Any = first_inside
        if inside != self._inside(batch.shape):
            inside = self._inside_each(shape, len(ends))
        self.recorder.leap(
            self.number,
            first_number,
            shape,
            planned,
            ends,
            cohort.number,
            first_step,
            queues.num_running,
            len(queues.waiting),
            free_blocks,
            taken,
            before,
            after,
            inside,
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

    def _on_completion(self, event: Event) -> None:
        if not event.void:  # type: ignore[attr-defined]
            leap = self._leap
            if self._ahead is not None:
                self._ahead.take_turn(self.number)
            if leap is not None:
                self._leap = None
                self._cross_to_flight(leap, len(leap.ends_ns) - 1)
        super()._on_completion(event)
