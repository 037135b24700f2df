"""Measured runs of whole engines: the split between fitting and judging, and that the tables say what was measured."""

import csv

import pytest

from profiler.measurements.engine_runs import closed_loop_runs, corrected, corrections, half_of, rate_runs
from tests.shared_data import shared


def test_the_half_of_a_row_follows_from_its_id_and_copies_share_it() -> None:
    runs = closed_loop_runs()
    by_id = {run.id: run for run in runs}
    assert len(by_id) == 631
    assert sum(bool(run.same_as) for run in runs) == 45
    for run in runs:
        assert run.half == half_of(run.same_as or run.id)
        if run.same_as:
            first = by_id[run.same_as]
            assert (run.ttft_ms, run.tpot_ms, run.shortest_share) == (
                first.ttft_ms,
                first.tpot_ms,
                first.shortest_share,
            )
    assert all(run.half == half_of(run.id) for run in rate_runs())


def test_halves_are_those_of_sha_256() -> None:
    # sha256("") begins with e3, sha256("abc") with ba: odd and even.
    assert half_of("") == "b"
    assert half_of("abc") == "a"


def test_e2e_of_a_closed_loop_is_ttft_and_the_gaps_after_it() -> None:
    run = next(run for run in closed_loop_runs() if run.id == "minimaxm2_5_h200_vllm_fp8_agg_8192x1024_c8_cfg606")
    assert abs(run.e2e_ms - (415.8945 + 15.60524 * 1023)) < 1e-6


def test_labels_that_cannot_be_right_are_corrected_by_a_table_with_reasons() -> None:
    runs = closed_loop_runs()
    for one in corrections():
        assert len(one.reason) > 40
        assert any(run.doubt.startswith(one.doubt) and str(getattr(run, one.field)) == one.found for run in runs)
    cut = [run for run in runs if run.model == "minimax-m2.5" and run.tp == 8]
    assert len(cut) == 54
    for run in cut:
        taken = corrected(run)
        assert (taken.experts_tp, taken.experts_ep, taken.tp) == (1, 8, 8)
        assert (taken.ttft_ms, taken.tpot_ms, taken.half) == (run.ttft_ms, run.tpot_ms, run.half)
    assert {corrected(run).tp for run in runs if run.model == "deepseek-v3"} == {1, 8}


@pytest.mark.originals
def test_tables_repeat_what_their_source_measured() -> None:
    with shared("engine_runs/aiconfigurator_silicon_sample_part.csv").open(newline="") as lines:
        source = {row["id"]: row for row in csv.DictReader(lines)}
    for run in closed_loop_runs():
        row = source.pop(run.id)
        assert abs(run.ttft_ms - float(row["silicon_ttft_ms"])) < 1e-4
        assert abs(run.tpot_ms - float(row["silicon_tpot_ms"])) < 1e-5
        assert [run.prompt_tokens, run.output_tokens] == [int(row["isl"]), int(row["osl"])]
        assert [run.concurrency, run.tp] == [int(float(row["batch_size"])), int(float(row["tp_size"]))]
        assert (run.engine, run.version) == (row["backend"], row["backend_version"])
    assert not source
