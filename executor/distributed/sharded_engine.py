"""The live engine over many ranks: the same scheduler, arrivals and records; batches run elsewhere, several at a time.

As in the simulator's pipeline, a micro-batch is planned as soon as a slot is open and something is free to be
scheduled, and what comes back is delivered at once, whatever the first stage is doing. What each stage did when is
gathered at the end of the run, brought to one clock, and written beside the iterations in the simulator's own columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from executor.distributed.clocks import RankClock
from executor.distributed.layout import Layout
from executor.distributed.plans import plan_bytes
from executor.distributed.ranks import Ranks
from executor.serving.arrivals import NEVER
from executor.serving.live_engine import Flight, LiveEngine
from executor.serving.runner import Prepared, Result, Runner
from metrics import Recorder
from policies import Batch, BatchShape, Chunk, Ns

Ints = NDArray[np.int64]


class PlanningRunner(Runner):
    """The part of a runner that plans: texts, rows and steps. Tokens come back before their requests are planned again,
    so a step's decode rows have their ids from the start."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._last_tokens = torch.zeros(len(self._tables), dtype=torch.int64)  # on the CPU, wherever the model is

    def prepare(self, batch: Batch) -> Prepared:
        prepared = super().prepare(batch)
        step = prepared.step
        self._remember_as_many_tokens(step)
        if step.num_decodes:
            first = int(step.decode_row[0])
            step.token_ids[first : first + step.num_decodes] = self._last_tokens.numpy()[step.decode_table]
        return prepared

    def came_back(self, prepared: Prepared, ids: Sequence[int]) -> None:
        """Remember sampled tokens as the next step's input. Batches come back in the order of their plans."""
        self.executed += 1
        if ids:
            tokens = np.maximum(np.array(ids, np.int64), 0)
            self._last_tokens.numpy()[prepared.step.sampled_table] = tokens


