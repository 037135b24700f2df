"""Whatever a file holds, it becomes a trace or one line; what was written reads back equal; both ways in agree."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from workloads import Trace, TraceError, read_trace, write_trace
from workloads.reading.delimited import DelimitedTable
from workloads.reading.json_lines import JsonTable
from workloads.reading.parquet import ParquetTable

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
    columns = {}
    for name, kind in kinds.items():
        column = data.draw(st.lists(st.none() | drawn[kind], min_size=3, max_size=3))
        columns[name] = pa.array(column, types[kind])
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table(columns), path)
    try_all(path)


@several
@given(st.binary(max_size=200), st.sampled_from(STARTS))
def test_any_bytes_end_in_a_trace_or_one_line(tmp_path: Path, content: bytes, start: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(start + content)
    try_all(path)


@contextmanager
def carefully() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for table in (DelimitedTable, JsonTable, ParquetTable):
            patch.setattr(table, "columns", lambda self, wanted: None)
        yield


good_names = ["arrival_s", "prompt_tokens", "output_tokens", "max_output_tokens", "session", "priority", "timeout_s"]
good_cells = st.integers(1, 60).map(str) | st.sampled_from(["2.5", "7.0", "1e1", "", " 3", "NA", "0", "x"])


@several
@given(st.lists(st.lists(good_cells, min_size=7, max_size=7), min_size=1, max_size=5), st.booleans())
def test_the_fast_and_the_careful_way_into_a_csv_agree(tmp_path: Path, rows: list[list[str]], tabs: bool) -> None:
    path = tmp_path / "t.csv"
    path.write_text("".join(("\t" if tabs else ",").join(row) + "\n" for row in [good_names, *rows]))
    agree(path)


good_values = st.integers(1, 60) | st.sampled_from([2.5, 7.0, None, "12", 0, "x"])


@several
@given(st.lists(st.lists(good_values, min_size=7, max_size=7), min_size=1, max_size=5))
def test_the_fast_and_the_careful_way_into_jsonl_and_parquet_agree(tmp_path: Path, rows: list[list[object]]) -> None:
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
        fast = outcome(path, **options)
        with carefully():
            careful = outcome(path, **options)
        if isinstance(fast, Trace) and isinstance(careful, Trace):
            assert fast.same_requests(careful)
            assert fast.notes == careful.notes
        else:
            assert fast == careful


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
    optional: dict[str, object] = {"session": perhaps(names), "slo": perhaps(names)}
    if draw(st.booleans()):
        optional["abort_ns"] = arrival_ns + column(st.integers(0, 10**12)) if draw(st.booleans()) else np.full(size, -1)
        optional["priority"] = column(st.integers(-5, 5))
        optional["turn"] = column(st.integers(0, 5))
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
    for name in ("session", "slo", "abort_ns", "priority", "turn", "after_row", "think_ns", "prefix_hashes"):
        expected, found = getattr(trace, name), getattr(again, name)
        assert (expected is None) == (found is None), name
        assert expected is None or list(expected) == list(found), name
    with carefully():
        assert read_trace(path).same_requests(again)
