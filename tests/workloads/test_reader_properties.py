"""Whatever a file holds, it becomes a trace or one line; what was written reads back equal; a cell means the same in any company."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from workloads import Trace, TraceError, read_trace, source, write_trace
from workloads.reading import columns

several = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

NAMES = ["arrival_s", "timestamp", "prompt_tokens", "output_tokens", "max_output_tokens", "session", "turn", "priority"]
NAMES += ["slo", "abort_s", "timeout_ms", "hash_ids", "hash_tokens", "prompt_ids", "after_row", "think_s", "other"]
NASTY = ["", " ", "0", "-1", "1", "7", "3.0", "2.5", "1e30", "1e400", "-1e-400", "NaN", "nan", "inf", "null", "N/A"]
NASTY += ["0x10", "1_000", "1,000", "+5", " 6 ", "\t4", "²", "١٢", "true", "[1, 2]", "1 2", "[", '"', "9" * 400]
NASTY += ["2023-11-16 18:15:46.6805900", "2023-02-30 10:00:00", "2023-11-16T18:15:46Z", "9999-99-99 99:99:99"]
BROKEN = ["\ud800", "\x00", "a" * 3000]
cells = st.sampled_from(NASTY + BROKEN) | st.integers(0, 9).map(str) | st.text(max_size=6)
values = st.sampled_from(NASTY + BROKEN) | st.none() | st.booleans() | st.integers() | st.floats()
values |= st.lists(st.integers(), max_size=3)
STARTS = [b"", b"PAR1", b"\x1f\x8b", b"{", b"[", b"arrival_s,prompt_tokens,output_tokens\n"]


def outcome(path: Path, **options: object) -> Trace | str:
    """A trace, or the one line that says why there is none."""
    try:
        return read_trace(path, **options)  # type: ignore[arg-type]
    except TraceError as error:
        line = str(error)
    assert "\n" not in line
    assert line.startswith(str(path))
    return line


def try_all(path: Path) -> None:
    for on_bad_row in ("fail", "skip"):
        for on_unsorted in ("fail", "sort"):
            outcome(path, on_bad_row=on_bad_row, on_unsorted=on_unsorted)


@several
@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6), st.data())
def test_any_cells_of_a_csv_end_in_a_trace_or_one_line(tmp_path: Path, names: list[str], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.lists(cells, min_size=len(names), max_size=len(names)), max_size=4))
    path = tmp_path / "t.csv"
    text = "".join(",".join(row) + "\n" for row in [names, *rows])
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try_all(path)


@several
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), values), min_size=1, max_size=4))
def test_any_values_in_jsonl_end_in_a_trace_or_one_line(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try_all(path)
    path.write_text(json.dumps(rows))
    try_all(path)


@several
@given(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 5), min_size=1), st.data())
def test_any_columns_of_a_parquet_end_in_a_trace_or_one_line(
    tmp_path: Path, kinds: dict[str, int], data: st.DataObject
) -> None:
    types = [pa.int64(), pa.float64(), pa.string(), pa.timestamp("ns"), pa.list_(pa.int64()), pa.bool_()]
    drawn = [
        st.integers(-5, 50),
        st.floats(-5, 50) | st.just(float("nan")),
        st.sampled_from(NASTY),
        st.integers(0, 10**18),
        st.lists(st.integers(0, 9), max_size=3),
        st.booleans(),
    ]
    drawn_columns = {}
    for name, kind in kinds.items():
        column = data.draw(st.lists(st.none() | drawn[kind], min_size=3, max_size=3))
        drawn_columns[name] = pa.array(column, types[kind])
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table(drawn_columns), path)
    try_all(path)


@several
@given(st.binary(max_size=200), st.sampled_from(STARTS))
def test_any_bytes_end_in_a_trace_or_one_line(tmp_path: Path, content: bytes, start: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(start + content)
    try_all(path)


@contextmanager
def cell_by_cell() -> Iterator[None]:
    """No column is converted as a whole: every cell goes through `workloads.cells`."""

    def unsure(raw: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(len(raw), dtype), np.zeros(len(raw), bool)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "fast_numbers", lambda raw: unsure(raw, np.float64))
        patch.setattr(columns, "fast_dates", lambda raw: unsure(raw, np.int64))
        yield


good_names = ["arrival_s", "prompt_tokens", "output_tokens", "max_output_tokens", "session", "priority", "timeout_s"]
good_cells = st.integers(1, 60).map(str) | st.sampled_from(["2.5", "7.0", "1e1", "", " 3", "NA", "0", "x", "-2", '"4"'])
dates = ["2023-11-16 18:15:46.6805900", "2023-11-16T18:15:47Z", "2023-11-16 19:15:48+01:00", "2023-02-30 10:00:00", "5"]


@several
@given(st.lists(st.lists(good_cells, min_size=7, max_size=7), min_size=1, max_size=5), st.booleans())
def test_a_csv_is_read_alike_by_columns_and_cell_by_cell(tmp_path: Path, rows: list[list[str]], tabs: bool) -> None:
    path = tmp_path / "t.csv"
    path.write_text("".join(("\t" if tabs else ",").join(row) + "\n" for row in [good_names, *rows]))
    agree(path)


@several
@given(st.lists(st.sampled_from(dates + NASTY), min_size=1, max_size=6))
def test_dates_are_read_alike_by_columns_and_cell_by_cell(tmp_path: Path, times: list[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text("timestamp,prompt,output\n" + "".join(f"{time},5,5\n" for time in times if "," not in time))
    agree(path)
    path.write_text("".join(json.dumps({"timestamp": time, "prompt": 5, "output": 5}) + "\n" for time in times))
    agree(path)


good_values = st.integers(1, 60) | st.sampled_from([2.5, 7.0, None, "12", 0, "x"])


@several
@given(st.lists(st.lists(good_values, min_size=7, max_size=7), min_size=1, max_size=5))
def test_jsonl_and_parquet_are_read_alike_by_columns_and_cell_by_cell(tmp_path: Path, rows: list[list[object]]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(dict(zip(good_names, row))) + "\n" for row in rows))
    agree(path)
    plain = [[value for value in column if not isinstance(value, str)] for column in zip(*rows)]
    if all(len(column) == len(rows) for column in plain):
        path = tmp_path / "t.parquet"
        parquet.write_table(pa.table(dict(zip(good_names, map(pa.array, plain)))), path)
        agree(path)


def agree(path: Path) -> None:
    for options in ({}, {"on_unsorted": "sort", "on_bad_row": "skip"}):
        by_columns = outcome(path, **options)
        with cell_by_cell():
            each = outcome(path, **options)
        same(by_columns, each)


def same(one: Trace | str, other: Trace | str) -> None:
    if isinstance(one, Trace) and isinstance(other, Trace):
        assert one.same_requests(other)
        assert one.notes == other.notes
    else:
        assert one == other


@several
@given(
    st.lists(st.tuples(st.lists(good_cells, min_size=6, max_size=6), st.booleans()), min_size=2, max_size=12),
    st.integers(1, 5),
)
def test_where_blocks_end_and_what_stands_elsewhere_changes_no_row(
    tmp_path: Path, drawn: list[tuple[list[str], bool]], block: int
) -> None:
    """A row is good or bad by itself: with bad rows skipped, a file holds what its rows hold one by one."""
    path = tmp_path / "t.csv"
    rows = [f"{at}," + ",".join(row)[: None if whole else 7] + "\n" for at, (row, whole) in enumerate(drawn)]

    def read(*some: str) -> Trace | str:
        path.write_text(",".join(good_names) + "\n" + "".join(some))
        return outcome(path, on_bad_row="skip")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "BLOCK", 1 << 20)
        whole = read(*rows)
        patch.setattr(source, "BLOCK", 16 * block)
        small = read(*rows)
        patch.setattr(source, "BLOCK", 1 << 20)
        alone = [read(row) for row in rows]
    same(whole, small)
    good = [trace for trace in alone if isinstance(trace, Trace)]
    assert len(good) == (len(whole) if isinstance(whole, Trace) else 0)
    if isinstance(whole, Trace):
        assert whole.prompt_tokens.tolist() == [int(trace.prompt_tokens[0]) for trace in good]


def test_one_bad_cell_costs_one_row(tmp_path: Path) -> None:
    """Wherever it stands: a first date that is none, an open quote, a quote that a later row seems to close."""
    good = [f"2023-11-16 18:15:{second:02}.5,5,5\n" for second in range(16)]
    path = tmp_path / "t.csv"
    for at in (0, 7, 15):
        for bad in ("soon,5,5\n", '2023-11-16 18:15:30,"5,5\n', '"2023-11-16 18:15:30,5,5\n', "1,2\n", "\udcff,5,5\n"):
            rows = [bad if row == at else text for row, text in enumerate(good)]
            path.write_bytes(("timestamp,prompt,output\n" + "".join(rows)).encode("utf-8", "surrogateescape"))
            trace = read_trace(path, on_bad_row="skip")
            assert len(trace) == 15
            assert trace.notes[0].startswith(f"1 bad row skipped: row {at + 1} (line {at + 2})")
    two = [text.replace("5,5", '"5,5') if row in (3, 9) else text for row, text in enumerate(good)]
    path.write_text("timestamp,prompt,output\n" + "".join(two))
    assert len(read_trace(path, on_bad_row="skip")) == 14


def test_a_quoted_cell_may_go_on_over_lines_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv"
    path.write_text('arrival_s,text,prompt_tokens,output_tokens\n0,"a ""b"",\nc\n",5,6\n1,d,7,8\n2,"x,5,6\n3,e,9,9\n')
    for block in (1 << 20, 16, 40):
        monkeypatch.setattr(source, "BLOCK", block)
        trace = read_trace(path, on_bad_row="skip")
        assert trace.prompt_tokens.tolist() == [5, 7, 9]
        assert "1 bad row skipped: row 3 (line 6)" in trace.notes[0]


def test_a_window_or_a_limit_reads_what_it_needs_and_the_same_of_it(tmp_path: Path) -> None:
    """Two hundred thousand rows in blocks of 64 KiB; the last one is bad, and a window before it never gets there."""
    path = tmp_path / "t.csv"
    rows = np.arange(200_000)
    path.write_text(
        "timestamp,prompt,output\n" + "".join(f"{row * 500},{5 + row % 7},{1 + row % 3}\n" for row in rows) + "x,y,z\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "BLOCK", 1 << 16)
        whole = read_trace(path, on_bad_row="skip", time_unit="ms")
        for window_s, limit in (((1000.0, 2000.0), None), ((0.0, 0.5), None), (None, 1234), ((3000.0, 9000.0), 50)):
            part = read_trace(path, time_unit="ms", window_s=window_s, limit=limit, max_bytes=1_000_000)
            cut = whole if window_s is None else whole.between(*window_s)
            assert part.same_requests(cut if limit is None else cut.head(limit))
        assert read_trace(path, limit=3).provenance["sha256"] == whole.provenance["sha256"]
        with pytest.raises(TraceError, match="pass --limit or --window"):
            read_trace(path, max_bytes=1_000_000)


counts = st.integers(1, 100_000_000)
names = st.none() | st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=5).map(str.strip).filter(
    lambda name: name.lower() not in ("", "nan", "na", "n/a", "null", "none") and not name.replace(".", "").isdigit()
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    size = draw(st.integers(1, 6))

    def column(of: st.SearchStrategy[int]) -> np.ndarray:
        return np.array(draw(st.lists(of, min_size=size, max_size=size)), np.int64)

    def perhaps(of: st.SearchStrategy[object]) -> list[object] | None:
        return draw(st.none() | st.lists(of, min_size=size, max_size=size))  # type: ignore[arg-type]

    arrival_ns = np.sort(column(st.integers(0, 4 * 10**15)))
    prompt_tokens = column(st.integers(1, 2000))
    optional: dict[str, object] = {name: perhaps(names) for name in ("session", "slo", "tenant", "program")}
    if draw(st.booleans()):
        optional["abort_ns"] = arrival_ns + column(st.integers(0, 10**12)) if draw(st.booleans()) else np.full(size, -1)
        optional["priority"] = column(st.integers(-5, 5))
        optional["turn"] = column(st.integers(0, 5))
        optional["predicted_tokens"] = column(st.integers(0, 5000))
    if draw(st.booleans()):
        optional["after_row"] = np.minimum(column(st.integers(-1, 5)), np.arange(size) - 1)
        optional["think_ns"] = column(st.integers(0, 10**12))
    if draw(st.booleans()):
        optional["hash_tokens"] = draw(st.integers(1, 600))
        most = -(-prompt_tokens // optional["hash_tokens"])
        hashes = [draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=min(int(n), 4))) for n in most]
        optional["prefix_hashes"] = [tuple(row) for row in hashes]
    return Trace("t", arrival_ns, prompt_tokens, column(counts), column(counts), **optional)  # type: ignore[arg-type]


@several
@given(traces(), st.sampled_from(["csv", "jsonl", "parquet", "csv.gz"]))
def test_a_written_trace_reads_back_equal(tmp_path: Path, trace: Trace, ending: str) -> None:
    path = write_trace(trace, tmp_path / f"t.{ending}")
    again = read_trace(path)
    assert again.arrival_ns.tolist() == trace.arrival_ns.tolist()
    texts = ("session", "slo", "tenant", "program")
    for name in (*texts, "abort_ns", "priority", "turn", "predicted_tokens", "after_row", "think_ns", "prefix_hashes"):
        expected, found = getattr(trace, name), getattr(again, name)
        assert (expected is None) == (found is None), name
        assert expected is None or list(expected) == list(found), name
    with cell_by_cell():
        assert read_trace(path).same_requests(again)


def test_a_limit_and_odd_bytes_change_no_rows_meaning(tmp_path: Path) -> None:
    """Dates are told by the file's first rows, not by those that a limit leaves; only a line end ends a row."""
    path = tmp_path / "t.csv"
    rows = ["-1,5,5\n", "q,5,5\n", *(f"2023-11-16 18:15:{second:02},{5 + second},5\n" for second in range(9))]
    path.write_text("timestamp,prompt,output\n" + "".join(rows))
    whole = read_trace(path, on_bad_row="skip")
    assert read_trace(path, on_bad_row="skip", limit=2).same_requests(whole.head(2))
    for mark in ("", '3,"7",7\n'):  # from the first quote on, lines are split one by one
        path.write_text("arrival_s,prompt,output\n" + "0,5,5\n" + mark + "4,\x1e6,5\n5,8\r,5\n6,\x85,5\n7,9,5\n")
        trace = read_trace(path, on_bad_row="skip")
        assert trace.prompt_tokens.tolist() == ([5, 7, 6, 8, 9] if mark else [5, 6, 8, 9])
