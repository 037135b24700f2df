"""Where a pipeline's bubbles come from: every idle interval of a stage, split by cause, in integer nanoseconds.

A replica has work in flight from the moment a batch is planned until its tokens are delivered. While that is so, a
stage either computes or has a bubble. The causes follow from counting. At any moment

    idle stages = (stages - batches in flight) + batches queued + batches being sent + batches with the host,

for a batch in flight that computes keeps one stage busy, and every other one leaves a stage empty. So each term
explains as many idle stages as it counts, and an idle stage is charged to the terms in proportion:

- a batch being sent: *transfer*; a batch with the host, before stage 0 or after the last stage: *host*;
- a batch queued on a stage: batches take unequal times. Let y be the one that waits and x, of those in flight with it
  that kept the stage busy without a break, the one whose time differs most from y's. The cause is *PB2* if only one of
  them has prefill tokens; *PB1* if both have and their prefill tokens differ by more than their decodes do; *PB3*
  otherwise: then decodes and contexts make the difference. These are the three of SARATHI (Sec. 3.2), which defines
  them for pure batches; the rule for hybrid ones is ours. Where this very stage is slower for y than y's fastest
  stage, the layers are dealt unevenly: that part is *stage_split*, in proportion (time of x - time of y on this stage)
  : (time of y here - time of y on its fastest stage), negative ones being 0;
- a missing batch: *starvation*, nothing was free to be scheduled;
- a batch that is done while another data-parallel rank still works on the same step: *rank*, and nothing else.

Two rules come first. While no stage computes at all, all idle time is transfer, host and rank. A stage that has not yet
seen its first batch since the replica was empty, or has seen its last before it becomes empty, has *fill_drain*,
provided that the pipeline becomes full in between; a pipeline that never does is starving.

A simulator may plan a batch when a slot becomes free, or only when stage 0 does. Both are treated alike: a batch
planned the moment stage 0 became free counts as queued there from the moment when it had a free slot and at least one
of its requests was free to be scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrics.measures.bubble_causes import (
    CAUSES,
    FILL_DRAIN,
    HOST,
    PB1,
    PB2,
    PB3,
    RANK,
    STAGE_SPLIT,
    STARVATION,
    TRANSFER,
)
from metrics.measures.replica_presence import devices_per_stage, fleet
from metrics.pipelines.stage_schedule import Schedule, schedules
from metrics.run_folder.tables import RunTables

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_BLOCK = 8_192
"""Batches looked at together: bounds the memory and stays in the cache."""


@dataclass(frozen=True)
class Gaps:
    """The bubbles of one replica, or of one rank of it. cause_ns: [gaps, causes]; rows sum exactly to end - start.

    batch: index (in plan order) of the batch that ended the bubble, -1 if the replica became empty instead.
    """

    replica: int
    stage: Ints
    start: Ints
    end: Ints
    batch: Ints
    cause_ns: Ints
    rank: int = 0


@dataclass(frozen=True)
class Bubbles:
    """The bubbles of a run. idle_ns: [stages, causes], busy_ns and in_flight_ns: [stages], summed over replicas.

    idle_ns.sum(axis=1) + busy_ns == in_flight_ns, exactly. batch_ns: per row of the table of iterations, the time that
    all stages together waited for this batch. lost_device_s: device-seconds lost, idle stage-seconds x devices of a
    stage.
    """

    idle_ns: Ints
    busy_ns: Ints
    in_flight_ns: Ints
    batch_ns: Ints
    lost_device_s: float
    gaps: list[Gaps] = field(repr=False)

    @property
    def share(self) -> float:
        """Idle / in flight, over all stages; NaN for an empty run."""
        total = int(self.in_flight_ns.sum())
        return int(self.idle_ns.sum()) / total if total else float("nan")

    @property
    def cause_shares(self) -> dict[str, float]:
        """Per cause, its idle time / in-flight time of all stages; they add up to `share`."""
        total = int(self.in_flight_ns.sum())
        return {name: int(self.idle_ns[:, c].sum()) / total if total else float("nan") for c, name in enumerate(CAUSES)}

    def rows(self) -> list[dict[str, Any]]:
        """One row per stage, and one for all: seconds in flight, busy, idle, and idle by cause."""
        stages = [str(stage) for stage in range(len(self.busy_ns))]
        return [
            {
                "stage": stage,
                "in_flight_s": int(in_flight) / 1e9,
                "busy_s": int(busy) / 1e9,
                "idle_s": int(idle.sum()) / 1e9,
                **{f"{name}_s": int(ns) / 1e9 for name, ns in zip(CAUSES, idle)},
            }
            for stage, in_flight, busy, idle in [
                *zip(stages, self.in_flight_ns, self.busy_ns, self.idle_ns),
                ("all", self.in_flight_ns.sum(), self.busy_ns.sum(), self.idle_ns.sum(axis=0)),
            ]
        ]


def find_bubbles(run: RunTables) -> Bubbles:
    """All bubbles of a run, by stage and cause. Replicas of unequal depth are added up stage by stage."""
    idle, busy, in_flight, gaps = [], [], [], []
    batch_ns = np.zeros(run.rows("iterations"), dtype=np.int64)
    for schedule in schedules(run):
        found, in_flight_ns = _replica_gaps(schedule)
        stages = schedule.num_stages
        per_stage = np.zeros((stages, len(CAUSES)), dtype=np.int64)
        np.add.at(per_stage, found.stage, found.cause_ns)
        idle.append(per_stage)
        busy.append((schedule.end - schedule.start).sum(axis=0))
        in_flight.append(np.full(stages, in_flight_ns))
        waited_for = found.batch >= 0
        np.add.at(batch_ns, schedule.row[found.batch[waited_for]], (found.end - found.start)[waited_for])
        gaps.append(found)
    depth = max((len(each) for each in busy), default=1)

    def total(parts: list[Ints], shape: tuple[int, ...]) -> Ints:
        summed = np.zeros(shape, dtype=np.int64)
        for part in parts:
            summed[: len(part)] += part
        return summed

    return Bubbles(
        total(idle, (depth, len(CAUSES))),
        total(busy, (depth,)),
        total(in_flight, (depth,)),
        batch_ns,
        _lost_device_s(run, gaps),
        gaps,
    )


def _lost_device_s(run: RunTables, gaps: list[Gaps]) -> float:
    width = devices_per_stage(fleet(run), np.array([found.replica for found in gaps], dtype=np.int64))
    return float(sum(int((found.end - found.start).sum()) * each for found, each in zip(gaps, width.tolist()))) / 1e9


def _replica_gaps(s: Schedule) -> tuple[Gaps, int]:
    """The bubbles of one replica with their causes, and how long it had work in flight."""
    batches, stages = s.num_batches, s.num_stages
    queued_from = _queued_from(s)
    # The replica is empty when everything planned before has been delivered; touching periods are told apart.
    emptied = np.maximum.accumulate(s.done)
    opens = np.concatenate([[True], s.planned[1:] >= emptied[:-1]])
    period = np.cumsum(opens) - 1
    first, last = np.flatnonzero(opens), np.append(np.flatnonzero(opens)[1:], batches) - 1
    opened, closed = s.planned[first], emptied[last]
    in_flight = np.arange(1, batches + 1) - np.searchsorted(np.sort(s.done), queued_from, side="right")
    filled = np.bincount(period, weights=in_flight >= stages) > 0

    previous_end = np.vstack([np.zeros((1, stages), dtype=np.int64), s.end[:-1]])
    gap_start = np.where(opens[:, None], opened[period][:, None], previous_end)
    stage_of = np.arange(stages)
    start = np.concatenate([gap_start.ravel(), s.end[last].ravel()])
    end = np.concatenate([s.start.ravel(), np.repeat(closed, stages)])
    stage = np.concatenate([np.tile(stage_of, batches), np.tile(stage_of, len(last))])
    batch = np.concatenate([np.repeat(np.arange(batches), stages), np.full(len(last) * stages, -1)])
    at_edge = np.concatenate([np.repeat(opens & filled[period], stages), np.repeat(filled, stages)])
    real = end > start
    start, end, stage, batch, at_edge = start[real], end[real], stage[real], batch[real], at_edge[real]
    owner = np.where(batch >= 0, batch, 0)
    owner[batch < 0] = np.repeat(last, stages)[real[batches * stages :]]
    cause_ns = np.zeros((len(start), len(CAUSES)), dtype=np.int64)
    margin = 2 * int(in_flight.max(initial=0)) + 2  # a gap is explained by batches in flight with its own
    for low in range(0, batches, _BLOCK):
        inside = (owner >= low) & (owner < low + _BLOCK)
        near = (owner >= low - margin) & (owner < low + _BLOCK + margin) & at_edge
        part = slice(max(low - margin, 0), low + _BLOCK + margin)
        edges = (start[near], end[near])
        cause_ns[inside] = _split_by_cause(
            s.part(part), queued_from[part], start[inside], end[inside], at_edge[inside], edges
        )
    return Gaps(s.replica, stage, start, end, batch, cause_ns, s.rank), int((closed - opened).sum())


def _queued_from(s: Schedule) -> Ints:
    """When each batch took its place: when it was planned, or, if its plan only waited for stage 0, when a slot and
    anything to put into it were there."""
    slot_free = np.concatenate([np.full(min(s.num_stages, s.num_batches), -1), s.done])[: s.num_batches]
    waited_for_stage = np.concatenate([[False], s.planned[1:] == s.end[:-1, 0]])
    head = np.maximum.accumulate(np.where(waited_for_stage, 0, np.arange(s.num_batches)))
    could_have = np.maximum.reduce([s.planned[head], np.maximum.accumulate(slot_free), s.ready])
    return np.where(waited_for_stage, np.minimum(s.planned, could_have), s.planned)


class _Sweep:
    """Counts over time, piecewise constant: intervals are added, then read off between all their ends."""

    def __init__(self) -> None:
        self._starts: list[Ints] = []
        self._ends: list[Ints] = []
        self._weights: list[Floats] = []
        self._names: list[int] = []

    def add(self, name: int, start: Ints, end: Ints, weight: Floats | float = 1.0) -> None:
        weights = np.broadcast_to(np.asarray(weight, dtype=np.float64), np.shape(start))
        wanted = (end > start) & (weights > 0)
        self._starts.append(start[wanted])
        self._ends.append(end[wanted])
        self._weights.append(weights[wanted])
        self._names.append(name)

    def counts(self, names: int, *moments: Ints) -> tuple[Ints, Floats]:
        """(times, [names, len(times)]): the counts from each time on until the next; `moments` are among the times."""
        times, at = np.unique(np.concatenate([*self._starts, *self._ends, *moments]), return_inverse=True)
        changes = np.zeros((names, len(times)))
        done, total = 0, sum(map(len, self._starts))
        for name, starts, weights in zip(self._names, self._starts, self._weights):
            part = slice(done, done + len(starts))
            changes[name] += np.bincount(at[part], weights, len(times))
            changes[name] -= np.bincount(at[total : 2 * total][part], weights, len(times))
            done += len(starts)
        counts = np.cumsum(changes, axis=1)
        counts[counts < 1e-9] = 0  # what rounding leaves of fractions that cancel
        return times, counts


def _split_by_cause(
    s: Schedule, queued_from: Ints, start: Ints, end: Ints, at_edge: Bools, edge_gaps: tuple[Ints, Ints]
) -> Ints:
    """[gaps, causes] in ns: the rules of this module's first lines.

    edge_gaps: start and end of every gap of fill or drain, those of other stages included.
    """
    if not len(start):
        return np.zeros((0, len(CAUSES)), dtype=np.int64)
    n = len(CAUSES)
    at_stage_0, in_flight, computing, edges = n, 2 * n, 2 * n + 1, 2 * n + 2  # at_stage_0 + cause: queued on stage 0
    sweep = _Sweep()
    sweep.add(in_flight, queued_from, s.done)
    sweep.add(computing, s.start.ravel(), s.end.ravel())
    sweep.add(edges, *edge_gaps)
    with_host = np.minimum(s.planned + s.host_before, s.start[:, 0])
    sweep.add(HOST, s.planned, with_host)
    sweep.add(RANK, s.end[:, -1], s.met)
    sweep.add(HOST, s.met, s.done)
    arrived = s.end[:, :-1] + s.send[:, :-1]
    sweep.add(TRANSFER, s.end[:, :-1].ravel(), np.minimum(arrived, s.start[:, 1:]).ravel())
    for stage in range(s.num_stages):
        if stage == 0:
            _add_queue(sweep, s, 0, queued_from, s.planned, queued_from, at_stage_0)
            _add_queue(sweep, s, 0, with_host, s.start[:, 0], queued_from, at_stage_0)
        else:
            _add_queue(sweep, s, stage, arrived[:, stage - 1], s.start[:, stage], queued_from, 0)
    times, counts = sweep.counts(2 * n + 3, start, end)

    # Batches planned further ahead than the pipeline is deep are meant to queue: they explain no idle stage.
    surplus = np.maximum(counts[in_flight] - s.num_stages, 0)
    ahead = counts[at_stage_0 : at_stage_0 + n]
    waiting = ahead.sum(axis=0)
    kept = np.divide(np.maximum(waiting - surplus, 0), waiting, out=np.zeros_like(waiting), where=waiting > 0)
    units = counts[:n] + ahead * kept
    missing = np.maximum(s.num_stages - counts[in_flight], 0)
    units[STARVATION] = np.maximum(missing - counts[edges], 0)
    units[:, units[RANK] > 0] *= (np.arange(n) == RANK)[:, None]
    nobody = (counts[computing] == 0) & (units[HOST] + units[TRANSFER] + units[RANK] > 0)
    units[:, nobody] *= np.isin(np.arange(n), (HOST, TRANSFER, RANK))[:, None]
    explained = units.sum(axis=0)
    units[STARVATION] += explained == 0
    shares = units / np.maximum(units.sum(axis=0), 1e-300)
    edge_shares = np.where(nobody, shares, 0)
    edge_shares[FILL_DRAIN] += ~nobody

    lengths = np.diff(times).astype(np.float64)
    a, b = np.searchsorted(times, start), np.searchsorted(times, end)

    def within(share: Floats) -> Floats:
        upto = np.concatenate([np.zeros((n, 1)), np.cumsum(share[:, :-1] * lengths, axis=1)], axis=1)
        spent: Floats = (upto[:, b] - upto[:, a]).T
        return spent

    return _whole_numbers(np.where(at_edge[:, None], within(edge_shares), within(shares)), end - start)


def _add_queue(
    sweep: _Sweep, s: Schedule, stage: int, since: Ints, until: Ints, queued_from: Ints, offset: int
) -> None:
    """Batches that wait for a stage: charged to the batch in front that differs most from the one that waits."""
    waits = np.flatnonzero(until > since)
    if not len(waits):
        return
    first = waits[waits == 0]
    sweep.add(HOST, since[first], until[first])
    waits = waits[waits > 0]
    since, until = since[waits], until[waits]
    time = (s.end - s.start)[:, stage]
    # In front are those that are in flight with it and kept this stage busy without a break until it could start.
    unbroken = np.ones(len(waits), dtype=bool)
    culprit = waits - 1
    for lag in range(2, s.num_batches + 1):
        ahead = np.maximum(waits - lag, 0)
        unbroken &= (waits >= lag) & (s.start[ahead + 1, stage] == s.end[ahead, stage])
        unbroken &= s.done[ahead] > queued_from[waits]
        if not unbroken.any():
            break
        differs_more = np.abs(time[ahead] - time[waits]) > np.abs(time[culprit] - time[waits])
        culprit = np.where(unbroken & differs_more, ahead, culprit)
    longer = np.maximum(time[culprit] - time[waits], 0)
    slower_here = time[waits] - (s.end - s.start)[waits].min(axis=1)
    unequal = longer + slower_here
    uneven = np.divide(slower_here, unequal, out=np.zeros(len(waits)), where=unequal > 0)
    left = np.clip(s.end[waits - 1, stage], since, until)
    kind = _pair_cause(s, culprit, waits)
    for cause in (PB1, PB2, PB3):
        sweep.add(offset + cause, since, left, np.where(kind == cause, 1 - uneven, 0.0))
    sweep.add(offset + STAGE_SPLIT, since, left, uneven)
    # Nobody runs there any more, yet the stage is not free: it still sends, or the host is late.
    sent = np.clip(s.end[waits - 1, stage] + s.send[waits - 1, stage], left, until)
    sweep.add(TRANSFER, left, sent)
    sweep.add(HOST, sent, until)


def _pair_cause(s: Schedule, first: Ints, second: Ints) -> Ints:
    """PB1, PB2 or PB3 of pairs of batches."""
    prefill, other = s.chunk_tokens[first], s.chunk_tokens[second]
    prefill_differs = np.abs(prefill - other) > np.abs(s.decodes[first] - s.decodes[second])
    both = (prefill > 0) & (other > 0)
    return np.where((prefill > 0) != (other > 0), PB2, np.where(both & prefill_differs, PB1, PB3))


def _whole_numbers(parts: Floats, totals: Ints) -> Ints:
    """Rows of parts rounded to integers that sum exactly to the totals; the largest remainders are rounded up."""
    parts = np.maximum(parts, 0)
    whole = np.floor(parts).astype(np.int64)
    missing = totals - whole.sum(axis=1)
    rank = np.argsort(np.argsort(-(parts - whole), axis=1, kind="stable"), axis=1, kind="stable")
    whole += rank < missing[:, None]
    # Rounding in the running sums can leave a nanosecond or so over: it belongs to the largest part.
    rest = totals - whole.sum(axis=1)
    whole[np.arange(len(whole)), np.argmax(whole, axis=1)] += rest
    return whole
