"""From buffered tuples to Arrow columns, vectorised: what a recorder gathered, written in the columns of a run folder.

Plain iterations and leaps (many equal iterations kept as one) are told apart only here. A leap is expanded into the
very rows that one call per iteration would have given: each kind fills its own rows of the same columns, in the order
in which the events were recorded. Nested columns are built from flat arrays and offsets, never from dictionaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from metrics.columns import ITERATIONS, NESTED, schema, to_seconds
from policies.batch import BatchShape
from policies.request import Ns, Request

Ints = NDArray[np.int64]


NUMBERS = (
    "replica", "iteration", "planned_s", "start_s", "end_s", "decodes", "decode_context_total", "decode_context_max",
    "dummy_tokens", "sampled", "executed_rows", "preempted", "running", "waiting", "free_blocks", "cached_tokens",
    "host_before_s", "host_after_s", "device_s", "inside",
)  # fmt: skip
"""The columns of iterations.parquet that a recorder keeps as flat numbers, in its order; times in nanoseconds."""


class Members(NamedTuple):
    """What a recorder keeps of one iteration beside its numbers."""

    chunks: Sequence[tuple[int, int, int, bool]]
    cohorts: Sequence[tuple[int, int, int]]
    stages: Sequence[tuple[Ns, Ns, Ns]]
    wall_s: float
    cpu_s: float


class LeapEvent(NamedTuple):
    """One call of `Recorder.leap`, and how many plain iterations were buffered before it."""

    after: int
    replica: int
    first_number: int
    shape: BatchShape
    starts_ns: Ints
    ends_ns: Ints
    cohort: int
    first_step: int
    running: int
    waiting: int
    free_blocks: Ints
    host_before_ns: Ns
    host_after_ns: Ns
    device_ns: Ints
    inside: NDArray[np.bool_]
    planned_ns: Ints
    stages_ns: Ints | None


class RequestEvent(NamedTuple):
    """One call of `Recorder.request`."""

    request: Request
    replica: int
    status: str
    reason: str
    output_tokens: int
    admitted_ns: Ns
    first_token_ns: Ns
    finished_ns: Ns
    preemptions: int
    cached_tokens: int
    segments: Sequence[tuple[int, int, int]]


def iteration_tables(
    numbers: Sequence[int], members: Sequence[tuple[Any, ...]], leaps: Sequence[LeapEvent]
) -> tuple[pa.Table, pa.Table]:
    """The `iterations` and `stages` rows of buffered events, in the order in which they were recorded.

    numbers: NUMBERS of every plain iteration, one after the other; members: one entry each.
    """
    plain_rows, leap_rows, total = _interleaved(len(members), leaps)
    columns = _empty_columns(total)
    chunk_lens = np.zeros(total, dtype=np.int64)
    cohort_lens = np.zeros(total, dtype=np.int64)
    stage_lens = np.ones(total, dtype=np.int64)
    flat_chunks: list[Ints] = [np.empty(0, dtype=np.int64)] * len(NESTED["chunks"])
    plain: Members | None = None
    if members:
        plain = Members(*zip(*members))
        _fill_plain(columns, numbers, plain, plain_rows)
        chunk_lens[plain_rows] = _lengths(plain.chunks)
        cohort_lens[plain_rows] = _lengths(plain.cohorts)
        stage_lens[plain_rows] = np.maximum(_lengths(plain.stages), 1)
        flat_chunks = _flat(plain.chunks, len(NESTED["chunks"]))
        columns["chunk_tokens"] = np.zeros(total, dtype=np.int64)
        columns["chunk_tokens"][plain_rows] = _sums(flat_chunks[1], chunk_lens[plain_rows])
    if leaps:
        _fill_leaps(columns, leaps, leap_rows)
        cohort_lens[leap_rows] = 1
        stage_lens[leap_rows] = np.concatenate(
            [np.full(len(leap.starts_ns), 1 if leap.stages_ns is None else leap.stages_ns.shape[1]) for leap in leaps]
        )
    columns["num_chunks"] = chunk_lens
    nested = {
        "chunks": _list_array("chunks", chunk_lens, flat_chunks),
        "cohorts": _cohort_lists(columns, cohort_lens, plain, plain_rows, leaps, leap_rows),
    }
    stages = _stage_table(columns, stage_lens, plain, plain_rows, leaps, leap_rows)
    return _iteration_table(columns, nested), stages


def request_tables(events: Sequence[RequestEvent]) -> tuple[pa.Table, pa.Table]:
    """The `requests` rows, by request, and the `segments` rows, by request and in order of time."""
    if not events:
        return schema("requests").empty_table(), schema("segments").empty_table()
    events = sorted(events, key=lambda event: event[0].id)
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
    segments = {
        "request": np.repeat(ids, lens),
        "replica": np.repeat(columns["replica"], lens),
        "cohort": cohort,
        "from_step": from_step,
        "to_step": to_step,
    }
    return _table("requests", columns), _table("segments", segments)


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


def _interleaved(plain: int, leaps: Sequence[LeapEvent]) -> tuple[Ints, Ints, int]:
    """Which rows of the table belong to plain iterations, which to leaps, and how many there are."""
    steps = _lengths([leap.starts_ns for leap in leaps])
    after = _ints([leap.after for leap in leaps])
    leapt_before = np.concatenate([[0], np.cumsum(steps)]).astype(np.int64)
    plain_index = np.arange(plain, dtype=np.int64)
    plain_rows = plain_index + leapt_before[np.searchsorted(after, plain_index, side="right")]
    leap_rows = np.repeat(after, steps) + np.arange(int(steps.sum()), dtype=np.int64)
    return plain_rows, leap_rows, plain + int(steps.sum())


def _empty_columns(total: int) -> dict[str, NDArray[Any]]:
    kinds = {"bool": np.bool_, "float64": np.int64}  # times stay integers until the table is written
    columns: dict[str, NDArray[Any]] = {
        c.name: np.zeros(total, dtype=kinds.get(c.type, np.int64)) for c in ITERATIONS if c.type not in NESTED
    }
    for measured in ("wall_s", "cpu_s"):
        columns[measured] = np.full(total, np.nan)
    return columns


def _fill_plain(columns: dict[str, NDArray[Any]], numbers: Sequence[int], plain: Members, rows: Ints) -> None:
    matrix = _ints(numbers).reshape(-1, len(NUMBERS))
    for name, values in zip(NUMBERS, matrix.T):
        columns[name][rows] = values
    columns["wall_s"][rows] = plain.wall_s
    columns["cpu_s"][rows] = plain.cpu_s


def _fill_leaps(columns: dict[str, NDArray[Any]], leaps: Sequence[LeapEvent], rows: Ints) -> None:
    steps = _lengths([leap.starts_ns for leap in leaps])
    elapsed = _counts_up(steps)

    def each(values: Sequence[Any]) -> Ints:
        return np.repeat(_ints(values), steps)

    decodes = each([leap.shape.decodes for leap in leaps])
    filled = {
        "replica": each([leap.replica for leap in leaps]),
        "iteration": each([leap.first_number for leap in leaps]) + elapsed,
        "planned_s": np.concatenate([leap.planned_ns for leap in leaps]),
        "start_s": np.concatenate([leap.starts_ns for leap in leaps]),
        "end_s": np.concatenate([leap.ends_ns for leap in leaps]),
        "decodes": decodes,
        "decode_context_total": each([leap.shape.decode_context_total for leap in leaps]) + elapsed * decodes,
        "decode_context_max": each([leap.shape.decode_context_max for leap in leaps]) + elapsed,
        "dummy_tokens": each([leap.shape.dummy_tokens for leap in leaps]),
        "sampled": each([leap.shape.sampled for leap in leaps]),
        "executed_rows": each([leap.shape.executed_rows for leap in leaps]),
        "running": each([leap.running for leap in leaps]),
        "waiting": each([leap.waiting for leap in leaps]),
        "free_blocks": np.concatenate([leap.free_blocks for leap in leaps]),
        "host_before_s": each([leap.host_before_ns for leap in leaps]),
        "host_after_s": each([leap.host_after_ns for leap in leaps]),
        "device_s": np.concatenate([leap.device_ns for leap in leaps]),
        "inside": np.concatenate([leap.inside for leap in leaps]),
    }
    for name, values in filled.items():
        columns[name][rows] = values


def _cohort_lists(
    columns: dict[str, NDArray[Any]],
    lens: Ints,
    plain: Members | None,
    plain_rows: Ints,
    leaps: Sequence[LeapEvent],
    leap_rows: Ints,
) -> pa.Array:
    flat = [np.zeros(int(lens.sum()), dtype=np.int64) for _ in NESTED["cohorts"]]
    starts = np.cumsum(lens) - lens
    if plain is not None:
        at = _flat_positions(starts, lens, plain_rows)
        for column, values in zip(flat, _flat(plain.cohorts, 3)):
            column[at] = values
    if leaps:
        at = starts[leap_rows]
        steps = _lengths([leap.starts_ns for leap in leaps])
        flat[0][at] = np.repeat(_ints([leap.cohort for leap in leaps]), steps)
        flat[1][at] = np.repeat(_ints([leap.first_step for leap in leaps]), steps) + _counts_up(steps)
        flat[2][at] = columns["decodes"][leap_rows]
    return _list_array("cohorts", lens, flat)


def _stage_table(
    columns: dict[str, NDArray[Any]],
    lens: Ints,
    plain: Members | None,
    plain_rows: Ints,
    leaps: Sequence[LeapEvent],
    leap_rows: Ints,
) -> pa.Table:
    """One row per iteration and stage; an iteration recorded without stages has one, busy for its device time."""
    starts = np.cumsum(lens) - lens
    flat = np.zeros((int(lens.sum()), 3), dtype=np.int64)
    flat[starts, 0] = columns["start_s"]
    flat[starts, 1] = columns["start_s"] + columns["device_s"]
    if plain is not None:
        given = _lengths(plain.stages)
        if given.any():
            at = _flat_positions(starts, lens, plain_rows[given > 0])
            flat[at] = np.stack(_flat(plain.stages, 3), axis=1)
    done = 0
    for leap in leaps:
        steps = len(leap.starts_ns)
        if leap.stages_ns is not None:
            at = _flat_positions(starts, lens, leap_rows[done : done + steps])
            flat[at] = leap.stages_ns.reshape(-1, 3)
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
