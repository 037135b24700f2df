"""Intervals held against the truth: which structures are left out, and what is said about them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from experiments.__main__ import build
from experiments.coverage.of_intervals import EVERYTHING, Covered, by_axis, by_statistic, left_out_halves, share_held
from experiments.errors import ExperimentError
from profiler.measurements.facts import carried_profile
from profiler.measurements.profile import Profile, make_profile, write_profile


def gemms_and_decodes() -> Profile:
    rows = [128, 256, 1024, 4096, 8192, 16384]
    gemms = [{"operator": "qkv", "rows": count, "n": 64, "k": 64} for count in rows]
    attention = [
        {
            "operator": "attention",
            "decodes": decodes,
            "decode_context_total": decodes * context,
            "decode_context_max": context,
            "chunks": chunk,
        }
        for decodes in (1, 20, 40, 80)
        for context in (1024, 4096, 16384, 32768, 65536, 131072)
        for chunk in ("", "64:0", "512:0", "2048:0", "4096:0")
    ]
    return make_profile(pd.DataFrame(gemms + attention).assign(device="a gpu", median_s=1e-3), {})


def test_long_contexts_are_left_out_too_but_gemms_only_to_the_rows_that_batches_have() -> None:
    profile = gemms_and_decodes()
    left_out: dict[str, set[float]] = {"rows": set(), "context": set()}
    for axis, _, part in left_out_halves(profile):
        if axis == "rows":
            left_out[axis] |= set(profile.rows_of("qkv")["rows"]) - set(part.rows_of("qkv")["rows"])
        if axis == "context":
            both = [
                p.rows_of("attention").pipe(lambda t: t["decode_context_total"] / t["decodes"]) for p in (profile, part)
            ]
            left_out[axis] |= set(both[0]) - set(both[1])
    assert left_out == {"rows": {256, 1024, 4096, 8192}, "context": {4096, 16384, 32768, 65536}}


def test_an_even_number_of_statistics_has_its_median_between_the_middle_two() -> None:
    found = [
        Covered("rows", 0, "a trace", "e2e_s_mean", 1 - w, 1 + w, 1.0, truth) for w, truth in ((0.1, 1.0), (0.3, 2.0))
    ]
    row = by_axis(found)[0]
    assert (row.held, row.count) == (1, 2)
    assert (row.mean_width, row.median_error, row.worst_error) == pytest.approx((0.2, 0.25, 0.5))


def test_halves_are_what_is_counted_and_not_their_statistics() -> None:
    """Two halves, of which one holds all its three statistics and the other none: one answer of two, give or take a half."""
    found = [
        Covered("rows", half, "a trace", f"{name}_s_mean", 0.9, 1.1, 1.0, 1.0 + half)
        for half in (0, 1)
        for name in ("ttft", "tpot", "e2e")
    ]
    assert share_held(found) == pytest.approx((0.5, 0.5))
    assert [(part.name, part.held, part.count) for part in by_statistic(found)] == [
        ("ttft", 1, 2),
        ("tpot", 1, 2),
        ("e2e", 1, 2),
    ]


def test_everything_at_once_leaves_out_what_each_axis_does() -> None:
    profile = gemms_and_decodes()
    kept = [(axis, half, len(part.table)) for axis, half, part in left_out_halves(profile)]
    assert {axis for axis, _, _ in kept} == {"rows", "tokens", "decodes", "context", EVERYTHING}
    for half in (0, 1):
        fewest = min(count for _, one, count in kept if one == half)
        assert (EVERYTHING, half, fewest) in kept
        assert sum(count == fewest for _, one, count in kept if one == half) == 1


@pytest.mark.parametrize(
    "option", [("--runs", "1"), ("--limit", "-3"), ("--rate-scale", "nan"), ("--profile", "no-such-card")]
)
def test_an_option_that_makes_no_sense_is_refused_before_anything_is_fitted(option: tuple[str, str]) -> None:
    done = CliRunner().invoke(build(), ["coverage", "--trace", "examples/trace.csv", *option])
    assert isinstance(done.exception, ExperimentError)
    for text in option:
        assert text in str(done.exception)


@pytest.mark.slow
def test_the_command_says_of_every_axis_and_half_what_held(tmp_path: Path) -> None:
    whole = carried_profile("rtx4090_llama-3.1-8b")
    table = whole.table
    chunks = [f"{tokens}:{prefix}" for tokens in (16, 64, 256, 1024) for prefix in (0, 512, 2048, 8192)]
    grid = table["chunks"].isin(["", *chunks]) & table["decodes"].isin([0, 1, 4, 16, 64, 128])
    card = tmp_path / "card.parquet"
    write_profile(
        Profile(table[(table["operator"] != "attention") | grid].reset_index(drop=True), whole.provenance), card
    )
    options = [
        "coverage",
        "--profile",
        str(card),
        "--trace",
        "examples/trace.csv",
        "--limit",
        "6",
        "--runs",
        "3",
        "--json",
    ]
    done = CliRunner().invoke(build(), options)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)[str(card)]
    halves = {(row["axis"], row["half"]) for row in rows}
    assert halves == {(a, h) for a in ("rows", "tokens", "prefix", "decodes", "context", EVERYTHING) for h in (0, 1)}
    assert len(rows) == 9 * len(halves)
    assert all(row["inside"] == (row["low"] <= row["truth"] <= row["high"]) for row in rows)
    assert {row["workload"] for row in rows} == {Path("examples/trace.csv").stem}
    assert sum(row["high"] > row["low"] for row in rows) > len(rows) / 2
