"""Existing runs as the reference: our own folders with their batches, other engines' logs with their statistics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from executor.config import LiveConfig
from executor.serving.replay import LiveRun, replay_live
from experiments.errors import ExperimentError
from experiments.validation.existing_runs import config_of_run, trace_of_run, validate_against
from experiments.validation.other_engines import read_other_run
from experiments.validation.pages.interactive_report import write_explorable_against
from metrics import RunTables
from metrics.run_folder.tables import TABLES
from workloads import Trace

BENCH = {
    "request_rate": "inf",
    "input_lens": [100, 50, 7],
    "output_lens": [3, 1, 0],
    "ttfts": [0.5, 0.25, 0.0],
    "itls": [[0.1, 0.3], [], []],
    "errors": ["", "", "timed out"],
}
LOG = [
    {
        "input_toks": 20,
        "output_toks": 5,
        "arrival_time": 1002.5,
        "queued_ts": 52.5,
        "first_token_ts": 53.0,
        "last_token_ts": 55.0,
    },
    {
        "input_toks": 10,
        "output_toks": 1,
        "arrival_time": 1000.0,
        "queued_ts": 50.0,
        "first_token_ts": 50.25,
        "last_token_ts": 50.25,
    },
]


def written(path: Path, content: Any, name: str) -> Path:
    file = path / name
    text = "\n".join(json.dumps(row) for row in content) if name.endswith("l") else json.dumps(content)
    file.write_text(text)
    return file


def test_a_benchmarks_result_becomes_requests_and_latencies(tmp_path: Path) -> None:
    run = read_other_run(written(tmp_path, BENCH, "bench.json"))
    assert run.trace.prompt_tokens.tolist() == [100, 50]  # the one that failed got no answer
    assert run.trace.arrival_ns.tolist() == [0, 0]
    assert run.summary()["tpot_s_mean"] == pytest.approx(0.2)
    assert run.summary()["e2e_s_max"] == pytest.approx(0.9)
    assert run.summary()["output_tokens_per_s"] == pytest.approx(4 / 0.9)


def test_a_request_log_is_sorted_by_arrival(tmp_path: Path) -> None:
    run = read_other_run(written(tmp_path, LOG, "requests.jsonl"))
    assert run.trace.arrival_ns.tolist() == [0, 2_500_000_000]
    assert run.ttft_s.tolist() == [0.25, 0.5]
    assert np.isnan(run.tpot_s[0])
    assert run.tpot_s[1] == 0.5


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ({"ttfts": []}, "bench.json", "no list 'input_lens'; run the benchmark with --save-detailed"),
        ({**BENCH, "ttfts": [1]}, "bench.json", "unequal length"),
        ({**BENCH, "request_rate": 3.0}, "bench.json", "no start_times"),
        ({**BENCH, "output_lens": [0, 0, 0]}, "bench.json", "no request that got an answer"),
        ([1], "bench.json", "JSON list"),
        ([{"input_toks": 1}], "requests.jsonl", "line 1: found no output_toks"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, content: Any, name: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        read_other_run(written(tmp_path, content, name))


def test_another_engines_log_is_simulated_and_compared(tmp_path: Path) -> None:
    file = written(tmp_path, LOG, "requests.jsonl")
    result = validate_against(
        [file], cost_model="roofline", gpu="h100", model="llama-3.1-8b", options={"num_blocks": 100}, say=lambda _: None
    )
    assert result.basis["cost_basis"] == "uncalibrated: specifications alone"
    assert {row.statistic for row in result.comparisons} >= {"ttft_s_mean", "tpot_s_p50", "e2e_s_p90"}
    assert result.agreements == {}
    with pytest.raises(ExperimentError, match="give --model and --gpu"):
        validate_against([file], cost_model="auto", gpu=None, model="x", options={}, say=lambda _: None)


ARRIVALS = np.array([0, 1, 2, 30]) * 1_000_000
PROMPTS, OUTPUTS = np.array([90, 20, 200, 9]), np.array([6, 12, 3, 8])
FOUR = Trace("four", ARRIVALS, PROMPTS, OUTPUTS, OUTPUTS)


def served(**settings: Any) -> LiveRun:
    return replay_live(FOUR, LiveConfig(model="nano", policy="vllm_v1", token_budget=64, **settings))


def told(run: LiveRun, requests: pa.Table | None = None, **config: Any) -> RunTables:
    """The same run with other settings in its config, or another table of requests."""
    live = {**run.config["live"], **{name: value for name, value in config.items() if name not in run.config}}
    tables = {name: run.tables.table(name) for name in TABLES}
    tables["requests"] = run.tables.requests if requests is None else requests
    return RunTables(tables, {**run.config, **config, "live": live}, run.summary)


def test_every_setting_of_a_live_run_that_changes_batches_is_simulated_or_refused(tmp_path: Path) -> None:
    run = served()
    same = config_of_run(
        told(run, chase_chunks=True, prefix_caching=True, layer_split=[3, 1], pp=2, warmup="1"), tmp_path
    )
    assert (same.chase_chunks, same.prefix_caching, same.layer_split, same.pp) == (True, True, (3, 1), 2)
    assert same.warmup == "1"
    assert config_of_run(told(run, ahead=True), tmp_path).knobs["async_scheduling"]
    for settings, message in [
        ({"preemption": "swap"}, "--preemption swap, expected one without"),
        ({"ladder": "preempt"}, "--ladder preempt, expected one without"),
        ({"kv_compression": "kivi4"}, "--kv-compression kivi4, expected one without"),
        ({"ahead": True, "knobs": {}, "policy": "orca"}, "of orca with --ahead"),
    ]:
        with pytest.raises(ExperimentError, match=message):
            config_of_run(told(run, **settings), tmp_path)
    column = run.tables.requests.schema.get_field_index("cached_tokens")
    shared = run.tables.requests.set_column(column, "cached_tokens", pa.array([0, 16, 0, 0], pa.int64()))
    with pytest.raises(ExperimentError, match="requests shared prefixes"):
        config_of_run(told(run, shared, prefix_caching=True), tmp_path)


def test_repeats_of_a_run_have_all_settings_but_the_seed_in_common(tmp_path: Path) -> None:
    one, two, other = served(), served(seed=1), served(prefix_caching=True)
    folders = [run.write(tmp_path / name) for run, name in ((one, "one"), (two, "two"), (other, "other"))]
    options: dict[str, Any] = {"cost_model": "roofline", "gpu": "h100", "model": None, "options": {}}
    assert len(validate_against(folders[:2], **options, say=lambda _: None).agreements) == 2
    with pytest.raises(ExperimentError, match="other: found a run of another world, policy, engine or trace"):
        validate_against([folders[0], folders[2]], **options, say=lambda _: None)


def test_a_run_with_a_prefix_cache_that_found_nothing_is_planned_again(tmp_path: Path) -> None:
    """Requests that are preempted find their own blocks again: the cache must be simulated for that alone."""
    run = replay_live(
        Trace("pressed", np.zeros(4, int), np.full(4, 60), np.full(4, 60), np.full(4, 60)),
        LiveConfig(model="nano", policy="vllm_v1", prefix_caching=True, num_blocks=20),
    )
    assert run.summary["preemptions"] > 0
    folder = run.write(tmp_path / "live")
    result = validate_against([folder], cost_model="roofline", gpu="h100", model=None, options={}, say=lambda _: None)
    fed = result.fed["live"]
    assert result.agreements["live"].exact
    assert not isinstance(fed, str)
    assert fed.exact


def test_a_run_folder_is_planned_again_batch_by_batch(tmp_path: Path) -> None:
    run = served()
    folder = run.write(tmp_path / "live")
    again = trace_of_run(run.tables)
    assert again.same_requests(
        replace(FOUR, priority=np.zeros(4), session=[None] * 4, slo=[None] * 4, tenant=[None] * 4, program=[None] * 4)
    )
    result = validate_against([folder], cost_model="roofline", gpu="h100", model=None, options={}, say=lambda _: None)
    assert result.agreements["live"].exact
    fed = result.fed["live"]
    assert not isinstance(fed, str)
    assert fed.exact
    assert result.iterations is not None
    assert len(result.iterations.measured_s) == fed.iterations
    explored = write_explorable_against(tmp_path / "explore.html", result).read_text()
    assert '"label": "predicted"' in explored or '"label":"predicted"' in explored
