"""timeline.json: a run as Chrome trace events, to be opened in Perfetto (ui.perfetto.dev).

A process per replica, a track per stage (of every rank, where it has several). A slice is one micro-batch on one stage,
named by what it holds (prefill, decode, mixed); between them lie the bubbles, named by their largest cause, with the
split in their arguments. Perfetto picks colours by name and ignores given ones, so the cause has to be the name.
Counters show KV blocks and queue; flow arrows follow one request through its batches.

Times are whole nanoseconds written as microseconds with three decimals. A slice is a begin and an end event: where one
ends and the next begins both carry the very same number, so however a reader rounds, no slice overlaps the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrics.measures.bubble_causes import CAUSE_NAMES, CAUSES
from metrics.pipelines.bubbles import Bubbles, Gaps, find_bubbles
from metrics.pipelines.stage_schedule import Schedule, schedules
from metrics.run_folder.columns import MetricsError
from metrics.run_folder.tables import RunTables
from policies.edges.output_file import whole_file
from policies.edges.settings import shown

Ints = NDArray[np.int64]


class Window(NamedTuple):
    """Part of a run, in nanoseconds from the trace's start: whatever overlaps it is written."""

    start: int
    end: int


EVERYTHING = Window(0, np.iinfo(np.int64).max)
LATEST_S = 9e9
"""No run lasts as long: 2^63 ns."""


def parse_window(text: str) -> Window:
    """Read `from:to` in seconds; either side may be left out."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)?\s*:\s*(\d+(?:\.\d+)?)?\s*", text)
    start_s, end_s = (float(match[1] or 0), float(match[2] or LATEST_S)) if match else (0.0, 0.0)
    if not start_s < min(end_s, LATEST_S):
        raise MetricsError(f"timeline window: found {shown(text)}, expected from:to in seconds, such as 10:20")
    return Window(round(start_s * 1e9), EVERYTHING.end if end_s >= LATEST_S else round(end_s * 1e9))


MOST_BATCHES = 50_000
"""Batches on stages that a timeline holds where nobody says which part of the run it is to show: about 40 MB."""


def bounded_window(run: RunTables, most: int = MOST_BATCHES) -> tuple[Window, str | None]:
    """All of a short run, the beginning of a long one; and the sentence that says so, None for all of it."""
    found = list(schedules(run))
    starts = np.sort(np.concatenate([s.start.ravel() for s in found])) if found else np.empty(0, np.int64)
    if len(starts) <= most:
        return EVERYTHING, None
    end = int(starts[most])
    return Window(0, end), (
        f"timeline: it holds the first {end / 1e9:.1f} s of {starts[-1] / 1e9:.1f} s ({most:,} of {len(starts):,} "
        "batches on stages); --window FROM:TO takes another part, --window : all"
    )


def empty_window(window: Window, summary: Mapping[str, Any]) -> str | None:
    """A sentence where nothing of a run lies in the window because it had ended by then."""
    end_s = summary.get("window_end_s")
    if end_s is None or window.start < end_s * 1e9:
        return None
    return f"timeline: nothing ran from {window.start / 1e9:g} s on: the run ended at {end_s:.1f} s"


def write_timeline(
    path: str | Path,
    run: RunTables,
    *,
    window: Window = EVERYTHING,
    request: int | None = None,
    bubbles: Bubbles | None = None,
) -> Path:
    """Write the timeline of a run, whole or not at all. Returns the path.

    request: a request to follow with flow arrows. bubbles: as found by `find_bubbles`, if they are at hand.
    """
    target = Path(path)
    followed = _iterations_of(run, request) if request is not None else np.empty(0, dtype=np.int64)
    found = bubbles or find_bubbles(run)
    with whole_file(target, MetricsError) as scratch, scratch.open("w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for schedule, gaps in zip(schedules(run), found.gaps):
            for event in _replica_events(run, schedule, gaps, window, request, followed):
                out.write(f"{separator}{event}")
                separator = ",\n"
        out.write("\n]}\n")
    return target


def _replica_events(
    run: RunTables, s: Schedule, gaps: Gaps, window: Window, request: int | None, followed: Ints
) -> Iterator[str]:
    pid = s.replica + 1  # Perfetto takes process 0 for the idle process
    yield _event(ph="M", pid=pid, name="process_name", args={"name": f"replica {s.replica}"})
    rank = f"rank {s.rank} " if run.ranks > 1 else ""
    for stage in range(s.num_stages):
        tid = _track(s, stage)
        yield _event(ph="M", pid=pid, tid=tid, name="thread_name", args={"name": f"{rank}stage {stage}"})
        yield _event(ph="M", pid=pid, tid=tid, name="thread_sort_index", args={"sort_index": tid - 1})
    for stage in range(s.num_stages):
        yield from _stage_slices(run, s, gaps, stage, window, pid)
    if request is not None:
        yield from _flow(s, window, pid, request, np.flatnonzero(np.isin(s.row, followed)))
    yield from _counters(run, s, window, pid, f" ({rank.strip()})" if rank else "")


def _track(s: Schedule, stage: int) -> int:
    """The number of a stage's track among those of its replica; ranks have equally many stages."""
    return s.rank * s.num_stages + stage + 1


