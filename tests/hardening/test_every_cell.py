"""Every cell of the tables that come from outside, profiles and traces of every format, becomes each of the texts that
no one can mean: refused by the reader's own error, or what was read is finite and within bounds.

Coverage-guided fuzzing seldom gets past a table's header; this begins behind it. `LEAF_VALUES=all` tries every text in
every cell, otherwise one in each cell in turn.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler.errors import ProfileError
from profiler.measurements.profile import COUNT_COLUMNS, TIME_COLUMNS, make_profile, read_profile, write_profile
from tests.hardening.test_every_leaf import ALL
from tests.profiler.test_profile import ROWS
from workloads import TraceError, read_trace

TEXTS = (
    "",
    " ",
    "x",
    "-1",
    "-0",
    "0",
    "0.5",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "1e-320",
    "1e400",
    "9223372036854775808",
    "1" * 400,
    "²",
    "١",
    "True",
    "null",
    "1,5",
    "0x10",
    "1_000",
    "\x00",
    "12:30",
    "2023-11-16 18:15:46",
    "=1+1",
    "\ud800",
)
MOST_TOKENS, MOST_NS = 1 << 40, 1 << 62

TRACES = {
    "ours": "arrival_s,prompt_tokens,output_tokens,session,priority\n0,5,5,a,1\n1.5,9,3,b,0\n",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n",
}
LINES = {
    "mooncake": [
        {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1, 2]},
        {"timestamp": 5, "input_length": 900, "output_length": 3, "hash_ids": [1, 3]},
    ],
    "ours": [{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5, "session": "a", "priority": 1}] * 2,
}


def changed(text: str) -> Iterator[tuple[str, str]]:
    """(what was done, the table with one cell changed), headers left as they are."""
    rows = list(csv.reader(io.StringIO(text)))
    places = [(row, column) for row in range(1, len(rows)) for column in range(len(rows[0]))]
    for turn, (row, column) in enumerate(places):
        for cell in TEXTS if ALL else [TEXTS[turn * 5 % len(TEXTS)]]:
            other = [list(each) for each in rows]
            other[row][column] = cell
            out = io.StringIO()
            csv.writer(out, lineterminator="\n").writerows(other)
            yield f"{rows[0][column]} in row {row} = {cell!r:.30}", out.getvalue()


def look_at_profile(file: Path) -> None:
    table = read_profile(file).table
    counts = table[[column for column in COUNT_COLUMNS if column in table]].to_numpy(float)
    times = table[list(TIME_COLUMNS)].to_numpy(float)
    assert np.isfinite(counts).all()
    assert (counts >= 0).all()
    assert np.isfinite(table["median_s"]).all()
    assert (np.isnan(times) | ((times >= 0) & (times < 1e9))).all()  # the least and the most need not be known


def look_at_trace(file: Path) -> None:
    trace = read_trace(file)
    for tokens in (trace.prompt_tokens, trace.output_tokens):
        assert ((tokens >= 0) & (tokens <= MOST_TOKENS)).all()
    assert ((trace.arrival_ns >= 0) & (trace.arrival_ns <= MOST_NS)).all()
    assert (np.diff(trace.arrival_ns) >= 0).all()


def faults(cases: Iterator[tuple[str, str]], file: Path, look: Any, error: type[Exception]) -> list[str]:
    found = []
    for what, text in cases:
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            look(file)
        except error as refused:
            if len(str(refused)) > 1500:
                found.append(f"{what}: a message of {len(str(refused))} characters")
        except Exception as other:
            found.append(f"{what}: {type(other).__name__}: {str(other)[:200]}")
    return found


def test_every_cell_of_a_profile_may_be_anything(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    write_profile(make_profile(ROWS, {"source": "test"}), file)
    look_at_profile(file)
    assert faults(changed(file.read_text()), file, look_at_profile, ProfileError) == []


@pytest.mark.parametrize("name", TRACES)
def test_every_cell_of_a_trace_may_be_anything(name: str, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(TRACES[name])
    look_at_trace(file)
    assert faults(changed(TRACES[name]), file, look_at_trace, TraceError) == []


@pytest.mark.parametrize("name", LINES)
def test_every_value_of_a_trace_of_lines_may_be_anything(name: str, tmp_path: Path) -> None:
    from tests.hardening.test_every_leaf import bent

    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES[name]))
    look_at_trace(file)

    def cases() -> Iterator[tuple[str, str]]:
        for what, document in bent({"lines": LINES[name]}):
            lines = document.get("lines")
            if isinstance(lines, list):
                yield what, "".join(json.dumps(line) + "\n" for line in lines)

    assert faults(cases(), file, look_at_trace, TraceError) == []
