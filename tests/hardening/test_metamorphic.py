"""What must change, and how, when a run is changed: theorems about schedules that no single expected number shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from metrics.tables import RunTables
from policies import PolicyError, Request, knobs_of, make_policy, make_scheduler, policy_class, policy_names
from simulator import replay
from tests.hardening.command_line import assert_refused, run
from tests.policies.driving import drive
from tests.simulator.constant_cost import ConstantCost, trace_of
from workloads import Trace

TIMED: dict[str, dict[str, dict[str, float]]] = {
    # knobs that hold a time (doubled with everything else) or a rate (halved)
    "slo_aware": {"times": {"ttft_s": 0.4, "tbt_s": 0.05}},
    "request_level": {"times": {"max_delay_s": 0.07}},
    "shortest_prompt_first": {"rates": {"ageing": 400.0}},
}
SHAPES = ("chunk_tokens", "num_chunks", "decodes", "decode_context_total", "dummy_tokens", "running", "waiting")


def random_trace(count: int = 60, seed: int = 5) -> Trace:
    """Arrivals in whole milliseconds, so that twice the time is exactly twice as many nanoseconds."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.integers(0, 60, count)) / 1000
    return trace_of([(float(at), int(rng.integers(1, 400)), int(rng.integers(1, 60))) for at in arrivals])


def run_tables(policy: str, trace: Trace, scale: int = 1, **more: Any) -> RunTables:
    timed = TIMED.get(policy, {})
    knobs = {name: value * scale for name, value in timed.get("times", {}).items()}
    knobs |= {name: value / scale for name, value in timed.get("rates", {}).items()}
    cost = ConstantCost(2_000_000 * scale, before_ns=100_000 * scale, per_row_ns=20_000 * scale, per_context_ns=10 * scale)
    return replay(trace, cost=cost, policy=policy, num_blocks=120, max_model_len=500, **knobs, **more).tables  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", policy_names())
def test_twice_the_costs_and_twice_the_gaps_are_the_same_batches_in_twice_the_time(policy: str) -> None:
    trace = random_trace()
    once = run_tables(policy, trace)
    twice = run_tables(policy, replace(trace, arrival_ns=trace.arrival_ns * 2), 2)
    for name in ("start_s", "end_s"):
        assert np.array_equal(once.column_ns("iterations", name) * 2, twice.column_ns("iterations", name))
    for name in SHAPES:
        assert np.array_equal(once.column("iterations", name), twice.column("iterations", name)), name
    for name in ("arrival_s", "first_token_s", "finished_s"):
        assert np.array_equal(once.column_ns("requests", name) * 2, twice.column_ns("requests", name))


@pytest.mark.parametrize("policy", policy_names())
def test_a_trace_split_at_an_idle_gap_is_two_runs(policy: str) -> None:
    first, second = random_trace(30, 1), random_trace(30, 2)
    gap_ns = 100 * 10**9
    columns = {
        name: np.concatenate([getattr(first, name), getattr(second, name) + (gap_ns if name == "arrival_ns" else 0)])
        for name in ("arrival_ns", "prompt_tokens", "output_tokens", "max_output_tokens")
    }
    whole, one, other = (run_tables(policy, trace) for trace in (replace(first, **columns), first, second))
    assert one.column_ns("requests", "finished_s").max() < gap_ns
    for name in ("first_token_s", "finished_s"):
        parts = [one.column_ns("requests", name), other.column_ns("requests", name) + gap_ns]
        assert np.array_equal(whole.column_ns("requests", name), np.concatenate(parts))
    for name in SHAPES:
        parts = [one.column("iterations", name), other.column("iterations", name)]
        assert np.array_equal(whole.column("iterations", name), np.concatenate(parts)), name


@pytest.mark.parametrize("policy", policy_names())
def test_other_names_for_the_requests_change_nothing(policy: str) -> None:
    """Where a policy breaks ties by id the new names keep the order; elsewhere they are shuffled."""
    rng = np.random.default_rng(11)
    rows = [(int(at), int(rng.integers(1, 60)), int(rng.integers(1, 30))) for at in np.cumsum(rng.integers(1, 4000, 14))]
    by_id = policy in ("slo_aware", "shortest_prompt_first")
    names = [7 * row + 3 for row in range(14)] if by_id else [int(name) for name in rng.permutation(14) + 100]

    def log_of(ids: list[int]) -> Any:
        scheduler = make_scheduler(make_policy(policy), num_blocks=40, block_size=4, max_model_len=100, tile=8, watermark=0.0)
        requests = [(Request(name, at, prompt, output), output) for name, (at, prompt, output) in zip(ids, rows)]
        return drive(scheduler, requests)

    plain, renamed = log_of(list(range(14))), log_of(names)
    assert [shape for _, _, shape, _ in plain.batches] == [shape for _, _, shape, _ in renamed.batches]
    assert {names[row]: times for row, times in plain.token_times.items()} == renamed.token_times


@pytest.mark.parametrize("policy", policy_names())
def test_a_knob_by_another_name_is_refused_with_those_that_there_are(policy: str) -> None:
    for knob in knobs_of(policy_class(policy)).values():
        with pytest.raises(PolicyError, match=rf"has no knob '{knob.name}x'; its knobs: .*{knob.name}"):
            make_policy(policy, {knob.name + "x": knob.default})


@pytest.mark.parametrize("policy", policy_names())
def test_a_knob_without_end_is_refused(policy: str) -> None:
    for knob in knobs_of(policy_class(policy)).values():
        if knob.type in (int, float):
            for value in (float("inf"), -float("inf"), float("nan"), "inf", "1e400", 10**400, 1e300):
                with pytest.raises(PolicyError, match=rf"policy {policy}, knob {knob.name}: found"):
                    make_policy(policy, {knob.name: value})


def test_a_knob_by_another_name_in_a_file_is_refused(tmp_path: Any) -> None:
    (tmp_path / "run.toml").write_text('policy = "chunked"\n[knobs]\nchunk_sise = 256\n')
    line = assert_refused(run("simulator", "replay", "examples/trace.csv", "--config", tmp_path / "run.toml"))
    assert "no knob 'chunk_sise'; its knobs: chunk_size" in line


def test_an_hour_of_load_keeps_its_memory(tmp_path: Any) -> None:
    """3,600 simulated seconds: what a replay needs beyond its records does not grow with the trace."""
    import tracemalloc

    grown = []
    for requests in (250, 1000):
        rng = np.random.default_rng(2)
        trace = trace_of([(float(row) * 3600 / requests, int(rng.integers(1, 900)), int(rng.integers(1, 120))) for row in range(requests)])
        tracemalloc.start()
        done = replay(trace, cost=ConstantCost(3_000_000), policy="chunked", num_blocks=2000)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (done.tables.column("requests", "status") == "finished").all()
        grown.append(size)
        del done
    assert grown[1] < 4.4 * grown[0]
