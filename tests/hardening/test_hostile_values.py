"""Values that are possible to write and impossible to mean: in config files, on command lines, in traces."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tests.hardening.command_line import assert_refused, assert_sound, needs_posix, run

TRACE = "arrival_s,prompt_tokens,output_tokens\n0,9,3\n1,9,3\n"
WRONG = (True, -1, 10**30, 1e300, -0.5, "x", "a\0b", [1, "x"], {"x": 1}, [[[]]])
SETTINGS = (
    "trace_format",
    "arrivals",
    "on_bad_row",
    "on_unsorted",
    "sessions",
    "spread_ties",
    "timeout",
    "window",
    "trace",
)


def _fields() -> list[str]:
    from simulator.config import ReplayConfig

    return [entry.name for entry in fields(ReplayConfig)] + list(SETTINGS)


@pytest.mark.parametrize("name", _fields())
def test_every_setting_may_hold_anything_in_a_config_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    for value in WRONG:
        (tmp_path / "c.json").write_text(json.dumps({name: value}))
        try:
            assert_sound(run("simulator", "replay", tmp_path / "t.csv", "--config", tmp_path / "c.json"))
        except Exception as error:
            raise AssertionError(f"{name} = {value!r}: {type(error).__name__}: {error}") from error


def test_every_setting_of_a_live_run_may_hold_anything() -> None:
    from executor.config import LiveConfig
    from executor.errors import ExecutorError

    for entry in fields(LiveConfig):
        for value in WRONG:
            try:
                LiveConfig.from_dict({entry.name: value})
            except ExecutorError as error:
                if "\n" in str(error):
                    raise AssertionError(f"{entry.name} = {value!r}: {error}") from error


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulator", "replay", "--replicas", "1000000000000"),
        ("simulator", "replay", "--runs", "1000000000000"),
        ("simulator", "replay", "--num-blocks", "1000000000000000000000000"),
        ("simulator", "replay", "--kv-store-gib", "1e308"),
        ("simulator", "replay", "--trouble-from", "nan"),
        ("simulator", "replay", "--max-wait", "-inf"),
        ("simulator", "replay", "--rate-scale", "nan"),
        ("simulator", "replay", "--watermark", "nan"),
        ("simulator", "replay", "--timeout", "inf"),
        ("simulator", "replay", "--window", "nan:1"),
        ("simulator", "replay", "--slo", "ttft_p99=nan"),
        ("simulator", "replay", "--chunk-size", "0"),
        ("simulator", "compare", "--seeds", "1000000000000"),
        ("workloads", "describe", "--rate-scale", "inf"),
        ("workloads", "describe", "--history", "nan"),
        ("workloads", "describe", "--arrivals", "poisson:nan"),
        ("workloads", "describe", "--arrivals", "gamma:1e308,1e308"),
    ],
)
def test_a_number_without_sense_is_refused_where_it_is_given(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    assert_refused(run(*arguments[:2], tmp_path / "t.csv", *arguments[2:]))


@pytest.mark.parametrize(
    "cells",
    [
        "0,1000000000000,1",
        "0,1,1000000000000",
        "1e18,1,1",
        "-1,1,1",
        "nan,1,1",
        "inf,1,1",
        "0,nan,1",
        "0,inf,1",
        "0,-1,1",
        "0,0,1",
        "0,1,0",
        "0,1.5,1",
        "0,1,1e400",
        "0,0x10,1",
        "0,１２x,1",
        "0,1_000_0x,1",
        ",1,1",
        "0,,1",
        "true,1,1",
        "0,1",
    ],
)
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_row_without_sense_is_named_with_its_row(cells: str, form: str, tmp_path: Path) -> None:
    names = ("arrival_s", "prompt_tokens", "output_tokens")
    file = tmp_path / f"t.{form}"
    if form == "csv":
        file.write_text(",".join(names) + "\n0,5,5\n" + cells + "\n")
    else:
        row = [
            f'"{name}": {cell if _is_number(cell) else json.dumps(cell)}' for name, cell in zip(names, cells.split(","))
        ]
        file.write_text('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5}\n{' + ", ".join(row) + "}\n")
    line = assert_refused(run("simulator", "replay", file))
    assert "row 2" in line or "line 2" in line or "line 3" in line


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


@needs_posix
def test_a_gigabyte_without_a_line_end_is_refused_in_little_memory(tmp_path: Path) -> None:
    """Each under an address space that a whole read would burst."""
    huge = tmp_path / "huge.csv"
    with huge.open("wb") as file:
        file.truncate(1 << 30)
    line = tmp_path / "line.csv"
    with line.open("wb") as file:
        file.write(b"arrival_s,prompt_tokens,output_tokens" + b"1" * (1 << 17))
        file.truncate(1 << 30)
    bomb = tmp_path / "bomb.csv.gz"
    bomb.write_bytes(gzip.compress(b"1" * (1 << 24)) * 70)  # unpacks to more than a gigabyte
    code = (
        "import resource, sys; import workloads.__main__ as w; import workloads.reading.reader;"
        "resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv.pop(1)),) * 2); w.main()"
    )
    for file, most in ((huge, 1 << 30), (line, 1 << 30), (bomb, 4 << 30)):
        words = [sys.executable, "-c", code, str(most), "describe", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, (file.name, done.stderr[-500:])
        assert done.stderr.startswith(f"error: {file}"), done.stderr[-300:]


def test_a_small_parquet_file_that_stands_for_far_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text, ten thousand times by its number in a dictionary: 30 kB on disk, 160 MB as texts, here above the limit."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    import profiler.measurements.bounded_parquet
    from profiler.errors import ProfileError
    from profiler.measurements.bounded_parquet import read_parquet
    from workloads import TraceError, read_trace

    monkeypatch.setattr(profiler.measurements.bounded_parquet, "MAX_BYTES", 1 << 26)
    rows = 10_000
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, dtype=np.int32)), pa.array(["x" * (1 << 14)]))
    columns = {name: np.ones(rows, dtype=np.int64) for name in ("arrival_s", "prompt_tokens", "output_tokens")}
    pq.write_table(pa.table({**columns, "session": texts}), tmp_path / "bomb.parquet", store_schema=False)
    assert (tmp_path / "bomb.parquet").stat().st_size < 200_000
    with pytest.raises(TraceError, match="expected a name of at most 1,000 characters"):
        read_trace(tmp_path / "bomb.parquet")
    with pytest.raises(ProfileError, match="when unpacked"):
        read_parquet(tmp_path / "bomb.parquet")


def test_more_rows_than_memory_has_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workloads import TraceError, generate, read_trace, write_trace
    from workloads.reading import columns

    trace = generate(requests=60, seed=1)
    monkeypatch.setattr(columns, "MAX_ROWS", 50)
    for name in ("t.csv", "t.jsonl", "t.parquet", "t.csv.gz"):
        with pytest.raises(TraceError, match=r"found more than 50 requests, expected at most that; pass --limit"):
            read_trace(write_trace(trace, tmp_path / name))
        assert len(read_trace(tmp_path / name, limit=20)) == 20


@pytest.mark.parametrize(
    ("fact", "said"), [("memory_bandwidth = 1e-308", "beyond 2^63"), ("memory_bytes = 1e308", "memory_bytes")]
)
def test_a_gpu_that_no_table_could_hold_is_one_line(fact: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "gpu.toml").write_text(f'base = "h100"\n{fact}\n')
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,40,3\n")
    assert said in assert_refused(run("simulator", "replay", tmp_path / "t.csv", "--gpu", tmp_path / "gpu.toml"))