class ShardedEngine(LiveEngine):
    """One scheduler in real time over the ranks of one replica."""

    def __init__(self, ranks: Ranks, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ranks = ranks
        self._held: list[tuple[Any, ...]] = []

    def _loop(self, worker: ThreadPoolExecutor | None) -> None:
        flights, outcome, depth = self._flights, self.outcome, self.scheduler.depth
        while self.arrivals.outstanding and not outcome.stopped_by:
            while flights and self._take_result(0.0):
                pass
            stuck = self._fill(self._admit(), None)
            if flights:
                self._take_result(self._patience_s(len(flights) < depth))
            elif stuck:
                self._wait()
        while flights:
            self._take_result(None)

    def _patience_s(self, slot_is_open: bool) -> float:
        """How long nothing but a result can change anything; signals are looked at four times a second."""
        until = self._give_up[0][0] if self._give_up else NEVER
        if slot_is_open:
            until = min(until, self.arrivals.next_ns, self.scheduler.alarm_ns or NEVER)
        return min(max(until - self.now_ns(), 0) / 1e9, 0.25)

    def _launch(self, batch: Batch, worker: ThreadPoolExecutor | None) -> None:
        queues = self.scheduler.queues
        prepared = self.runner.prepare(batch)
        self.ranks.submit(plan_bytes(prepared, self.runner.cache.block_size))
        self._flights.append(
            Flight(
                prepared,
                Future(),
                batch.planned_ns,
                0,
                0,
                queues.num_running,
                len(queues.waiting),
                self.scheduler.ledger.free_blocks,
            )
        )

    def _take_result(self, timeout_s: float | None) -> bool:
        ran = self.ranks.result(timeout_s)
        if ran is None:
            return False
        flight = self._flights.popleft()
        assert flight.prepared.batch.number == ran.number
        assert ran.ids is not None
        assert flight.future is not None
        assert isinstance(self.runner, PlanningRunner)
        self.runner.came_back(flight.prepared, ran.ids)
        flight.future.set_result(Result(ran.ids, ran.end_ns, ran.end_ns))
        self._complete(flight)
        return True

    def _record(self, flight: Flight, result: Result, now: Ns) -> None:
        """Keep what the records say of a batch until it is known when each stage had it."""
        batch = flight.prepared.batch
        chunks: list[tuple[int, int, int, bool]] = []
        cohorts: list[tuple[int, int, int]] = []
        for part in batch.parts:
            if isinstance(part, Chunk):
                chunks.append((part.track.request.id, part.tokens, part.prefix, part.samples))
            else:
                cohorts.append((part.cohort.number, part.step, part.size))
        self._held.append(
            (
                batch.number,
                flight.planned_ns,
                now,
                batch.shape,
                chunks,
                cohorts,
                len(batch.preempted),
                flight.running,
                flight.waiting,
                flight.free_blocks,
                batch.cached_tokens,
            )
        )

    def write_records(self, logs: Sequence[Ints], clocks: Sequence[RankClock]) -> None:
        """One row per iteration, now that the ranks have told when they had it."""
        times, cpu_ns = stage_times(self.ranks.layout, logs, clocks, self._origin)
        assert len(times) == len(self._held), "every batch ran on every rank"
        activated = activated_experts(self.ranks.layout, logs)
        for at, held in enumerate(self._held):
            number, planned, done, shape, *rest = held
            # Whatever another machine's clock says, a batch was run between its plan and its delivery.
            arrived, start, end = np.clip(times[at], planned, done).T
            send = np.append(np.maximum(arrived[1:] - end[:-1], 0), 0)
            stages = list(zip(start.tolist(), end.tolist(), send.tolist()))
            before, after = int(arrived[0]) - planned, done - int(end[-1])
            self._row(
                number,
                planned,
                done,
                shape,
                rest,
                stages if len(stages) > 1 else (),
                int(start[0]),
                before,
                after,
                int((end - start).sum()),
                int(cpu_ns[at]),
                float(activated[at]),
            )
            self.outcome.host_ns.append(before + after)
        self._held.clear()

    def _row(
        self,
        number: int,
        planned: Ns,
        done: Ns,
        shape: BatchShape,
        rest: Sequence[Any],
        stages: Any,
        start: Ns,
        before: Ns,
        after: Ns,
        device: Ns,
        cpu_ns: int,
        activated: float,
    ) -> None:
        chunks, cohorts, preempted, running, waiting, free_blocks, cached = rest
        assert isinstance(self.recorder, Recorder)
        self.recorder.iteration(
            0,
            number,
            planned,
            start,
            done,
            shape,
            chunks,
            cohorts,
            preempted,
            running,
            waiting,
            free_blocks,
            cached,
            before,
            after,
            device,
            self.inside is not None and self.inside(shape),
            (done - planned) / 1e9,
            cpu_ns / 1e9,
            stages,
            activated,
        )


def activated_experts(layout: Layout, logs: Sequence[Ints]) -> NDArray[np.float64]:
    """Experts that each batch touched, the mean over layers with experts; NaN without any. Ranks of one stage route
    alike: the first speaks for all."""
    told = sum(logs[layout.ranks_of(stage)[0]][:, 5:7] for stage in range(layout.pp))
    assert isinstance(told, np.ndarray)
    layers = told[:, 1]
    return np.where(layers > 0, told[:, 0] / np.maximum(layers, 1), np.nan)


def stage_times(layout: Layout, logs: Sequence[Ints], clocks: Sequence[RankClock], origin_ns: int) -> tuple[Ints, Ints]:
    """([batches, stages, (input there, start, end)], CPU ns of each batch on all ranks), in the order of the logs.

    A stage starts when the last of its ranks does and ends when the last of them does. Times of other machines are as
    right as their clock's estimate: where they would have a stage start before its input was sent, they are moved.
    """
    by_rank = []
    for rank, log in enumerate(logs):
        moments = log[:, 1:4]
        if rank:
            moments = clocks[rank - 1].to_rank_0(moments)
        by_rank.append(moments - origin_ns)
    times = np.stack(
        [np.max([by_rank[rank] for rank in layout.ranks_of(stage)], axis=0) for stage in range(layout.pp)], axis=1
    )
    for batch in range(len(times)):
        for stage in range(layout.pp):
            least = times[batch - 1, stage, 2] if batch else times[batch, stage, 1]
            if stage:
                least = max(least, times[batch, stage - 1, 2])
            times[batch, stage, 1] = max(times[batch, stage, 1], least)
            times[batch, stage, 2] = max(times[batch, stage, 2], times[batch, stage, 1])
            times[batch, stage, 0] = min(times[batch, stage, 0], times[batch, stage, 1])
    return times, np.sum([log[:, 4] for log in logs], axis=0)
