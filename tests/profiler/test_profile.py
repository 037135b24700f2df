"""The profile table: one reader, one writer, errors that name row and column."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.errors import ProfileError
from profiler.measurements.profile import chunk_text, make_profile, parse_chunks, read_profile, write_profile
from profiler.operators.fitting.device_fit import fit_device
from profiler.specs.hardware import load_hardware

ROWS = pd.DataFrame(
    {
        "device": "NVIDIA H200",
        "model": "llama-3.1-8b",
        "operator": ["qkv", "attention", "iteration"],
        "rows": [128, 131, 640],
        "n": [6144, 0, 0],
        "k": [4096, 0, 0],
        "chunks": ["", "128:0", "512:0 64:1024x2"],
        "decodes": [0, 3, 0],
        "decode_context_total": [0, 300, 0],
        "decode_context_max": [0, 120, 0],
        "median_s": [20e-6, 9e-6, 31e-3],
        "min_s": [19e-6, 9e-6, 30e-3],
    }
)


def test_a_fit_asks_for_the_width_of_every_operator_of_rows() -> None:
    rows = ROWS[ROWS["operator"] != "attention"].assign(operator=["norm", "iteration"], n=0)
    with pytest.raises(ProfileError, match="operator norm: n: found less than 1"):
        fit_device(make_profile(rows, {}), load_hardware("h200"))


@pytest.mark.parametrize("name", ["p.parquet", "p.csv"])
def test_a_profile_reads_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    profile = make_profile(ROWS, {"source": "test", "licence": "none"})
    write_profile(profile, tmp_path / name)
    again = read_profile(tmp_path / name)
    pd.testing.assert_frame_equal(again.table, profile.table)
    assert again.provenance == {"source": "test", "licence": "none"}
    assert [path.name for path in tmp_path.iterdir()] == [name]


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 99999)), max_size=6))
def test_chunks_are_never_collapsed_into_a_sum(chunks: list[tuple[int, int]]) -> None:
    assert parse_chunks(chunk_text(chunks)) == tuple(chunks)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("rows", -1, "row 2, rows: found -1, expected a whole number"),
        ("median_s", 0.0, "row 2, median_s"),
        ("median_s", float("nan"), "row 2, median_s"),
        ("min_s", 1.0, "row 2, min_s"),
        ("operator", "softmax", "row 2, operator: found 'softmax', expected one of qkv"),
        ("chunks", "128", "row 2: chunks: found '128', expected tokens:prefix"),
    ],
)
def test_a_bad_cell_is_named_by_row_and_column(column: str, value: object, message: str) -> None:
    table = ROWS.astype({column: object})
    table.loc[1, column] = value
    with pytest.raises(ProfileError, match=message.replace("(", r"\(")):
        make_profile(table, {})


def test_what_is_no_profile_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "p.csv").write_text("device,time\nx,1\n")
    for name in ("p.parquet", "p.csv", "missing.csv", "p.json"):
        with pytest.raises(ProfileError) as error:
            read_profile(tmp_path / name)
        assert "\n" not in str(error.value)
        assert name in str(error.value)


def test_a_slower_device_is_a_scaled_profile() -> None:
    profile = make_profile(ROWS, {}).scaled(2.0)
    assert profile.table["median_s"].tolist() == [40e-6, 18e-6, 62e-3]
    assert profile.provenance["scaled"] == 2.0
