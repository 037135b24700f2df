"""Sweeps: their points, their folder, and that no engine, kill or restart changes what comes out."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from experiments.errors import ExperimentError
from experiments.running.ray_runner import _placed, _renamed
from experiments.running.task_runners import ThisProcess, WorkerProcesses
from experiments.running.tasks import perform, with_inputs
from experiments.running.workload import load_workload
from experiments.sweeps.axes import Axis, SweepSpec, enumerate_points, parse_sweep, read_sweep, task_of
from experiments.sweeps.point import replay_config
from experiments.sweeps.run import run_sweep
from profiler.errors import ProfileError
from tests.hardening.command_line import run

ROOT = Path(__file__).resolve().parents[2]
TRACE = {"requests": 12, "arrivals": "poisson:4", "prompt": "fixed:600", "output": "fixed:20"}
BASE = {"model": "llama-3.1-8b", "gpu": "a100", "cost_model": "roofline"}
SPACE: dict[str, Any] = {"policy": ["chunked", "prefill_priority"], "chunk_size": [128, 256], "seed": [0, 1]}
FILE = """
[trace]
requests = 40
arrivals = "poisson:4"
prompt = "fixed:600"
output = "fixed:60"
[base]
gpu = "a100"
cost_model = "roofline"
[space]
chunk_size = [64, 128, 256, 512]
rate_scale = {low = 0.5, high = 2.0, count = 5, log = true}
"""


def small(**changes: Any) -> SweepSpec:
    return parse_sweep({"trace": TRACE, "base": BASE, "space": SPACE, **changes})


def test_a_grid_visits_every_combination_once_and_a_knob_only_where_the_policy_has_it() -> None:
    points = enumerate_points(small())
    assert points == [
        *({"policy": "chunked", "chunk_size": chunk, "seed": seed} for chunk in (128, 256) for seed in (0, 1)),
        *({"policy": "prefill_priority", "seed": seed} for seed in (0, 1)),
    ]


def test_ranges_become_the_values_between_their_ends() -> None:
    space = {
        "chunk_size": {"low": 64, "high": 256, "step": 64},
        "rate_scale": {"low": 1.0, "high": 4.0, "count": 3, "log": True},
    }
    axes = {axis.name: axis.grid() for axis in small(space=space).axes}
    assert axes == {"chunk_size": (64, 128, 192, 256), "rate_scale": (1.0, 2.0, 4.0)}


def test_what_takes_fractions_gets_them_between_whole_ends_too() -> None:
    space = {
        "rate_scale": {"low": 1, "high": 2, "count": 5},
        "tbt_target_s": {"low": 0, "high": 1, "step": 0.5},
        "trace.duration_s": {"low": 1, "high": 2, "count": 3},
        "large": {"low": 64, "high": 67, "count": 3},
    }
    axes = {axis.name: axis.grid() for axis in small(base={**BASE, "policy": "dynamic_chunk"}, space=space).axes}
    assert axes["rate_scale"] == (1.0, 1.25, 1.5, 1.75, 2.0)
    assert axes["tbt_target_s"] == (0.0, 0.5, 1.0)
    assert axes["trace.duration_s"] == (1.0, 1.5, 2.0)
    assert axes["large"] == (64, 66, 67)
    with pytest.raises(ExperimentError, match=r"step: found 0\.5, expected a whole number"):
        small(space={"seed": {"low": 1, "high": 2, "step": 0.5}})


def test_a_longer_random_sweep_begins_with_the_points_of_a_shorter_one() -> None:
    space = {"chunk_size": {"low": 1, "high": 4096}, "rate_scale": {"low": 0.1, "high": 10.0, "log": True}}
    shorter, longer = (enumerate_points(small(space=space, method="random", points=n)) for n in (5, 20))
    assert longer[:5] == shorter
    assert all(0.1 <= point["rate_scale"] <= 10 and 1 <= point["chunk_size"] <= 4096 for point in longer)


@pytest.mark.parametrize("log", [False, True])
def test_the_ends_of_a_whole_range_are_drawn_as_often_as_their_place_asks(log: bool) -> None:
    axis = Axis("seed", low=1, high=4, log=log)
    rng = np.random.default_rng(3)
    drawn = np.array([axis.draw(rng) for _ in range(8000)])
    edges = np.array([0.5, 1.5, 2.5, 3.5, 4.5])
    widths = np.diff(np.log(edges)) if log else np.diff(edges)
    expected = 8000 * widths / widths.sum()
    counts = np.bincount(drawn, minlength=5)[1:]
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all(), counts


def test_more_points_of_a_random_sweep_go_into_the_same_folder(tmp_path: Path) -> None:
    space = {"chunk_size": {"low": 100, "high": 900}}
    first = run_sweep(small(space=space, method="random", points=2), tmp_path).rows()
    kept = (tmp_path / "points/000001.json").stat().st_mtime_ns
    rows = run_sweep(small(space=space, method="random", points=4), tmp_path).rows()
    assert rows[:2] == first
    assert len(rows) == 4
    assert (tmp_path / "points/000001.json").stat().st_mtime_ns == kept
    with pytest.raises(ExperimentError, match="holds a sweep of 4 points; ask for as many or more"):
        run_sweep(small(space=space, method="random", points=3), tmp_path)
    with pytest.raises(ExperimentError, match="another sweep"):
        run_sweep(small(space=space, method="random", points=4, seed=1), tmp_path)


def test_an_axis_may_be_a_term_of_the_engine() -> None:
    spec = small(base={**BASE, "terms": {"host_before_us": 5.0}}, space={"term.front_before_us": [0, 500]})
    terms = [task_of(spec, values)["config"]["terms"] for values in enumerate_points(spec)]
    assert terms == [{"host_before_us": 5.0, "front_before_us": value} for value in (0, 500)]
    with pytest.raises(ProfileError, match="unknown term 'speed'"):
        small(space={"term.speed": [1, 2]})


def test_settings_find_their_place_in_the_task() -> None:
    space = {"trace.prompt": ["fixed:9"], "hardware.memory_bandwidth": [1e12], "chunk_size": [64], "tp": [2]}
    spec = small(space=space)
    task = task_of(spec, enumerate_points(spec)[0])
    assert task["trace"] == {**TRACE, "prompt": "fixed:9", "seed": 0}
    assert task["hardware"] == {"memory_bandwidth": 1e12}
    assert task["config"] == {**BASE, "tp": 2, "knobs": {"chunk_size": 64}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"space": {}}, "found no axis"),
        ({"space": {"chunk_sise": [1]}}, "neither a setting of a replay nor a knob of chunked"),
        ({"space": {"trace.promt": ["fixed:1"]}}, r"found 'trace.promt', expected trace. and one of"),
        ({"space": {"gpus.sms": [1]}}, "expected a prefix"),
        ({"space": {"tp": 4}}, "expected a list or a range"),
        ({"space": {"tp": {"low": 4, "high": 1}}}, "expected low below high"),
        ({"base": {"knobs": 5}}, "knobs: found 5, expected a table"),
        ({"base": {"chunk_size": 4, "knobs": {"chunk_size": 5}}}, r"found chunk_size 4 and knobs\.chunk_size 5"),
        ({"method": "gird"}, "method: found 'gird'"),
        ({"method": "random"}, "points: found 0"),
        ({"method": "optuna", "points": 3, "objective": "speed"}, "objective: found 'speed'"),
        ({"spase": {}}, "found key 'spase'"),
        ({"trace": {"fyle": "x"}}, "trace: found 'fyle'"),
    ],
)
def test_a_mistake_in_a_sweep_is_one_clear_line(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        small(**content)


def test_every_file_that_a_sweep_names_is_the_one_beside_it(tmp_path: Path) -> None:
    for name in ("t.csv", "p.py", "gpu.toml", "lengths.txt"):
        (tmp_path / name).touch()
    (tmp_path / "sweep.toml").write_text(
        '[trace]\nfile = "t.csv"\n[base]\ngpu = "gpu.toml:mine"\n[space]\ntp = [1]\n'
        '"trace.prompt" = ["empirical:lengths.txt", "fixed:5"]\n'
    )
    spec = read_sweep(tmp_path / "sweep.toml")
    assert spec.trace["file"] == str(tmp_path / "t.csv")
    assert spec.base["gpu"] == f"{tmp_path / 'gpu.toml'}:mine"
    assert spec.axes[1].values == (f"empirical:{tmp_path / 'lengths.txt'}", "fixed:5")


def test_worker_processes_and_this_process_write_the_same_table(tmp_path: Path) -> None:
    run_sweep(small(), tmp_path / "a", engine=ThisProcess())
    run_sweep(small(), tmp_path / "b", engine=WorkerProcesses(2))
    assert (tmp_path / "a/sweep.parquet").read_bytes() == (tmp_path / "b/sweep.parquet").read_bytes()
    rows = pq.read_table(tmp_path / "a/sweep.parquet").to_pylist()
    assert [row["finished"] for row in rows] == [12] * 6
    assert rows[0]["chunk_size"] == 128
    assert rows[5]["chunk_size"] is None


def test_changed_facts_of_gpu_and_model_change_the_costs(tmp_path: Path) -> None:
    space = {"hardware.memory_bandwidth": [1e12, 2e12], "model.layers": [16, 32]}
    rows = run_sweep(small(space=space), tmp_path / "sweep").rows()
    slow_half, slow_whole, fast_half, fast_whole = (row["tbt_s_p50"] for row in rows)
    # Decoding is bound by bandwidth: half the layers or twice the bandwidth is near half the time.
    assert 0.4 < slow_half / slow_whole < 0.65
    assert 0.4 < fast_whole / slow_whole < 0.65
    assert fast_half < slow_half
    assert all("changed" in row["cost_model"] for row in rows)


@pytest.mark.parametrize(
    ("kind", "facts", "same"),
    [
        ("hardware", {"memory_bandwidth": 3_350_000_000_000}, True),
        ("hardware", {"peak_flops.bf16": 989.5e12, "sms": 132}, True),
        ("hardware", {"memory_bandwidth": 3.35e12, "sms": 131}, False),
        ("model", {"layers": 32, "rope_scaling.factor": 8}, True),
        ("model", {"rope_scaling.factor": 9.0}, False),
    ],
)
def test_a_grid_through_the_datasheets_own_value_keeps_the_name_and_so_the_fit_there(
    kind: str, facts: dict[str, Any], same: bool
) -> None:
    config = replay_config({"config": {"gpu": "h100", "model": "llama-3.1-8b"}, kind: facts})
    name = {"hardware": config.gpu, "model": config.model}[kind]
    assert (name in ("h100", "llama-3.1-8b")) is same
    assert name.endswith("-changed.toml") is not same


def test_a_part_of_a_fact_that_has_none_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"hardware\.sms\.x: sms of h100 is no table, expected hardware\.sms"):
        replay_config({"config": {"gpu": "h100"}, "hardware": {"sms.x": 1}})


def test_a_point_that_cannot_be_run_is_a_row_with_its_error(tmp_path: Path) -> None:
    rows = run_sweep(small(space={"tp": [1, 3]}), tmp_path / "sweep").rows()
    assert [row["status"] for row in rows] == ["ok", "failed"]
    assert rows[1]["error"].startswith("tp: found 3")
    assert rows[1]["ttft_s_p50"] is None
    again = run_sweep(small(space={"tp": [1, 3]}), tmp_path / "sweep", retry_failed=True).rows()
    assert again == rows


def test_a_worker_that_dies_costs_its_point_alone(tmp_path: Path) -> None:
    deadly = tmp_path / "deadly.py"
    deadly.write_text(
        "import os\nfrom dataclasses import dataclass\nfrom policies import Policy\n"
        "@dataclass(frozen=True)\nclass Deadly(Policy):\n    def plan(self, *args):\n        os._exit(7)\n"
    )
    spec = small(space={"policy": ["chunked", f"{deadly}:Deadly", "prefill_priority"]})
    rows = run_sweep(spec, tmp_path / "sweep", engine=WorkerProcesses(1)).rows()
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert rows[1]["error"] == "worker process died (exit code 7)"


def test_a_sweep_taken_up_again_keeps_finished_points_and_does_the_others(tmp_path: Path) -> None:
    folder = run_sweep(small(), tmp_path / "sweep")
    rows = folder.rows()
    kept, lost = tmp_path / "sweep/points/000001.json", tmp_path / "sweep/points/000004.json"
    marked = json.loads(kept.read_text())
    marked["result"]["ttft_s_p50"] = 123.0
    kept.write_text(json.dumps(marked))
    lost.unlink()
    again = run_sweep(small(), tmp_path / "sweep").rows()
    assert again[1]["ttft_s_p50"] == 123.0
    assert again[4] == rows[4]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ExperimentError, match="no folder of a sweep"):
        run_sweep(small(), tmp_path)
    run_sweep(small(space={"tp": [1]}), tmp_path / "sweep")
    with pytest.raises(ExperimentError, match="another sweep"):
        run_sweep(small(), tmp_path / "sweep")


def test_a_sweep_survives_kill_9_without_redoing_or_losing_a_point(tmp_path: Path) -> None:
    file, out = tmp_path / "sweep.toml", tmp_path / "killed"
    file.write_text(FILE)
    command = [sys.executable, "-m", "experiments", "sweep", str(file), "--out", str(out), "--workers", "1", "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 600  # a busy machine starts a process in a minute
    while len(list(out.glob("points/0*.json"))) < 8 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = {path: path.stat().st_mtime_ns for path in out.glob("points/0*.json")}
    assert 8 <= len(before) < 20
    assert all(json.loads(path.read_text())["status"] == "ok" for path in before)
    run_sweep(read_sweep(file), out)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    run_sweep(read_sweep(file), tmp_path / "whole")
    assert (out / "sweep.parquet").read_bytes() == (tmp_path / "whole/sweep.parquet").read_bytes()


def test_optuna_proposes_the_same_points_whoever_works_and_however_often_it_is_stopped(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    search = {
        "method": "optuna",
        "points": 14,
        "batch": 4,
        "objective": "ttft_s_p99",
        "direction": "minimize",
        "space": {"chunk_size": {"low": 64, "high": 1024, "step": 64}, "policy": ["chunked", "vllm_v1"]},
    }
    whole = run_sweep(small(**search), tmp_path / "a").rows()
    for number in (5, 12, 13):
        (tmp_path / f"a/points/{number:06d}.json").unlink()
    assert run_sweep(small(**search), tmp_path / "a").rows() == whole
    assert len(whole) == 14


@pytest.mark.slow
def test_a_file_is_renamed_for_another_node_where_a_task_names_it_and_nowhere_else() -> None:
    places = {"a.csv": "/node/a.csv", "data/a.csv": "/node/data.csv", "p.py": "/node/p.py"}
    task = {
        "file": "data/a.csv",
        "same": ["a.csv", "empirical:a.csv"],
        "policy": "p.py:Mine",
        "other": "old/a.csv",
        "n": 3,
    }
    assert _renamed(task, places) == {
        "file": "/node/data.csv",
        "same": ["/node/a.csv", "empirical:/node/a.csv"],
        "policy": "/node/p.py:Mine",
        "other": "old/a.csv",
        "n": 3,
    }


ON_RAY = """
import os, signal, sys
from pathlib import Path
from experiments.running.task_runners import make_engine
from experiments.sweeps.run import run_sweep
from tests.experiments.test_sweep import small

