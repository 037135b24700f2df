"""From buffered events to Arrow columns, vectorised: what a recorder gathered, written in the columns of a run folder.

Plain iterations, stretches and leaps are told apart in metrics/recording/unfolding.py alone. Nested columns are
built from flat arrays and offsets, never from dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from metrics.recording.events import REQUEST, Ended, Leaps, Plain, Straight
from metrics.recording.unfolding import Entries, Ints, Unfolded, counts_up, flattened, ints, unpacked
from metrics.run_folder.columns import ITERATIONS, STATUSES, MetricsError, schema, to_seconds

_INT32 = np.iinfo(np.int32)


class Engines:
    """Which replica and rank each engine is. places: by engine number; empty where every engine is a replica.

    Cohorts are numbered within a replica: those of its ranks take turns.
    """

    def __init__(self, places: Sequence[tuple[int, int]] = (), ranks: int = 1) -> None:
        self.ranks = ranks
        # The last entry is that of -1, no engine at all.
        self._places = np.array([*places, (-1, 0)], np.int64) if places else None

    @property
    def split(self) -> bool:
        """Whether replicas have ranks."""
        return self._places is not None

    def places(self, engine: Ints) -> dict[str, Ints]:
        """The columns `replica` and `rank` of rows with an engine's number each."""
        if self._places is None:
            return {"replica": engine, "rank": np.zeros(len(engine), np.int32)}
        replica, rank = self._places[engine].T
        return {"replica": replica, "rank": rank}

    def cohorts(self, engine: Ints, cohort: Ints) -> Ints:
        """Numbers of cohorts, unique within their replicas."""
        return cohort if self._places is None else cohort * self.ranks + self._places[engine, 1]


def iteration_tables(
    plain: Plain, straight: Straight, leaps: Leaps, engines: Engines | None = None
) -> tuple[pa.Table, pa.Table]:
    """The `iterations` and `stages` rows of buffered events, in the order in which they were recorded."""
    engines = engines or Engines()
    rows = Unfolded(plain, straight, leaps)
    in_cohorts = rows.cohorts(plain.cohorts)
    places: dict[str, Any] = {"rank": np.zeros(rows.rows, np.int32)}
    if engines.split:
        engine = rows.per_row(rows.each("replica"))
        places = engines.places(engine)
        in_cohorts[1][0] = engines.cohorts(np.repeat(engine, in_cohorts[0]), in_cohorts[1][0])
    columns: dict[str, Any] = {
        "iteration": rows.per_row(rows.each("iteration")) + rows.elapsed,
        "planned_s": to_seconds(rows.planned_ns),
        "start_s": to_seconds(rows.starts_ns),
        "end_s": to_seconds(rows.ends_ns),
        "decode_context_total": rows.per_row(rows.each("decode_context_total"))
        + rows.elapsed * rows.per_row(rows.each("decodes")),
        "decode_context_max": rows.per_row(rows.each("decode_context_max")) + rows.elapsed,
        "free_blocks": rows.free_blocks,
        "device_s": to_seconds(rows.device_ns),
        "inside": rows.inside,
        "chunks": _list_array("chunks", rows.chunks(plain.chunks)),
        "cohorts": _list_array("cohorts", in_cohorts),
        **places,
        **_measured(plain, rows.rows),
        **_drafted(plain, rows.rows),
    }
    for name, kind in _COMMON.items():
        if name in columns:
            continue
        each = rows.each(name)
        if kind == "float64":
            columns[name] = rows.per_row(to_seconds(each))
            continue
        held = _as_int32("iterations", name, each, rows.at)
        first = held[0]
        columns[name] = rows.per_row(held) if (held != first).any() else np.full(rows.rows, first)
    table = _table("iterations", columns)
    return table, _stage_table(table, rows, rows.stages(plain))


_MEASURED = ("wall_s", "cpu_s", "activated_experts")
_DIFFER = {
    "rank",
    "iteration",
    "planned_s",
    "start_s",
    "end_s",
    "decode_context_total",
    "decode_context_max",
    "free_blocks",
    "device_s",
    "inside",
    *_MEASURED,
    "chunks",
    "cohorts",
    "draft_tokens",
    "draft_context_total",
    "drafting",
    "drafts",
}
_COMMON = {column.name: column.type for column in ITERATIONS if column.name not in _DIFFER}
"""The columns that are the same for all rows of an event."""


