"""From buffered events to Arrow columns, vectorised: what a recorder gathered, written in the columns of a run folder.

Plain iterations, stretches and leaps (metrics/stretches.py) are told apart only here: each kind fills its own rows of
the same columns, in the order in which the events were recorded, as one call per iteration would have done. Nested
columns are built from flat arrays and offsets, never from dictionaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from metrics.columns import ITERATIONS, NESTED, MetricsError, schema, to_seconds
from metrics.events import (
    CHUNK_FIELDS,
    COUNTS,
    LEAP,
    NUMBERS,
    ROW_LENGTH,
    STRAIGHT,
    Leaps,
    Plain,
    RequestEvent,
    Stretch,
)
from metrics.stretches import Entries, Ints, counts_up, fill_leaps, fill_stretches, ints

_INT32 = np.iinfo(np.int32)


def iteration_tables(
    plain: Plain,
    straight: tuple[Sequence[bytes], Sequence[Stretch]],
    leap_rows: Sequence[bytes],
    leaps: Sequence[tuple[Any, ...]],
) -> tuple[pa.Table, pa.Table]:
    """The `iterations` and `stages` rows of buffered events, in the order in which they were recorded.

    straight: rows of `pack_straight` and their stretches. leap_rows: `pack_leap` of every leap's first iteration;
    leaps: the entries of Leaps for each.
    """
    leapt = _together(Leaps, leaps) if leaps else None
    total = len(plain.rows) + len(straight[0]) + (sum(leapt.steps) if leapt is not None else 0)
    columns = _empty_columns(total)
    chunks: list[Entries] = []
    cohorts: list[Entries] = []
    # Stages that were given: the rows that have them, their number, and [fields, stages].
    stages: list[Entries] = []
    if plain.rows:
        _fill_plain(columns, plain, chunks, cohorts, stages)
    if straight[0]:
        for part, parts in zip(
            fill_stretches(columns, _unpacked(straight[0], len(STRAIGHT)), straight[1]), (chunks, cohorts)
        ):
            parts.append(part)
    if leapt is not None:
        steps = ints(leapt.steps)
        rows = np.repeat(ints(leapt.at), steps) + counts_up(steps)
        cohorts.append(fill_leaps(columns, _unpacked(leap_rows, len(LEAP)), leapt, rows))
        done = 0
        for k, of_leap in zip(leapt.steps, leapt.stages_ns):
            if of_leap is not None:
                stages.append((rows[done : done + k], np.full(k, of_leap.shape[1]), of_leap.reshape(-1, 3).T))
            done += k
    num_chunks, chunk_entries = _in_order("chunks", total, chunks)
    num_cohorts, cohort_entries = _in_order("cohorts", total, cohorts)
    columns["num_chunks"] = num_chunks
    nested = {
        "chunks": _list_array("chunks", num_chunks, chunk_entries),
        "cohorts": _list_array("cohorts", num_cohorts, cohort_entries),
    }
    return _iteration_table(columns, nested), _stage_table(columns, stages)


def _fill_plain(
    columns: dict[str, NDArray[Any]], plain: Plain, chunks: list[Entries], cohorts: list[Entries], stages: list[Entries]
) -> None:
    """Fill the rows of plain iterations, and add their chunks, cohorts and stages to the given entries."""
    matrix = _unpacked(plain.rows, ROW_LENGTH)
    at = ints(plain.at)
    counts = dict(zip(COUNTS, matrix[len(NUMBERS) :]))
    for name, values in zip(NUMBERS, matrix):
        columns[name][at] = values
    for position, wall_s, cpu_s in plain.measured:
        columns["wall_s"][at[position]] = wall_s
        columns["cpu_s"][at[position]] = cpu_s
    firsts = matrix[len(NUMBERS) + len(COUNTS) :]
    flat = _with_firsts(firsts[:CHUNK_FIELDS], counts["chunks"], plain.chunks)
    columns["chunk_tokens"][at] = _sums(flat[1], counts["chunks"])
    chunks.append((at, counts["chunks"], flat))
    cohorts.append((at, counts["cohorts"], _with_firsts(firsts[CHUNK_FIELDS:], counts["cohorts"], plain.cohorts)))
    if plain.stages:
        stages.append((at, counts["stages"], _matrix(plain.stages, 3)))


def _together(kind: Any, events: Sequence[tuple[Any, ...]]) -> Any:
    """Many events as one, each field a sequence of theirs."""
    return kind(*zip(*events))


def _in_order(name: str, total: int, parts: Sequence[Entries]) -> tuple[Ints, Ints]:
    """A list column's lengths and [fields, entries], for all rows of the table."""
    lens = np.zeros(total, dtype=np.int64)
    for rows, counts, _ in parts:
        lens[rows] = counts
    flat = np.empty((len(NESTED[name]), int(lens.sum())), dtype=np.int64)
    starts = np.cumsum(lens) - lens
    for rows, counts, entries in parts:
        if len(counts) and counts.max() <= 1:
            flat[:, starts[rows[counts > 0]]] = entries
        else:
            flat[:, _flat_positions(starts, lens, rows)] = entries
    return lens, flat