before = signal.getsignal(signal.SIGTERM)
engine = make_engine("ray", ray_address="local")
import ray

# Ray's own handler would end this with exit code 15.
print(signal.getsignal(signal.SIGTERM) is before, ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.readline()
run_sweep(small(), Path(sys.argv[1]), engine=engine)
assert "RAY_AUTH_TOKEN" not in os.environ
"""


def test_ray_writes_the_same_table_as_this_process_and_lets_nobody_else_in(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(
        [sys.executable, "-c", ON_RAY, str(tmp_path / "b")],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    handler_stays, place = driver.stdout.readline().split()
    # Another process of this machine, which knows where the cluster is but has not the token.
    stranger = subprocess.Popen(
        [sys.executable, "-c", f"import ray; ray.init(address={place!r}); print('let in')"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    run_sweep(small(), tmp_path / "a")
    assert "let in" not in stranger.communicate(timeout=120)[0]
    assert stranger.returncode != 0
    driver.communicate("go on\n", timeout=120)
    assert driver.returncode == 0
    assert handler_stays == "True"
    assert (tmp_path / "a/sweep.parquet").read_bytes() == (tmp_path / "b/sweep.parquet").read_bytes()


def test_limit_takes_the_first_requests_and_first_leaves_them_out(tmp_path: Path) -> None:
    file = ROOT / "examples/trace.csv"
    whole = load_workload({"file": str(file)})
    head = load_workload({"file": str(file), "limit": 30})
    assert (head.arrival_ns.tolist(), len(head)) == (whole.head(30).arrival_ns.tolist(), 30)
    assert len(load_workload({"file": str(file), "first": 30})) == len(whole) - 30
    assert (
        load_workload({"file": str(file), "first": [10, 50], "limit": 5}).arrival_ns.tolist()
        == whole.arrival_ns[10:15].tolist()
    )
    for wrong in (0, 2.5, True, "30"):
        with pytest.raises(
            ExperimentError, match=r"trace\.limit: found .*, expected a whole number of requests, at least 1"
        ):
            load_workload({"file": str(file), "limit": wrong})


def edited_sweep(tmp_path: Path) -> tuple[SweepSpec, Path]:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt,output\n0,100,5\n0.5,200,7\n")
    return small(trace={"file": str(trace)}, space={"chunk_size": [64, 128]}), trace


def test_points_of_other_inputs_are_never_put_beside_new_ones_without_a_word(tmp_path: Path) -> None:
    spec, trace = edited_sweep(tmp_path)
    folder = run_sweep(spec, tmp_path / "out")
    assert {row["requests"] for row in folder.rows()} == {2}
    (tmp_path / "out" / "points" / "000001.json").unlink()  # stopped there
    with trace.open("a") as file:
        file.write("1.5,50,3\n")
    with pytest.raises(ExperimentError, match=r"point 0 was made from other inputs: .*trace\.csv \(sha256 .* --anyway"):
        run_sweep(spec, tmp_path / "out")
    assert not (tmp_path / "out" / "points" / "000001.json").exists()
    kept = run_sweep(spec, tmp_path / "out", anyway=True)
    assert [row["requests"] for row in kept.rows()] == [2, 3]
    # Nor is a trace that this very process has read taken from memory.
    assert {row["requests"] for row in run_sweep(spec, tmp_path / "fresh").rows()} == {3}
    with pytest.raises(ExperimentError, match="point 0 was made from other inputs"):  # a finished one too
        run_sweep(spec, tmp_path / "out")


def test_points_of_another_version_are_not_taken_for_those_of_this_one(tmp_path: Path) -> None:
    spec, _ = edited_sweep(tmp_path)
    run_sweep(spec, tmp_path / "out")
    file = tmp_path / "out" / "points" / "000000.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": "0.0.1"}))
    with pytest.raises(ExperimentError, match=r"charioteer \(0\.0\.1 then"):
        run_sweep(spec, tmp_path / "out")


def test_a_file_that_changes_between_the_making_of_a_task_and_its_turn_fails_it(tmp_path: Path) -> None:
    spec, trace = edited_sweep(tmp_path)
    task = with_inputs(task_of(spec, {"chunk_size": 64}))
    assert perform(task)["status"] == "ok"
    trace.write_text(trace.read_text() + "2,9,9\n")
    assert "trace.csv (sha256" in perform(task)["error"]


def test_a_node_gets_all_files_that_belong_to_one_that_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "other"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "other").mkdir()
    contents = {"fit.json": b"{}", "fit.npz": b"arrays"}
    place = Path(_placed("/where/it/was/fit.json", contents))
    assert place.parent != Path("/where/it/was")
    assert {path.name: path.read_bytes() for path in place.parent.iterdir()} == contents
    folder = Path(_placed("/where/it/was/model", {"config.json": b"{}", "tokenizer.json": b"[]"}))
    assert (folder / "config.json").read_bytes() == b"{}"
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert _placed(str(tmp_path / "fit.json"), contents) == str(tmp_path / "fit.json")  # the same is there already


def test_a_sweep_whose_points_all_failed_is_no_success(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(FILE.replace("[base]", "[base]\nnum_blocks = 1\nkv_bandwidth = -1"))
    done = run("experiments", "sweep", file, "--workers", 0, "--out", tmp_path / "out")
    assert done.code == 2
    assert "all 20 points failed" in done.err
