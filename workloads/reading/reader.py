"""The one door through which traces come in: any known format, found by content, into columns.

A file is read in chunks of rows, and each chunk becomes columns at once (`workloads.reading.columns`), so that a file
may be larger than memory as long as what a window or a limit leaves of it is not.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workloads import column_names as fields
from workloads.column_names import Field
from workloads.generating import arrival_processes, predictions
from workloads.generating import sessions as session_loops
from workloads.reading import servegen
from workloads.reading.agent_sessions import is_agent_sessions, read_agent_sessions
from workloads.reading.assembly import Options, assemble
from workloads.reading.chunk import Table
from workloads.reading.client_results import TOOLS, client_tool, read_client_run
from workloads.reading.columns import Columns
from workloads.reading.delimited import DelimitedTable
from workloads.reading.json_lines import PROBED_ROWS, JsonTable
from workloads.reading.parquet import ParquetTable
from workloads.reading.part import Part
from workloads.source import MAX_BYTES, Source, open_source, refuse_settings
from workloads.trace import Trace, TraceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMATS = (
    *("auto", "csv", "jsonl", "parquet"),
    *(
        "azure",
        "vidur",
        "mooncake",
        "bailian",
        "agent_sessions",
        "burstgpt",
        "vllm",
        "vllm_steps",
        "servegen",
        "lengths",
    ),
    *TOOLS,
)
"""What `trace_format` may be: a container, or a project's form of it; `lengths` has no arrival times."""

_CONTAINERS: dict[str, type[DelimitedTable | JsonTable | ParquetTable]] = {
    "csv": DelimitedTable,
    "jsonl": JsonTable,
    "json": JsonTable,
    "parquet": ParquetTable,
}


