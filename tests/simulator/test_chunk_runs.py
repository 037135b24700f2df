"""A prompt's chunks follow each other without asking the policy again, and padded decodes are leapt over: the tables
stay those of the plain path."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.chunked import Chunked
from simulator.config import ReplayConfig
from simulator.simulation import replay
from tests.simulator.constant_cost import ConstantCost, trace_of

S = 1_000_000_000

POLICIES = [
    ("chunked", {"chunk_size": 7}, None),
    ("shortest_prompt_first", {"chunk_size": 9}, None),
    ("decode_maximal", {"chunk_size": 16, "align": "shrink"}, None),
    ("decode_maximal", {"chunk_size": 16, "align": "pad"}, None),
    ("vllm_v1", {}, 8),
    ("vllm_v1", {"long_prefill_token_threshold": 3}, 8),
    ("request_level", {"max_batch_size": 3}, None),
    ("orca", {"max_batch_size": 4}, None),
]


def tables_of(trace, policy, num_blocks, leaps, cost=None):
    name, knobs, budget = policy
    cost = cost or ConstantCost(S // 3, per_row_ns=1_000_003, per_context_ns=10_007, after_ns=777, tile=8)
    config = ReplayConfig(
        policy=name, knobs=knobs, token_budget=budget, num_blocks=num_blocks, block_size=4, max_num_seqs=6, leaps=leaps
    )
    return replay(trace, config, cost=cost).tables


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=10),
    st.sampled_from(POLICIES),
    st.integers(12, 90),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_runs_of_chunks_write_the_very_tables_of_the_plain_path(rows, policy, num_blocks, impatient):
    at, requests = 0.0, []
    for gap, prompt, output in rows:
        at += gap
        requests.append((at, prompt, output))
    trace = trace_of(requests)
    if impatient:
        trace = trace.with_timeout(9.7)
    fast, plain = (tables_of(trace, policy, num_blocks, leaps) for leaps in (True, False))
    for table in ("requests", "iterations", "tokens", "segments", "stages"):
        assert repr(fast.table(table).to_pydict()) == repr(plain.table(table).to_pydict()), table


def test_the_policy_is_asked_once_for_a_long_prompt_beside_decodes(monkeypatch):
    """40 tokens in chunks of 6 beside one decode: the first chunk is planned with nobody beside it but the decode, five
    more of the same size follow unasked, and the last one samples. Otherwise the test above would compare the plain
    path with itself."""
    halves = []
    plan = Chunked.plan

    def watched(self, queues, draft, kv, host, now_ns):
        halves.append(len(queues.partial))
        plan(self, queues, draft, kv, host, now_ns)

    monkeypatch.setattr(Chunked, "plan", watched)
    tables = tables_of(trace_of([(0, 4, 30), (5, 40, 2)]), POLICIES[0], 100, True)
    assert halves.count(1) == 1
    assert tables.column("iterations", "chunk_tokens").tolist().count(6) == 6


def test_the_cost_model_of_a_real_gpu_agrees_too():
    trace = trace_of([(0.01 * i, 700 + 90 * (i % 7), 5 + i % 9) for i in range(12)])
    tables = [
        replay(trace, ReplayConfig(knobs={"chunk_size": 128}, cost_model="roofline", leaps=leaps)).tables
        for leaps in (True, False)
    ]
    for table in ("requests", "iterations", "tokens"):
        one, other = (repr(each.table(table).to_pydict()) for each in tables)
        assert one == other, table
