"""How fast is the simulator? Iterations per second beside a bare SimPy loop, in one process, and a whole real trace.

    python benchmarks/simulator.py [--json] [--trace my_trace.csv] [--repeats 5]
        [--requests 1000000 [--replicas 1000]]

An iteration is compared with what SimPy itself needs for one timeout of one process, so that the figure is a ratio that
a busy or slow machine does not change much. CPU seconds are given with wall seconds for the same reason. Pipelines and
replicas are those of benchmarks/clusters.py. --requests adds a long run whose records are streamed to disk. The first
line says whether the hot modules were compiled (docs/evidence/performance.md).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simpy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.clusters import measure_fleet, measure_pipeline
from metrics import Recorder, summarise
from policies import make_policy
from policies.edges.compiling import how_built
from profiler import load_cost_model
from profiler.measurements.facts import TRACES
from simulator.config import ReplayConfig
from simulator.simulation import Engine, make_engine, simulate
from workloads import Trace, generate, read_trace

CONVERSATION = TRACES / "azure2023_conv.parquet"
VIDUR_SECONDS = 30.8
"""Vidur's time for the whole Azure conversation trace (Sarathi scheduler, chunk 512, PP1) on two such cores."""
ROUTERS = (
    "round_robin",
    "least_outstanding_requests",
    "power_of_two",
    "session_affinity",
    "least_kv",
    "least_outstanding_tokens",
)
"""One that looks at no replica, three that count requests, one of blocks and one of tokens."""


