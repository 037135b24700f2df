"""When each stage of a pipeline worked on which micro-batch: the tables of a run as one array per replica.

Batches run through all stages in plan order, so a replica's schedule is a matrix: one row per batch, one column per
stage. Everything about bubbles and timelines reads these matrices, in integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from metrics.measures.ranks import met_ns
from metrics.measures.token_times import cohort_rows
from metrics.run_folder.columns import MetricsError
from metrics.run_folder.tables import RunTables

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Schedule:
    """One replica, or one rank of it. start, end, send: [batches, stages] in ns; the others have one entry per batch.

    Batches are in plan order.

    row: the batch's row in the table of iterations. ready: the first moment when one of its requests was free to be
    scheduled (0 if nothing is known of them); planned: it was planned; host_before: host time before stage 0; done: its
    tokens were delivered. send is 0 on the last stage. met: every rank of the same step was done with it; the end of
    the last stage where ranks do not step together.
    """

    replica: int
    row: Ints
    iteration: Ints
    ready: Ints
    planned: Ints
    host_before: Ints
    done: Ints
    start: Ints
    end: Ints
    send: Ints
    chunk_tokens: Ints
    decodes: Ints
    met: Ints
    rank: int = 0

    @property
    def num_batches(self) -> int:
        return int(self.start.shape[0])

    @property
    def num_stages(self) -> int:
        return int(self.start.shape[1])

    def part(self, batches: slice) -> Schedule:
        """The same schedule with some of its batches."""
        names = [column.name for column in fields(self) if column.name not in ("replica", "rank")]
        columns = {name: getattr(self, name)[batches] for name in names}
        return replace(self, **columns)


def schedules(run: RunTables) -> Iterator[Schedule]:
    """The schedule of each replica (of each of its ranks) that ran anything, in order. MetricsError if the tables
    contradict each other."""
    engine = run.engines("iterations")
    iteration = run.column("iterations", "iteration")
    times = {name: run.column_ns("iterations", f"{name}_s") for name in ("planned", "start", "end", "host_before")}
    tokens = {name: run.column("iterations", name).astype(np.int64) for name in ("chunk_tokens", "decodes")}
    stage_columns = {name: run.column("stages", name) for name in ("stage", "iteration")}
    stage_columns["engine"] = run.engines("stages")
    stage_times = {name: run.column_ns("stages", f"{name}_s") for name in ("start", "end", "send")}
    ready = _ready(run, times["end"])
    by_stage = np.lexsort((stage_columns["stage"], stage_columns["iteration"], stage_columns["engine"]))
    met = met_ns(run)
    for number in np.unique(engine).tolist():
        rows = np.flatnonzero(engine == number)
        rows = rows[np.argsort(iteration[rows], kind="stable")]
        own = by_stage[stage_columns["engine"][by_stage] == number]
        replica, rank = divmod(number, run.ranks)
        num_stages = int(stage_columns["stage"][own].max(initial=-1)) + 1
        expected = (np.repeat(iteration[rows], num_stages), np.tile(np.arange(num_stages), len(rows)))
        found = (stage_columns["iteration"][own], stage_columns["stage"][own])
        if not num_stages or not all(np.array_equal(a, b) for a, b in zip(expected, found)):
            raise MetricsError(
                f"stages: replica {replica}: found {len(own)} rows for {len(rows)} iterations, "
                f"expected each iteration once on each of {max(num_stages, 1)} stages"
            )
        start, end, send = (stage_times[name][own].reshape(-1, num_stages) for name in ("start", "end", "send"))
        _check_order(replica, start, end)
        yield Schedule(
            replica,
            rows,
            iteration[rows],
            ready[rows],
            times["planned"][rows],
            times["host_before"][rows],
            times["end"][rows],
            start,
            end,
            send,
            tokens["chunk_tokens"][rows],
            tokens["decodes"][rows],
            end[:, -1] if met is None else met[rows],
            rank,
        )


def _ready(run: RunTables, done: Ints) -> Ints:
    """Per iteration, when the first of its parts became free: a request arrived or its last chunk was done, or a
    cohort's last tokens were delivered."""
    never = np.iinfo(np.int64).max
    ready = np.full(len(done), never)
    chunks = run.chunks()
    if len(chunks["row"]):
        ids = run.column("requests", "request")
        order = np.argsort(ids, kind="stable")
        known = np.isin(chunks["request"], ids)
        rows, requests = chunks["row"][known], chunks["request"][known]
        free = run.column_ns("requests", "arrival_s")[order[np.searchsorted(ids, requests, sorter=order)]]
        in_turn = np.lexsort((done[rows], requests))
        follows = requests[in_turn][1:] == requests[in_turn][:-1]
        after = np.where(follows, done[rows][in_turn][:-1], 0)
        free[in_turn[1:]] = np.maximum(free[in_turn[1:]], after)
        np.minimum.at(ready, rows, free)
    cohorts = run.cohorts()
    if len(cohorts["row"]):
        start, length = cohort_rows(run, run.column("iterations", "replica")[cohorts["row"]], cohorts["cohort"])
        before = cohorts["step"] - 1
        known = (before >= 0) & (before < length)
        delivered = run.column_ns("tokens", "time_s")
        np.minimum.at(ready, cohorts["row"][known], delivered[(start + before)[known]])
    return np.where(ready == never, 0, ready)


def _check_order(replica: int, start: Ints, end: Ints) -> None:
    if (end < start).any():
        raise MetricsError(f"stages: replica {replica}: found a stage that ends before it starts")
    for wrong, what in (
        ((start[1:] < end[:-1]).any(axis=1), "on a stage that is still busy with the batch before"),
        ((start[1:, 1:] < end[1:, :-1]).any(axis=1), "on a stage before the stage ahead of it is done"),
    ):
        if wrong.any():
            raise MetricsError(f"stages: replica {replica}: found batch {int(np.argmax(wrong)) + 1} starting {what}")
