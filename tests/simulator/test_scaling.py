"""Four times as much of everything takes about four times the work, counted in lines of Python executed, not in seconds.

Above five times, something goes through all that there is for each one that comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from metrics import Recorder
from policies import policy_names
from policies.edges.compiling import compiled_modules
from simulator.config import ReplayConfig
from simulator.routers import router_names
from simulator.simulation import make_cluster_plan, simulate
from tests.simulator.constant_cost import ConstantCost, trace_of
from workloads import Trace

pytestmark = pytest.mark.skipif(bool(compiled_modules()), reason="compiled code has no lines to count")

S = 1_000_000_000
MOST = 5.0
FEW = 60
"""Requests (or replicas) of the smaller run; the larger one has four times as many."""

KNOBS = {"shortest_prompt_first": {"window": 16}, "slo_aware": {"window": 8}, "most_in_time": {"window": 8}}
"""How many of those waiting a policy compares; by default more than wait in the smaller run."""


def lines_of(run: Callable[[], object]) -> int:
    """Lines of the project's own modules that a call executes."""
    count = 0
    ours: dict[str, bool] = {}

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal count
        name = frame.f_code.co_filename
        if name not in ours:
            ours[name] = any(f"/{folder}/" in name for folder in ("policies", "simulator", "metrics"))
        if not ours[name]:
            return None
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def growth(make: Callable[[int], tuple[Trace, dict[str, Any]]], few: int = FEW) -> float:
    """How many times the lines of a run its fourfold takes."""
    counts = []
    for n in (few, 4 * few):
        trace, options = make(n)
        options = {"block_size": 4, "num_blocks": 60, **options}
        stages = options.get("pp", 1)
        cost = ConstantCost(device_ns=S // 100, per_row_ns=1_003, stages=stages, tile=8)
        plan = make_cluster_plan(ReplayConfig(**options), trace, cost)
        counts.append(lines_of(lambda plan=plan, trace=trace: simulate(trace, plan, Recorder())))  # type: ignore[misc]
    return counts[1] / counts[0]


def burst(n: int) -> Trace:
    """Everybody at once; lengths repeat, so that the fourfold has four of each."""
    return trace_of([(0, 6 + 5 * i % 20, 2 + i % 7) for i in range(n)])


@pytest.mark.parametrize("policy", policy_names())
def test_a_burst(policy: str) -> None:
    assert growth(lambda n: (burst(n), {"policy": policy, "knobs": KNOBS.get(policy, {})})) < MOST


@pytest.mark.parametrize("policy", policy_names())
def test_a_burst_in_a_pipeline(policy: str) -> None:
    assert growth(lambda n: (burst(n), {"policy": policy, "pp": 2, "knobs": KNOBS.get(policy, {})})) < MOST


@pytest.mark.parametrize("router", router_names())
def test_a_steady_load_over_replicas(router: str) -> None:
    def make(n: int) -> tuple[Trace, dict[str, Any]]:
        trace = trace_of([(0.01 * i, 10, 4) for i in range(n)])
        sessions = [f"s{i % 7}" for i in range(n)]
        hashes = [(i % 5, 100 + i % 9) for i in range(n)]
        return replace(trace, session=sessions, prefix_hashes=hashes, hash_tokens=5), {"router": router, "replicas": 4}

    assert growth(make) < MOST


def test_replicas_are_made_and_opened() -> None:
    assert growth(lambda n: (burst(8), {"replicas": n})) < MOST


@pytest.mark.parametrize("policy", ["chunked", "slo_aware", "vllm_v1"])
def test_clients_give_up_in_another_order_than_they_came(policy: str) -> None:
    def make(n: int) -> tuple[Trace, dict[str, Any]]:
        order = np.random.default_rng(3).permutation(n)
        return replace(burst(n), abort_ns=(order + 1) * 1_000), {"policy": policy}

    assert growth(make) < MOST


def test_every_request_of_a_class_of_its_own() -> None:
    def make(n: int) -> tuple[Trace, dict[str, Any]]:
        return replace(burst(n), slo=[f"tenant {i}" for i in range(n)]), {"policy": "slo_aware"}

    assert growth(make) < MOST


@pytest.mark.parametrize("policy", ["chunked", "vllm_v1"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_memory_that_holds_few(policy: str, preemption: str) -> None:
    def make(n: int) -> tuple[Trace, dict[str, Any]]:
        trace = trace_of([(0, 6 + 5 * i % 20, 20 + i % 30) for i in range(n)])
        return trace, {"policy": policy, "preemption": preemption, "num_blocks": 30}

    assert growth(make) < MOST


def test_a_prefix_that_waits_for_memory_is_not_looked_up_again_in_every_plan() -> None:
    """While one request decodes a prompt is computed in chunks; another with the same beginning and an end of its own
    finds no room beside the two."""

    def make(n: int) -> tuple[Trace, dict[str, Any]]:
        trace = trace_of([(0, 40, n), (0, 8 * n, 2), (0.001, 16 * n, 2)])
        hashes = [(), tuple(range(2 * n)), (*range(2 * n), *range(1_000_000, 1_000_000 + 2 * n))]
        options = {
            "policy": "vllm_v1",
            "knobs": {"long_prefill_token_threshold": 8},
            "prefix_caching": True,
            "num_blocks": 4 * n + 1,
        }
        return replace(trace, prefix_hashes=hashes, hash_tokens=4), options

    assert growth(make) < MOST


def test_long_answers_planned_one_batch_ahead() -> None:
    """Four times the answer is hardly more work: equal decodes are crossed at once."""

    def make(n: int) -> tuple[Trace, dict[str, Any]]:
        trace = trace_of([(0, 100 + i, 10 * n) for i in range(4)])
        return trace, {"policy": "vllm_v1", "knobs": {"async_scheduling": True}, "num_blocks": 40 * n}

    assert growth(make) < 1.5


@pytest.mark.parametrize("tokens", [4, 400])
def test_work_for_a_prefix_cache_goes_with_hashes(tokens: int) -> None:
    """Blocks of 4 tokens, a hash of 4 or of 400: prompts four times as long cost four times as much, or hardly more."""

    def make(n: int) -> tuple[Trace, dict[str, Any]]:
        length = 40 * n if tokens > 4 else 4 * n
        trace = trace_of([(0.5 * i, length + 1, 2) for i in range(12)])
        hashes = [tuple(range(-(-length // tokens))) for _ in range(12)]
        options = {"policy": "vllm_v1", "prefix_caching": True, "num_blocks": 60 * n, "token_budget": 1 << 20}
        return replace(trace, prefix_hashes=hashes, hash_tokens=tokens), options

    assert growth(make) < MOST


@pytest.mark.parametrize("kv_bandwidth", [1e12, 1e6])
def test_prompts_whose_kv_moves(kv_bandwidth: float) -> None:
    def make(n: int) -> tuple[Trace, dict[str, Any]]:
        pools = ({"role": "prefill", "replicas": 2}, {"role": "decode", "replicas": 2})
        return burst(n), {"pools": pools, "kv_bandwidth": kv_bandwidth, "num_blocks": 40 * n}

    assert growth(make) < MOST


def test_arrived_kv_waits_for_a_slot() -> None:
    def make(n: int) -> tuple[Trace, dict[str, Any]]:
        pools = ({"role": "prefill"}, {"role": "decode", "max_num_seqs": 2})
        return burst(n), {"pools": pools, "kv_bandwidth": 1e12, "num_blocks": 40 * n}

    assert growth(make, few=150) < MOST


@pytest.mark.parametrize("by", ["queue", "slo"])
def test_a_pool_that_grows_looks_at_long_queues(by: str) -> None:
    def make(n: int) -> tuple[Trace, dict[str, Any]]:
        return burst(n), {"autoscale": {"most": 2, "by": by, "interval_s": 0.05, "startup_s": 1e6, "ttft_s": 0.001}}

    assert growth(make) < MOST


def test_closed_loops() -> None:
    def make(n: int) -> tuple[Trace, dict[str, Any]]:
        trace = burst(n)
        return replace(trace, after_row=np.maximum(np.arange(n) - 5, -1), think_ns=np.full(n, 1_000)), {}

    assert growth(make) < MOST


@pytest.mark.parametrize("rungs", ["preempt", "preempt,plain", "preempt,oversubscribe", "reject"])
def test_the_overload_ladder(rungs: str) -> None:
    assert growth(lambda n: (burst(n), {"ladder": rungs})) < MOST
