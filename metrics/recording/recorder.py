"""The recorder: what a simulator or an executor calls while it runs; one cheap call per event, tables at the end.

An event is its numbers appended to flat lists (metrics/recording/events.py); nothing is computed while the run is
going on.
Every `part_rows` iterations the buffer is turned into Arrow columns, in memory or, with `stream_to`, straight into
parquet files, so that memory stays flat per request however long the run is. Both ways give the same tables.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from metrics.recording.events import (
    CHUNK_FIELDS,
    COHORT_FIELDS,
    Ended,
    Leaps,
    Plain,
    Straight,
    pack_leap,
    pack_request,
    pack_row,
    pack_stretch,
)
from metrics.run_folder.columns import STATUSES, MetricsError
from policies.edges.compiling import mypyc_attr
from policies.work.batch import BatchShape
from policies.work.request import Ns, Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from metrics.recording.columnar import Engines
    from metrics.run_folder.tables import RunTables

_NAN = math.nan
# A row of a leap takes less than a fourth of the memory of a plain one until it is written.
_LEAPT_ROWS = 4
_STATUS_CODES: Final = {status: code for code, status in enumerate(STATUSES)}
_pack_leap: Final = pack_leap
_pack_request: Final = pack_request
_pack_stretch: Final = pack_stretch
_NO_CHUNK, _NO_COHORT = (0,) * CHUNK_FIELDS, (0,) * COHORT_FIELDS


@mypyc_attr(allow_interpreted_subclasses=True)
class Recorder:
    """Records one run. Append-only; `tables()` ends the recording.

    part_rows: buffered iterations after which they are turned into columns (small parts stay in the processor's
        cache: 4,096 is faster than 65,536).
    stream_to: an existing folder to stream parquet files into (a scratch folder: `write_run` copies them from there).

    Sequences and arrays that are handed in are kept, not copied: the caller must not change them afterwards.

    places: replica and rank of each engine, by the number that rows are recorded with, where that is no replica's own
    number; ranks: how many a replica has at most.

    straight: where whoever has begun a `stretch` appends one `metrics.recording.events.pack_straight` an iteration,
    nothing else being recorded meanwhile. Once it holds `part_rows` rows the next row has to begin another stretch.
    """

    def __init__(self, *, part_rows: int = 4_096, stream_to: str | Path | None = None) -> None:
        if part_rows < 1:
            raise MetricsError(f"part_rows: found {part_rows}, expected at least 1")
        self.part_rows = part_rows
        self.places: list[tuple[int, int]] = []
        self.ranks = 1
        self._plain = Plain([], [], [], [], [], [], [], [])
        self._plain_rows, self._plain_at, self._plain_stages = self._plain.rows, self._plain.at, self._plain.stages
        self._rows = 0
        self.straight: list[bytes] = []
        self._stretches: list[bytes] = []
        self._leap_rows: list[bytes] = []
        self._leap_ends: list[Ns] = []
        self._leap_taken: list[int] = []
        self._leap_inside: list[tuple[int, Sequence[bool]]] = []
        self._leap_times: list[tuple[int, Sequence[Ns], Sequence[Ns], Sequence[Ns]]] = []
        self._leapt = 0
        self._cohorts: list[tuple[int, int, NDArray[np.int64]]] = []
        self._token_rows = 0
        self._ended = Ended([], [], {}, {}, {}, {}, {}, {})
        self._requests, self._segments = self._ended.rows, self._ended.segments
        self._request_parts: list[tuple[bytes, NDArray[np.int64]]] = []
        self._sink = _MemorySink() if stream_to is None else _ParquetSink(Path(stream_to))
        self._done = False

    def iteration(
        self,
        replica: int,
        number: int,
        planned_ns: Ns,
        start_ns: Ns,
        end_ns: Ns,
        shape: BatchShape,
        chunks: Sequence[tuple[int, int, int, bool]],
        cohorts: Sequence[tuple[int, int, int]],
        preempted: int,
        running: int,
        waiting: int,
        free_blocks: int,
        cached_tokens: int,
        host_before_ns: Ns,
        host_after_ns: Ns,
        device_ns: Ns,
        inside: bool,
        wall_s: float = _NAN,
        cpu_s: float = _NAN,
        stages: Sequence[tuple[Ns, Ns, Ns]] = (),
        activated_experts: float = _NAN,
    ) -> None:
        """One completed batch. All columns of iterations.parquet; see `metrics.run_folder.columns.ITERATIONS`.

        chunks: (request id, tokens, prefix, samples); cohorts: (cohort, step completed, size).
        stages: (start, end, send) of each pipeline stage; none given means one stage, busy from start_ns on for
            device_ns.
        """
        _, decodes, context_total, context_max, dummy_tokens, sampled, executed_rows, _, _, _ = shape
        if wall_s == wall_s or cpu_s == cpu_s:
            self._plain.measured.append((self._rows, wall_s, cpu_s, activated_experts))
        self.row(
            pack_row(
                replica,
                number,
                planned_ns,
                start_ns,
                end_ns,
                decodes,
                context_total,
                context_max,
                dummy_tokens,
                sampled,
                executed_rows,
                preempted,
                running,
                waiting,
                free_blocks,
                cached_tokens,
                host_before_ns,
                host_after_ns,
                device_ns,
                inside,
                len(chunks),
                len(cohorts),
                len(stages),
                *(chunks[0] if chunks else _NO_CHUNK),
                *(cohorts[0] if cohorts else _NO_COHORT),
            ),
            [field for chunk in chunks[1:] for field in chunk],
            [field for cohort in cohorts[1:] for field in cohort],
            [time for stage in stages for time in stage],
        )

    def speculated(self, shape: BatchShape, drafts: Sequence[tuple[int, int, int, int]]) -> None:
        """What the iteration recorded next speculated. drafts: (request, drafts verified, accepted, tokens delivered)
        of every speculating decode, in batch order."""
        at = self._rows
        self._plain.drafted.append((at, shape[7], shape[8], shape[9]))
        self._plain.drafts.extend([(at, *decode) for decode in drafts])

    def row(
        self, row: bytes, chunks: Sequence[int] = (), cohorts: Sequence[int] = (), stages: Sequence[Ns] = ()
    ) -> None:
        """`iteration` for whoever records a million of them: nothing is checked or named.

        row: `metrics.recording.events.pack_row` of it. chunks, cohorts: the fields of further ones than the first,
        one after the other; stages: those of all stages.
        """
        self._plain_rows.append(row)
        self._plain_at.append(self._rows + self._leapt + len(self.straight))
        if chunks:
            self._plain.chunks.extend(chunks)
        if cohorts:
            self._plain.cohorts.extend(cohorts)
        if stages:
            self._plain_stages.extend(stages)
        self._rows += 1
        if self._rows >= self.part_rows:
            self._flush_iterations()

    def stretch(self, replica: int, number: int, planned_ns: Ns, inside: bool) -> None:
        """The next rows appended to `straight` are iterations of one replica that follow each other without a gap.

        number: of the first of them, planned at planned_ns; every other is planned when the one before it ends.
        """
        if len(self.straight) >= self.part_rows:
            self._flush_iterations()
        held = len(self.straight)
        at = self._rows + self._leapt + held
        self._stretches.append(_pack_stretch(at, held, replica, number, planned_ns, inside))

    def leap(
        self,
        replica: int,
        first_number: int,
        shape: BatchShape,
        planned_ns: Ns,
        ends_ns: Sequence[Ns],
        cohort: int,
        first_step: int,
        running: int,
        waiting: int,
        free_blocks: int,
        taken: Sequence[int],
        host_before_ns: Ns,
        host_after_ns: Ns,
        inside: Sequence[bool] | bool,
        times_ns: tuple[Sequence[Ns], Sequence[Ns], Sequence[Ns]] | None = None,
    ) -> None:
        """len(ends_ns) equal decode-only iterations of one cohort on one stage; the same rows as so many `iteration`s.

        shape: the first of them; every decode's context is one longer in each that follows. Each is planned when the
        one before it ends, the first at planned_ns; whatever is not host time is device time, so the ends say it all.
        free_blocks: after the plan of the first; taken: what each plan that follows took, that of the iteration after
        the leap included. inside: one for all, or one each. times_ns: when each was planned, when it started and its
        device time, where they are planned ahead and none of this follows from the ends.
        """
        chunks, decodes, context_total, context_max, dummy_tokens, sampled, executed_rows, _, _, _ = shape
        if chunks:
            raise MetricsError("leap: found a batch with prefill chunks, expected decodes only")
        steps = len(ends_ns)
        if isinstance(inside, bool):
            alike = inside
        else:
            alike = False
            self._leap_inside.append((self._leapt, inside))
        if times_ns is not None:
            self._leap_times.append((self._leapt, *times_ns))
        self._leap_rows.append(
            _pack_leap(
                self._rows + self._leapt + len(self.straight),
                steps,
                replica,
                first_number,
                planned_ns,
                decodes,
                context_total,
                context_max,
                dummy_tokens,
                sampled,
                executed_rows,
                running,
                waiting,
                free_blocks,
                host_before_ns,
                host_after_ns,
                alike,
                cohort,
                first_step,
            )
        )
        self._leap_ends += ends_ns
        self._leap_taken += taken
        self._leapt += steps
        if self._leapt >= self.part_rows * _LEAPT_ROWS:
            self._flush_iterations()

    def cohort_times(self, replica: int, cohort: int, times_ns: array[int] | Sequence[Ns] | NDArray[np.int64]) -> None:
        """The token times of one cohort, one per step from step 0; once per cohort, when it dies or at the end.

        The times are copied, so the caller may go on using its own list.
        """
        import numpy as np

        if not len(times_ns):
            return
        self._cohorts.append((replica, cohort, np.fromiter(times_ns, np.int64, len(times_ns))))
        self._token_rows += len(times_ns)
        if self._token_rows >= self.part_rows:
            self._flush_tokens()

    def request(
        self,
        request: Request,
        replica: int,
        status: str,
        reason: str,
        output_tokens: int,
        admitted_ns: Ns,
        first_token_ns: Ns,
        finished_ns: Ns,
        preemptions: int,
        cached_tokens: int,
        segments: Sequence[tuple[int, int, int]],
        segment_replicas: Sequence[int] | None = None,
    ) -> None:
        """The end of one request, whatever end it was; once per request of the trace. -1 ns = never.

        segments: (cohort, from_step, to_step), half-open and in order: its token times are those of the cohorts.
        segment_replicas: the replica of each segment; `replica` for all unless given (a request that moved has more).
        """
        if status not in _STATUS_CODES:
            raise MetricsError(f"request {request.id}: found status {status!r}, expected one of {', '.join(STATUSES)}")
        row, arrival_ns, prompt_tokens, max_output_tokens, _, _, session, priority, slo, tenant, program, _ = request
        self._requests.append(
            _pack_request(
                row,
                replica,
                arrival_ns,
                prompt_tokens,
                output_tokens,
                max_output_tokens,
                _STATUS_CODES[status],
                admitted_ns,
                first_token_ns,
                finished_ns,
                preemptions,
                cached_tokens,
                priority,
                len(segments),
            )
        )
        self._segments += segments
        if reason:
            self._ended.reasons[row] = reason
        if session is not None:
            self._ended.sessions[row] = session
        if slo is not None:
            self._ended.slos[row] = slo
        if tenant is not None:
            self._ended.tenants[row] = tenant
        if program is not None and program != session:
            self._ended.programs[row] = program
        if segment_replicas is not None:
            self._ended.segment_replicas[row] = segment_replicas
        if len(self._requests) >= self.part_rows:
            self._pack_requests()

    def tables(self) -> RunTables:
        """The tables of the run. Ends the recording: a second call raises MetricsError."""
        from metrics.recording.columnar import request_tables
        from metrics.run_folder.columns import schema
        from metrics.run_folder.tables import RunTables

        if self._done:
            raise MetricsError("recorder: found a second call of tables(), expected one at the end of the run")
        self._done = True
        self._flush_iterations()
        self._flush_tokens()
        self._pack_requests()
        if self._request_parts:
            requests, segments = request_tables(self._request_parts, self._ended, self._engines())
        else:
            requests, segments = schema("requests").empty_table(), schema("segments").empty_table()
        return RunTables({"requests": requests, "segments": segments, **self._sink.close()})

    def _engines(self) -> Engines:
        from metrics.recording.columnar import Engines

        return Engines(self.places, self.ranks)

    def _flush_iterations(self) -> None:
        from metrics.recording.columnar import iteration_tables

        if not self._rows and not self._leapt and not self.straight:
            return
        straight = Straight(self.straight, self._stretches)
        leaps = Leaps(self._leap_rows, self._leap_ends, self._leap_taken, self._leap_inside, self._leap_times)
        iterations, stages = iteration_tables(self._plain, straight, leaps, self._engines())
        self._plain.clear()
        straight.clear()
        leaps.clear()
        self._rows = self._leapt = 0
        self._sink.write("iterations", iterations)
        self._sink.write("stages", stages)

    def _pack_requests(self) -> None:
        from metrics.recording.columnar import packed_requests

        if self._requests:
            self._request_parts.append(packed_requests(self._ended))
            self._requests.clear()
            self._segments.clear()

    def _flush_tokens(self) -> None:
        from metrics.recording.columnar import token_table

        if self._cohorts:
            self._sink.write("tokens", token_table(self._cohorts, self._engines()))
            self._cohorts.clear()
            self._token_rows = 0


_STREAMED = ("iterations", "stages", "tokens")


class _MemorySink:
    """Parts as Arrow tables in memory, joined without a copy."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Any]] = {name: [] for name in _STREAMED}

    def write(self, table: str, part: Any) -> None:
        self._parts[table].append(part)

    def close(self) -> dict[str, Any]:
        import pyarrow as pa

        from metrics.run_folder.columns import schema

        return {
            name: pa.concat_tables(parts) if parts else schema(name).empty_table()
            for name, parts in self._parts.items()
        }


