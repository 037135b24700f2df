"""Tutorial 1: which policy serves this trace best? `python examples/tutorials/compare_policies.py [TRACE]`."""

import sys
from pathlib import Path

from metrics import draw_all
from simulator import replay
from workloads import read_trace

SLO = "ttft_p99=2,tbt_p99=0.05"
POLICIES = ("prefill_priority", "chunked", "decode_maximal", "vllm_v1")


def main(trace_file: str = "examples/trace.csv", out: str = "runs/tutorial-1") -> dict[str, dict[str, float]]:
    """Replays the trace under each policy; returns each run's summary."""
    trace = read_trace(trace_file).take(range(200))
    print(f"{len(trace.arrival_ns)} requests of {trace_file}")
    runs = {}
    for policy in POLICIES:
        run = replay(trace, policy=policy, model="llama-3.1-8b", gpu="a100", slo=SLO)
        run.write(Path(out) / policy)
        runs[policy] = run
        print(
            f"{policy:18} TTFT P99 {1e3 * run.summary['ttft_s_p99']:7.0f} ms   TBT P99 "
            f"{1e3 * run.summary['tbt_s_p99']:6.1f} ms   goodput {run.summary['goodput_requests_per_s']:.2f} requests/s"
        )
    draw_all({policy: run.tables for policy, run in runs.items()}, Path(out) / "figures")
    best = max(runs, key=lambda policy: runs[policy].summary["goodput_requests_per_s"])
    print(f"Most requests within {SLO}: {best}. Costs: {runs[best].summary['cost_basis']}")
    return {policy: run.summary for policy, run in runs.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
