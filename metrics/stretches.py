"""Iterations that were recorded as less than a row each, unfolded into the columns that one call each would have given.

Two kinds are: leaps (equal iterations kept as one) and stretches (iterations of one replica that follow each other
without a gap, of which only what differs is kept). Both fill their own rows of columns that exist already.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrics.events import LEAP, STRAIGHT, Stretch

Ints = NDArray[np.int64]
_RARE = ("dummy_tokens", "executed_rows", "waiting", "replica")
Columns = dict[str, NDArray[Any]]
AllLeaps = Any
"""A `metrics.events.Leaps` in which each field is a sequence, of all leaps."""
Entries = tuple[Ints, Ints, Ints]
"""Entries of a list column: the rows that have some, how many each has, and [fields, entries] in order of the rows."""


def fill_stretches(columns: Columns, rows: Ints, stretches: Sequence[Stretch]) -> tuple[Entries, Entries]:
    """Fill the rows of all stretches; returns their chunks and their cohorts. rows: [STRAIGHT, iterations]."""
    values = dict(zip(STRAIGHT, rows))
    ends = values["end_s"]
    at, first, replica, number, planned, inside = (ints(column) for column in zip(*stretches))
    lens = np.diff(np.append(first, len(ends)))
    elapsed = counts_up(lens)
    where = np.repeat(at, lens) + elapsed
    planned_ns = np.empty_like(ends)
    planned_ns[1:] = ends[:-1]
    planned_ns[first] = planned
    starts = planned_ns + values["host_before_s"]
    decodes, tokens = values["decodes"], values["tokens"]
    for name, column in {
        "replica": np.repeat(replica, lens),
        "iteration": np.repeat(number, lens) + elapsed,
        "planned_s": planned_ns,
        "start_s": starts,
        "device_s": ends - starts - values["host_after_s"],
        "inside": np.repeat(inside, lens),
        "chunk_tokens": tokens,
        **{name: values[name] for name in STRAIGHT if name in columns},
    }.items():
        columns[name][where] = column
    some = tokens > 0
    samples = values["sampled"] > decodes
    chunks = np.stack([values["request"][some], tokens[some], values["prefix"][some], samples[some]])
    grow = decodes > 0
    cohorts = np.stack([values["cohort"][grow], values["step"][grow], decodes[grow]])
    return (where, some.astype(np.int64), chunks), (where, grow.astype(np.int64), cohorts)


def fill_leaps(columns: Columns, numbers: Ints, leaps: AllLeaps, rows: Ints) -> Entries:
    """Fill the rows of all leaps; returns their cohorts. numbers: [LEAP, leaps]; rows: where the iterations belong."""
    steps = ints(leaps.steps)
    elapsed = counts_up(steps)
    # Columns are full of zeros already.
    zero = {name for name, each in zip(LEAP, numbers) if name in _RARE and not each.any()}
    first = {name: np.repeat(each, steps) for name, each in zip(LEAP, numbers) if name not in zero}
    ends = _joined(leaps.ends_ns)
    before, after = first["host_before_s"], first["host_after_s"]
    follows = np.concatenate([first["planned_s"][:1], ends[:-1]])
    follows[elapsed == 0] = first["planned_s"][elapsed == 0]
    device = ends - follows - before - after
    starts = follows + before
    planned = follows
    given = np.repeat([each is not None for each in leaps.starts_ns], steps)
    if given.any():
        some = given.nonzero()[0]
        starts[some] = np.concatenate([each for each in leaps.starts_ns if each is not None])
        device[some] = _per_step(
            [each for each in leaps.device_ns if each is not None],
            ints([k for k, each in zip(leaps.steps, leaps.device_ns) if each is not None]),
        )
        planned[some] = starts[some] - before[some]
    given = np.repeat([each is not None for each in leaps.planned_ns], steps)
    if given.any():
        planned[given] = np.concatenate([each for each in leaps.planned_ns if each is not None])
    first.update(
        iteration=first["iteration"] + elapsed,
        planned_s=planned,
        start_s=starts,
        end_s=ends,
        decode_context_total=first["decode_context_total"] + elapsed * first["decodes"],
        decode_context_max=first["decode_context_max"] + elapsed,
        free_blocks=_per_step(leaps.free_blocks, steps) - _taken_before(leaps, steps),
        device_s=device,
        inside=_per_step(leaps.inside, steps),
    )
    for name, values in first.items():
        columns[name][rows] = values
    cohorts = np.stack(
        [
            np.repeat(ints(leaps.cohort), steps),
            np.repeat(ints(leaps.first_step), steps) + elapsed,
            first["decodes"],
        ]
    )
    return rows, np.ones(len(rows), dtype=np.int64), cohorts


def _taken_before(leaps: AllLeaps, steps: Ints) -> Ints:
    """Blocks that the plans of a leap took between its first iteration and each of its iterations."""
    taken = _joined([[0] * k if each is None else each for each, k in zip(leaps.taken, leaps.steps)])
    before = np.cumsum(taken) - taken
    since: Ints = before - np.repeat(before[np.cumsum(steps) - steps], steps)
    return since


def _per_step(values: Sequence[Any], steps: Ints) -> Ints:
    """One value per step of every leap, each given as an array or as one number for all of its steps."""
    single = [not hasattr(value, "__len__") for value in values]
    if all(single):
        return np.repeat(ints(values), steps)
    if not any(single):
        return _joined(values)
    return np.concatenate([np.full(k, value) if one else value for value, one, k in zip(values, single, steps)])


def _joined(sequences: Sequence[Any]) -> Ints:
    """Lists or arrays of integers, one after the other. Short lists are many: they are not made arrays one by one."""
    if all(isinstance(each, list) for each in sequences):
        return np.fromiter(chain.from_iterable(sequences), dtype=np.int64, count=sum(map(len, sequences)))
    return np.concatenate(sequences).astype(np.int64, copy=False)


def counts_up(lens: Ints) -> Ints:
    """0, 1, ... len - 1 for each length, one after the other."""
    return np.arange(int(lens.sum()), dtype=np.int64) - np.repeat(np.cumsum(lens) - lens, lens)


def ints(values: Sequence[Any]) -> Ints:
    return np.array(values, dtype=np.int64)
