"""Tables for people, and the command that prints them."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from metrics import summarise, write_run
from metrics.drawing.text_tables import comparison_table, differences, format_value
from tests.hardening.command_line import run
from tests.metrics.sample_runs import three_requests


@pytest.fixture
def run_folder(tmp_path):
    run = three_requests()
    return write_run(tmp_path / "chunked", run, {"policy": "chunked"}, summarise(run))


def call(*arguments):
    return run("metrics", *arguments)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("ttft_s_p99", 1.2345, "1.23 s"),
        ("tbt_s_mean", 0.0213, "21.3 ms"),
        ("host_s_total", 0.0, "0 s"),
        ("iteration_s_p50", 0.0000071, "7.1 µs"),
        ("duration_s", 3600.4, "3,600 s"),
        ("output_tokens_per_s", 3216.4, "3,216"),
        ("slo_attainment", 0.123, "12.3%"),
        ("kv_use_max", 1.0, "100.0%"),
        ("finished", 19366, "19,366"),
        ("tpot_s_mean", float("nan"), "-"),
        ("slo_met", True, "True"),
    ],
)
def test_values_are_printed_with_their_units(key, value, text) -> None:
    assert format_value(key, value) == text


def test_a_difference_is_relative_to_the_first_run() -> None:
    found = differences({"ttft_s_p50": 2.0, "policy": "a"}, {"ttft_s_p50": 1.5, "policy": "b", "stalls": 3})
    assert found["ttft_s_p50"] == {"first": 2.0, "second": 1.5, "relative": -0.25}
    assert found["policy"]["relative"] is None
    assert found["stalls"] == {"first": None, "second": 3, "relative": None}


@pytest.mark.parametrize("width", [80, 120, 160])
def test_a_comparison_of_many_policies_fits_the_terminal(width) -> None:
    summary = summarise(three_requests(), slo="ttft_p99=2") | {
        "calibrated": False,
        "cost_basis": "uncalibrated: by hand; all",
    }
    summaries = {name: dict(summary) for name in ("prefill_priority", "decode_maximal", "vllm_v1")}
    summaries["vllm_v1"]["ttft_s_p50"] = 1.5
    console = Console(width=width, record=True, file=StringIO())
    console.print(comparison_table(summaries, max_width=width))
    text = console.export_text()
    assert "…" not in text
    assert "decode_maximal *" in text
    assert "1.5 s" in text
    assert "* uncalibrated: by hand" in text
    assert ("3 of 4" in text) == (width > 80)


def test_prefix_hits_stand_in_the_table_where_there_are_any() -> None:
    summary = {"finished": 9, "ttft_s_p50": 0.5, "cached_share": 0.25}
    headings = [str(column.header) for column in comparison_table({"a": summary, "b": summary}, max_width=200).columns]
    assert "prefix\nhits" in headings
    none = comparison_table({"a": {**summary, "cached_share": 0.0}}, max_width=200)
    assert "prefix\nhits" not in [str(column.header) for column in none.columns]


def test_show_prints_the_summary_of_the_folder_or_anew(run_folder) -> None:
    printed = json.loads(call("show", run_folder, "--json").out)
    assert printed == json.loads((run_folder / "summary.json").read_text())
    anew = json.loads(call("show", run_folder, "--json", "--slo", "ttft_p99=2", "--warmup", "1").out)
    assert (anew["slo"], anew["measured"]) == ("ttft_p99=2", 3)
    text = call("show", run_folder).out
    assert "scheduling_delay" in text
    assert "requests that could never run" in text


def test_diff_of_a_run_with_itself_is_nothing(run_folder) -> None:
    found = json.loads(call("diff", run_folder, run_folder, "--json").out)
    assert found["ttft_s_mean"]["relative"] == 0
    assert {row["relative"] for row in found.values()} == {0}
    assert "ttft_s_mean" in call("diff", run_folder, run_folder).out


def test_token_times_of_a_preempted_request_show_its_wait(run_folder) -> None:
    printed = json.loads(call("token-times", run_folder, "--request", 1, "--json").out)
    assert printed == {"request": 1, "arrival_s": 1.0, "time_s": [3.0, 4.0, 8.0], "gap_s": [2.0, 1.0, 4.0]}
    assert "2 s (TTFT)" in call("token-times", run_folder, "--request", 1).out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("token-times", "RUN", "--request", "99"), "found no request 99, expected one of its 4 (0 to 3)"),
        (("show", "RUN", "--slo", "fast"), "SLO: found 'fast'"),
        (("show", "RUN", "--warmup", "soon"), "warm-up: found 'soon'"),
        (("show", "nowhere"), "found nothing, expected a run folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(run_folder, arguments, complaint) -> None:
    result = call(*(run_folder if argument == "RUN" else argument for argument in arguments))
    assert result.code == 2
    assert result.out == ""
    assert complaint in result.err
    assert result.err.count("\n") == 1


def test_bubbles_and_timeline_of_a_run_folder(run_folder) -> None:
    printed = json.loads(call("bubbles", run_folder, "--json").out)["chunked"]
    assert printed["bubble_share"] == 1 / 8
    assert printed["stages"][-1] == {
        "stage": "all",
        "in_flight_s": 8.0,
        "busy_s": 7.0,
        "idle_s": 1.0,
        "pb1_s": 0.0,
        "pb2_s": 0.0,
        "pb3_s": 0.0,
        "stage_split_s": 0.0,
        "fill_drain_s": 0.0,
        "transfer_s": 0.0,
        "host_s": 1.0,
        "starvation_s": 0.0,
        "rank_s": 0.0,
    }
    assert printed["request_bubble_s"]["max"] == 0.5
    assert "12.50%" in call("bubbles", run_folder).out
    assert call("timeline", run_folder, "--request", 1).out.strip() == str(run_folder / "timeline.json")
    assert json.loads((run_folder / "timeline.json").read_text())["traceEvents"]
    assert call("timeline", run_folder, "--window", "9").code == 2
