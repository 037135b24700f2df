"""Real vLLM runs against their replay: read right, errors within what is claimed, nothing fitted on the run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from experiments.__main__ import build
from experiments.errors import ExperimentError
from experiments.vllm.fidelity import Bench, Variant, latencies_of, make_bench, over_time, statistics
from experiments.vllm.recorded_run import VllmRun, read_vllm_run
from experiments.vllm.steps_from_request_times import by_size, decode_seconds, known_stretches, level_us
from profiler.measurements.facts import VLLM_RUNS
from simulator import replay
from tests.shared_data import ORIGINALS, shared
from tests.simulator.constant_cost import ConstantCost, trace_of

RUN = VLLM_RUNS / "RTXPRO6000/Llama-3.1-8B"
PRESSED = VLLM_RUNS / "RTX4090/Llama-3.1-8B"
ORIGINAL = ORIGINALS / "traces/vllm_runs/RTXPRO6000/Llama-3.1-8B"
"""The first 40 requests of RUN, in its own form."""


@pytest.fixture(scope="module")
def bench() -> Bench:
    return make_bench(RUN)


def test_a_run_brings_the_settings_of_its_engine() -> None:
    pressed = read_vllm_run(PRESSED)
    settings = pressed.settings()
    assert settings["num_blocks"] == 2587  # one of 2588 is the null block
    assert (settings["max_num_seqs"], settings["token_budget"], settings["max_model_len"]) == (256, 2048, 32768)
    assert settings["prefix_caching"]
    assert settings["async_scheduling"]
    assert settings["free_order"] == "0.19"
    assert read_vllm_run(RUN).largest_graph == 256  # not recorded: twice max_num_seqs
    assert pressed.largest_graph == 512
    first = pressed.requests.iloc[0]
    assert pressed.latencies["ttft"][0] == pytest.approx(first["first_s"] - first["queued_s"])


def test_the_log_of_the_pressed_run_shows_that_prompts_share_blocks() -> None:
    second, blocks = read_vllm_run(PRESSED).overcommitted()
    assert 20 <= second <= 90
    assert 30 <= blocks <= 90
    assert read_vllm_run(RUN).overcommitted() == (0.0, 0)


def test_a_replay_meets_its_aims_on_a_run_that_it_never_saw(bench: Bench) -> None:
    result = bench.replay()
    errors = result.errors
    assert abs(errors["tpot"]["mean"]) < 0.01
    assert abs(errors["tpot"]["p50"]) < 0.015
    assert max(abs(errors["e2e"][name]) for name in ("mean", "p50")) < 0.02
    assert abs(errors["ttft"]["mean"]) < 0.05
    columns = over_time(result)
    assert np.abs(columns["running_simulated"] - columns["running_measured"]).mean() < 4
    assert result.costs["calibrated"]
    assert "perturbed" not in result.costs


def test_the_run_of_two_cards_is_met_without_peer_to_peer_and_says_that_it_was_calibrated_on() -> None:
    bench = make_bench(VLLM_RUNS / "RTXPRO6000/Qwen3-32B", p2p=False)
    assert "CALIBRATED on RTXPRO6000/Qwen3-32B" in bench.source
    assert bench.replay().missed == []


def test_the_ablation_switches_one_effect_at_a_time(bench: Bench) -> None:
    equal = bench.replay(Variant("equal", {"uneven_contexts": False}))
    assert equal.errors["tpot"]["mean"] < bench.replay().errors["tpot"]["mean"] - 0.02


def test_the_command_takes_any_folder_of_the_form_and_prints_json(tmp_path: Path) -> None:
    folder = tmp_path / "RTXPRO6000/mine"
    shutil.copytree(ORIGINAL, folder)
    lines = (folder / "requests.jsonl").read_text().splitlines()[:20]
    (folder / "requests.jsonl").write_text("\n".join(lines) + "\n")
    chosen = ["fidelity", "--run", str(folder), "--model", "llama-3.1-8b", "--tp", "1", "--no-ablation", "--json"]
    shown = CliRunner().invoke(build(), [*chosen, "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert report["costs"].startswith("shipped fit of rtxpro6000")
    assert set(report["errors"]["tpot"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert (tmp_path / "out/RTXPRO6000/mine/over_time.csv").exists()
    other = CliRunner().invoke(build(), [*chosen[:-1], "--model", "qwen3-32b", "--tp", "2"])
    assert other.exit_code == 0, other.output
    assert "the profile holds another model or degree of tensor parallelism" in other.stdout
    assert "all_reduce" in next(line for line in other.stdout.splitlines() if "never measured near" in line)


def test_an_original_run_is_the_carried_one() -> None:
    carried, original = read_vllm_run(RUN), read_vllm_run(ORIGINAL)
    columns = ["prompt", "output", "queued_s", "scheduled_s", "first_s", "last_s"]
    pd.testing.assert_frame_equal(carried.requests[columns].head(40), original.requests[columns], rtol=0, atol=1e-9)
    pd.testing.assert_frame_equal(carried.log, original.log)
    assert carried.settings() == original.settings()
    assert carried.trace().head(40).same_requests(original.trace())


@pytest.mark.originals
@pytest.mark.parametrize("name", ["RTX4090/Llama-3.1-8B", "RTXPRO6000/Llama-3.1-8B", "RTXPRO6000/Qwen3-32B"])
def test_whole_original_runs_are_the_carried_ones(name: str) -> None:
    original, carried = read_vllm_run(shared(f"traces/vllm_runs/{name}")), read_vllm_run(VLLM_RUNS / name)
    assert carried.settings() == original.settings()
    assert (carried.gpu, carried.largest_graph, carried.version) == (
        original.gpu,
        original.largest_graph,
        original.version,
    )
    assert all((carried.latencies[key] == values).all() for key, values in original.latencies.items())


def test_a_folder_that_is_no_run_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"meta.json: no such file; a run has requests.jsonl"):
        read_vllm_run(tmp_path)


def test_runs_of_other_forms_are_named_by_what_they_lack(tmp_path: Path) -> None:
    shutil.copytree(ORIGINAL, tmp_path / "somewhere/mine")
    with pytest.raises(ExperimentError, match="names no GPU, nor do the folders around it: name it with --gpu"):
        make_bench(tmp_path / "somewhere/mine")
    beside = make_bench(
        tmp_path / "somewhere/mine", profile=ORIGINALS / "profiles/llmservingsim/RTXPRO6000/Llama-3.1-8B"
    )
    assert beside.hardware.name == "rtxpro6000"
    path = tmp_path / "somewhere/mine/requests.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["first_token_ts"] = None
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    with pytest.raises(ExperimentError, match=r"requests.jsonl: row 3: first_token_ts: found none, expected a time"):
        read_vllm_run(tmp_path / "somewhere/mine")


def test_an_answer_of_one_token_has_no_time_per_output_token() -> None:
    requests = pd.DataFrame(
        {
            "queued_s": [0.0, 0.0, 1.0],
            "first_s": [1.0, 1.0, 1.5],
            "last_s": [1.0, 3.0, 1.6],
            "prompt": [100] * 3,
            "output": [1, 11, 2],
        }
    )
    measured = VllmRun(Path("."), {}, requests, pd.DataFrame()).latencies
    assert measured["tpot"] == pytest.approx([0.2, 0.1])
    assert measured["e2e"] == pytest.approx([1.0, 3.0, 0.6])
    run = replay(trace_of([(0.0, 10, 1), (0.0, 10, 11)]), cost=ConstantCost(10**8))
    simulated = latencies_of(run)
    assert len(simulated["ttft"]) == 2
    assert simulated["tpot"] == pytest.approx([0.1])
    assert math.isnan(statistics(simulated["tpot"][:0])["p50"])


def test_requests_with_one_first_step_tell_the_steps_between_their_ends() -> None:
    """Three of one step, with 10, 40 and 50 tokens: 30 and 10 steps of 10 and 8 ms between their ends, 40 in all."""
    requests = pd.DataFrame(
        {"first_s": [1.0] * 3, "last_s": [2.0, 2.3, 2.38], "prompt": [100] * 3, "output": [10, 40, 50]}
    )
    # The log's own count: 45 tokens of 1.5 requests on average, then 10 of one.
    log = pd.DataFrame({"t": [2.0, 2.3, 2.38], "running": [2, 1, 1], "gen_throughput": [9, 45, 10]})
    run = VllmRun(Path("."), {}, requests, log)
    (stretch,) = known_stretches(run, ConstantCost(device_ns=9_000_000))
    assert (stretch.steps, stretch.decodes) == (40, (2, 1))
    assert stretch.measured_s == pytest.approx(0.0095)
    assert stretch.error == pytest.approx(9 / 9.5 - 1)
    assert level_us([stretch]) == pytest.approx(500)
    # Had the last one been preempted for a second, nothing would be certain.
    late = VllmRun(Path("."), {}, requests.assign(last_s=[2.0, 2.3, 3.38]), log)
    assert known_stretches(late, ConstantCost(device_ns=9_000_000)) == []
    # Nor if the log counts 43 steps: one of the two was preempted earlier, so their tokens do not tell the steps.
    other = VllmRun(Path("."), {}, requests, log.assign(gen_throughput=[9, 48, 11]))
    assert known_stretches(other, ConstantCost(device_ns=9_000_000)) == []


def test_seconds_of_the_log_with_decodes_alone_tell_steps_by_batch_size() -> None:
    """Two requests, 200 tokens a second: steps of 10 ms. A second with a prompt, one after it, and one that admits a
    preempted request tell nothing."""
    requests = pd.DataFrame(
        {"queued_s": [0.0, 0.0], "first_s": [0.2, 0.2], "last_s": [8.0, 9.0], "prompt": [100] * 2, "output": [700, 800]}
    )
    log = pd.DataFrame(
        {
            "t": [1.0, 2.0, 3.0, 4.0, 5.0],
            "prompt_throughput": [200, 0, 0, 0, 0],
            "gen_throughput": [100, 180, 200, 210, 200],
            "running": [2, 2, 2, 2, 2],
            "waiting": [1, 1, 1, 1, 0],
        }
    )
    seconds = decode_seconds(VllmRun(Path("."), {}, requests, log), ConstantCost(device_ns=9_000_000))
    assert [one.t for one in seconds] == [3.0, 4.0]
    assert [one.measured_s for one in seconds] == pytest.approx([0.01, 2 / 210])
    ((least, most, count, ms, error),) = by_size(seconds)
    assert (least, most, count) == (1, 8, 2)
    assert ms == pytest.approx((10 + 2000 / 210) / 2)
    assert error == pytest.approx((0.9 - 1 + 0.945 - 1) / 2)
