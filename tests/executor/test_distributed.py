"""Many ranks answer as one: real processes over gloo, every policy, and what happens when one of them dies."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.config import LiveConfig
from executor.distributed import ShardedModel, load_sharded
from executor.distributed.ranks import RankError
from executor.errors import ExecutorError
from executor.model.loading import Loaded
from executor.serving.prompts import random_prompts
from executor.serving.replay import LiveRun, load_for, replay_live
from metrics import read_run
from metrics.drawing.perfetto import write_timeline
from metrics.pipelines.bubbles import find_bubbles
from policies import knobs_of, policy_class, policy_names
from tests.executor.batches import blocks_needed, make_step
from workloads import Trace, write_trace

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 61
MARGIN = 2e-4
"""Top-2 logit margin below which float32 may choose otherwise."""
SPEC = """
name = "small"
layers = 3
hidden = 32
heads = 4
kv_heads = 2
head_dim = 8
intermediate = 42
vocab = 61
max_position = 512
tied_embeddings = true
qkv_bias = true
"""
LENGTHS = [(37, 7), (5, 11), (64, 3), (1, 9), (90, 2), (20, 6)]


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("model") / "small.toml"
    file.write_text(SPEC)
    return str(file)


def config(spec_file: str, **options: Any) -> LiveConfig:
    fields = {
        "model": spec_file,
        "device": "cpu",
        "dtype": "float64",
        "kernels": "torch",
        "attention": "sdpa",
        "seed": 5,
        "threads": 1,
        "block_size": 8,
    }
    return LiveConfig(**{**fields, **options})


@cache
def single(spec_file: str, dtype: str = "float64", kernels: str = "torch", attention: str = "sdpa") -> Loaded:
    return load_for(config(spec_file, dtype=dtype, kernels=kernels, attention=attention), 512)


def trace_of(lengths: list[tuple[int, int]], spacing_s: float = 0.0) -> Trace:
    prompt, output = (np.array(column) for column in zip(*lengths))
    return Trace("small", np.arange(len(lengths)) * round(spacing_s * 1e9), prompt, output, output)


def serve(loaded: Loaded, settings: LiveConfig, trace: Trace, **options: Any) -> LiveRun:
    return replay_live(trace, settings, loaded=loaded, prompts=random_prompts(trace, VOCAB), **options)


def knobs_for(policy: str, chunk_size: int) -> dict[str, Any]:
    return {"chunk_size": chunk_size} if "chunk_size" in knobs_of(policy_class(policy)) else {}


def check_every_policy(loaded: Loaded, spec_file: str, **ranks: int) -> None:
    trace = trace_of(LENGTHS)
    for policy in policy_names():
        common = {"policy": policy, "knobs": knobs_for(policy, 32), "as_fast_as_possible": True, "num_blocks": 60}
        alone = serve(single(spec_file), config(spec_file, **common), trace)
        run = serve(loaded, config(spec_file, **common, **ranks, poison=True), trace)
        assert set(run.tables.column("requests", "status")) == {"finished"}, policy
        assert run.answers == alone.answers, policy
        check_stages(run, ranks.get("pp", 1))


def check_stages(run: LiveRun, pp: int) -> None:
    """Every iteration once on every stage, in plan order, and bubbles that add up."""
    tables = run.tables
    count = tables.rows("iterations")
    assert tables.rows("stages") == count * pp
    assert tables.column("iterations", "iteration").tolist() == list(range(count))
    planned, start = (tables.column_ns("iterations", name) for name in ("planned_s", "start_s"))
    assert (start >= planned).all()
    assert (tables.column("iterations", "host_after_s") >= 0).all()
    bubbles = find_bubbles(tables)  # raises where stages overlap or run before their input
    assert bubbles.in_flight_ns.tolist() == (bubbles.idle_ns.sum(axis=1) + bubbles.busy_ns).tolist()
    assert len(bubbles.busy_ns) == pp


class TestTwoStages:
    """One pipeline for several runs: a process has one set of ranks at a time."""

    @pytest.fixture(scope="class")
    @staticmethod
    def pp2(spec_file: str) -> Iterator[Loaded]:
        with load_for(config(spec_file, pp=2), 512) as loaded:
            yield loaded

    def test_a_pipeline_answers_as_one_process_under_every_policy(self, pp2: Loaded, spec_file: str) -> None:
        check_every_policy(pp2, spec_file, pp=2)

    def test_micro_batches_are_in_flight_together_and_memory_pressure_changes_no_answer(
        self, pp2: Loaded, spec_file: str, tmp_path: Path
    ) -> None:
        lengths = [(30, 12), (9, 15), (50, 8), (3, 20), (25, 10), (40, 12)]
        trace = trace_of(lengths, 0.004)
        common = {"policy": "vllm_v1", "token_budget": 24, "num_blocks": 9, "watermark": 0.0}
        alone = serve(single(spec_file), config(spec_file, **common), trace)
        run = serve(pp2, config(spec_file, **common, pp=2, chase_chunks=True, poison=True), trace)
        assert run.answers == alone.answers
        assert sum(run.tables.column("requests", "preemptions")) > 0
        # The next one is planned before the last one is done.
        planned, done = (run.tables.column_ns("iterations", name) for name in ("planned_s", "end_s"))
        assert (planned[1:] < done[:-1]).any()
        assert (planned[2:] >= done[:-2]).all()
        run.write(tmp_path / "run")
        read = read_run(tmp_path / "run")
        assert read.config["pp"] == 2
        assert read.config["layer_split"] == [2, 1]
        assert read.config["ahead"] is False
        (clock,) = read.config["clocks"]
        assert clock["rank"] == 1
        assert clock["error_s"] <= clock["estimate_error_s"] < 2.0  # of a machine that others use too
        if clock["same_clock"]:  # the estimate is then a check of itself
            assert abs(clock["estimated_offset_s"]) <= clock["estimate_error_s"]
        write_timeline(tmp_path / "timeline.json", read)
        assert '"ph"' in (tmp_path / "timeline.json").read_text()

    def test_the_fast_kernels_give_the_same_bits_in_a_pipeline(self, pp2: Loaded, spec_file: str) -> None:
        quick = {"dtype": "float32", "kernels": "auto", "attention": "auto"}
        settings = config(spec_file, **quick, pp=2, policy="prefill_priority")
        assert isinstance(pp2, ShardedModel)
        trace = trace_of(LENGTHS, 0.002)
        run = serve(load_sharded(settings, 512, pp2.ranks), settings, trace)
        alone = serve(single(spec_file, **quick), replace(settings, pp=1), trace)
        load_sharded(config(spec_file, pp=2), 512, pp2.ranks)  # for whoever comes next
        assert run.answers == alone.answers

    def test_sampling_and_prefix_hits_are_the_same_on_two_stages(self, pp2: Loaded, spec_file: str) -> None:
        prompt, output = (np.array(column) for column in zip(*[(50, 5), (50, 5), (48, 7), (20, 3)]))
        hashes = [(1, 2, 3), (1, 2, 3), (1, 2, 9), (4,)]
        trace = Trace("shared", np.zeros(4), prompt, output, output, prefix_hashes=hashes, hash_tokens=16)
        options = {"policy": "vllm_v1", "prefix_caching": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
        alone = serve(single(spec_file), config(spec_file, **options), trace)
        run = serve(pp2, config(spec_file, **options, pp=2, token_budget=60), trace)
        assert run.answers == alone.answers
        assert sum(run.tables.column("requests", "cached_tokens")) > 0


def test_tensor_parallel_ranks_answer_as_one_process_under_every_policy(spec_file: str, tmp_path: Path) -> None:
    with load_for(config(spec_file, tp=2), 512) as loaded:
        check_every_policy(loaded, spec_file, tp=2)
        trace = trace_of(LENGTHS)
        hot = {"policy": "chunked", "temperature": 0.9, "top_p": 0.95, "as_fast_as_possible": True}
        alone = serve(single(spec_file), config(spec_file, **hot), trace)
        assert serve(loaded, config(spec_file, **hot, tp=2), trace).answers == alone.answers
        # One KV head for all, which each rank then holds, and a vocabulary and an FFN that do not divide.
        shared = tmp_path / "shared.toml"
        shared.write_text(
            SPEC.replace("kv_heads = 2", "kv_heads = 1").replace("intermediate = 42", "intermediate = 41")
        )
        assert isinstance(loaded, ShardedModel)
        with load_sharded(config(str(shared), tp=2), 512, loaded.ranks) as other:
            plain = {"policy": "chunked", "as_fast_as_possible": True}
            alone = serve(single(str(shared)), config(str(shared), **plain), trace)
            assert serve(other, config(str(shared), **plain, tp=2), trace).answers == alone.answers


EXPERTS = """
experts = 6
top_k = 2
expert_intermediate = 9
shared_intermediate = 7
shared_gate = true
dense_layers = [1]
"""


def test_two_by_two_ranks_answer_as_one_process(spec_file: str, tmp_path: Path) -> None:
    with load_for(config(spec_file, tp=2, pp=2), 512) as loaded:
        trace = trace_of(LENGTHS)
        for policy in ("chunked", "prefill_priority"):
            common = {"policy": policy, "knobs": knobs_for(policy, 32), "as_fast_as_possible": True}
            alone = serve(single(spec_file), config(spec_file, **common), trace)
            run = serve(loaded, config(spec_file, **common, tp=2, pp=2), trace)
            assert run.answers == alone.answers
            check_stages(run, 2)
        # The fast kernels, on the same ranks: sums over ranks are rounded differently, so near ties may break otherwise.
        quick = {"dtype": "float32", "kernels": "auto", "attention": "auto"}
        settings = config(spec_file, **quick, tp=2, pp=2, policy="chunked", as_fast_as_possible=True)
        assert isinstance(loaded, ShardedModel)
        run = serve(load_sharded(settings, 512, loaded.ranks), settings, trace)
        one = single(spec_file, **quick)
        alone = serve(one, replace(settings, tp=1, pp=1), trace)
        for row, answer in run.answers.items():
            expected = alone.answers[row]
            at = next((i for i, pair in enumerate(zip(answer, expected)) if pair[0] != pair[1]), None)
            if at is not None:
                ids = np.concatenate((random_prompts(trace, VOCAB)(row), expected[:at]))
                assert margin(one, ids) < MARGIN, f"request {row}, token {at}"
        # Each rank has a part of every expert, of a width that does not divide; ranks of a stage route alike.
        experts = tmp_path / "experts.toml"
        experts.write_text(SPEC + EXPERTS)
        plain = config(str(experts), policy="chunked", as_fast_as_possible=True)
        settings = replace(plain, tp=2, pp=2)
        run = serve(load_sharded(settings, 512, loaded.ranks), settings, trace)
        alone = serve(single(str(experts)), plain, trace)
        assert run.answers == alone.answers
        for each in (run, alone):
            activated = each.tables.column("iterations", "activated_experts")
            assert ((activated >= 2) & (activated <= 6)).all()


def margin(loaded: Loaded, ids: np.ndarray) -> float:
    """Top-2 margin of the logits after `ids`."""
    step = make_step([(len(ids), 0)], [], vocab=VOCAB)
    step.token_ids[:] = ids
    logits = loaded.model.forward(torch.from_numpy(step.token_ids), step, loaded.new_cache(blocks_needed(step), 16))
    top = logits[0].double().topk(2).values
    return float(top[0] - top[1])


def test_what_does_not_go_together_is_refused_before_anything_starts(spec_file: str) -> None:
    for options, words in (
        ({"ahead": True}, "--async"),
        ({"preemption": "swap"}, "--preemption"),
        ({"tp": 3}, "attention heads"),
        ({"pp": 4}, "3 layers"),
        ({"kv_compression": "kivi4"}, "--kv-compression"),
        ({"tp": 0}, "expected at least 1"),
    ):
        with pytest.raises(ExecutorError, match=words):
            load_for(config(spec_file, **{"pp": 2, **options}), 64)


def under_torchrun(trace: Path, spec_file: str, out: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "executor",
        "replay",
        str(trace),
        "--model",
        spec_file,
        "--kernels",
        "torch",
        "--pp",
        "2",
        "--threads",
        "1",
        "--out",
        str(out),
    ]


@pytest.mark.slow
def test_ranks_do_not_outlive_a_launcher_that_was_killed(spec_file: str, tmp_path: Path) -> None:
    trace = trace_of(LENGTHS)
    late = replace(trace, arrival_ns=trace.arrival_ns + np.int64(600_000_000_000) * (np.arange(len(trace)) > 0))
    launcher = subprocess.Popen(
        under_torchrun(write_trace(late, tmp_path / "trace.csv"), spec_file, tmp_path / "out"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        until = time.monotonic() + 300
        # They serve as soon as the first request is on the disk.
        while not list(tmp_path.glob("out.unfinished*")) and time.monotonic() < until and launcher.poll() is None:
            time.sleep(0.1)
        ranks = children_of(launcher.pid)
        assert len(ranks) == 2
    finally:
        launcher.kill()
        launcher.wait()
    until = time.monotonic() + 120  # mostly for importing PyTorch on a busy machine; no rank would end by itself
    while any(map(is_alive, ranks)) and time.monotonic() < until:
        time.sleep(0.1)
    left = [pid for pid in ranks if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.slow
def test_the_same_command_runs_under_torchrun(spec_file: str, tmp_path: Path) -> None:
    file = write_trace(trace_of(LENGTHS), tmp_path / "trace.csv")
    command = under_torchrun(file, spec_file, tmp_path / "out")
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "out")
    assert set(run.column("requests", "status")) == {"finished"}
    assert run.rows("stages") == 2 * run.rows("iterations")
    assert done.stdout.count("written to") == 1  # one rank speaks


# Failures


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_that_raises_ends_the_run_with_its_own_words(spec_file: str) -> None:
    with load_for(config(spec_file, pp=2), 64) as loaded:
        ranks = loaded.ranks  # type: ignore[attr-defined]
        child = ranks.children[0].process
        trace = trace_of([(5, 4)])
        with pytest.raises(RankError, match=r"rank 1 \(stage 1\) failed: IndexError"):
            # A table that points outside the pool, as only a bug would have it.
            replay_live(trace, config(spec_file, pp=2, num_blocks=4), loaded=Broken.of(loaded))
    assert not is_alive(child.pid)


class Broken:
    """The model, with block numbers on the way to the other ranks that no pool has."""

    @staticmethod
    def of(loaded: Any) -> Any:
        send = loaded.ranks.frames.send

        def spoil(kind: int, payload: np.ndarray, to: list[int]) -> None:
            if kind == 0:
                payload = payload.copy()
                cells = payload.view(np.int64)
                rows = int(cells[1])
                cells[8 + rows : 8 + 2 * rows] = 1 << 40  # slots: in a block far beyond the pool's last
            send(kind, payload, to)

        loaded.ranks.frames.send = spoil
        return loaded


def listening_addresses(pid: int) -> list[tuple[str, int]]:
    """(address, port) of every TCP socket on which a process listens, IPv4 and IPv6."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if (target := os.readlink(descriptor)).startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                found.append((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found


