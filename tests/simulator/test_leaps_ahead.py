"""Where planning runs one batch ahead of the running one, equal decodes are crossed at once: the tables stay those of
the plain path, whether the device waits for the host or hides it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import Recorder, RunTables
from simulator.config import ReplayConfig
from simulator.simulation import replay
from tests.simulator.constant_cost import ConstantCost, trace_of
from workloads import Trace

S = 1_000_000_000

COSTS = {
    "hidden": {"per_row_ns": 1_003, "per_context_ns": 10_007, "before_ns": S // 100, "after_ns": 777},
    "host-bound": {"per_context_ns": 1_007, "before_ns": S // 2, "after_ns": S // 7},
    "in turn": {"per_context_ns": S // 900, "before_ns": S // 4, "after_ns": S // 13},
}


def tables_of(trace: Trace, leaps: bool, cost: str, **options: Any) -> RunTables:
    config = ReplayConfig(
        policy="vllm_v1",
        knobs={"async_scheduling": True, **options.pop("knobs", {})},
        token_budget=32,
        block_size=4,
        max_num_seqs=6,
        leaps=leaps,
        **options,
    )
    return replay(trace, config, cost=ConstantCost(S // 3, **COSTS[cost], tile=8)).tables


@given(
    st.lists(st.tuples(st.floats(0, 60), st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=8),
    st.sampled_from(sorted(COSTS)),
    st.integers(46, 120),
    st.sampled_from([None, "abort", "caching", "declared", "replicas"]),
)
@settings(max_examples=120, deadline=None)
def test_leaps_ahead_write_the_very_tables_of_the_plain_path(rows, cost, num_blocks, other) -> None:
    at, requests = 0.0, []
    for gap, prompt, output in rows:
        at += gap
        requests.append((at, prompt, output))
    trace = trace_of(requests)
    options: dict[str, Any] = {"num_blocks": num_blocks}
    if other == "abort":
        trace = trace.with_timeout(39.7)
    elif other == "caching":
        trace = Trace(
            "test",
            trace.arrival_ns,
            trace.prompt_tokens,
            trace.output_tokens,
            trace.max_output_tokens,
            prefix_hashes=[tuple(range(prompt // 4)) for prompt in trace.prompt_tokens.tolist()],
            hash_tokens=4,
        )
        options["prefix_caching"] = True
    elif other == "declared":
        trace = Trace(
            "test", trace.arrival_ns, trace.prompt_tokens, trace.output_tokens, trace.output_tokens + len(rows) % 4
        )
    elif other == "replicas":
        options.update(replicas=2, router="least_outstanding_requests")
    fast, plain = (tables_of(trace, leaps, cost, **options) for leaps in (True, False))
    for table in ("requests", "iterations", "tokens", "segments", "stages"):
        order = [(name, "ascending") for name in fast.table(table).column_names if name in ("replica", "iteration")]
        found, expected = (
            each.table(table).sort_by(order) if other == "replicas" and len(order) == 2 else each.table(table)
            for each in (fast, plain)
        )
        if other == "replicas" and len(order) < 2:
            assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, expected.to_pylist())), table
        else:
            assert repr(found.to_pydict()) == repr(expected.to_pydict()), table


@pytest.mark.parametrize("cost", sorted(COSTS))
def test_a_long_answer_is_crossed_in_few_leaps(monkeypatch: pytest.MonkeyPatch, cost: str) -> None:
    """Otherwise the test above would compare the plain path with itself."""
    leapt: list[int] = []
    leap = Recorder.leap

    def watched(self: Recorder, *args: Any) -> None:
        leapt.append(len(args[4]))
        leap(self, *args)

    try:
        monkeypatch.setattr(Recorder, "leap", watched)
    except TypeError:
        pytest.skip("a compiled recorder cannot be watched")
    tables_of(trace_of([(0, 40, 400), (10.0, 9, 200)]), True, cost, num_blocks=200)
    assert sum(leapt) > 350
    assert len(leapt) <= 6
