"""One engine in virtual time, at speed: the leaping replica with its events left out.

A completion has to be waited for only where something else happens before it (simulator/clock/virtual_time.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from metrics import Recorder
from metrics.recording.events import pack_straight
from policies import Batch, Ns, Scheduler, Track
from policies.edges.compiling import mypyc_attr
from simulator.clock.virtual_time import COMPLETION, FAR, Moment, Nanoseconds, VirtualTime
from simulator.replica.fast_costs import IterationTimes, later, refuse
from simulator.replica.leap_ends import LEAST_AHEAD, LEAST_LEAP, Leap, ends_ahead, ends_until
from simulator.replica.leaping import LeapingReplica

if TYPE_CHECKING:
    from profiler.cost_model import CostModel

_pack: Final = pack_straight


@mypyc_attr(allow_interpreted_subclasses=True)
class Replica(LeapingReplica):
    """TP x PP devices that share a scheduler; on_end and overlap_sends as `PlainReplica` has them.

    leaps: cross equal iterations in one step, and run ahead of the event queue where `env` is a VirtualTime (False
        keeps the plain path of one event per iteration).
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
        super().__init__(
            env, number, scheduler, cost, recorder, on_end=on_end, overlap_sends=overlap_sends, leaps=leaps
        )
        self._iteration_ns: IterationTimes = self._costs.iteration_ns
        # Nothing but this loop's own steps to take: see _run_straight.
        self._straight = self.leaps and cost.stages == 1 and type(self)._launch is Replica._launch
        if scheduler.speculation is not None:
            self._straight = False
        # Micro-batches that would be planned again are, without asking the policy.
        self._repeats = leaps and cost.stages > 1
        # One batch planned ahead of the running one: equal iterations are crossed as well (_leap_ahead).
        self._leaps_ahead = (
            leaps
            and cost.stages == 1
            and scheduler.depth == 2
            and scheduler.chase_decodes
            and self._checks is None
            and type(self)._launch is Replica._launch
        )
        self._running_ahead = False
        # What every iteration takes at least, where they follow each other one by one.
        self._least_ns: Ns = self._costs.least_ns if self._straight else 0

    # What a fleet may know without looking (simulator/cluster/in_own_time.py)

    def calm_until(self, next_ns: Ns) -> Ns:
        """A moment before which nobody ends here unless somebody comes or is withdrawn; next_ns: of the next event."""
        least = self._least_ns
        steps = self.scheduler.steps_to_an_end() if least else 0
        if not steps:
            return next_ns
        if self._leap is not None:
            further = steps - len(self._leap.ends_ns)
            return next_ns + further * least if further > 0 else next_ns
        return self._flights[0][2] + (steps - 1) * least if self._flights else next_ns + steps * least

    # Running ahead of the event queue

    def _run(self) -> None:
        ahead, flights = self._ahead, self._flights
        if ahead is None:
            super()._run()
            return
        if self._running_ahead:
            # An event that happened while this very replica let events happen: it goes on afterwards.
            if not self._straight:
                self._plan()
            return
        self._running_ahead = True
        try:
            if not self._straight:
                self._run_pipeline(ahead)
            elif not flights and self._leap is None:
                self._run_straight(ahead)
        finally:
            self._running_ahead = False

    def _run_pipeline(self, ahead: VirtualTime) -> None:
        """Plan; then go from completion to completion as long as nothing else happens before the next one."""
        flights, depth = self._flights, self._depth
        while True:
            if len(flights) < depth:
                self._plan()
            if not flights or self._completion is not None:
                return
            if self._leaps_ahead and len(flights) == 2 and not flights[1][0].chunks:
                self._leap_ahead(ahead)
            end = flights[0][2]
            if not (ahead.moved_to(end) or self._passed(ahead, end)):
                return
            ahead.take_turn(self.number)
            self._complete()

    def _leap_ahead(self, ahead: VirtualTime) -> None:
        """Complete and plan equal iterations at once, as many as end before anything else happens; two are in flight
        before and after."""
        flights, scheduler = self._flights, self.scheduler
        older, first_start, first_end, before, after, first_device, _, running, waits, free_blocks = flights[0]
        newer, second_start, second_end, before_too, after_too, second_device, _, running_too, waits_too, free = (
            flights[1]
        )
        horizon = ahead.next_ns()
        if second_end >= horizon or self._owed:
            return
        if (before, after, running, waits) != (before_too, after_too, running_too, waits_too):
            return
        steps = scheduler.quiet_steps_ahead(older, newer)
        if steps < LEAST_AHEAD:
            return
        shape = newer.shape
        following = later(shape, 1)
        if (before, after) != self._host_ns(following):
            return
        times = ends_ahead(
            self._costs,
            following,
            steps,
            first_end,
            second_end,
            before,
            after,
            second_device,
            self._host_free_ns,
            self._free_ns[0],
            horizon,
        )
        if times is None:
            return
        starts, devices, ends, ready = times
        done = len(ends)
        number, first_planned, second_planned = older.number, older.planned_ns, newer.planned_ns
        first_shape, (cohort, step, _, _, _) = older.shape, older.grown[0]
        completed = [first_end, second_end, *ends[:-2]]
        taken = scheduler.leap_ahead(older, newer, completed)
        inside: Any = self._inside(first_shape)
        if inside != self._inside(older.shape):
            inside = self._inside_each(first_shape, done)
        self.recorder.leap(
            self.number,
            number,
            first_shape,
            first_planned,
            completed,
            cohort.number,
            step,
            running,
            waits,
            free_blocks,
            [free_blocks - free, *taken[:-1]],
            before,
            after,
            inside,
            (
                [first_planned, second_planned, *completed[:-2]],
                [first_start, second_start, *starts[:-2]],
                [first_device, second_device, *devices[:-2]],
            ),
        )
        self._host_free_ns = ready
        self._free_ns[0] = starts[-1] + devices[-1]
        self._last_end_ns = ends[-1]
        free = scheduler.ledger.free_blocks
        flights.clear()
        for batch, at, left in ((older, -2, free + taken[-1]), (newer, -1, free)):
            flights.append((batch, starts[at], ends[at], before, after, devices[at], [], running, waits, left))
        ahead.moved_to(completed[-1])
        ahead.take_turn(self.number)

    def _passed(self, ahead: VirtualTime, end_ns: Ns) -> bool:
        """Whether everything before the completion of the oldest flight has happened now; else it is scheduled."""
        if ahead.sharers != 1:
            self._complete_at(end_ns)
            return False
        flights = self._flights
        # A compiled tuple has no identity that lasts; its batch has.
        batch = flights[0][0]
        place = ahead.reserve(end_ns, COMPLETION + self.number)
        try:
            if ahead.passed(place, flights):
                return True
        except BaseException:
            self._await(ahead, place)
            raise
        if flights and flights[0][0] is batch:
            self._await(ahead, place)
        return False

    def _await(self, ahead: VirtualTime, place: tuple[Ns, int, int]) -> None:
        self._completion = Moment.unscheduled(ahead, self._on_completion)
        ahead.take(place, self._completion)

    def _run_straight(self, ahead: VirtualTime) -> None:
        """The pipeline's loop for one stage and one batch at a time, unrolled: the simulator's hot path.

        With one batch at a time whatever was in flight is over when the next one is planned, so host and stage are
        free and times follow each other. Nobody looks at the clock meanwhile: it is moved for those alone who may.
        Ordinary iterations are recorded as stretches. The tests hold all this against the plain path.
        """
        scheduler, recorder, flights = self.scheduler, self.recorder, self._flights
        handover, checks = scheduler.handover, self._checks
        queues, ledger, waiting = scheduler.queues, scheduler.ledger, scheduler.queues.waiting
        straight, room, replica = recorder.straight, recorder.part_rows, self.number
        now, horizon = self.now_ns, ahead.next_ns()
        # Whether nothing can happen before `horizon`, and what happens then concerns this replica.
        alone = ahead.sharers == 1 and horizon < ahead.limit
        costs, iteration_ns, leaves = self._costs, self._iteration_ns, self._leaves
        # Whether, and with what `inside`, the stretch goes on.
        stretch: bool | None = None
        batch: Batch | None = None
        while True:
            # Whatever happens between two iterations drops the batch.
            if batch is None or not (
                scheduler.plan_again(batch, now) if checks is None else checks.plan_again(batch, now)
            ):
                batch = scheduler.plan(now)
                if handover.gave_back:
                    ahead.moved_to(now)
                    self._tell_of_room()
                    horizon = ahead.next_ns()
                    alone = ahead.sharers == 1 and horizon < ahead.limit
            if batch is None:
                ahead.moved_to(now)
                if not self._idle(now):
                    return
                horizon = ahead.next_ns()
                alone = ahead.sharers == 1 and horizon < ahead.limit
                stretch = None
                continue
            chunks, shape = batch.chunks, batch.shape
            before, after, device, inside = iteration_ns(shape)
            if device <= 0:
                refuse(self.cost, shape, device)
            owing = False
            if leaves is not None:
                owing = bool(self._owed)
                device += self._aftermath_ns(batch)
            end = now + before + device + after
            if (
                not chunks
                and not owing
                and not (alone and end >= horizon)
                and (quiet := scheduler.quiet_steps(batch)) >= LEAST_LEAP
            ):
                ends = ends_until(costs, shape, quiet + 1, now, before + after, device, horizon if alone else FAR)
                done = len(ends) - 1
                if not alone and ends[done] >= horizon:
                    # Somebody else's event in the middle of it need not concern this replica.
                    ahead.moved_to(now)
                    self._leap = Leap(batch, now, ends, before, after, inside)
                    self._complete_at(ends[done])
                    return
                if done:
                    self._cross(batch, now, ends[:done], before, after, inside)
                    shape, now, end = batch.shape, ends[done - 1], ends[done]
                    device = end - now - before - after
                    inside = self._inside(shape)
                    stretch = None
            running, waits, free_blocks = queues.num_running, len(waiting), ledger.free_blocks
            if end >= horizon:
                ahead.moved_to(now)
                self._free_ns[0] = end - after
                self._last_end_ns = end
                flights.append((batch, now + before, end, before, after, device, [], running, waits, free_blocks))
                if not self._passed(ahead, end):
                    return
                flights.pop()
                horizon = ahead.next_ns()
                alone = ahead.sharers == 1 and horizon < ahead.limit
                same = False
            else:
                same = bool(chunks)
            finished = scheduler.deliver(batch, end)
            decodes, dummies = shape[1], shape[4]
            grown = batch.grown
            if len(chunks) > 1 or len(grown) > 1 or dummies or batch.preempted or batch.cached_tokens:
                self._record(batch, now + before, end, before, after, device, [], running, waits, free_blocks, inside)
                stretch = None
            else:
                if stretch is not inside or len(straight) >= room:
                    recorder.stretch(replica, batch.number, now, inside)
                    stretch = inside
                if chunks:
                    track, tokens, prefix, _ = chunks[0]
                    request = track.request.id
                else:
                    request = tokens = prefix = 0
                if decodes:
                    part = grown[0]
                    number, step = part[0].number, part[1]
                else:
                    number = step = 0
                straight.append(
                    _pack(
                        end,
                        decodes,
                        shape[2],
                        shape[3],
                        shape[5],
                        running,
                        waits,
                        free_blocks,
                        before,
                        after,
                        request,
                        tokens,
                        prefix,
                        number,
                        step,
                    )
                )
            now = end
            if finished:
                # Whoever hears of an end may look at the clock, or have something happen soon.
                ahead.moved_to(now)
                ahead.take_turn(replica)
                for track in finished:
                    self._end(track)
                horizon = ahead.next_ns()
                alone = ahead.sharers == 1 and horizon < ahead.limit
                same = False
            if scheduler.retired:
                self._record_retired()
            if not same:
                batch = None

    def _complete(self) -> Batch:
        end = self._flights[0][2]
        batch = super()._complete()
        if self._repeats and (
            self.scheduler.plan_decodes_again(batch, end)
            if self._checks is None
            else self._checks.plan_decodes_again(batch, end)
        ):
            self._launch(batch)
        return batch