def _stage_slices(run: RunTables, s: Schedule, gaps: Gaps, stage: int, window: Window, pid: int) -> Iterator[str]:
    """Batches and bubbles of one stage in order of time; a reader needs them sorted to match ends with begins."""
    tid = _track(s, stage)
    own = gaps.stage == stage
    start = np.concatenate([s.start[:, stage], gaps.start[own]])
    end = np.concatenate([s.end[:, stage], gaps.end[own]])
    wanted = np.flatnonzero((end > window.start) & (start < window.end) & (end > start))
    dummies = run.column("iterations", "dummy_tokens")
    context = run.column("iterations", "decode_context_total")
    gap_causes = gaps.cause_ns[own]
    for position in wanted[np.argsort(start[wanted], kind="stable")].tolist():
        if position < s.num_batches:
            row = int(s.row[position])
            prefill, decodes = int(s.chunk_tokens[position]), int(s.decodes[position])
            name = "mixed" if prefill and decodes else "prefill" if prefill else "decode" if decodes else "dummy"
            args: dict[str, float] = {
                "iteration": int(s.iteration[position]),
                "prefill tokens": prefill,
                "decodes": decodes,
                "decode context": int(context[row]),
                "dummy tokens": int(dummies[row]),
            }
        else:
            split = gap_causes[position - s.num_batches]
            name = f"bubble: {CAUSE_NAMES[CAUSES[int(np.argmax(split))]]}"
            args = {CAUSE_NAMES[cause] + " (us)": int(ns) / 1000 for cause, ns in zip(CAUSES, split) if ns}
        yield _event(ph="B", pid=pid, tid=tid, ns=int(start[position]), name=name, args=args)
        yield _event(ph="E", pid=pid, tid=tid, ns=int(end[position]))


def _flow(s: Schedule, window: Window, pid: int, request: int, batches: Ints) -> Iterator[str]:
    """Arrows from stage to stage and batch to batch; each binds to the slice that begins at its moment."""
    steps = [
        (int(s.start[batch, stage]), _track(s, stage))
        for batch in batches.tolist()
        for stage in range(s.num_stages)
        if s.end[batch, stage] > s.start[batch, stage]
        and s.end[batch, stage] > window.start
        and s.start[batch, stage] < window.end
    ]
    steps.sort()
    if len(steps) < 2:
        return
    for position, (ns, tid) in enumerate(steps):
        phase = "s" if not position else "f" if position == len(steps) - 1 else "t"
        binding: dict[str, Any] = {"bp": "e"} if phase == "f" else {}
        yield _event(
            ph=phase,
            pid=pid,
            tid=tid,
            ns=ns,
            name=f"request {request}",
            cat="request",
            id=s.replica * (1 << 32) + request + 1,
            **binding,
        )


def _counters(run: RunTables, s: Schedule, window: Window, pid: int, of_rank: str) -> Iterator[str]:
    """Queue, running requests and KV blocks after each plan, written when they change."""
    wanted = (s.planned >= window.start) & (s.planned < window.end)
    when, rows = s.planned[wanted], s.row[wanted]
    blocks = run.config.get("num_blocks")
    free = run.column("iterations", "free_blocks")[rows]
    series = {
        "requests waiting": run.column("iterations", "waiting")[rows],
        "requests running": run.column("iterations", "running")[rows],
        **({"KV blocks in use": blocks - free} if blocks else {"KV blocks free": free}),
    }
    for name, values in series.items():
        changes: Any = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])) if len(values) else []
        for position in np.asarray(changes, dtype=np.int64).tolist():
            yield _event(
                ph="C", pid=pid, ns=int(when[position]), name=name + of_rank, args={"value": int(values[position])}
            )


def _iterations_of(run: RunTables, request: int) -> Ints:
    """Rows of the iterations that a request took part in, with a chunk or as a decode."""
    rows = np.flatnonzero(run.column("requests", "request") == request)
    if not len(rows):
        raise MetricsError(f"timeline: found no request {request} in the run, expected one of its requests")
    chunks, cohorts = run.chunks(), run.cohorts()
    own = run.column("segments", "request") == request
    segments = {name: run.column("segments", name)[own] for name in ("replica", "cohort", "from_step", "to_step")}
    replica = run.column("iterations", "replica")[cohorts["row"]]
    found = [chunks["row"][chunks["request"] == request]]
    for where, cohort, first, last in zip(*segments.values()):
        decoding = (replica == where) & (cohorts["cohort"] == cohort)
        found.append(cohorts["row"][decoding & (cohorts["step"] >= first) & (cohorts["step"] < last)])
    return np.unique(np.concatenate(found))


def _event(*, ns: int | None = None, args: Mapping[str, Any] | None = None, **fields: Any) -> str:
    """One event as JSON; its time is written digit by digit, never through a float."""
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items()]
    if ns is not None:
        parts.append(f'"ts": {ns // 1000}.{ns % 1000:03d}')
    if args is not None:
        parts.append(f'"args": {json.dumps(args)}')
    return "{" + ", ".join(parts) + "}"
