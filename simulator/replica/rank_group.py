"""Data-parallel ranks of one replica that step together: each its own scheduler and KV, one step for all of them.

A step begins when every rank is ready and ends with the slowest. Ranks without work run a dummy step, because expert
layers exchange tokens between all ranks. As long as every rank's plan repeats, the group crosses its steps in one leap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from simpy import Event

from metrics import Recorder
from metrics.recording.events import pack_row
from policies import Batch, BatchShape, Ns, Scheduler, Track
from simulator.clock.virtual_time import COMPLETION, FAR, WAKE, Moment, Nanoseconds, VirtualTime
from simulator.replica.fast_costs import later, refuse, times_of_ranks
from simulator.replica.leap_ends import LEAST_LEAP
from simulator.replica.promise_checks import PromiseChecks, is_own
from simulator.replica.running_ahead import Replica
from simulator.replica.variants import SwapsKV

if TYPE_CHECKING:
    from profiler.cost_model import CostModel

Ints = NDArray[np.int64]

DUMMY = BatchShape(dummy_tokens=1)
"""What a rank without requests runs: one row that stands for nobody (vLLM's dummy batch)."""


def shapes_of_step(shapes: Sequence[BatchShape | None], graph_rows: int) -> list[BatchShape]:
    """What every rank runs in a step: None is a rank without work.

    Where the largest batch fits a captured graph, every rank replays the graph of that size, so all execute its rows
    (vLLM pads data-parallel ranks to the largest as soon as all of them use graphs). graph_rows: of the largest graph,
    0 where none are captured.
    """
    given = [DUMMY if shape is None else shape for shape in shapes]
    most = max([shape.rows for shape in given])
    if most > graph_rows:
        return given
    return [shape if shape.rows == most else shape._replace(executed_rows=most) for shape in given]


class Part(NamedTuple):
    """One rank's part of a step. batch: None where it has no work. device_ns: its own time, without waiting.

    running, waiting, free_blocks: of its scheduler, as its plan left them.
    """

    batch: Batch | None
    shape: BatchShape
    host_before_ns: Ns
    host_after_ns: Ns
    device_ns: Ns
    running: int
    waiting: int
    free_blocks: int


class Step(NamedTuple):
    """A step in flight, planned at planned_ns; the ranks start at start_ns and all complete at end_ns."""

    number: int
    planned_ns: Ns
    start_ns: Ns
    end_ns: Ns
    parts: list[Part]


class GroupLeap(NamedTuple):
    """Equal steps in flight at once, back to back: step i of them ends at ends_ns[i]. first: of them.

    device_ns: [ranks, steps].
    """

    first: Step
    ends_ns: list[Ns]
    device_ns: Ints


class Rank(Replica):
    """One rank of a group: an engine as everybody else sees it, which plans and completes when its group does."""

    group: RankGroup
    on_last_chunk: Callable[[Track, Replica], None] | None = None

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
        # The group runs ahead and leaps, its ranks by themselves do neither.
        super().__init__(
            env, number, scheduler, cost, recorder, on_end=on_end, overlap_sends=overlap_sends, leaps=False
        )
        self.checks = None if is_own(scheduler.policy) else PromiseChecks(scheduler, number)

    def settle(self) -> None:
        self.group.settle()

    def wake(self) -> None:
        self.group.wake()

    def _on_wake(self, event: Event) -> None:
        self.group.on_wake(event)

    @property
    def busy_until_ns(self) -> Ns:
        return self.group.busy_until_ns

    @property
    def decode_tokens_promised(self) -> int:
        promised = self.scheduler.queues.decode_tokens_promised
        part, done = self.group.leapt(self)
        return promised if part is None else promised - part.shape.decodes * done

    @property
    def free_blocks(self) -> int:
        free = self.scheduler.ledger.free_blocks
        part, done = self.group.leapt(self)
        if part is None or part.batch is None:
            return free
        return free - part.batch.grown[0][0].growth_within(done)

    def abandon(self, reason: str) -> list[Track]:
        self.group.stop()
        return super().abandon(reason)

    # What the group asks of it

    def plan(self, now_ns: Ns) -> Batch | None:
        """The next batch, None where there is nothing to run; a rank without requests is not asked."""
        scheduler = self.scheduler
        while scheduler.tracks:
            batch = scheduler.plan(now_ns)
            if scheduler.handover.gave_back:
                self._tell_of_room()
            if batch is not None or not self._idle(now_ns):
                return batch
        return None

    def quiet_steps(self, batch: Batch | None) -> int:
        """How often a plan will be made again unchanged; a rank without requests stays without."""
        if batch is None:
            return 0 if self.scheduler.tracks else 1 << 40
        return 0 if self._owed else self.scheduler.quiet_steps(batch)

    def aftermath_ns(self, batch: Batch | None) -> Ns:
        return 0 if batch is None or self._leaves is None else self._aftermath_ns(batch)

    def swapped_ns(self, batch: Batch | None, free_ns: Ns) -> Ns:
        """When the swaps of a batch are over."""
        return free_ns

    def launched(self, batch: Batch | None) -> None:
        """Its part of a step is on its way: tell whose prompt it ends, as `PrefillReplica` does."""
        if batch is not None and self.on_last_chunk is not None:
            for chunk in batch.chunks:
                if chunk.samples and chunk.track.hands_over:
                    self.on_last_chunk(chunk.track, self)

    def leap(self, batch: Batch, ends_ns: list[Ns]) -> list[int]:
        return self.scheduler.leap(batch, ends_ns) if self.checks is None else self.checks.leap(batch, ends_ns)

    def part(self, batch: Batch | None, shape: BatchShape, device_ns: Ns) -> Part:
        scheduler = self.scheduler
        queues = scheduler.queues
        before, after = self._host_ns(shape)
        return Part(
            batch,
            shape,
            before,
            after,
            device_ns,
            queues.num_running,
            len(queues.waiting),
            scheduler.ledger.free_blocks,
        )

    def record(self, step: Step, part: Part) -> None:
        """The row of a step that is complete: its batch with the number and the rows of the step, or a dummy's."""
        batch = part.batch if part.batch is not None else Batch(0, step.planned_ns, [], [], [], [], [], 0, DUMMY)
        own = batch.number, batch.shape
        batch.number, batch.shape = step.number, part.shape
        self._record(
            batch,
            step.start_ns,
            step.end_ns,
            part.host_before_ns,
            part.host_after_ns,
            part.device_ns,
            [],
            part.running,
            part.waiting,
            part.free_blocks,
            self._inside(part.shape),
        )
        batch.number, batch.shape = own

    def ended(self, tracks: Sequence[Track]) -> None:
        """Tell of those whose last token was delivered."""
        for track in tracks:
            self._end(track)
        if self.scheduler.retired:
            self._record_retired()


class SwapRank(SwapsKV, Rank):
    """A rank that swaps: its part of a step begins when its own transfers are over."""

    def swapped_ns(self, batch: Batch | None, free_ns: Ns) -> Ns:
        if batch is None or not (batch.swap_out or batch.swap_in):
            return free_ns
        size = self.device_block_bytes
        out_bytes, in_bytes = (
            sum([move.num_blocks for move in moves]) * size for moves in (batch.swap_out, batch.swap_in)
        )
        return self.link.move(max(self.now_ns, free_ns), out_bytes, in_bytes)


class RankGroup:
    """The ranks of one replica, in rank order, as one engine in virtual time; its number is that of the first.

    leaps: cross equal steps at once, and run ahead of the event queue where it is a VirtualTime.
    """

    def __init__(self, env: Nanoseconds, ranks: Sequence[Rank], cost: CostModel, *, leaps: bool = True) -> None:
        self.env, self.ranks, self.cost = env, ranks, cost
        self.number = ranks[0].number
        for rank in ranks:
            rank.group = self
        self._ranks_ns, self._repeat_ranks_ns = times_of_ranks(cost)
        self._graph_rows = int(getattr(cost, "graph_rows", 0))
        self._depth = ranks[0].scheduler.depth
        self.leaps = leaps and self._depth == 1
        self._ahead = env if leaps and isinstance(env, VirtualTime) else None
        if self._ahead is not None:
            self._ahead.sharers += 1
        self._steps: deque[Step] = deque()
        self._leap: GroupLeap | None = None
        self._completion: Moment | None = None
        self._wake: Moment | None = None
        self._count = 0
        self._free_ns: Ns = 0
        self._last_end_ns: Ns = 0
        self._host_free_ns = [0] * len(ranks)

    # What ranks pass on

    def wake(self) -> None:
        """Look for something to plan at this moment, once everything else that happens in it has happened."""
        if self._wake is None and len(self._steps) < self._depth and self._leap is None:
            self._wake = Moment(self.env, 0, self.on_wake, WAKE + self.number)

    def on_wake(self, event: Event) -> None:
        if event is self._wake:
            self._wake = None
        if self._ahead is not None:
            self._ahead.take_turn(FAR)
        self._run()

    @property
    def busy_until_ns(self) -> Ns:
        return self._steps[-1].end_ns if self._steps else self.env.now

    def stop(self) -> None:
        """The replica dies: steps in flight never complete."""
        self.settle()
        if self._completion is not None:
            self._completion.void = True
            self._completion = None
        self._steps.clear()
        self._free_ns = self._last_end_ns = 0
        self._host_free_ns = [0] * len(self.ranks)

    # Steps

    def _run(self) -> None:
        """Go from completion to completion as long as nothing else happens before the next one."""
        ahead = self._ahead
        while True:
            self._plan()
            if not self._steps or self._completion is not None:
                return
            end = self._steps[0].end_ns
            if ahead is None or not ahead.moved_to(end):
                self._complete_at(end)
                return
            ahead.take_turn(self.number)
            self._complete()

    def _plan(self) -> None:
        """All ranks plan at one moment; a step is launched as soon as one of them has work."""
        while len(self._steps) < self._depth and self._leap is None:
            now = self.env.now
            batches = [rank.plan(now) for rank in self.ranks]
            if all(batch is None for batch in batches):
                return
            self._launch(batches)

    def _launch(self, batches: list[Batch | None]) -> None:
        now, ranks = self.env.now, self.ranks
        shapes = shapes_of_step([batch.shape if batch is not None else None for batch in batches], self._graph_rows)
        quiet = 0
        if self.leaps and not any(shape.chunks for shape in shapes):
            quiet = min([rank.quiet_steps(batch) for rank, batch in zip(ranks, batches)])
        device = [ns + rank.aftermath_ns(batch) for ns, rank, batch in zip(self._times(shapes), ranks, batches)]
        parts = [rank.part(batch, shape, ns) for rank, batch, shape, ns in zip(ranks, batches, shapes, device)]
        start = self._free_ns
        for at, (rank, part) in enumerate(zip(ranks, parts)):
            # Every rank has a process of its own that prepares batch after batch.
            self._host_free_ns[at] = max(now, self._host_free_ns[at]) + part.host_before_ns
            start = max(start, self._host_free_ns[at], rank.swapped_ns(part.batch, self._free_ns))
        done = start + max(device)
        end = max(done + max([part.host_after_ns for part in parts]), self._last_end_ns)
        step = Step(self._count, now, start, end, parts)
        self._count += 1
        self._free_ns, self._last_end_ns = done, end
        if quiet >= LEAST_LEAP and start - now == max([part.host_before_ns for part in parts]):
            self._launch_leap(step, quiet)
            return
        self._steps.append(step)
        for rank, batch in zip(ranks, batches):
            rank.launched(batch)

    def _times(self, shapes: list[BatchShape]) -> list[Ns]:
        device = self._ranks_ns(shapes)
        for shape, ns in zip(shapes, device):
            if ns <= 0:
                refuse(self.cost, shape, ns)
        return device

    def _complete_at(self, end_ns: Ns) -> None:
        self._completion = Moment(self.env, end_ns - self.env.now, self._on_completion, COMPLETION + self.number)

    def _on_completion(self, event: Event) -> None:
        if event.void:  # type: ignore[attr-defined]
            return
        self._completion = None
        if self._ahead is not None:
            self._ahead.take_turn(self.number)
        leap = self._leap
        if leap is not None:
            self._leap = None
            self._cross(leap, len(leap.ends_ns) - 1)
        self._complete()
        self._run()

    def _complete(self) -> None:
        """Deliver the oldest step, now: every rank its tokens, then who has ended, rank by rank."""
        step = self._steps.popleft()
        finished: list[tuple[Rank, Sequence[Track]]] = []
        for rank, part in zip(self.ranks, step.parts):
            if part.batch is not None:
                if rank.decide is not None:
                    rank.decide(part.batch)
                ended = rank.scheduler.deliver(part.batch, step.end_ns)
                finished.append((rank, ended))
                if rank.on_batch is not None:
                    rank.on_batch(rank, part.batch, step.end_ns, ended)
            rank.record(step, part)
        for rank, tracks in finished:
            rank.ended(tracks)

    # Leaps

    def settle(self) -> None:
        """Bring a leap up to now: steps that ended before this moment are complete, one is in flight."""
        leap = self._leap
        if leap is None:
            return
        self._leap = None
        done = self._steps_done(leap.ends_ns)
        if done < len(leap.ends_ns) - 1:
            assert self._completion is not None
            self._completion.void = True
            self._complete_at(leap.ends_ns[done])
        self._cross(leap, done)

    def leapt(self, rank: Rank) -> tuple[Part | None, int]:
        """The part of a rank in the first step of the leap in flight, and how many of its steps are complete."""
        leap = self._leap
        if leap is None:
            return None, 0
        return leap.first.parts[self.ranks.index(rank)], self._steps_done(leap.ends_ns)

    def _steps_done(self, ends_ns: list[Ns]) -> int:
        """One that ends this very moment is complete if an engine with a later turn has had it."""
        ahead, now = self._ahead, self.env.now
        if ahead is not None and ahead.turn_ns == now and ahead.turn > self.number:
            return bisect_right(ends_ns, now)
        return bisect_left(ends_ns, now)

    def _launch_leap(self, step: Step, quiet: int) -> None:
        ahead = self._ahead
        alone = ahead is not None and ahead.sharers == 1 and ahead.next_ns() < ahead.limit
        horizon = ahead.next_ns() if ahead is not None and alone else FAR
        first, room, steps = step.end_ns - step.planned_ns, horizon - step.planned_ns, quiet + 1
        if room < first * steps:
            # Durations hardly ever shrink while contexts grow: then there are fewer steps, never wrong ones.
            steps = max(1, min(steps, room // first + 1))
        shapes = [part.shape for part in step.parts]
        device = self._repeat_ranks_ns(shapes, steps)
        if device.min() <= 0:
            rank, at = (int(where[0]) for where in np.nonzero(device <= 0))
            refuse(self.cost, later(shapes[rank], at), int(device[rank, at]))
        host = max([part.host_before_ns for part in step.parts]) + max([part.host_after_ns for part in step.parts])
        ends = (np.cumsum(device.max(axis=0) + host) + step.planned_ns).tolist()
        if ends[-1] > horizon:
            del ends[bisect_left(ends, horizon) + 1 :]
        leap = GroupLeap(step, ends, device)
        if ahead is not None and (alone or ends[-1] < ahead.next_ns()):
            self._cross(leap, len(ends) - 1)
        else:
            self._leap = leap
            self._complete_at(ends[-1])

    def _cross(self, leap: GroupLeap, done: int) -> None:
        """The first `done` steps of a leap are complete and recorded; the next one is in flight as a plain step."""
        first, ends, device = leap
        before = max([part.host_before_ns for part in first.parts])
        planned = [first.planned_ns, *ends]
        if done:
            recorder = self.ranks[0].recorder
            of_ranks = enumerate(zip(self.ranks, first.parts))
            for rows in zip(*[self._rows(rank, part, leap, done, at) for at, (rank, part) in of_ranks]):
                for row in rows:
                    recorder.row(row)
        parts = []
        for at, part in enumerate(first.parts):
            free = self.ranks[at].scheduler.ledger.free_blocks
            shape = later(part.shape, done) if part.shape.decodes else part.shape
            parts.append(part._replace(shape=shape, device_ns=int(device[at, done]), free_blocks=free))
        step = Step(first.number + done, planned[done], planned[done] + before, ends[done], parts)
        self._count = step.number + 1
        self._free_ns = step.start_ns + max([part.device_ns for part in parts])
        self._last_end_ns = step.end_ns
        self._host_free_ns = [planned[done] + part.host_before_ns for part in parts]
        self._steps.append(step)

    def _rows(self, rank: Rank, part: Part, leap: GroupLeap, done: int, at: int) -> list[bytes]:
        """The rows of a rank for the first `done` steps of a leap, which its scheduler crosses."""
        first, ends, device = leap
        batch = part.batch
        before = first.start_ns - first.planned_ns
        cohort: tuple[int, ...] = (0, 0, 0)
        taken: Sequence[int] = (0,) * done
        if batch is not None:
            grown = batch.grown[0]
            cohort = (grown[0].number, grown[1], grown[2])
            taken = rank.leap(batch, ends[:done])
        inside = _inside_each(rank._inside, part.shape, done)
        _, decodes, total, longest, *rest = part.shape[:7]
        number, step, size = cohort
        planned, free = first.planned_ns, part.free_blocks
        own = device[at].tolist()
        rows: list[bytes] = []
        for i in range(done):
            end = ends[i]
            rows.append(
                pack_row(
                    rank.number,
                    first.number + i,
                    planned,
                    planned + before,
                    end,
                    decodes,
                    total + i * decodes,
                    longest + i if decodes else 0,
                    *rest,
                    0,
                    part.running,
                    part.waiting,
                    free,
                    0,
                    part.host_before_ns,
                    part.host_after_ns,
                    own[i],
                    inside[i],
                    0,
                    1 if size else 0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    number,
                    step + i if size else 0,
                    size,
                )
            )
            planned = end
            free -= taken[i]
        return rows


def _inside_each(inside: Callable[[BatchShape], bool], shape: BatchShape, steps: int) -> list[bool]:
    """Whether each of so many steps lies in the measured region."""
    first = inside(shape)
    if not shape.decodes or first == inside(later(shape, steps)):
        return [first] * steps
    return [inside(later(shape, step)) for step in range(steps)]
