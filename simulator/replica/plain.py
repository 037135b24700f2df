"""One engine in virtual time: a scheduler, a pipeline of stages, and a cost model that says how long things take.

This is the plain path, one event an iteration: what `simulator.replica.running_ahead.Replica` does faster, and what
the tests hold it
against. A batch costs one event: its stage times follow from a recurrence (a stage starts when it is free and its input
is there), so only its completion has to be waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from simpy import Event

from metrics import Recorder
from metrics.recording.events import STAGE_FIELDS, pack_row
from policies import Batch, BatchShape, Ns, Request, Scheduler, Track
from policies.edges.compiling import mypyc_attr
from policies.work.batch import drafts_of
from profiler.iterations.aftermath import merged
from simulator.clock.virtual_time import COMPLETION, WAKE, Moment, Nanoseconds
from simulator.replica.fast_costs import FastCosts, StageTimes, refuse

if TYPE_CHECKING:
    from profiler.cost_model import CostModel
    from simulator.replica.running_ahead import Replica

# A batch between plan and completion, a plain tuple because one is made per iteration: batch, start_ns, end_ns,
# host_before_ns, host_after_ns, device_ns, stages (start, end, send of each, one after the other; none for a single
# stage), running, waiting, free_blocks (as `Recorder.iteration` takes them).
Flight = tuple[Batch, Ns, Ns, Ns, Ns, Ns, list[Ns], int, int, int]

OnBatch = Callable[["Replica", Batch, Ns, Sequence[Track]], None]

_pack: Final = pack_row


@mypyc_attr(allow_interpreted_subclasses=True)
class PlainReplica:
    """TP x PP devices that share a scheduler.

    on_end(track, replica): called once for every request that ends here, whatever its end. on_room(replica): called
    where blocks have become free without anybody's end. on_batch(replica, batch, end, finished): called for every batch
    that completes one by one (no leaps), before anybody's end, for whoever hands out tokens as they come.
    overlap_sends: a stage may start its next batch while the last one's output is still on the link.
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
    ) -> None:
        self.env = env
        self.number = number
        self.scheduler = scheduler
        self._tracks, self._depth = scheduler.tracks, scheduler.depth
        self.cost = cost
        self.recorder = recorder
        fast = self._costs = FastCosts(cost)
        self._inside: Callable[[BatchShape], bool] = fast.inside
        self._host_ns: Callable[[BatchShape], tuple[Ns, Ns]] = fast.host_ns
        self._stage_ns: Callable[[BatchShape], Ns] = fast.stage_ns
        self._stages_ns: StageTimes = fast.stages_ns
        self._num_stages = cost.stages
        self._leaves: Callable[[BatchShape], list[Ns]] | None = fast.leaves
        # Extra device time of the iterations to come, the next one last.
        self._owed: list[Ns] = []
        self.on_end = on_end
        # Where the engine speculates: says of a batch that completes which of its drafts are accepted.
        self.decide: Callable[[Batch], None] | None = None
        self.on_room: Callable[[Replica], None] | None = None
        self.on_batch: OnBatch | None = None
        self.overlap_sends = overlap_sends
        self._flights: deque[Flight] = deque()
        # The event at which the oldest flight completes.
        self._completion: Moment | None = None
        self._free_ns = [0] * cost.stages
        self._last_end_ns = 0
        self._host_free_ns = 0
        self._wake: Moment | None = None
        self._look_ns = 0

    @property
    def now_ns(self) -> Ns:
        """SimPy's clock, which counts whole nanoseconds here."""
        return self.env.now

    # Requests come and go

    def submit(
        self,
        request: Request,
        ends_after: int | None,
        *,
        produced: int = 0,
        hands_over: bool = False,
        computed: int = 0,
    ) -> Track:
        """Queue a request now. produced, hands_over, computed: as `Scheduler.add` takes them."""
        self.settle()
        track = self.scheduler.add(
            request, self.now_ns, ends_after=ends_after, produced=produced, hands_over=hands_over, computed=computed
        )
        if track.status == "waiting":
            self.wake()
        else:
            self._end(track)
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
        gone = self.scheduler.withdraw(ids, reason, self.now_ns, status=status)
        if gone:
            self.wake()
        return gone

    def abandon(self, reason: str) -> list[Track]:
        """The replica dies: batches in flight never complete. Returns its requests; not even the end of those
        that have finished is reported."""
        self.settle()
        if self._completion is not None:
            self._completion.void = True
            self._completion = None
        self._flights.clear()
        self._free_ns = [0] * self.cost.stages
        self._last_end_ns = self._host_free_ns = 0
        self._owed = []
        gone = self.scheduler.abandon(reason, self.now_ns)
        self._record_retired()
        return gone

    def settle(self) -> None:
        """Bring whatever stands for many iterations up to now; the plain path has no such thing."""

    @property
    def busy_until_ns(self) -> Ns:
        """When the batches in flight are over, wanted or not (who plans ahead computes a token too many)."""
        return self._flights[-1][2] if self._flights else self.now_ns

    # What a router sees (simulator.routers.ReplicaView)

    @property
    def num_requests(self) -> int:
        return len(self._tracks)

    @property
    def num_running(self) -> int:
        return self.scheduler.queues.num_running

    @property
    def num_waiting(self) -> int:
        scheduler = self.scheduler
        return len(scheduler.tracks) - scheduler.queues.num_running - len(scheduler.withheld)

    @property
    def prefill_tokens(self) -> int:
        return self.scheduler.queues.prefill_tokens

    @property
    def decode_tokens_promised(self) -> int:
        return self.scheduler.queues.decode_tokens_promised

    @property
    def free_blocks(self) -> int:
        return self.scheduler.ledger.free_blocks

    @property
    def total_blocks(self) -> int:
        return self.scheduler.ledger.total_blocks

    @property
    def block_size(self) -> int:
        return self.scheduler.ledger.block_size

    # Planning

    def wake(self) -> None:
        """Look for something to plan at this moment, once everything else that happens in it has happened."""
        if self._wake is None and len(self._flights) < self._depth:
            self._wake = Moment(self.env, 0, self._on_wake, WAKE + self.number)

    def _on_wake(self, event: Event) -> None:
        if event is self._wake:
            self._wake = None
        self._run()

    def _run(self) -> None:
        """Plan, and wait for the oldest flight."""
        self._plan()
        if self._flights and self._completion is None:
            self._complete_at(self._flights[0][2])

    def _complete_at(self, end_ns: Ns) -> None:
        self._completion = Moment(self.env, end_ns - self.now_ns, self._on_completion, COMPLETION + self.number)

    def _plan(self) -> None:
        scheduler, flights = self.scheduler, self._flights
        while len(flights) < self._depth:
            batch = scheduler.plan(self.now_ns)
            if scheduler.handover.gave_back:
                self._tell_of_room()
            if batch is not None:
                self._launch(batch)
            elif not self._idle(self.now_ns):
                return

    def _tell_of_room(self) -> None:
        """The plan just made took blocks back from whoever waited: what it has left is there for others."""
        self.scheduler.handover.gave_back = False
        if self.on_room is not None:
            self.on_room(self)  # type: ignore[arg-type]

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
        if not self.now_ns < self._look_ns <= at_ns:
            self._look_ns = at_ns
            Moment(self.env, at_ns - self.now_ns, self._on_wake, WAKE + self.number)

    def _launch(self, batch: Batch) -> None:
        shape, free = batch.shape, self._free_ns
        before, after = self._host_ns(shape)
        # One process prepares batch after batch: hidden behind stage 0 wherever planning runs ahead of it.
        ready = batch.planned_ns
        if ready < self._host_free_ns:
            ready = self._host_free_ns
        self._host_free_ns = ready = ready + before
        stages: list[Ns] = []
        if self._num_stages == 1:
            device = self._stage_ns(shape)
            if device <= 0:
                refuse(self.cost, shape, device)
            if self._leaves is not None:
                device += self._aftermath_ns(batch)
            start = ready
            if start < free[0]:
                start = free[0]
            free[0] = end = start + device
        else:
            end, device = self._through_stages(shape, ready, stages)
            start = stages[0]
        completes = end + after
        if completes < self._last_end_ns:
            completes = self._last_end_ns
        self._last_end_ns = completes
        scheduler = self.scheduler
        queues = scheduler.queues
        self._flights.append(
            (
                batch,
                start,
                completes,
                before,
                after,
                device,
                stages,
                queues.num_running,
                len(queues.waiting),
                scheduler.ledger.free_blocks,
            )
        )

    def _aftermath_ns(self, batch: Batch) -> Ns:
        """What this iteration pays for chunks that ran before it; with chunks of its own it leaves something itself."""
        extra = self._owed.pop() if self._owed else 0
        if not batch.chunks:
            return extra
        if self._leaves is not None:
            self._owed = merged(self._owed, self._leaves(batch.shape))
        return 0

    def _through_stages(self, shape: BatchShape, ready_ns: Ns, stages: list[Ns]) -> tuple[Ns, Ns]:
        """Append the start, end and send of every stage to `stages`; returns the last end, and the time in all stages.

        A stage starts when it is free and its input has arrived.
        """
        free, overlap = self._free_ns, self.overlap_sends
        device = end = 0
        arrived = ready_ns
        for stage, (busy, send) in enumerate(self._stages_ns(shape)):
            if busy <= 0:
                refuse(self.cost, shape, busy, stage)
            start = free[stage]
            if arrived > start:
                start = arrived
            end = start + busy
            arrived = end + send
            free[stage] = end if overlap else arrived
            device += busy
            stages.append(start)
            stages.append(end)
            stages.append(send)
        return end, device

    # Completion

    def _on_completion(self, event: Event) -> None:
        if event.void:  # type: ignore[attr-defined]
            return
        self._completion = None
        self._complete()
        self._run()

    def _complete(self) -> Batch:
        """Deliver the oldest flight, now; returns its batch."""
        batch, start, end, before, after, device, stages, running, waiting, free_blocks = self._flights.popleft()
        scheduler = self.scheduler
        if self.decide is not None:
            self.decide(batch)
        finished = scheduler.deliver(batch, end)
        if self.on_batch is not None:
            self.on_batch(self, batch, end, finished)  # type: ignore[arg-type]
        self._record(
            batch, start, end, before, after, device, stages, running, waiting, free_blocks, self._inside(batch.shape)
        )
        for track in finished:
            self._end(track)
        if scheduler.retired:
            self._record_retired()
        return batch

    def _record(
        self,
        batch: Batch,
        start: Ns,
        end: Ns,
        before: Ns,
        after: Ns,
        device: Ns,
        stages: list[Ns],
        running: int,
        waiting: int,
        free_blocks: int,
        inside: bool,
    ) -> None:
        """`Recorder.iteration` in numbers alone."""
        _, decodes, context_total, context_max, dummy_tokens, sampled, executed_rows, _, _, _ = batch.shape
        chunks = batch.chunks
        num_chunks, num_stages = len(chunks), len(stages) // STAGE_FIELDS
        request = tokens = prefix = num_cohorts = number = step = size = 0
        samples = False
        more_chunks: Sequence[int] = ()
        more_cohorts: Sequence[int] = ()
        if num_chunks:
            track, tokens, prefix, samples = chunks[0]
            request = track.request.id
            if num_chunks > 1:
                more_chunks = [field for track, *fields in chunks[1:] for field in (track.request.id, *fields)]
        for part in batch.grown:
            members = part[2]
            # A cohort that begins with this batch has decoded nobody in it.
            if members:
                if num_cohorts:
                    more_cohorts = [*more_cohorts, part[0].number, part[1], members]
                else:
                    number, step, size = part[0].number, part[1], members
                num_cohorts += 1
        if batch.verified:
            for verified, (first, delivered) in zip(batch.verified, batch.delivered):
                if delivered:
                    if num_cohorts:
                        more_cohorts = [*more_cohorts, verified[0].number, first, 1]
                    else:
                        number, step, size = verified[0].number, first, 1
                    num_cohorts += 1
        if batch.shape[9]:
            self.recorder.speculated(batch.shape, drafts_of(batch))
        self.recorder.row(
            _pack(
                self.number,
                batch.number,
                batch.planned_ns,
                start,
                end,
                decodes,
                context_total,
                context_max,
                dummy_tokens,
                sampled,
                executed_rows,
                len(batch.preempted),
                running,
                waiting,
                free_blocks,
                batch.cached_tokens,
                before,
                after,
                device,
                inside,
                num_chunks,
                num_cohorts,
                num_stages,
                request,
                tokens,
                prefix,
                samples,
                number,
                step,
                size,
            ),
            more_chunks,
            more_cohorts,
            stages,
        )

    def _record_retired(self) -> None:
        for cohort in self.scheduler.take_retired():
            self.recorder.cohort_times(self.number, cohort.number, cohort.times)

    def _end(self, track: Track) -> None:
        if self.on_end is not None:
            self.on_end(track, self)  # type: ignore[arg-type]

    def close(self) -> None:
        """Hand the token times of cohorts still alive to the recorder (a run that was cut short)."""
        self.settle()
        for part in self.scheduler.queues.parts:
            if not isinstance(part, Track):
                self.recorder.cohort_times(self.number, part.number, part.times)
        for cohort in self.scheduler.retired:
            self.recorder.cohort_times(self.number, cohort.number, cohort.times)