_ROW_GROUP_ROWS = 65_536


class _ParquetSink:
    """Parts gathered into row groups of one parquet file per table."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise MetricsError(f"{folder}: found no such folder, expected a scratch folder to stream the run into")
        self._folder = folder
        self._writers: dict[str, Any] = {}
        self._pending: dict[str, list[Any]] = {name: [] for name in _STREAMED}

    def write(self, table: str, part: Any) -> None:
        pending = self._pending[table]
        pending.append(part)
        if sum(len(held) for held in pending) >= _ROW_GROUP_ROWS:
            self._write_row_group(table)

    def close(self) -> dict[str, Any]:
        from metrics.run_folder.columns import schema

        tables: dict[str, Any] = {}
        for name, pending in self._pending.items():
            if pending:
                self._write_row_group(name)
            if name in self._writers:
                self._writers[name].close()
                tables[name] = self._folder / f"{name}.parquet"
            else:
                tables[name] = schema(name).empty_table()
        return tables

    def _write_row_group(self, table: str) -> None:
        import pyarrow as pa

        from metrics.run_folder.folder import parquet_writer

        if table not in self._writers:
            self._writers[table] = parquet_writer(self._folder / f"{table}.parquet", table)
        self._writers[table].write_table(pa.concat_tables(self._pending[table]))
        self._pending[table].clear()
