"""Tutorial 2: a policy of one's own, checked and compared. `python examples/tutorials/own_policy.py`."""

from pathlib import Path

from simulator import ReplayConfig, replay
from simulator.studies.check_user_code import Check, check_user_code
from workloads import read_trace

POLICY = f"{Path(__file__).resolve().parents[1] / 'my_policy.py'}:GatheredPrefills"


def main(seconds: float = 20.0) -> list[Check]:
    """Checks the policy, replays it beside chunked prefills, and returns the checks."""
    checks = check_user_code(POLICY, ReplayConfig(model="llama-3.1-8b", gpu="h100"), seconds=seconds)
    for check in checks:
        print(f"{'FAILED' if check.failure else 'ok':6} {check.name}")
    trace = read_trace("examples/trace.csv").take(range(100))
    for policy, knobs in ((POLICY, {"enough": 4096}), ("chunked", {"chunk_size": 512})):
        run = replay(trace, policy=policy, knobs=knobs, model="llama-3.1-8b", gpu="h100")
        print(
            f"{policy.rpartition(':')[2]:18} TTFT P99 {1e3 * run.summary['ttft_s_p99']:6.0f} ms   "
            f"TBT P99 {1e3 * run.summary['tbt_s_p99']:6.1f} ms"
        )
    return checks


if __name__ == "__main__":
    main()