def request_tables(events: Sequence[RequestEvent]) -> tuple[pa.Table, pa.Table]:
    """The `requests` and `segments` rows of buffered events, in their order; segments of a request in order of time."""
    fields = _together(RequestEvent, events)
    requests = fields.request
    ids = ints([request.id for request in requests])
    never = -1
    columns: dict[str, Any] = {
        "request": ids,
        "replica": ints(fields.replica),
        "arrival_s": to_seconds(ints([request.arrival_ns for request in requests])),
        "prompt_tokens": ints([request.prompt_tokens for request in requests]),
        "output_tokens": ints(fields.output_tokens),
        "max_output_tokens": ints([request.max_output_tokens for request in requests]),
        "status": fields.status,
        "reason": fields.reason,
        "admitted_s": to_seconds(ints(fields.admitted_ns), never),
        "first_token_s": to_seconds(ints(fields.first_token_ns), never),
        "finished_s": to_seconds(ints(fields.finished_ns), never),
        "preemptions": ints(fields.preemptions),
        "cached_tokens": ints(fields.cached_tokens),
        "priority": ints([request.priority for request in requests]),
        "session": [request.session for request in requests],
        "slo": [request.slo for request in requests],
    }
    lens = _lengths(fields.segments)
    cohort, from_step, to_step = _flat(fields.segments, 3)
    replica = np.repeat(columns["replica"], lens)
    moved = [row for row, replicas in enumerate(fields.segment_replicas) if replicas is not None]
    if moved:
        at = _flat_positions(np.cumsum(lens) - lens, lens, ints(moved))
        replica[at] = ints([r for row in moved for r in fields.segment_replicas[row]])
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
        order = np.argsort(table.column("request").to_numpy(), kind="stable")
        return table.take(pa.Array.from_buffers(pa.int64(), len(order), [None, pa.py_buffer(order)]))

    return ordered(requests), ordered(segments)


def token_table(cohorts: Sequence[tuple[int, int, Ints]]) -> pa.Table:
    """The `tokens` rows of (replica, cohort, token times in ns)."""
    if not cohorts:
        return schema("tokens").empty_table()
    replica, cohort, times = zip(*cohorts)
    lens = _lengths(times)
    columns = {
        "replica": np.repeat(ints(replica), lens),
        "cohort": np.repeat(ints(cohort), lens),
        "step": counts_up(lens),
        "time_s": to_seconds(np.concatenate(times)),
    }
    return _table("tokens", columns)


def _empty_columns(total: int) -> dict[str, NDArray[Any]]:
    kinds = {"bool": np.bool_, "float64": np.int64}  # times stay integers until the table is written
    columns: dict[str, NDArray[Any]] = {
        c.name: np.zeros(total, dtype=kinds.get(c.type, np.int64)) for c in ITERATIONS if c.type not in NESTED
    }
    for measured in ("wall_s", "cpu_s"):
        columns[measured] = np.full(total, np.nan)
    return columns