def started(spec_file: str, tmp_path: Path, *flags: str, **environment: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A long run over two stages by the command, and its child processes once it serves."""
    file = write_trace(trace_of([(20, 60)] * 40, 0.2), tmp_path / "trace.csv")
    command = [
        sys.executable,
        "-m",
        "executor",
        "replay",
        str(file),
        "--model",
        spec_file,
        "--kernels",
        "torch",
        "--attention",
        "sdpa",
        "--pp",
        "2",
        "--threads",
        "1",
        "--out",
        str(tmp_path / "out"),
        *flags,
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("serving")
    time.sleep(0.5)
    children = children_of(process.pid)
    assert len(children) == 1
    return process, children


def test_a_killed_rank_is_noticed_within_seconds_and_leaves_nothing_behind(spec_file: str, tmp_path: Path) -> None:
    process, children = started(spec_file, tmp_path)
    os.kill(children[0], signal.SIGKILL)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=90)
    assert time.monotonic() - began < 15  # a second where the cores are free
    assert process.returncode == 2
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert lines == [
        f"error: rank 1 (stage 1) was killed by signal 9; the requests that had ended are in {tmp_path}/out.unfinished.jsonl"
    ]
    assert not (tmp_path / "out").exists()  # as a single process that failed
    assert not is_alive(children[0])


def test_a_rank_that_hangs_is_given_up_and_what_had_ended_is_kept(spec_file: str, tmp_path: Path) -> None:
    process, children = started(spec_file, tmp_path, CHARIOTEER_RANK_SILENCE_S="3")
    # Before that: whatever address of this machine somebody comes from, nothing but 127.0.0.1 answers.
    listening = [place for pid in (process.pid, *children) for place in listening_addresses(pid)]
    assert {address for address, _ in listening} == {"127.0.0.1"}
    time.sleep(1.0)
    os.kill(children[0], signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)  # which waits for the batches in flight
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "error: rank 1 (stage 1) failed: no sign of life for 3 s: it hangs, or its machine is paused; " in stderr
    assert not is_alive(children[0])
    _, *ended = [json.loads(line) for line in (tmp_path / "out.unfinished.jsonl").read_text().splitlines()]
    assert ended
    assert {row["status"] for row in ended} <= {"finished", "aborted"}


def test_a_command_that_is_stopped_as_a_whole_goes_on_where_it_was(spec_file: str, tmp_path: Path) -> None:
    """Ctrl-Z in a terminal, and fg: nobody has been silent, all were."""
    process, children = started(spec_file, tmp_path, CHARIOTEER_RANK_SILENCE_S="2")
    everybody = [process.pid, *children]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3.0)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr


def test_a_signal_ends_all_ranks_with_everything_accounted_for(spec_file: str, tmp_path: Path) -> None:
    process, children = started(spec_file, tmp_path)
    for pid in children:  # a terminal's Ctrl-C reaches the whole process group
        os.kill(pid, signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 130, stderr
    run = read_run(tmp_path / "out")
    assert run.config["stopped_by"] == "SIGINT"
    assert run.rows("requests") == 40
    assert "aborted" in set(run.column("requests", "status"))
    assert find_bubbles(run).share >= 0
    assert not any(is_alive(pid) for pid in children)


def test_no_rank_outlives_rank_0(spec_file: str, tmp_path: Path) -> None:
    process, children = started(spec_file, tmp_path)
    process.kill()
    process.communicate(timeout=90)
    until = time.monotonic() + 20
    while any(is_alive(pid) for pid in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in children)
