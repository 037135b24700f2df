"""What a served session leaves beside the tables of its run: its requests as a trace, its tokens on the wire.

`trace.parquet` is read by every command that takes a trace, so a served session can be replayed; `wire.parquet` has a
row for each token: when the engine had it and when it was written.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.work.request import Ns
from workloads.door.contract import Ask, Ended
from workloads.trace import Trace
from workloads.write import write_trace

if TYPE_CHECKING:
    from workloads.door.app import Door
    from workloads.door.listening import Server

CLOCK_KEPT_S = 1e-3
"""How late the engine's clock may be."""
WIRE_SHARE = 0.1
"""Share of the time between two tokens of an answer that writing them may take."""
WIRE = "wire.parquet"
TRACE = "trace.parquet"
_PART = 1 << 12
"""Tokens that are written at once: more of them would make the next ones late."""


class Wire:
    """Token times and writing times, kept as flat numbers; streamed into parquet where there is a scratch folder."""

    def __init__(self, folder: Path | None) -> None:
        if folder is not None:
            # Now, and not between two tokens: it takes a tenth of a second.
            import pyarrow.parquet  # noqa: F401
        self._folder = folder
        self._rows = array("q")
        self._writer: Any = None
        self.tokens = 0

    def written(self, number: int, time_ns: Ns, written_ns: Ns) -> None:
        self.tokens += 1
        if self._folder is not None:
            self._rows.extend((number, time_ns, written_ns))
            if len(self._rows) >= 3 * _PART:
                self._flush()

    def close(self) -> Path | None:
        """The file, whole; None without a folder."""
        if self._folder is None:
            return None
        self._flush()
        self._writer.close()
        return self._folder / WIRE

    def _flush(self) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        rows = np.frombuffer(self._rows, np.int64).reshape(-1, 3)
        columns = {
            "request": pa.array(rows[:, 0].copy()),
            "time_s": pa.array(rows[:, 1] / 1e9),
            "written_s": pa.array(rows[:, 2] / 1e9),
        }
        del rows
        table = pa.table(columns)
        if self._writer is None:
            assert self._folder is not None
            self._writer = parquet.ParquetWriter(self._folder / WIRE, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._rows = array("q")


class Visitors:
    """Everybody who has asked, as rows of a trace. keeps_ids: with the prompts' token ids, for prefix caches."""

    def __init__(self, *, keeps_ids: bool) -> None:
        self._keeps_ids = keeps_ids
        self._asks: dict[int, tuple[int, int, int, str | None, str | None]] = {}
        self._ids: dict[int, array[int]] = {}
        self._ends: dict[int, tuple[Ns, int, Ns]] = {}

    def came(self, ask: Ask) -> None:
        self._asks[ask.number] = (len(ask.prompt_ids), ask.max_tokens, ask.priority, ask.session, ask.tenant)
        if self._keeps_ids:
            self._ids[ask.number] = array("i", ask.prompt_ids)

    def went(self, end: Ended) -> None:
        gone = end.finished_ns if end.status == "aborted" else -1
        self._ends[end.number] = end.arrival_ns, end.output_tokens, gone

    def __len__(self) -> int:
        return len(self._ends)

    def trace(self, name: str) -> Trace:
        """The requests that reached the engine, in order of arrival there."""
        rows = sorted(self._ends, key=lambda number: (self._ends[number][0], number))
        asks = [self._asks[number] for number in rows]
        ends = [self._ends[number] for number in rows]
        arrival = np.array([end[0] for end in ends], np.int64)
        limits = np.array([ask[1] for ask in asks], np.int64)
        gone = np.array([end[2] for end in ends], np.int64)
        # A client that left would have got the rest of its answer.
        produced = np.array([end[1] for end in ends], np.int64)
        outputs = np.where((gone >= 0) | (produced < 1), limits, np.maximum(produced, 1))
        sessions, tenants = [ask[3] for ask in asks], [ask[4] for ask in asks]
        priorities = np.array([ask[2] for ask in asks], np.int64)
        return Trace(
            name,
            arrival,
            np.array([ask[0] for ask in asks], np.int64),
            outputs,
            limits,
            session=sessions if any(session is not None for session in sessions) else None,
            priority=priorities if priorities.any() else None,
            tenant=tenants if any(tenant is not None for tenant in tenants) else None,
            abort_ns=gone if (gone >= 0).any() else None,
            prompt_ids=[self._ids[number] for number in rows] if self._keeps_ids else None,
            source_format="served",
            history="none" if self._keeps_ids else "in_prompt",
        )


def leave(folder: Path, trace: Trace, wire: Path | None) -> Sequence[Path]:
    """Put the session's own files into its run folder."""
    left = []
    if len(trace):
        left.append(write_trace(trace, folder / TRACE))
    if wire is not None:
        shutil.move(wire, folder / WIRE)
        left.append(folder / WIRE)
    return left


def said_of(door: Door, server: Server) -> dict[str, Any]:
    """What config.json says of a served session: how late things were, who left, and what could not be kept."""
    wire, clock = door.gauges.wire.facts(), door.engine.clock.lateness.facts()
    notes = []
    if clock["p99_s"] > CLOCK_KEPT_S:
        notes.append(
            f"the engine's clock was late by {clock['p99_s'] * 1e3:.1f} ms at P99 (1 ms is kept otherwise): this "
            "machine cannot play so many events in real time; times in the tables are those that were due"
        )
    step_s = door.mean_gap_s
    if wire["count"] and step_s and wire["p50_s"] > WIRE_SHARE * step_s:
        notes.append(
            f"tokens were written {wire['p50_s'] * 1e3:.1f} ms after their time in the median, more than a tenth of "
            f"the {step_s * 1e3:.1f} ms between two of an answer: clients have seen this machine, not only the engine"
        )
    return {
        "url": server.url,
        "stopped_by": server.stopped_by,
        "model_name": door.model,
        "counts": dict(door.counts),
        "wire_lag": wire,
        "clock_lag": clock,
        "notes": notes,
    }
