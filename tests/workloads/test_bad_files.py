"""Wrong input gets one line that says where, what was found and what was expected."""

import gzip
import os
from pathlib import Path

import pytest

from workloads import TraceError, read_trace

HEADER = "arrival_s,prompt_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
WHOLE = r"expected a whole number of tokens from 1 to 100,000,000"
SECOND = r"row 2 \(line 3\), column "

BAD_CELLS = {
    "negative": ("1,-3,5", SECOND + "'prompt_tokens': found '-3', " + WHOLE),
    "zero": ("1,0,5", SECOND + "'prompt_tokens': found '0', " + WHOLE),
    "zero output": ("1,5,0", SECOND + "'output_tokens': found '0', " + WHOLE),
    "missing": ("1,5,", SECOND + "'output_tokens': found '', " + WHOLE),
    "words": ("1,many,5", SECOND + "'prompt_tokens': found 'many', " + WHOLE),
    "NaN": ("1,5,NaN", SECOND + "'output_tokens': found 'NaN', " + WHOLE),
    "infinite": ("1,5,inf", SECOND + "'output_tokens': found 'inf', " + WHOLE),
    "1e30": ("1,1e30,5", SECOND + "'prompt_tokens': found '1e30', " + WHOLE),
    "fraction": ("1,5.5,5", SECOND + "'prompt_tokens': found '5.5', " + WHOLE),
    "underscore": ("1,1_000,5", SECOND + "'prompt_tokens': found '1_000', " + WHOLE),
    "negative time": ("-1,5,5", SECOND + r"'arrival_s': found '-1', expected a time as a number of s from 0"),
    "no time": (",5,5", SECOND + "'arrival_s': found ''"),
    "1e30 s": ("1e30,5,5", SECOND + "'arrival_s': found '1e30'"),
    "a century": ("3e9,5,5", SECOND + r"'arrival_s': found 3000000000, expected a time within ten years"),
    "date among numbers": ("2023-11-16 18:17:03,5,5", SECOND + "'arrival_s': found '2023-11-16 18:17:03'"),
    "back in time": ("0.25,5,5", SECOND + r"'arrival_s': found 0.25, expected a time not before .* \(0.5\); sort"),
    "too few cells": ("1,2", r"row 2 \(line 3\): found 2 cells, expected 3 cells as in the header"),
    "too many cells": ("1,2,3,4", r"row 2 \(line 3\): found 4 cells, expected 3 cells"),
    "open quote": ('1,"2,3', r"row 2 \(line 3\): found a line that cannot be split"),
    "not UTF-8": ("1,\udcff,4", SECOND + r"'prompt_tokens': found '\\udcff'"),
}

BAD_FILES = {
    "empty": (b"", "found an empty file, expected a header line"),
    "blank": (b"\n \n", "found an empty file"),
    "header alone": (HEADER, "found no rows, expected one line per request"),
    "no header": ("0,5,5\n", "line 1: found '0,5,5', expected a header line with column names"),
    "header twice the same": (
        "arrival_s,output_tokens,output_tokens\n0,1,1\n",
        "line 1, column 3: found the name 'output_tokens' again",
    ),
    "strange header": ("a,b\n1,2\n", "header: found columns 'a', 'b', expected one for prompt_tokens"),
    "binary": (bytes(range(256)), "found binary data"),
    "picture": (b"\x89PNG\r\n\x1a\n", "found a picture"),
    "UTF-16": ((HEADER + "0,5,5\n").encode("utf-16"), "found UTF-16 text, expected UTF-8"),
    "cut gz": (gzip.compress((HEADER + "1,5,5\n" * 100).encode())[:-9], "found gzip data that stops early"),
    "damaged gz": (b"\x1f\x8b" + b"x" * 100, "found damaged gzip data"),
    "broken Parquet": (b"PAR1" + b"x" * 100, "found damaged Parquet"),
    "cut JSONL": (
        '{"arrival_s":0,"prompt_tokens":3,"output_tokens":2}\n{"arrival_s":1,"prompt_to',
        r"row 2 \(line 2\): found .* broken or cut off at column 16, expected one whole JSON object per line",
    ),
    "cut JSON": (
        '[{"arrival_s":0,"prompt_tokens":3,"output_tokens":2},{"arr',
        "line 1, column 55: found JSON that is broken",
    ),
    "a number in JSONL": (
        '{"arrival_s":0,"prompt_tokens":3,"output_tokens":2}\n5\n',
        r"row 2 \(line 2\): found 5, expected one whole",
    ),
    "deep array": ("[" * 100_000, "found JSON that cannot be read"),
    "deep object": ('{"a":' * 100_000, r"row 1 \(line 1\): found"),
    "long integer": (
        '{"arrival_s":0,"prompt_tokens":' + "9" * 5000 + ',"output_tokens":2}',
        r"row 1 \(line 1\): found",
    ),
    "prompt text": ('{"arrival_s":0,"prompt":"hello","output_tokens":2}', "column 'prompt': found 'hello', " + WHOLE),
    "bool": ('{"arrival_s":0,"prompt_tokens":true,"output_tokens":2}', "found True, " + WHOLE),
    "Azure out of order": (
        AZURE + "2023-11-16 18:17:02.9799600,48,10\n",
        r"row 2 \(line 3\), column 'TIMESTAMP': found 2023-11-16T18:17:02.979960000, expected a time not before",
    ),
    "thirteenth month": (
        AZURE + "2023-13-16 18:17:02.9799600,48,10\n",
        SECOND + "'TIMESTAMP': found '2023-13-16 18:17:02.97",
    ),
    "waiting for a later row": (
        "arrival_s,prompt_tokens,output_tokens,after_row\n0,1,1,\n0,1,1,5\n",
        SECOND + "'after_row': found 5, expected an earlier row",
    ),
    "too many hashes": (
        '{"timestamp":0,"input_length":512,"output_length":2,"hash_ids":[1,2,3]}',
        r"row 1 \(line 1\), column 'hash_ids': found \[1, 2, 3\], expected at most one hash per 512 prompt tokens",
    ),
}


