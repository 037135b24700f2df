"""The live engine: real time in, the simulator's records out, and nothing lost when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.config import LiveConfig
from executor.model.loading import Loaded, load_model
from executor.model.sampler import INVALID
from executor.serving.journal import Journal
from executor.serving.replay import LiveRun, replay_live
from executor.serving.runner import Prepared, Runner
from metrics import read_run
from profiler.specs.model_spec import ModelSpec
from workloads.trace import Trace

SPEC = ModelSpec(
    name="small", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=40, vocab=61, max_position=512
)
ROOT = Path(__file__).resolve().parents[2]


@cache
def model() -> Loaded:
    return load_model(SPEC, device="cpu", kernels="torch", attention="sdpa", seed=5)


def trace_of(rows: list[tuple[int, int]], arrivals_s: list[float] | None = None, **columns: Any) -> Trace:
    prompt, output = (np.array(column) for column in zip(*rows))
    at = np.zeros(len(rows)) if arrivals_s is None else np.array(arrivals_s) * 1e9
    return Trace("small", at, prompt, output, output, **columns)


def column(run: LiveRun, name: str, table: str = "requests") -> list[Any]:
    return list(run.tables.column(table, name))


def test_a_run_folder_has_the_simulators_columns_and_its_numbers_add_up(tmp_path: Path) -> None:
    rows = [(30, 5), (12, 9), (50, 3), (1, 1)]
    run = replay_live(trace_of(rows), loaded=model(), policy="chunked", chunk_size=16, as_fast_as_possible=True)
    run.write(tmp_path / "run")
    read = read_run(tmp_path / "run")
    assert read.config["world"] == "live"
    assert list(read.column("requests", "status")) == ["finished"] * 4
    assert list(read.column("requests", "output_tokens")) == [5, 9, 3, 1]
    assert sum(read.column("iterations", "chunk_tokens")) == sum(prompt for prompt, _ in rows)
    assert sum(read.column("iterations", "sampled")) == sum(output for _, output in rows)
    start, end = read.column("iterations", "start_s"), read.column("iterations", "end_s")
    assert all(start[1:] >= end[:-1] - 1e-9)  # one batch at a time
    wall, parts = read.column("iterations", "wall_s"), ("host_before_s", "device_s", "host_after_s")
    assert np.allclose(wall, sum(read.column("iterations", part) for part in parts), atol=1e-6)
    assert all(read.column("iterations", "cpu_s") >= 0)


def test_requests_arrive_on_the_wall_clock_and_wait_for_it() -> None:
    arrivals = [0.0, 0.5, 1.0]
    began = time.perf_counter()
    run = replay_live(trace_of([(4, 2)] * 3, arrivals), loaded=model(), policy="vllm_v1", time_scale=0.2)
    assert time.perf_counter() - began >= 0.2
    assert column(run, "arrival_s") == pytest.approx([0.0, 0.1, 0.2])
    assert all(np.array(column(run, "admitted_s")) >= np.array(column(run, "arrival_s")))


def test_closed_loop_requests_arrive_after_the_answer_they_wait_for() -> None:
    trace = trace_of([(4, 3), (6, 2)], [0.0, 0.0], after_row=np.array([-1, 0]), think_ns=np.array([0, 50_000_000]))
    run = replay_live(trace, loaded=model(), policy="vllm_v1")
    ended, arrived = column(run, "finished_s")[0], column(run, "arrival_s")[1]
    assert arrived == pytest.approx(ended + 0.05, abs=1e-6)


def test_a_rejected_follower_is_recorded_once_where_the_run_is_stopped() -> None:
    """Row 1 waits for row 0 and is too long when it comes; row 3 would have waited for row 2, which is cut off."""
    rows = [(4, 2), (300, 9), (4, 60), (4, 2)]
    trace = trace_of(rows, [0.0] * 4, after_row=np.array([-1, 0, -1, 2]), think_ns=np.zeros(4, np.int64))
    ended: list[int] = []

    def interrupt(row: int, token: int) -> None:
        if 1 in ended and row == 2:
            signal.raise_signal(signal.SIGINT)

    run = replay_live(
        trace,
        loaded=model(),
        policy="vllm_v1",
        max_model_len=100,
        on_token=interrupt,
        on_ended=lambda track: ended.append(track.request.id),
    )
    assert dict(zip(column(run, "request"), column(run, "status"))) == {
        0: "finished",
        1: "rejected",
        2: "aborted",
        3: "aborted",
    }
    assert len(column(run, "request")) == 4


def test_one_request_with_nan_logits_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Runner._sample

    def spoiled(self: Runner, logits: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        for index, (track, _, _) in enumerate(prepared.wanted):
            if track.request.id == 1 and track.delivered >= 2:
                logits[index, 7] = float("nan")
        return original(self, logits, prepared)

    monkeypatch.setattr(Runner, "_sample", spoiled)
    rows = [(30, 6), (12, 9), (20, 5)]
    run = replay_live(trace_of(rows), loaded=model(), policy="vllm_v1", as_fast_as_possible=True)
    assert column(run, "status") == ["finished", "failed", "finished"] or sorted(column(run, "status")) == [
        "failed",
        "finished",
        "finished",
    ]
    by_request = dict(zip(column(run, "request"), column(run, "status")))
    assert by_request[1] == "failed"
    assert "NaN" in next(reason for reason in column(run, "reason") if reason)
    assert len(run.answers[0]) == 6
    assert len(run.answers[2]) == 5


@pytest.mark.parametrize("ahead", [False, True])
def test_out_of_memory_takes_its_own_batch_and_nobody_else(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    original = Runner.execute

    def short(self: Runner, prepared: Prepared) -> Any:
        if any(tokens == 77 for tokens, _ in prepared.batch.shape.chunks):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(self, prepared)

    monkeypatch.setattr(Runner, "execute", short)
    trace = trace_of([(30, 4), (77, 4), (20, 5)], [0.0, 0.15, 0.3])
    run = replay_live(trace, loaded=model(), policy="prefill_priority", ahead=ahead)
    by_request = dict(zip(column(run, "request"), column(run, "status")))
    assert by_request == {0: "finished", 1: "failed", 2: "finished"}


def test_what_cannot_run_is_rejected_with_its_reason() -> None:
    run = replay_live(
        trace_of([(30, 4), (400, 200), (20, 5)]), loaded=model(), policy="vllm_v1", as_fast_as_possible=True
    )
    by_request = dict(zip(column(run, "request"), zip(column(run, "status"), column(run, "reason"))))
    assert by_request[1][0] == "rejected"
    assert "longest allowed" in by_request[1][1]
    assert by_request[0] == by_request[2] == ("finished", "")


def test_a_client_that_gives_up_is_withdrawn() -> None:
    trace = trace_of([(400, 100), (20, 3)]).with_timeout(0.02)
    run = replay_live(trace, loaded=model(), policy="chunked", chunk_size=8)
    by_request = dict(zip(column(run, "request"), column(run, "status")))
    assert by_request[0] == "aborted"


def test_a_stop_token_ends_an_answer_early_and_planning_ahead_delivers_nothing_after_it() -> None:
    trace = trace_of([(30, 40), (12, 40)])
    pinned = replay_live(trace, loaded=model(), policy="vllm_v1", as_fast_as_possible=True).answers
    stop = pinned[0][4]
    for ahead in (False, True):
        run = replay_live(
            trace,
            loaded=model(),
            policy="vllm_v1",
            as_fast_as_possible=True,
            ignore_eos=False,
            stop_ids=(stop,),
            ahead=ahead,
        )
        for row, answer in run.answers.items():
            whole = pinned[row]
            end = whole.index(stop) + 1 if stop in whole else len(whole)
            assert answer == whole[:end]
        assert set(column(run, "status")) == {"finished"}


def test_sampling_depends_on_the_request_alone() -> None:
    trace = trace_of([(30, 12), (12, 9), (20, 8)])
    options = {"loaded": model(), "temperature": 1.0, "top_k": 20, "top_p": 0.9, "as_fast_as_possible": True}
    together = replay_live(trace, policy="chunked", chunk_size=16, **options).answers
    tight = replay_live(trace, policy="vllm_v1", num_blocks=4, watermark=0.0, **options)
    assert sum(column(tight, "preemptions")) > 0
    assert together == tight.answers
    assert together != replay_live(trace, policy="vllm_v1", **{**options, "seed": 1}).answers


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_everything_accounted_for(tmp_path: Path, number: int, code: int) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,20,5\n0.0,20,4000\n900.0,5,5\n", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "executor", "replay", str(trace), "--model", "nano", "--out", str(tmp_path / "run")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith(b"serving")
    time.sleep(0.3)
    deadline = time.monotonic() + 60
    process.send_signal(number)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process.returncode == code, process.stderr.read()
    read = read_run(tmp_path / "run")
    by_request = dict(zip(read.column("requests", "request"), read.column("requests", "status")))
    assert by_request[2] == "aborted"
    assert set(by_request) == {0, 1, 2}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".run")]


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,20,5\n", encoding="utf-8")
    for flags, said in (
        (["--kernels", "fast"], "kernels"),
        (["--policy", "nobody"], "policy"),
        (["--dtype", "int4"], "dtype"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "executor", "replay", str(trace), "--model", "nano", *flags],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_invalid_marks_only_rows_with_nan() -> None:
    kernels = model().model.kernels
    logits = torch.zeros(3, 61)
    logits[0, 5] = 1.0
    logits[1, 3] = float("nan")
    logits[2] = float("-inf")
    assert kernels.argmax(logits).tolist() == [5, INVALID, INVALID]


def test_config_names_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="unknown key 'chunks'"):
        LiveConfig.from_dict({"chunks": 3})


def test_a_killed_run_leaves_what_had_ended_and_no_half_folder(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,20,5\n0.0,12,9\n900.0,5,5\n", encoding="utf-8")
    command = [sys.executable, "-m", "executor", "replay", str(trace), "--model", "nano", "--threads", "1"]
    out = tmp_path / "run"
    journal = tmp_path / "run.unfinished.jsonl"
    process = subprocess.Popen([*command, "--out", str(out)], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not journal.exists() or len(journal.read_text().splitlines()) < 3):
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not out.exists()
    about, *ended = [json.loads(line) for line in journal.read_text().splitlines()]
    assert about["requests"] == 3
    assert sorted((line["request"], line["status"], line["output_tokens"]) for line in ended) == [
        (0, "finished", 5),
        (1, "finished", 9),
    ]
    # The next run keeps it under another name, and leaves none of its own.
    again = subprocess.run(
        [*command, "--out", str(out), "--limit", "2"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert "run.unfinished.1.jsonl" in again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.unfinished.1.jsonl", "trace.csv"]


def test_a_run_that_ends_takes_away_its_own_journal_and_not_that_of_a_second_run_into_the_folder(tmp_path):
    first, second = Journal(tmp_path / "r[1]", {"run": 1}), Journal(tmp_path / "r[1]", {"run": 2})
    assert second.kept is not None
    first.remove()
    assert not second.kept.exists()
    assert json.loads(second.path.read_text()) == {"run": 2}
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_the_journal_and_not_the_run(tmp_path: Path) -> None:
    class Full:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            self.write("")

    journal = Journal(tmp_path / "run", {})
    journal._file = Full()
    replay_live(trace_of([(4, 3), (5, 2)]), loaded=model(), as_fast_as_possible=True, on_ended=journal.ended)
    assert journal.stopped == "No space left on device"