def read_trace(
    path: str | os.PathLike[str],
    *,
    trace_format: str = "auto",
    on_bad_row: Literal["fail", "skip"] = "fail",
    on_unsorted: Literal["fail", "sort"] = "fail",
    arrivals: str | None = None,
    seed: int = 0,
    spread_ties: bool = False,
    sessions: Literal["open", "closed"] = "open",
    history: Literal["in_prompt", "add", "none"] = "in_prompt",
    coupling: servegen.Coupling = "shared",
    window_s: tuple[float, float] | None = None,
    limit: int | None = None,
    timeout_s: float | None = None,
    hash_tokens: int | None = None,
    time_unit: str | None = None,
    predict: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> Trace:
    """Reads a request trace: CSV, JSONL, JSON or Parquet, plain or .gz, with any sensible column names.

    trace_format: one of FORMATS; `auto` decides by content, another one is checked against the content.
    on_bad_row: `fail` at the first bad cell, or `skip` bad rows (how many and why is in the trace's notes).
    on_unsorted: what to do when arrivals go back in time. `fail` by default, because that is most often a wrong unit, a
        mixed time zone or two files in one; `sort` sorts stably and says so. Logs of vLLM are always sorted.
    arrivals: arrival process to use instead of the file's times (`poisson:5.5`, ...; see
    workloads.generating.arrival_processes), needed
        for files that hold lengths only. seed: of that process and of spread_ties.
    spread_ties: requests with equal times are spread at random over the time up to the next one, in file order.

    sessions: `closed` makes a turn wait for its session's last answer instead of coming at its recorded time.
    history: `in_prompt` where recorded prompts may hold the conversation so far, `add` to add it where they hold the
        new tokens only, `none` where no turn sends it.
    coupling: of ServeGen's prompt and answer lengths (see workloads.reading.servegen).
    window_s: only the requests that arrive in [start, end) seconds, counted from start. limit: only the first so many
        (of those).
    timeout_s: every client gives up so long after its request's arrival.
    hash_tokens: prompt tokens per prefix hash, whatever the file says or leaves open. time_unit: s, ms, us or ns, of
        times that are numbers, likewise.
    predict: predicted answer lengths in place of the file's (`oracle:0.5`; see workloads.generating.predictions).
    max_bytes: most memory of the requests' columns; a larger file is read as far as window_s and limit go.

    Raises TraceError: one line with file, row, column, what was found, what was expected and how to mend it.
    """
    _check_choice("trace format", trace_format, FORMATS)
    _check_choice("on_bad_row", on_bad_row, ("fail", "skip"))
    _check_choice("on_unsorted", on_unsorted, ("fail", "sort"))
    _check_choice("sessions", sessions, ("open", "closed"))
    _check_choice("history", history, ("in_prompt", "add", "none"))
    if time_unit is not None:
        _check_choice("time_unit", time_unit, tuple(fields.NS_PER_UNIT))
    if hash_tokens is not None and not 1 <= hash_tokens <= 1_000_000:
        raise TraceError(f"hash_tokens: found {hash_tokens}, expected 1 to 1,000,000")
    _check_choice("coupling", coupling, ("shared", "independent"))
    process = arrival_processes.parse(arrivals) if arrivals is not None else None
    elapsed_ns = parents = None
    agents = trace_format == "agent_sessions" or (trace_format == "auto" and is_agent_sessions(path))
    if agents:
        trace = read_agent_sessions(path, closed=sessions == "closed", process=process, seed=seed)
        process, sessions = None, "open"
    if sessions == "closed" and process is not None:
        raise TraceError("sessions: found closed sessions and an arrival process, expected one of the two")
    if agents:
        pass
    elif trace_format in TOOLS or (trace_format == "auto" and client_tool(path)):
        if trace_format not in ("auto", client_tool(path)):
            raise TraceError(f"{path}: found no result of {trace_format}; leave the format on auto")
        trace = read_client_run(path).trace(timeless=process is not None)
    elif trace_format == "servegen" or (trace_format == "auto" and servegen.is_servegen(path)):
        early = window_s if process is None else None
        trace = servegen.read_servegen(
            path, seed=seed, coupling=coupling, window_s=early, limit=limit if early or window_s is None else None
        )
        window_s = None if early else window_s
    else:
        # What moves rows afterwards has to see all of them.
        whole = process is not None or spread_ties or sessions == "closed" or on_unsorted == "sort" or predict
        part = Part() if whole else Part(window_s, limit)
        options = Options(os.fspath(path), on_bad_row == "skip", on_unsorted == "sort", hash_tokens)
        trace, elapsed_ns, parents = _read_file(
            path, trace_format, options, part, process is not None, time_unit, max_bytes
        )
    if process is not None:
        trace = arrival_processes.retimed(trace, process, seed)
    if spread_ties:
        trace = arrival_processes.spread_ties(trace, seed)
    if history == "add":
        trace = session_loops.with_history(trace)
    if sessions == "closed":
        trace = session_loops.closed(trace, elapsed_ns, parents)
    trace = replace(trace, history="none" if history == "none" else "in_prompt")
    if predict is not None:
        trace = predictions.with_predictions(trace, predict, seed)
    if window_s is not None:
        trace = trace.between(*window_s)
    if limit is not None:
        trace = trace.head(limit)
    return trace if timeout_s is None else trace.with_timeout(timeout_s)


def _read_file(
    path: str | os.PathLike[str],
    trace_format: str,
    options: Options,
    part: Part,
    has_process: bool,
    time_unit: str | None,
    max_bytes: int,
) -> tuple[Trace, NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """One file as a trace, how long its answers took and which row called each, where it tells."""
    source = open_source(path)
    refuse_settings(source)
    table = _table(source, trace_format)
    found = fields.find(table.names)
    kind = _kind(table, found, trace_format)
    if kind == "lengths" or has_process:
        found.pop("arrival", None)
    if time_unit is not None and "arrival" in found:
        found["arrival"] = replace(found["arrival"], unit=time_unit)
    options = replace(
        options, path=source.path, kind=kind, sort=options.sort or kind.startswith("vllm") or "delay" in found
    )
    _require(table, found, has_process)
    unused = fields.unused(table.names, found, kind)
    columns = _columns(table, found, options, part, max_bytes)
    if unused:
        columns["notes"] += (f"Not used: column{'s' * (len(unused) > 1)} {_listed(unused)}.",)
    if table.late_names:
        columns["notes"] += (
            f"Not used, because no row of the first {PROBED_ROWS} has it: {_listed(list(table.late_names))}; give the "
            "first row a null there.",
        )
    columns["name"] = Path(source.path).name.removesuffix(".gz").rsplit(".", 1)[0] or source.path
    columns["provenance"] = {"path": os.fspath(path), "format": kind, "sha256": source.sha256()}
    elapsed_ns, parent_row = columns.pop("elapsed_ns"), columns.pop("parent_row")
    return Trace(**columns), elapsed_ns, parent_row


def _columns(table: Table, found: dict[str, Field], options: Options, part: Part, max_bytes: int) -> dict[str, Any]:
    least = 0 if options.kind == "burstgpt" else 1
    columns = Columns(table.path, found, skip=options.skip, least_output=least, max_bytes=max_bytes)
    part.begin(found, options)
    wanted = list(dict.fromkeys(field.column for field in found.values()))
    for chunk in table.chunks(wanted):
        columns.look_at(chunk)
        while part.wants_more and (len(chunk.rows) or chunk.bad):
            some, chunk = chunk.cut(part.rows_at_once(len(chunk.rows)))
            columns.add(some, part.keep)
        if not part.wants_more:
            break
    if not columns.num_rows and not part.num_left_out:
        columns.refuse_none()
    return assemble(columns.cells(), columns.places(), found, options, columns.notes())


def _table(source: Source, trace_format: str) -> Table:
    table = _CONTAINERS[source.kind](source)
    if trace_format in ("csv", "jsonl", "parquet") and table.kind != trace_format:
        raise TraceError(
            f"{source.path}: found {table.kind} by its content, expected {trace_format}; leave the format on auto"
        )
    return table


def _kind(table: Table, found: dict[str, Field], trace_format: str) -> str:
    dialect = fields.dialect(table.names)
    if trace_format in ("auto", "csv", "jsonl", "parquet"):
        if trace_format == "auto" and dialect:
            return dialect
        return table.kind if "arrival" in found else "lengths"
    if trace_format not in ("lengths", dialect):
        raise TraceError(
            f"{table.path}: found columns {_listed(table.names)}, expected a {trace_format} file with "
            f"{', '.join(sorted(fields.DIALECTS[trace_format]))}; leave the format on auto"
        )
    return trace_format


def _require(table: Table, found: dict[str, Field], has_process: bool) -> None:
    for meaning in fields.REQUIRED:
        if meaning not in found:
            raise TraceError(
                f"{table.path}, header: found columns {_listed(table.names)}, expected one for {meaning} "
                f"(such as {', '.join(fields.NAMES[meaning][:4])}); rename it"
            )
    if "arrival" not in found and not has_process:
        raise TraceError(
            f"{table.path}, header: found columns {_listed(table.names)} and no arrival times, expected one such as "
            "arrival_s; or say how requests arrive, for example with arrivals poisson:5.5"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name[:40]) for name in names[:12])
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _check_choice(what: str, found: str, choices: tuple[str, ...]) -> None:
    if found not in choices:
        raise TraceError(f"{what}: found {found!r}, expected one of {', '.join(choices)}")
