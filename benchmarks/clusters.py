"""Pipelines and clusters: iterations per second of a four-stage pipeline, and a run on eight replicas.

    python benchmarks/clusters.py [--json] [--trace my_trace.csv]

Vidur simulates 2,400 to 4,300 iterations per second of a PP4 replica on two such cores. CPU seconds stand beside wall
seconds, because another load on the machine changes only the latter.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from metrics import Recorder
from profiler.measurements.facts import TRACES
from simulator.config import ReplayConfig
from simulator.simulation import make_cluster_plan, simulate
from workloads import Trace, generate, read_trace

CONVERSATION = TRACES / "azure2023_conv.parquet"
VIDUR_PP4 = (2_400, 4_300)
"""Iterations per second of Vidur's simulation of a replica with four stages."""


def measure(trace: Trace, **settings: Any) -> dict[str, Any]:
    """One replay with records kept: iterations and requests per second, wall and CPU."""
    config = ReplayConfig(cost_model="roofline", **settings)
    plan = make_cluster_plan(config, trace)
    recorder = Recorder()
    wall, cpu = time.perf_counter(), time.process_time()
    cluster = simulate(trace, plan, recorder)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    iterations = recorder.tables().rows("iterations")
    return {
        "requests": len(trace),
        "replicas": len(cluster.replicas),
        "iterations": iterations,
        "wall_s": wall,
        "cpu_s": cpu,
        "iterations_per_s": iterations / wall,
        "iterations_per_cpu_s": iterations / cpu,
        "us_per_iteration": cpu / iterations * 1e6,
    }


def measure_pipeline(trace: Trace) -> dict[str, Any]:
    """Chunked prefills on a replica of four stages; every iteration passes all four."""
    return measure(trace, policy="chunked", pp=4)


def measure_replicas(trace: Trace, router: str = "least_outstanding_requests", replicas: int = 8) -> dict[str, Any]:
    """The same trace, eight times as fast, on eight replicas."""
    return measure(trace.scaled(replicas), policy="chunked", replicas=replicas, router=router)


def measure_fleet(replicas: int, router: str = "round_robin", each: int = 20, least: int = 4_000) -> dict[str, Any]:
    """So many replicas at one replica's rate each, every one of which gets `each` requests: the same work per request
    however many replicas there are. Small fleets run several times, with other seeds, until `least` requests are done.
    """
    total = {"requests": 0, "iterations": 0, "cpu_s": 0.0, "wall_s": 0.0}
    for seed in range(max(1, least // (replicas * each))):
        trace = generate(
            requests=replicas * each,
            arrivals=f"poisson:{5.53 * replicas}",
            prompt="lognormal:1020,1",
            output="lognormal:129,1",
            seed=seed,
        )
        row = measure(trace, policy="chunked", replicas=replicas, router=router)
        for key in total:
            total[key] += row[key]
    return {
        "replicas": replicas,
        "router": router,
        **total,
        "us_per_request": total["cpu_s"] / total["requests"] * 1e6,
        "us_per_iteration": total["cpu_s"] / total["iterations"] * 1e6,
    }


def measure_disaggregated(trace: Trace) -> dict[str, Any]:
    """Four prefill and four decode replicas, KV over the network."""
    pools = ({"role": "prefill", "replicas": 4}, {"role": "decode", "replicas": 4})
    return measure(trace.scaled(8), policy="chunked", pools=pools)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--trace", type=Path, default=CONVERSATION, help="Azure conversation trace")
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace)
    result = {
        "trace": trace.name,
        "vidur_pp4_iterations_per_s": VIDUR_PP4,
        "pipeline of 4": measure_pipeline(trace),
        "8 replicas, least requests": measure_replicas(trace),
        "8 replicas, least KV": measure_replicas(trace, "least_kv"),
        "4 prefill + 4 decode": measure_disaggregated(trace),
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{trace.name}, records kept")
    for name, row in result.items():
        if isinstance(row, dict):
            print(
                f"{name:<28}{row['iterations']:>10,} iterations{row['wall_s']:>8.2f} s wall{row['cpu_s']:>8.2f} s CPU "
                f"{row['iterations_per_cpu_s']:>10,.0f} per CPU second {row['us_per_iteration']:>6.1f} us each"
            )
    print(f"Vidur, pipeline of 4: {VIDUR_PP4[0]:,} to {VIDUR_PP4[1]:,} iterations per second")


if __name__ == "__main__":
    main()