def _measured(plain: Plain, rows: int) -> dict[str, NDArray[np.float64]]:
    """The columns of live runs; NaN in simulated ones."""
    wall_s = np.full(rows, np.nan)
    if not plain.measured:
        return dict.fromkeys(_MEASURED, wall_s)
    positions, *measured = zip(*plain.measured)
    at = ints(plain.at)[list(positions)]
    columns = {}
    for name, values in zip(_MEASURED, measured):
        columns[name] = wall_s.copy()
        columns[name][at] = values
    return columns


def _drafted(plain: Plain, rows: int) -> dict[str, Any]:
    """The columns of iterations that speculated, zero in others."""
    numbers = np.zeros((3, rows), np.int64)
    lens, fields = np.zeros(rows, np.int64), np.zeros((4, 0), np.int64)
    if plain.drafted:
        places = ints(plain.at)
        drafted = flattened(plain.drafted, 4)
        numbers[:, places[drafted[0]]] = drafted[1:]
        if plain.drafts:
            drafts = flattened(plain.drafts, 5)
            np.add.at(lens, places[drafts[0]], 1)
            fields = drafts[1:]
    columns: dict[str, Any] = dict(zip(("draft_tokens", "draft_context_total", "drafting"), numbers))
    return {**columns, "drafts": _list_array("drafts", (lens, list(fields)))}


def packed_requests(ended: Ended) -> tuple[bytes, Ints]:
    """Buffered requests in as little room as they can be kept until the run is over: the rows and [3, segments]."""
    return b"".join(ended.rows), flattened(ended.segments, 3)


def request_tables(
    parts: list[tuple[bytes, Ints]], ended: Ended, engines: Engines | None = None
) -> tuple[pa.Table, pa.Table]:
    """The `requests` and `segments` rows of all `packed_requests`, by request; segments of one in order of time.

    ended: what of them is rare. Empties `parts`, so that a million requests are not held twice.
    """
    engines = engines or Engines()
    flat = np.concatenate([fields for _, fields in parts], axis=1)
    matrix = unpacked([rows for rows, _ in parts], len(REQUEST))
    parts.clear()
    order = np.argsort(matrix[0], kind="stable")
    requests = _request_table(matrix, order, ended, engines)
    ids, lens, replica = (matrix[REQUEST.index(name)][order] for name in ("request", "segments", "replica"))
    starts = (np.cumsum(matrix[-1]) - matrix[-1])[order]
    del matrix
    at = np.repeat(starts, lens) + counts_up(lens)
    served = np.repeat(replica, lens)
    if ended.segment_replicas:
        ends = np.cumsum(lens)
        for row in np.flatnonzero(np.isin(ids, list(ended.segment_replicas))).tolist():
            served[ends[row] - lens[row] : ends[row]] = ended.segment_replicas[int(ids[row])]
    cohort, from_step, to_step = flat
    segments = {
        "request": np.repeat(ids, lens),
        **engines.places(served),
        "cohort": engines.cohorts(served, cohort[at]),
        "from_step": from_step[at],
        "to_step": to_step[at],
    }
    return requests, _table("segments", segments)


def _request_table(matrix: Ints, order: Ints, ended: Ended, engines: Engines) -> pa.Table:
    """Column after column: each is as narrow as in the table before the next is taken from the numbers."""
    never = -1
    convert: dict[str, Callable[[Ints], Any]] = {
        "arrival_s": to_seconds,
        "status": lambda codes: _strings(STATUSES, codes),
        **dict.fromkeys(("admitted_s", "first_token_s", "finished_s"), lambda times: to_seconds(times, never)),
    }
    ids = matrix[0][order]
    columns: dict[str, Any] = {
        **engines.places(matrix[REQUEST.index("replica")][order]),
        "reason": _rare(ids, ended.reasons, ""),
        "session": _rare(ids, ended.sessions, None),
        "slo": _rare(ids, ended.slos, None),
        "tenant": _rare(ids, ended.tenants, None),
        "program": _rare(ids, ended.programs, None),
    }
    for field in schema("requests"):
        if field.name in ("replica", "rank"):
            columns[field.name] = _array("requests", field, columns[field.name])
        elif field.name not in columns:
            values = matrix[REQUEST.index(field.name)][order]
            columns[field.name] = _array("requests", field, convert.get(field.name, np.asarray)(values))
    return _table("requests", columns)


def token_table(cohorts: Sequence[tuple[int, int, Ints]], engines: Engines | None = None) -> pa.Table:
    """The `tokens` rows of (engine, cohort, token times in ns)."""
    if not cohorts:
        return schema("tokens").empty_table()
    engines = engines or Engines()
    numbers, cohort, times = zip(*cohorts)
    lens = _lengths(times)
    engine = ints(numbers)
    columns = {
        **{name: np.repeat(values, lens) for name, values in engines.places(engine).items()},
        "cohort": np.repeat(engines.cohorts(engine, ints(cohort)), lens),
        "step": counts_up(lens),
        "time_s": to_seconds(np.concatenate(times)),
    }
    return _table("tokens", columns)