def timed(run: Callable[[], Any]) -> tuple[float, float, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def bare_loop(events: int) -> None:
    """One process, one timeout an iteration: the floor of anything built on SimPy."""
    env = simpy.Environment()

    def loop():  # type: ignore[no-untyped-def]
        for _ in range(events):
            yield env.timeout(1)

    env.process(loop())
    env.run()


def changing_batches(decodes: int, iterations: int) -> Trace:
    """`decodes` requests that never end while others are prefilled, 448 tokens of a 2,240-token prompt an iteration.

    Every iteration differs from the one before; every fifth starts a new request and ends another.
    """
    prompts = iterations // 5
    rows = decodes + prompts
    return Trace(
        "changing batches",
        np.zeros(rows, np.int64),
        np.concatenate([np.full(decodes, 16), np.full(prompts, 2240)]),
        np.concatenate([np.full(decodes, iterations), np.full(prompts, 1)]),
        np.concatenate([np.full(decodes, iterations), np.full(prompts, 1)]),
    )


def measure_changing(decodes: int, iterations: int, pp: int = 1) -> dict[str, float]:
    trace = changing_batches(decodes, iterations)
    config = ReplayConfig(max_num_seqs=2 * decodes, pp=pp)
    cost = load_cost_model("llama-3.1-8b", "h100", cost_model="roofline", pp=pp)
    policy = make_policy("chunked", {"chunk_size": decodes + 448})
    engine = Engine(policy, cost, 10_000_000, 1 << 40, config)
    recorder = Recorder()
    wall, cpu, _ = timed(lambda: simulate(trace, engine, recorder))
    done = recorder.tables().rows("iterations")
    return {"decodes": decodes, "iterations": done, "wall_us": wall / done * 1e6, "cpu_us": cpu / done * 1e6}


def measure_ratio(sizes: Sequence[int], iterations: int, repeats: int) -> dict[str, Any]:
    """Best CPU time of many short rounds, the bare loop between all others, so that a busy machine slows both alike."""
    bare: list[float] = []
    best: dict[int, dict[str, float]] = {}
    for _ in range(repeats):
        for decodes in sizes:
            _, cpu, _ = timed(lambda: bare_loop(50_000))
            bare.append(cpu / 50_000 * 1e6)
            row = measure_changing(decodes, iterations)
            if decodes not in best or row["cpu_us"] < best[decodes]["cpu_us"]:
                best[decodes] = row
    for row in best.values():
        row["ratio_to_bare"] = row["cpu_us"] / min(bare)
        row["iterations_per_s"] = 1e6 / row["cpu_us"]
    return {"bare_timeout_us": min(bare), "changing": list(best.values())}


def best_of(repeats: int, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row with the least CPU time of several, and what a bare timeout took beside it at best."""
    bare: list[float] = []
    rows: list[dict[str, Any]] = []
    for _ in range(repeats):
        bare.append(timed(lambda: bare_loop(50_000))[1] / 50_000 * 1e6)
        rows.append(measure())
    return {**min(rows, key=lambda row: row["cpu_s"]), "bare_timeout_us": min(bare)}


def measure_trace(path: Path, policy: str) -> dict[str, Any]:
    read_wall, _, trace = timed(lambda: read_trace(path))
    config = ReplayConfig(policy=policy, cost_model="roofline")
    engine = make_engine(config, trace)
    recorder = Recorder()
    wall, cpu, _ = timed(lambda: simulate(trace, engine, recorder))
    table_wall, table_cpu, tables = timed(recorder.tables)
    iterations = tables.rows("iterations")
    return {
        "policy": policy,
        "requests": len(trace),
        "iterations": iterations,
        "read_s": read_wall,
        "wall_s": wall,
        "cpu_s": cpu,
        "tables_s": table_wall,
        "iterations_per_s": iterations / wall,
        "requests_per_s": len(trace) / wall,
        "times_faster_than_vidur": VIDUR_SECONDS / (cpu + table_cpu),
    }


def measure_start() -> dict[str, float]:
    """Seconds of fresh processes, best of three: the help text, and everything up to one simulated request."""
    root = Path(__file__).resolve().parents[1]
    one_request = (
        "from simulator import replay\nfrom workloads import generate\n"
        "replay(generate(requests=1, arrivals='poisson:1', prompt='fixed:8', output='fixed:1'), cost_model='roofline')"
    )

    def best(command: list[str]) -> tuple[float, float]:
        walls, cpus = [], []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            run = [sys.executable, *command]
            walls.append(timed(lambda run=run: subprocess.run(run, cwd=root, check=True, capture_output=True))[0])  # type: ignore[misc]
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(walls), min(cpus)

    (help_s, help_cpu_s), (first_s, first_cpu_s) = best(["-m", "simulator", "--help"]), best(["-c", one_request])
    return {
        "help_s": help_s,
        "help_cpu_s": help_cpu_s,
        "first_iteration_s": first_s,
        "first_iteration_cpu_s": first_cpu_s,
    }


def measure_long(requests: int, replicas: int = 1) -> dict[str, Any]:
    """A conversation of so many requests, as fast as one replica takes it for each of them (round robin), records
    streamed to disk, and its summary. peak_mib: of this process."""

    def peak_mib() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    trace = generate(
        requests=requests, arrivals=f"poisson:{5.53 * replicas}", prompt="lognormal:1020,1", output="lognormal:129,1"
    )
    config = ReplayConfig(policy="chunked", cost_model="roofline", replicas=replicas, router="round_robin")
    engine = make_engine(config, trace)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(stream_to=folder)
        wall, cpu, _ = timed(lambda: simulate(trace, engine, recorder))
        tables = recorder.tables()
        after_run = peak_mib()
        summary_wall, summary_cpu, _ = timed(lambda: summarise(tables))
        return {
            "requests": requests,
            "replicas": replicas,
            "iterations": tables.rows("iterations"),
            "wall_s": wall,
            "cpu_s": cpu,
            "peak_mib": after_run,
            "summary_wall_s": summary_wall,
            "summary_cpu_s": summary_cpu,
            "peak_mib_with_summary": peak_mib(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--trace", type=Path, default=CONVERSATION, help="Azure conversation trace")
    parser.add_argument("--policies", default="chunked", help="policies for the trace, separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--requests", type=int, help="also a long run of so many requests, streamed to disk")
    parser.add_argument("--replicas", type=int, default=1, help="replicas of the long run (round robin)")
    arguments = parser.parse_args()

    measure_changing(16, 2_000)  # imports and tables
    result: dict[str, Any] = {"build": how_built()}
    result |= measure_ratio((16, 64, 256), arguments.iterations, arguments.repeats)
    if arguments.trace.exists():
        result["trace"] = [
            best_of(3, lambda policy=policy: measure_trace(arguments.trace, policy))  # type: ignore[misc]
            for policy in arguments.policies.split(",")
        ]
        # A part of it: a pipeline has many more iterations.
        some = read_trace(arguments.trace).head(1_500)
        result["pipeline of 4"] = best_of(3, lambda: measure_pipeline(some))
    result["replicas"] = [measure_fleet(replicas, router) for router in ROUTERS for replicas in (1, 8, 1_000)]
    result["start"] = measure_start()
    if arguments.requests:
        result["long run"] = measure_long(arguments.requests, arguments.replicas)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    print(f"build: {result['build']}")
    print(f"bare SimPy timeout: {result['bare_timeout_us']:.2f} us CPU")
    print("changing batches, records kept:")
    for row in result["changing"]:
        print(
            f"  {row['decodes']:4d} decodes  {row['cpu_us']:6.2f} us CPU an iteration"
            f"  {row['ratio_to_bare']:5.1f} x bare"
            f"  {row['iterations_per_s']:9,.0f} iterations/s"
        )
    for row in result.get("trace", []):
        print(
            f"{arguments.trace.name}, {row['policy']}: {row['iterations']:,} iterations in {row['wall_s']:.2f} s wall, "
            f"{row['cpu_s']:.2f} s CPU (+ {row['tables_s']:.2f} s tables, {row['read_s']:.2f} s reading); "
            f"{row['times_faster_than_vidur']:.0f} times less than Vidur's {VIDUR_SECONDS} s "
            f"(bare timeout beside it: {row['bare_timeout_us']:.2f} us)"
        )
    if "pipeline of 4" in result:
        row = result["pipeline of 4"]
        print(
            f"pipeline of 4: {row['us_per_iteration']:.1f} us CPU an iteration, "
            f"{row['iterations_per_cpu_s']:,.0f} iterations a CPU second "
            f"(bare timeout beside it: {row['bare_timeout_us']:.2f} us)"
        )
    for row in result["replicas"]:
        print(
            f"{row['replicas']:,} replicas, {row['router']}, 20 requests each: "
            f"{row['us_per_request']:.0f} us CPU a request, {row['us_per_iteration']:.1f} us an iteration"
        )
    start = result["start"]
    print(
        f"start: help in {start['help_s']:.2f} s ({start['help_cpu_s']:.2f} s CPU), first iteration in "
        f"{start['first_iteration_s']:.2f} s ({start['first_iteration_cpu_s']:.2f} s CPU)"
    )
    if "long run" in result:
        row = result["long run"]
        print(
            f"{row['requests']:,} requests, {row['iterations']:,} iterations: {row['wall_s']:.0f} s wall, "
            f"{row['cpu_s']:.0f} s CPU, at most {row['peak_mib']:,.0f} MiB; summary {row['summary_cpu_s']:.0f} s CPU, "
            f"at most {row['peak_mib_with_summary']:,.0f} MiB"
        )


if __name__ == "__main__":
    main()
