"""The data of the zoomable timeline: batches and bubbles of every stage, as short columns of whole microseconds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrics.measures.bubble_causes import CAUSE_NAMES, CAUSES
from metrics.pipelines.bubbles import Gaps, find_bubbles
from metrics.pipelines.stage_schedule import Schedule, schedules
from metrics.run_folder.tables import RunTables

Ints = NDArray[np.int64]

MOST_BATCHES = 12_000
"""Of one run, all stages together: more would make the page slow to open."""


class Slice(NamedTuple):
    """Part of a run, in seconds."""

    start_s: float
    end_s: float


def timeline_of(run: RunTables, window: Slice | None) -> dict[str, Any]:
    """Lanes (one per replica, rank and stage) with their batches and bubbles, and which part of the run they are.

    Columns of a lane: batch starts (microseconds since the one before) and durations, for the batches from `first` on;
    bubbles the same way with the cause's index. `batches`: iteration, prefill tokens, decodes, dummy tokens, context of
    the decodes.
    """
    found = list(schedules(run))
    if not found:
        return {"lanes": [], "batches": [], "start_s": 0.0, "end_s": 0.0, "whole": True, "causes": []}
    run_start = min(int(s.start.min()) for s in found)
    run_end = max(int(s.end.max()) for s in found)
    start, end = (run_start, run_end) if window is None else (round(window.start_s * 1e9), round(window.end_s * 1e9))
    if window is None and sum(s.start.size for s in found) > MOST_BATCHES:
        start, end = _around_longest_stall(run, found)
    lanes: list[dict[str, Any]] = []
    batches: list[list[int]] = []
    bubbles = find_bubbles(run)
    rest = MOST_BATCHES
    for schedule, gaps in zip(found, bubbles.gaps):
        inside = np.flatnonzero((schedule.end[:, -1] > start) & (schedule.start[:, 0] < end))
        inside = inside[: max(0, rest // schedule.num_stages)]
        rest -= len(inside) * schedule.num_stages
        first = len(batches)
        batches += _batch_rows(run, schedule, inside)
        lanes += [_lane(schedule, gaps, stage, inside, first, start, end) for stage in range(schedule.num_stages)]
    return {
        "lanes": lanes,
        "batches": batches,
        "start_s": start / 1e9,
        "end_s": end / 1e9,
        "run_s": [run_start / 1e9, run_end / 1e9],
        "whole": start <= run_start and end >= run_end,
        "causes": [{"key": key, "name": CAUSE_NAMES[key]} for key in CAUSES],
        "ranks": run.ranks,
        "bubble_share": bubbles.share,
        "cause_shares": bubbles.cause_shares,
    }


def _around_longest_stall(run: RunTables, found: list[Schedule]) -> tuple[int, int]:
    """A part with about MOST_BATCHES batches, in whose middle the longest gap between two tokens ends."""
    from metrics.measures.token_times import TokenTimes

    tokens = TokenTimes(run)
    cover = tokens.cover()
    gaps = np.where(cover > 0, tokens.gaps_ns, 0)
    gaps[:1] = 0
    starts = np.sort(np.concatenate([s.start[:, 0] for s in found]))
    per_batch = sum(s.start.size for s in found) / max(1, len(starts))
    wanted = max(1, int(MOST_BATCHES / per_batch))
    inside = np.ones(len(gaps), dtype=bool)
    # The first step of a cohort has no gap before it: what np.diff finds there lies between two cohorts.
    inside[tokens.first] = False
    gaps = np.where(inside, gaps, 0)
    middle = int(np.searchsorted(starts, tokens.times_ns[int(np.argmax(gaps))])) if len(gaps) else 0
    low = min(max(0, middle - wanted // 2), max(0, len(starts) - wanted))
    high = min(len(starts) - 1, low + wanted)
    return int(starts[low]), int(starts[high])


def _batch_rows(run: RunTables, schedule: Schedule, inside: Ints) -> list[list[int]]:
    rows = schedule.row[inside]
    columns = [schedule.iteration[inside], schedule.chunk_tokens[inside], schedule.decodes[inside]]
    columns += [run.column("iterations", name)[rows] for name in ("dummy_tokens", "decode_context_total")]
    return np.stack([column.astype(np.int64) for column in columns], axis=1).tolist() if len(rows) else []


def _lane(
    schedule: Schedule, gaps: Gaps, stage: int, inside: Ints, first: int, start_ns: int, end_ns: int
) -> dict[str, Any]:
    begin = (schedule.start[inside, stage] - start_ns) // 1000
    finish = (schedule.end[inside, stage] - start_ns) // 1000
    last = int(schedule.end[inside, stage].max(initial=start_ns))
    own = np.flatnonzero((gaps.stage == stage) & (gaps.end > start_ns) & (gaps.start < min(end_ns, last)))
    bubble_start = (gaps.start[own] - start_ns) // 1000
    bubble_end = (gaps.end[own] - start_ns) // 1000
    return {
        "replica": schedule.replica,
        "rank": schedule.rank,
        "stage": stage,
        "first": first,
        "at": np.diff(begin, prepend=0).tolist(),
        "lasts": (finish - begin).tolist(),
        "bubble_at": np.diff(bubble_start, prepend=0).tolist(),
        "bubble_lasts": (bubble_end - bubble_start).tolist(),
        "bubble_cause": np.argmax(gaps.cause_ns[own], axis=1).tolist() if len(own) else [],
    }
