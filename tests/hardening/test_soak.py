"""Flat memory: an hour of simulated load here and now; minutes of live load by hand, since they pass in real time
(SOAK_MINUTES=10 python -m pytest tests/hardening/test_soak.py -s). Nobody lost on a thousand replicas; as many requests
as SOAK_REQUESTS says (1000000 by hand: minutes)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hardening.command_line import needs_posix

MINUTES = float(os.environ.get("SOAK_MINUTES", "0"))
"""Of live load; none unless asked for, since it passes in real time."""
REQUESTS = int(os.environ.get("SOAK_REQUESTS", "4000"))


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


@needs_posix
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_an_hour_of_simulated_load_keeps_its_memory(tmp_path: Path) -> None:
    """Records go to the disk as they come; what is left is the trace and the requests that are there."""
    from metrics import Recorder
    from simulator import ReplayConfig
    from simulator.cluster.pools import make_cluster_plan
    from simulator.simulation import simulate
    from workloads import generate

    trace = generate(
        duration_s=3600, arrivals="poisson:1", prompt="lognormal:900,1,1,4000", output="lognormal:60,1,1,500", seed=4
    )
    plan = make_cluster_plan(ReplayConfig(policy="vllm_v1", num_blocks=4000), trace, None)
    recorder = Recorder(part_rows=512, stream_to=tmp_path)
    sizes: dict[int, float] = {}

    def look(ended: int, total: int) -> None:
        sizes[100 * ended // total] = resident_mib(os.getpid())

    simulate(trace, plan, recorder, look)
    recorder.tables()
    early, late = (
        max(size for share, size in sizes.items() if 20 <= share < 40),
        max(size for share, size in sizes.items() if share >= 80),
    )
    print(f"{len(trace)} requests: {early:.1f} MiB after a quarter of an hour, {late:.1f} MiB at the end")
    assert len(trace) > 3_400
    # Parts are unfolded and written in turn: a saw-tooth of some 10 MiB, the same over one hour and over four.
    assert late < early + 16


@needs_posix
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("replicas", [1, 1000])
def test_nobody_is_lost_among_many(replicas: int, tmp_path: Path) -> None:
    """Every request ends once, with all its tokens, and no more memory is held than the trace and who is there need."""
    import numpy as np

    from metrics import Recorder
    from simulator import ReplayConfig
    from simulator.cluster.pools import make_cluster_plan
    from simulator.simulation import simulate
    from workloads import generate

    trace = generate(
        requests=REQUESTS,
        arrivals=f"poisson:{40 * replicas}",
        prompt="lognormal:300,1,1,4000",
        output="lognormal:20,1,1,200",
        seed=6,
    )
    config = ReplayConfig(policy="chunked", num_blocks=4000, replicas=replicas, cost_model="roofline", gpu="h100")
    recorder = Recorder(part_rows=65_536, stream_to=tmp_path)
    sizes = [resident_mib(os.getpid())]
    began = time.process_time()
    simulate(
        trace,
        make_cluster_plan(config, trace, None),
        recorder,
        lambda ended, total: sizes.append(resident_mib(os.getpid())),
    )
    took = time.process_time() - began
    kept = recorder.tables()
    rows, status, tokens = (kept.column("requests", name) for name in ("request", "status", "output_tokens"))
    print(f"{len(trace):,} requests on {replicas:,} replicas: {took:.0f} s of CPU, {max(sizes):.0f} MiB at most")
    assert (np.bincount(rows, minlength=len(trace)) == 1).all()
    assert (status == "finished").all()
    assert (tokens == trace.output_tokens[rows]).all()
    assert max(sizes) < sizes[0] + 150 + 0.001 * len(trace) + 0.2 * replicas


@needs_posix
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.skipif(not MINUTES, reason="takes SOAK_MINUTES=10 of real time")
def test_minutes_of_live_load_keep_their_memory(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from workloads import generate, write_trace

    trace = generate(duration_s=MINUTES * 60, arrivals="poisson:2", prompt="uniform:8,200", output="uniform:4,40")
    file = write_trace(trace, tmp_path / "t.csv")
    words = [
        sys.executable,
        "-m",
        "executor",
        "replay",
        file,
        "--model",
        "nano",
        "--threads",
        "1",
        "--out",
        tmp_path / "run",
    ]
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL, stderr=err)
    sizes = []
    while process.poll() is None:
        time.sleep(2)
        sizes.append(resident_mib(process.pid))
    assert process.returncode == 0, (tmp_path / "err").read_text()
    sizes = [size for size in sizes if size]
    settled = sizes[len(sizes) // 5 :]
    early, late = settled[: len(settled) // 4], settled[-len(settled) // 4 :]
    grown = max(late) - max(early)
    print(f"{len(trace)} requests, {len(sizes)} looks: {max(early):.0f} MiB early, {max(late):.0f} MiB late")
    assert grown < 0.05 * max(early) + 0.01 * len(trace)