def _stage_table(iterations: pa.Table, rows: Unfolded, given: tuple[Ints, Ints] | None) -> pa.Table:
    """One row per iteration and stage; an iteration without stages of its own has one, busy for its device time."""
    if given is None:
        zeros = np.zeros(rows.rows)
        return _table(
            "stages",
            {
                **{name: iterations.column(name).chunk(0) for name in ("replica", "rank", "iteration", "start_s")},
                "stage": np.zeros(rows.rows, np.int32),
                "end_s": to_seconds(rows.starts_ns + rows.device_ns),
                "send_s": zeros,
            },
        )
    lens, (starts, ends, sends) = given
    return _table(
        "stages",
        {
            **{name: np.repeat(iterations.column(name).chunk(0).to_numpy(), lens) for name in ("replica", "rank")},
            "stage": counts_up(lens),
            "iteration": np.repeat(iterations.column("iteration").chunk(0).to_numpy(), lens),
            "start_s": to_seconds(starts),
            "end_s": to_seconds(ends),
            "send_s": to_seconds(sends),
        },
    )


def _table(name: str, columns: dict[str, Any]) -> pa.Table:
    fields = schema(name)
    return pa.Table.from_arrays([_array(name, field, columns[field.name]) for field in fields], schema=fields)


def _array(table: str, field: pa.Field, values: Any) -> pa.Array:
    """One column as Arrow has it. Straight from memory where it can be: `pa.array` looks for pandas first, and loading
    that takes longer than many a replay."""
    if isinstance(values, pa.Array):
        return values
    if field.type == pa.bool_():
        bits = np.packbits(np.asarray(values, dtype=np.bool_), bitorder="little")
        return pa.Array.from_buffers(field.type, len(values), [None, pa.py_buffer(bits)])
    held = np.asarray(values)
    if field.type == pa.int32() and held.dtype != np.int32:
        held = _as_int32(table, field.name, held)
    return pa.Array.from_buffers(field.type, len(held), [None, pa.py_buffer(np.ascontiguousarray(held))])


def _as_int32(table: str, column: str, values: Ints, rows: Ints | None = None) -> NDArray[np.int32]:
    """rows: those of the table that the values belong to, if not 0, 1, ..."""
    if len(values) and (values.min() < _INT32.min or values.max() > _INT32.max):
        at = int(np.argmax((values < _INT32.min) | (values > _INT32.max)))
        row = at if rows is None else rows[at]
        raise MetricsError(f"{table}: row {row}, column {column}: found {values[at]}, more than 32 bits hold")
    return values.astype(np.int32)


def _rare(ids: Ints, texts: dict[int, str], otherwise: str | None) -> pa.Array:
    """A column of texts that only some requests have."""
    if not texts:
        return _strings([otherwise], np.zeros(len(ids), np.int64))
    return _strings([texts.get(request, otherwise) for request in ids.tolist()])


def _strings(values: Sequence[str | None], codes: Ints | None = None) -> pa.Array:
    """Texts as Arrow has them. codes: the place in `values` of each, if not 0, 1, ..."""
    encoded = [b"" if value is None else value.encode() for value in values]
    lens = _lengths(encoded)
    valid = np.array([value is not None for value in values], dtype=np.bool_)
    text = b"".join(encoded)
    if codes is not None:
        lens, valid = lens[codes], valid[codes]
        text = b"".join([encoded[code] for code in codes.tolist()]) if text else b""
    ends = np.cumsum(lens)
    if len(ends) and ends[-1] > _INT32.max:
        return pa.array(values if codes is None else [values[code] for code in codes.tolist()], type=pa.string())
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    nulls = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.string(), len(lens), [nulls, pa.py_buffer(offsets), pa.py_buffer(text)])


def _list_array(name: str, entries: Entries) -> pa.Array:
    lens, flat = entries
    list_type = schema("iterations").field(name).type
    offsets = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=offsets[1:])
    arrays = [_array(name, field, values) for values, field in zip(flat, list_type.value_type)]
    structs = pa.StructArray.from_arrays(arrays, fields=list(list_type.value_type))
    return pa.Array.from_buffers(list_type, len(lens), [None, pa.py_buffer(offsets)], children=[structs])


def _lengths(sequences: Sequence[Any]) -> Ints:
    return np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
