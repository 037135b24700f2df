"""What a command would have ignored or mixed up in silence is refused in one line, before anything runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from experiments.capacity.command import _spoken_size
from experiments.errors import ExperimentError
from experiments.papers.attention_ffn import frontiers
from experiments.running.task_runners import WorkerProcesses
from experiments.sweeps.axes import read_sweep
from experiments.sweeps.command import _costs
from experiments.validation.comparing.settings import Settings, claim_folder, load_name
from experiments.validation.comparing.statistics import aim_of
from metrics.run_folder.folder import RUN_MARKER, json_ready
from profiler import ProfileError
from simulator import SimulationError
from tests.hardening.command_line import run


def test_a_policy_or_load_named_twice_would_be_served_into_one_folder() -> None:
    with pytest.raises(ExperimentError, match="--policies: found one twice"):
        Settings(trace="t.csv", policies=("chunked", "chunked"))
    with pytest.raises(ExperimentError, match="--load: found one twice"):
        Settings(trace="t.csv", policies=("chunked",), loads=(0.6, 0.6))


def test_loads_that_files_and_reports_could_not_tell_apart_are_refused() -> None:
    assert [load_name(load) for load in (0.6, 0.601, 0.07, 1.5)] == ["60%", "60.1%", "7%", "150%"]
    with pytest.raises(ExperimentError, match="--load: found two that agree"):
        Settings(trace="t.csv", policies=("chunked",), loads=(0.6, 0.6000000001))


def test_a_folder_made_with_another_profile_is_refused(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one.parquet", "same.parquet", "other.parquet"))
    for file, content in ((one, b"1"), (same, b"1"), (other, b"2")):
        file.write_bytes(content)
    settings, out = Settings(trace="t.csv", policies=("chunked",)), tmp_path / "out"
    claim_folder(out, settings, one)
    claim_folder(out, settings, same)
    for profile in (other, None):
        with pytest.raises(ExperimentError, match="another profile"):
            claim_folder(out, settings, profile)
    (out / "settings.json").write_text("[1]")
    with pytest.raises(ExperimentError, match=r"settings\.json: found something else"):
        claim_folder(out, settings, one)


def test_the_time_to_the_first_token_has_no_aim_near_saturation() -> None:
    assert aim_of("ttft_s_mean", 0.6) == 0.05
    assert aim_of("ttft_s_mean", 0.9) is None
    assert aim_of("tpot_s_mean", 0.9) == 0.03


def test_options_that_a_comparison_would_ignore_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({RUN_MARKER: 1}))
    for arguments, message in (
        (["--against", folder, "--tp", 2], "--tp: a run folder says itself how it ran"),
        (["--against", tmp_path / "log.jsonl", "--repeats", 2], "--repeats: nothing is run with --against"),
        ([tmp_path / "trace.csv", "--gpu", "h100"], "--gpu: goes with --against alone"),
    ):
        ended = run("experiments", "validate", *arguments)
        assert ended.code == 2
        assert message in ended.err


def test_a_closed_engine_says_so_and_does_not_wait_for_ever() -> None:
    engine = WorkerProcesses(1)
    engine.close()
    with pytest.raises(ExperimentError, match="engine: was closed"):
        next(iter(engine.run({0: {}})))


def test_a_worker_that_cannot_be_started_ends_the_run_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: WorkerProcesses) -> None:
        raise OSError("too many processes")

    monkeypatch.setattr(WorkerProcesses, "_start", refuse)
    with pytest.raises(ExperimentError, match="worker processes: OSError: too many processes"):
        list(WorkerProcesses(2).run({0: {}, 1: {}, 2: {}}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "lama-3"}, "lama-3"),
        ({"gpu": "h1000"}, "h1000"),
        ({"link": "string"}, "link: found 'string'"),
        ({"devices": 1}, "--devices: found 1, expected 2"),
        ({"devices": 2}, "fits on 2 x h100 in no way both"),
    ],
)
def test_names_that_do_not_exist_are_not_told_as_what_does_not_fit(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((ExperimentError, ProfileError, SimulationError), match=message):
        frontiers(**wrong)


@pytest.mark.parametrize("name", ["rate_scale=2", "limit=100", "trace.requests=5"])
def test_a_capacity_search_takes_no_settings_that_it_makes_itself(name: str) -> None:
    ended = run("experiments", "capacity", "--prompt", "fixed:8", "--output", "fixed:2", "--set", name)
    assert ended.code == 2
    assert f"--set {name.partition('=')[0]}" in ended.err


def test_a_survey_refuses_what_it_does_not_look_at() -> None:
    ended = run("experiments", "sarathi-pipeline", "--survey", "--chunk-size", "128")
    assert ended.code == 2
    assert "--survey" in ended.err


def test_a_grid_that_sorts_by_an_objective_has_to_say_which_way(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(
        'method = "grid"\nobjective = "ttft_s_p99"\n[axes]\nmax_num_seqs = [8, 16]\n[trace]\nrequests = 4\n'
    )
    with pytest.raises(ExperimentError, match="direction"):
        read_sweep(file)


def test_a_bound_that_nothing_keeps_is_told_without_a_number() -> None:
    at = {"tightest": "e2e", "tightness": {"e2e": 0.5}, "cost_model": "roofline", "cost_basis": "uncalibrated"}
    at |= {"measured": 9, "rejected": 0}
    below = {"tightest": "e2e", "tightness": {"e2e": math.inf, "ttft": 0.2}}
    row = {"error": "", "replicas": 2, "devices": 2, "gpu_seconds": 10.0, "tried": {"1": below, "2": at}}
    assert "with 1: e2e misses" in _spoken_size(json_ready(row))


def test_a_sweep_says_where_its_costs_come_from_point_by_point() -> None:
    rows = [{"cost_model": "roofline h100-changed", "cost_basis": "uncalibrated: specifications alone"}] * 2
    rows += [{"cost_model": "fitted h100", "cost_basis": "partly measured: 80 %; head 20 % by law"}]
    rows += [{"cost_model": None, "status": "failed"}]
    assert dict(_costs(rows)) == {
        "roofline h100-changed (uncalibrated: specifications alone)": 2,
        "fitted h100 (partly measured: 80 %; head 20 % by law)": 1,
    }