def _stage_table(columns: dict[str, NDArray[Any]], given: Sequence[Entries]) -> pa.Table:
    """One row per iteration and stage; an iteration without stages of its own has one, busy for its device time."""
    if not given:
        return _table(
            "stages",
            {
                "replica": columns["replica"],
                "stage": np.zeros(len(columns["start_s"]), dtype=np.int64),
                "iteration": columns["iteration"],
                "start_s": to_seconds(columns["start_s"]),
                "end_s": to_seconds(columns["start_s"] + columns["device_s"]),
                "send_s": np.zeros(len(columns["start_s"])),
            },
        )
    lens = np.ones(len(columns["start_s"]), dtype=np.int64)
    for rows, counts, _ in given:
        lens[rows] = np.maximum(counts, 1)
    starts = np.cumsum(lens) - lens
    flat = np.zeros((int(lens.sum()), 3), dtype=np.int64)
    flat[starts, 0] = columns["start_s"]
    flat[starts, 1] = columns["start_s"] + columns["device_s"]
    for rows, counts, stages in given:
        flat[_flat_positions(starts, lens, rows[counts > 0])] = stages.T
    return _table(
        "stages",
        {
            "replica": np.repeat(columns["replica"], lens),
            "stage": counts_up(lens),
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
    return pa.Table.from_arrays([_array(name, field, columns[field.name]) for field in fields], schema=fields)


def _array(table: str, field: pa.Field, values: Any) -> pa.Array:
    """One column as Arrow has it. Straight from memory where it can be: `pa.array` looks for pandas first, and loading
    that takes longer than many a replay."""
    if isinstance(values, pa.Array):
        return values
    if field.type == pa.string():
        return _strings(values)
    if field.type == pa.bool_():
        bits = np.packbits(np.asarray(values, dtype=np.bool_), bitorder="little")
        return pa.Array.from_buffers(field.type, len(values), [None, pa.py_buffer(bits)])
    wanted = field.type.to_pandas_dtype()
    held = np.asarray(values)
    if held.dtype != wanted:
        if wanted is np.int32 and len(held) and (held.min() < _INT32.min or held.max() > _INT32.max):
            at = int(np.argmax((held < _INT32.min) | (held > _INT32.max)))
            raise MetricsError(f"{table}: row {at}, column {field.name}: found {held[at]}, more than 32 bits hold")
        held = held.astype(wanted)
    return pa.Array.from_buffers(field.type, len(held), [None, pa.py_buffer(np.ascontiguousarray(held))])


def _strings(values: Sequence[str | None]) -> pa.Array:
    encoded = [b"" if value is None else value.encode() for value in values]
    ends = np.cumsum(_lengths(encoded))
    if len(ends) and ends[-1] > _INT32.max:
        return pa.array(values, type=pa.string())
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    valid = np.array([value is not None for value in values], dtype=np.bool_)
    nulls = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [nulls, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def _list_array(name: str, lens: Ints, flat: Ints) -> pa.Array:
    list_type = schema("iterations").field(name).type
    offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    arrays = [_array(name, field, values) for values, field in zip(flat, list_type.value_type)]
    structs = pa.StructArray.from_arrays(arrays, fields=list(list_type.value_type))
    return pa.Array.from_buffers(list_type, len(lens), [None, pa.py_buffer(offsets)], children=[structs])


def _flat(nested: Sequence[Sequence[tuple[Any, ...]]], width: int) -> list[Ints]:
    """The fields of all inner tuples as columns."""
    total = int(_lengths(nested).sum())
    values = chain.from_iterable(chain.from_iterable(nested))
    return list(np.fromiter(values, dtype=np.int64, count=total * width).reshape(total, width).T)


def _flat_positions(starts: Ints, lens: Ints, rows: Ints) -> Ints:
    """Where the elements of the given rows lie in the flat array of a list column."""
    return np.repeat(starts[rows], lens[rows]) + counts_up(lens[rows])


def _sums(values: Ints, lens: Ints) -> Ints:
    running = np.concatenate([[0], np.cumsum(values)]).astype(np.int64)
    ends = np.cumsum(lens)
    sums: Ints = running[ends] - running[ends - lens]
    return sums


def _lengths(sequences: Sequence[Any]) -> Ints:
    return np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))


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
