"""Buffered events, side by side as columns, and unfolded into the rows that one call per iteration would have given.

An event is one plain iteration, one iteration of a stretch, or a leap, which stands for many rows. What all rows of an
event have in common is looked at, checked and converted once per event, and then taken for each row; only times,
contexts and free blocks differ from row to row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrics.recording.events import (
    CHUNK_FIELDS,
    COHORT_FIELDS,
    COUNTS,
    LEAP,
    NUMBERS,
    ROW_LENGTH,
    STRAIGHT,
    STRETCH,
    Leaps,
    Plain,
    Straight,
)

Ints = NDArray[np.int64]
Entries = tuple[Ints, list[Ints]]
"""A list column: how many entries each row has, and the columns of all entries."""

_CHUNK = ("request", "tokens", "prefix", "samples")


class Unfolded:
    """The rows of all buffered events, in the order in which they were recorded.

    planned_ns, starts_ns, ends_ns, device_ns: one entry per row. `each` gives what does not differ within an event, one
    entry per event, and `per_row` spreads that over the rows.
    """

    def __init__(self, plain: Plain, straight: Straight, leaps: Leaps) -> None:
        self._kinds: list[dict[str, Any]] = []
        self._plain: dict[str, Any] = {}
        if plain.rows:
            self._plain = _plain_columns(plain)
            self._kinds.append(self._plain)
        if straight.rows:
            self._kinds.append(_straight_columns(straight))
        leapt = dict(zip(LEAP, unpacked(leaps.rows, len(LEAP)))) if leaps.rows else None
        if leapt is not None:
            self._kinds.append({**leapt, "size": leapt["decodes"], "num_cohorts": np.ones(len(leaps.rows), np.int64)})
        steps = leapt["steps"] if leapt is not None else np.zeros(0, np.int64)
        self.at = self.each("at")
        singles = len(self.at) - len(steps)
        self.rows = singles + int(steps.sum())
        # Where the iterations of leaps belong, and for every row the event that it comes from.
        leapt_rows = np.repeat(leapt["at"], steps) + counts_up(steps) if leapt is not None else steps
        self._event: Ints | None = None
        if len(self._kinds) > 1 or leapt is not None:
            self._event = np.empty(self.rows, np.int64)
            self._event[self.at[:singles]] = np.arange(singles)
            self._event[leapt_rows] = np.repeat(np.arange(singles, len(self.at)), steps)
        self._taken(leaps, leapt_rows, steps)
        self._times(leaps, leapt_rows)

    def each(self, name: str) -> Ints:
        """What every event has of this kind, zero where it has no such thing."""
        parts = [kind[name] if name in kind else np.zeros(len(kind["at"]), np.int64) for kind in self._kinds]
        return np.concatenate(parts) if len(parts) > 1 else np.ascontiguousarray(parts[0])

    def per_row(self, each: NDArray[Any]) -> NDArray[Any]:
        """A column of events as one of rows."""
        return each if self._event is None else each.take(self._event)

    def _taken(self, leaps: Leaps, rows: Ints, steps: Ints) -> None:
        self.elapsed = np.arange(self.rows, dtype=np.int64) - self.per_row(self.at)
        self.free_blocks = self.per_row(self.each("free_blocks"))
        self.inside = self.per_row(self.each("inside") != 0)
        if not len(rows):
            return
        taken = np.fromiter(leaps.taken, np.int64, len(rows))
        # Blocks that the plans of a leap took between its first iteration and each of its iterations.
        before = np.cumsum(taken) - taken
        before -= np.repeat(before[np.cumsum(steps) - steps], steps)
        self.free_blocks[rows] -= before
        for first, flags in leaps.inside:
            self.inside[rows[first : first + len(flags)]] = flags

    def _times(self, leaps: Leaps, rows: Ints) -> None:
        ends = self.per_row(self.each("end_s"))
        if len(rows):
            ends[rows] = np.fromiter(leaps.ends, np.int64, len(rows))
        planned = np.empty_like(ends)
        planned[1:] = ends[:-1]
        # What follows another without a gap was planned when that one ended.
        for kind in self._kinds:
            planned[kind["first_rows"] if "first_rows" in kind else kind["at"]] = kind["planned_s"]
        starts = planned + self.per_row(self.each("host_before_s"))
        device = ends - self.per_row(self.each("host_after_s")) - starts
        for first, *times in leaps.times:
            own = rows[first : first + len(times[0])]
            planned[own], starts[own], device[own] = times
        if self._plain:
            at = self._plain["at"]
            starts[at], device[at] = self._plain["start_s"], self._plain["device_s"]
        self.planned_ns, self.starts_ns, self.ends_ns, self.device_ns = planned, starts, ends, device

    def chunks(self, others: Sequence[int]) -> Entries:
        """The prefill chunks of all rows. others: the fields of those after the first of plain iterations."""
        counts = self.each("num_chunks")
        some = counts.nonzero()[0]
        if self._plain and len(self._kinds) > 1:
            some = some[self.at[some].argsort(kind="stable")]
        return self.per_row(counts), _with_others([self.each(name)[some] for name in _CHUNK], counts[some], others)

    def cohorts(self, others: Sequence[int]) -> Entries:
        """The cohorts of all rows, each with the step that the row completes. others: as for chunks."""
        lens = self.per_row(self.each("num_cohorts"))
        firsts = [self.per_row(self.each(name)) for name in ("cohort", "step", "size")]
        firsts[1] = firsts[1] + self.elapsed
        some = lens > 0
        if some.all():
            return lens, _with_others(firsts, lens, others)
        return lens, _with_others([column[some] for column in firsts], lens[some], others)

    def stages(self, plain: Plain) -> tuple[Ints, Ints] | None:
        """How many stages each row has and (start, end, send) of all of them, [3, stages]; None if none was given.

        A row that has none of its own has one, which is busy for its device time.
        """
        if not plain.stages:
            return None
        counts, at = self._plain["stages"], self._plain["at"]
        given = np.fromiter(plain.stages, np.int64, len(plain.stages)).reshape(-1, 3)
        if len(at) == self.rows and counts.all():
            return counts, given.T
        lens = np.ones(self.rows, np.int64)
        lens[at] = np.maximum(counts, 1)
        starts = np.cumsum(lens) - lens
        flat = np.zeros((int(lens.sum()), 3), np.int64)
        flat[starts, 0] = self.starts_ns
        flat[starts, 1] = self.starts_ns + self.device_ns
        own = at[counts > 0]
        flat[np.repeat(starts[own], lens[own]) + counts_up(lens[own])] = given
        return lens, flat.T


def _plain_columns(plain: Plain) -> dict[str, Any]:
    matrix = unpacked(plain.rows, ROW_LENGTH)
    columns: dict[str, Any] = dict(zip((*NUMBERS, *COUNTS), matrix))
    firsts = matrix[len(NUMBERS) + len(COUNTS) :]
    columns.update(zip(_CHUNK, firsts[:CHUNK_FIELDS]))
    columns.update(zip(("cohort", "step", "size"), firsts[CHUNK_FIELDS : CHUNK_FIELDS + COHORT_FIELDS]))
    columns.update(at=ints(plain.at), num_chunks=columns["chunks"], num_cohorts=columns["cohorts"])
    columns["chunk_tokens"] = columns["tokens"]
    if plain.chunks:
        more = columns["chunks"] - 1
        more[more < 0] = 0
        running = np.concatenate([[0], np.cumsum(ints(plain.chunks).reshape(-1, CHUNK_FIELDS)[:, 1])])
        ends = np.cumsum(more)
        columns["chunk_tokens"] = columns["tokens"] + running[ends] - running[ends - more]
    return columns


def _straight_columns(straight: Straight) -> dict[str, Any]:
    columns: dict[str, Any] = dict(zip(STRAIGHT, unpacked(straight.rows, len(STRAIGHT))))
    stretches = dict(zip(STRETCH, unpacked(straight.stretches, len(STRETCH))))
    lens = np.diff(stretches["first"], append=len(straight.rows))
    elapsed = counts_up(lens)
    decodes, tokens = columns["decodes"], columns["tokens"]
    columns.update(
        at=np.repeat(stretches["at"], lens) + elapsed,
        first_rows=stretches["at"],
        planned_s=stretches["planned_s"],
        replica=np.repeat(stretches["replica"], lens),
        iteration=np.repeat(stretches["iteration"], lens) + elapsed,
        inside=np.repeat(stretches["inside"], lens),
        chunk_tokens=tokens,
        num_chunks=(tokens > 0).astype(np.int64),
        samples=(columns["sampled"] > decodes).astype(np.int64),
        num_cohorts=(decodes > 0).astype(np.int64),
        size=decodes,
    )
    return columns


def _with_others(firsts: list[Ints], lens: Ints, others: Sequence[int]) -> list[Ints]:
    """The entries of rows that have some: the first of each, and the others of those with more."""
    if not others:
        return firsts
    starts = np.cumsum(lens) - lens
    rest = np.ones(int(lens.sum()), np.bool_)
    rest[starts] = False
    columns = []
    for first, other in zip(firsts, ints(others).reshape(-1, len(firsts)).T):
        column = np.empty(len(rest), np.int64)
        column[starts] = first
        column[rest] = other
        columns.append(column)
    return columns


def counts_up(lens: Ints) -> Ints:
    """0, 1, ... len - 1 for each length, one after the other."""
    return np.arange(int(lens.sum()), dtype=np.int64) - np.repeat(np.cumsum(lens) - lens, lens)


def ints(values: Sequence[int]) -> Ints:
    return np.fromiter(values, np.int64, len(values))


def flattened(tuples: Sequence[tuple[int, ...]], width: int) -> Ints:
    """Tuples of so many integers as [width, tuples]."""
    return np.fromiter(chain.from_iterable(tuples), np.int64, len(tuples) * width).reshape(-1, width).T


def unpacked(rows: Sequence[bytes], width: int) -> Ints:
    """Rows of `width` packed numbers as [width, rows]."""
    return np.frombuffer(b"".join(rows), np.int64).reshape(-1, width).T