def complaint(path: object, **options: object) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("what", BAD_CELLS)
def test_a_bad_row_is_named(tmp_path: Path, what: str) -> None:
    row, expected = BAD_CELLS[what]
    path = tmp_path / "t.csv"
    path.write_bytes((HEADER + "0.5,5,5\n" + row + "\n").encode("utf-8", "surrogateescape"))
    found = complaint(path)
    assert found.startswith(str(path))
    assert _matches(expected, found), found


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_bad_file_is_explained(tmp_path: Path, what: str) -> None:
    content, expected = BAD_FILES[what]
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = complaint(path)
    assert found.startswith(str(path))
    assert _matches(expected, found), found


def _matches(expected: str, found: str) -> bool:
    import re

    return re.search(expected, found) is not None


def test_blank_lines_do_not_shift_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n" + HEADER + "\n0,5,5\n\n\n1,0,5\n")
    assert "row 2 (line 7)" in complaint(path)


def test_what_is_not_a_file_is_said(tmp_path: Path) -> None:
    assert "found a folder" in complaint(tmp_path)
    assert "No such file" in complaint(tmp_path / "nowhere.csv")
    assert "found a pipe or device" in complaint("/dev/zero")
    assert "no file can have" in complaint("a\0b")
    os.mkfifo(tmp_path / "pipe")
    assert "found a pipe or device" in complaint(tmp_path / "pipe")


def test_a_small_gz_cannot_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.csv.gz"
    path.write_bytes(gzip.compress(HEADER.encode() + b"0,5,5\n" * 1_000_000))
    assert "expected at most 1,000,000 bytes; pass --limit or --window" in complaint(path, max_bytes=1_000_000)
    assert len(read_trace(path, max_bytes=1_000_000, limit=7)) == 7


def test_wrong_options_are_said(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "0,5,5\n")
    assert "expected poisson:RATE" in complaint(path, arrivals="poisson:-1")
    assert "expected poisson:RATE" in complaint(path, arrivals="sometimes")
    assert "expected one of fail, skip" in complaint(path, on_bad_row="ignore")


def test_an_endless_session_name_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 2, "session": Infinity}\n')
    assert "column 'session': found inf, expected a name" in complaint(path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("0,5;100;5", r"column 'arrival': found '0,5', expected a time .*, written without a comma: 0\.5;"),
        ("1;1,024;5", r"column 'prompt': found '1,024', expected .*, written without a comma: 1\.024 or 1024;"),
        ("1;1,024,000;5", r"found '1,024,000', expected .*, written without separators: 1024000;"),
    ],
)
def test_decimal_commas_and_thousands_separators_are_refused_with_what_to_write(
    tmp_path: Path, row: str, words: str
) -> None:
    file = tmp_path / "t.csv"
    file.write_text(f"arrival;prompt;output\n{row}\n")
    with pytest.raises(TraceError, match=words):
        read_trace(file)
