"""From buffered events to Arrow columns, vectorised: what a recorder gathered, written in the columns of a run folder.

Plain iterations and leaps (many equal iterations kept as one) are told apart only here. A leap is expanded into the
very rows that one call per iteration would have given: each kind fills its own rows of the same columns, in the order
in which the events were recorded. Nested columns are built from flat arrays and offsets, never from dictionaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from metrics.columns import ITERATIONS, NESTED, schema, to_seconds
from metrics.events import CHUNK_FIELDS, COUNTS, NUMBERS, ROW_LENGTH, Leaps, Plain, RequestEvent
from policies.request import Ns

Ints = NDArray[np.int64]


def iteration_tables(
    plain: Plain, leap_rows: Sequence[bytes], leaps: Sequence[tuple[Any, ...]]
) -> tuple[pa.Table, pa.Table]:
    """The `iterations` and `stages` rows of buffered events, in the order in which they were recorded.

    leap_rows: `pack_leap` of every leap's first iteration; leaps: the entries of Leaps for each.
    """
    matrix = _unpacked(plain.rows, ROW_LENGTH)
    counts = dict(zip(COUNTS, matrix[len(NUMBERS) :]))
    leapt = Leaps(*zip(*leaps)) if leaps else None
    plain_at, leap_at, total = _interleaved(matrix.shape[1], leapt)
    columns = _empty_columns(total)
    lens = {name: np.zeros(total, dtype=np.int64) for name in COUNTS}
    lens["stages"][:] = 1
    for name, values in zip(NUMBERS, matrix):
        columns[name][plain_at] = values
    for name in COUNTS:
        lens[name][plain_at] = np.maximum(counts[name], lens[name][plain_at])
    for at, wall_s, cpu_s in plain.measured:
        columns["wall_s"][plain_at[at]] = wall_s
        columns["cpu_s"][plain_at[at]] = cpu_s
    firsts = matrix[len(NUMBERS) + len(COUNTS) :]
    chunks = _with_firsts(firsts[:CHUNK_FIELDS], counts["chunks"], plain.chunks)
    cohorts = _with_firsts(firsts[CHUNK_FIELDS:], counts["cohorts"], plain.cohorts)
    columns["chunk_tokens"][plain_at] = _sums(chunks[1], counts["chunks"])
    columns["num_chunks"] = lens["chunks"]
    if leapt is not None:
        _fill_leaps(columns, _unpacked(leap_rows, len(NUMBERS)), leapt, leap_at)
        lens["cohorts"][leap_at] = 1
        num_stages = _ints([1 if stages is None else stages.shape[1] for stages in leapt.stages_ns])
        lens["stages"][leap_at] = np.repeat(num_stages, leapt.steps)
    nested = {
        "chunks": _list_array("chunks", lens["chunks"], chunks),
        "cohorts": _cohort_lists(columns, lens["cohorts"], cohorts, plain_at, leapt, leap_at),
    }
    given = plain_at[counts["stages"] > 0]
    stages = _stage_table(columns, lens["stages"], plain.stages, given, leapt, leap_at)
    return _iteration_table(columns, nested), stages


def request_tables(events: Sequence[RequestEvent]) -> tuple[pa.Table, pa.Table]:
    """The `requests` and `segments` rows of buffered events, in their order; segments of a request in order of time."""
    fields = RequestEvent(*zip(*events))
    requests = fields.request
    ids = _ints([request.id for request in requests])
    never = -1
    columns: dict[str, Any] = {
        "request": ids,
        "replica": _ints(fields.replica),
        "arrival_s": to_seconds(_ints([request.arrival_ns for request in requests])),
        "prompt_tokens": _ints([request.prompt_tokens for request in requests]),
        "output_tokens": _ints(fields.output_tokens),
        "max_output_tokens": _ints([request.max_output_tokens for request in requests]),
        "status": fields.status,
        "reason": fields.reason,
        "admitted_s": to_seconds(_ints(fields.admitted_ns), never),
        "first_token_s": to_seconds(_ints(fields.first_token_ns), never),
        "finished_s": to_seconds(_ints(fields.finished_ns), never),
        "preemptions": _ints(fields.preemptions),
        "cached_tokens": _ints(fields.cached_tokens),
        "priority": _ints([request.priority for request in requests]),
        "session": [request.session for request in requests],
        "slo": [request.slo for request in requests],
    }
    lens = _lengths(fields.segments)
    cohort, from_step, to_step = _flat(fields.segments, 3)
    replica = np.repeat(columns["replica"], lens)
    moved = [row for row, replicas in enumerate(fields.segment_replicas) if replicas is not None]
    if moved:
        at = _flat_positions(np.cumsum(lens) - lens, lens, _ints(moved))
        replica[at] = _ints([r for row in moved for r in fields.segment_replicas[row]])
    segments = {
        "request": np.repeat(ids, lens),
        "replica": replica,
        "cohort": cohort,
        "from_step": from_step,
        "to_step": to_step,
    }
    return _table("requests", columns), _table("segments", segments)


def ordered_by_request(parts: Sequence[tuple[pa.Table, pa.Table]]) -> tuple[pa.Table, pa.Table]:
    """All `requests` rows and all `segments` rows, by request."""
    if not parts:
        return schema("requests").empty_table(), schema("segments").empty_table()
    requests, segments = (pa.concat_tables(tables) for tables in zip(*parts))

    def ordered(table: pa.Table) -> pa.Table:
        return table.take(np.argsort(table.column("request").to_numpy(), kind="stable"))

    return ordered(requests), ordered(segments)


def token_table(cohorts: Sequence[tuple[int, int, Ints]]) -> pa.Table:
    """The `tokens` rows of (replica, cohort, token times in ns)."""
    if not cohorts:
        return schema("tokens").empty_table()
    replica, cohort, times = zip(*cohorts)
    lens = _lengths(times)
    columns = {
        "replica": np.repeat(_ints(replica), lens),
        "cohort": np.repeat(_ints(cohort), lens),
        "step": _counts_up(lens),
        "time_s": to_seconds(np.concatenate(times)),
    }
    return _table("tokens", columns)


def _interleaved(plain: int, leaps: Leaps | None) -> tuple[Ints, Ints, int]:
    """Which rows of the table belong to plain iterations, which to leaps, and how many there are."""
    plain_index = np.arange(plain, dtype=np.int64)
    if leaps is None:
        return plain_index, np.empty(0, dtype=np.int64), plain
    steps, after = _ints(leaps.steps), _ints(leaps.after)
    leapt_before = np.concatenate([[0], np.cumsum(steps)])
    plain_rows = plain_index + leapt_before[np.searchsorted(after, plain_index, side="right")]
    leap_rows = np.repeat(after, steps) + np.arange(leapt_before[-1])
    return plain_rows, leap_rows, plain + int(leapt_before[-1])


def _empty_columns(total: int) -> dict[str, NDArray[Any]]:
    kinds = {"bool": np.bool_, "float64": np.int64}  # times stay integers until the table is written
    columns: dict[str, NDArray[Any]] = {
        c.name: np.zeros(total, dtype=kinds.get(c.type, np.int64)) for c in ITERATIONS if c.type not in NESTED
    }
    for measured in ("wall_s", "cpu_s"):
        columns[measured] = np.full(total, np.nan)
    return columns


def _fill_leaps(columns: dict[str, NDArray[Any]], numbers: Ints, leaps: Leaps, rows: Ints) -> None:
    steps = _ints(leaps.steps)
    elapsed = _counts_up(steps)
    first = dict(zip(NUMBERS, np.repeat(numbers, steps, axis=1)))
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
            _ints([k for k, each in zip(leaps.steps, leaps.device_ns) if each is not None]),
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
        free_blocks=_per_step(leaps.free_blocks, steps),
        device_s=device,
        inside=_per_step(leaps.inside, steps),
    )
    for name, values in first.items():
        columns[name][rows] = values


def _per_step(values: Sequence[Any], steps: Ints) -> Ints:
    """One value per step of every leap, each given as an array or as one number for all of its steps."""
    single = [not hasattr(value, "__len__") for value in values]
    if all(single):
        return np.repeat(_ints(values), steps)
    if not any(single):
        return _joined(values)
    return np.concatenate([np.full(k, value) if one else value for value, one, k in zip(values, single, steps)])


def _joined(sequences: Sequence[Any]) -> Ints:
    """Lists or arrays of integers, one after the other. Short lists are many: they are not made arrays one by one."""
    if all(isinstance(each, list) for each in sequences):
        return np.fromiter(chain.from_iterable(sequences), dtype=np.int64, count=sum(map(len, sequences)))
    return np.concatenate(sequences).astype(np.int64, copy=False)


def _cohort_lists(
    columns: dict[str, NDArray[Any]],
    lens: Ints,
    plain: Ints,
    plain_rows: Ints,
    leaps: Leaps | None,
    leap_rows: Ints,
) -> pa.Array:
    flat = np.zeros((len(NESTED["cohorts"]), int(lens.sum())), dtype=np.int64)
    starts = np.cumsum(lens) - lens
    flat[:, _flat_positions(starts, lens, plain_rows)] = plain
    if leaps is not None:
        at, steps = starts[leap_rows], _ints(leaps.steps)
        flat[0][at] = np.repeat(_ints(leaps.cohort), steps)
        flat[1][at] = np.repeat(_ints(leaps.first_step), steps) + _counts_up(steps)
        flat[2][at] = columns["decodes"][leap_rows]
    return _list_array("cohorts", lens, flat)


def _stage_table(
    columns: dict[str, NDArray[Any]],
    lens: Ints,
    plain: Sequence[Ns],
    plain_rows: Ints,
    leaps: Leaps | None,
    leap_rows: Ints,
) -> pa.Table:
    """One row per iteration and stage; an iteration recorded without stages has one, busy for its device time.

    plain: stages of the iterations in plain_rows, which are those that were recorded with stages.
    """
    starts = np.cumsum(lens) - lens
    flat = np.zeros((int(lens.sum()), 3), dtype=np.int64)
    flat[starts, 0] = columns["start_s"]
    flat[starts, 1] = columns["start_s"] + columns["device_s"]
    if plain:
        flat[_flat_positions(starts, lens, plain_rows)] = _matrix(plain, 3).T
    if leaps is not None:
        done = 0
        for steps, stages in zip(leaps.steps, leaps.stages_ns):
            if stages is not None:
                flat[_flat_positions(starts, lens, leap_rows[done : done + steps])] = stages.reshape(-1, 3)
            done += steps
    return _table(
        "stages",
        {
            "replica": np.repeat(columns["replica"], lens),
            "stage": _counts_up(lens),
            "iteration": np.repeat(columns["iteration"], lens),
            "start_s": to_seconds(flat[:, 0]),
            "end_s": to_seconds(flat[:, 1]),
            "send_s": to_seconds(flat[:, 2]),
        },
    )


def _iteration_table(columns: dict[str, NDArray[Any]], nested: dict[str, pa.Array]) -> pa.Table:
    values: dict[str, Any] = dict(nested)
    for column in ITERATIONS:
        if column.name in ("wall_s", "cpu_s"):
            values[column.name] = columns[column.name]
        elif column.type == "float64":
            values[column.name] = to_seconds(columns[column.name])
        elif column.name not in nested:
            values[column.name] = columns[column.name]
    return _table("iterations", values)


def _table(name: str, columns: dict[str, Any]) -> pa.Table:
    fields = schema(name)

    def array(field: pa.Field) -> pa.Array:
        values = columns[field.name]
        if isinstance(values, pa.Array):
            return values
        if isinstance(values, np.ndarray) and values.dtype == np.int64 and field.type == pa.int32():
            return pa.array(values).cast(pa.int32())  # checked: raises instead of wrapping around
        return pa.array(values, type=field.type)

    return pa.Table.from_arrays([array(field) for field in fields], schema=fields)


def _list_array(name: str, lens: Ints, flat: Sequence[Ints]) -> pa.Array:
    list_type = schema("iterations").field(name).type
    offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    arrays = [pa.array(np.ascontiguousarray(v)).cast(field.type) for v, field in zip(flat, list_type.value_type)]
    structs = pa.StructArray.from_arrays(arrays, fields=list(list_type.value_type))
    return pa.ListArray.from_arrays(pa.array(offsets), structs).cast(list_type)


def _flat(nested: Sequence[Sequence[tuple[Any, ...]]], width: int) -> list[Ints]:
    """The fields of all inner tuples as columns."""
    total = int(_lengths(nested).sum())
    values = chain.from_iterable(chain.from_iterable(nested))
    return list(np.fromiter(values, dtype=np.int64, count=total * width).reshape(total, width).T)


def _flat_positions(starts: Ints, lens: Ints, rows: Ints) -> Ints:
    """Where the elements of the given rows lie in the flat array of a list column."""
    return np.repeat(starts[rows], lens[rows]) + _counts_up(lens[rows])


def _counts_up(lens: Ints) -> Ints:
    """0, 1, ... len - 1 for each length, one after the other."""
    return np.arange(int(lens.sum()), dtype=np.int64) - np.repeat(np.cumsum(lens) - lens, lens)


def _sums(values: Ints, lens: Ints) -> Ints:
    running = np.concatenate([[0], np.cumsum(values)]).astype(np.int64)
    ends = np.cumsum(lens)
    return running[ends] - running[ends - lens]


def _lengths(sequences: Sequence[Any]) -> Ints:
    return np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))


def _ints(values: Sequence[Any]) -> Ints:
    return np.array(values, dtype=np.int64)


def _unpacked(rows: Sequence[bytes], width: int) -> Ints:
    """Rows of `width` packed numbers as [width, rows]."""
    return np.frombuffer(b"".join(rows), dtype=np.int64).reshape(-1, width).T


def _with_firsts(firsts: Ints, lens: Ints, others: Sequence[int]) -> Ints:
    """All entries of a list column as [fields, entries]: each row's first one, and the others of those with more."""
    has = lens > 0
    starts = (np.cumsum(lens) - lens)[has]
    flat = np.empty((len(firsts), int(lens.sum())), dtype=np.int64)
    flat[:, starts] = firsts[:, has]
    if others:
        rest = np.ones(flat.shape[1], dtype=np.bool_)
        rest[starts] = False
        flat[:, rest] = _matrix(others, len(firsts))
    return flat


def _matrix(values: Sequence[int], width: int) -> Ints:
    """Rows of `width` numbers, one after the other, as [width, rows]."""
    return np.fromiter(values, dtype=np.int64, count=len(values)).reshape(-1, width).T
