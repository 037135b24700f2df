"""Prefill and decode apart: hand-worked transfers, back-pressure, and nothing lost on the way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cluster.pools import make_cluster_plan, parse_pool
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.simulation import replay
from tests.simulator.constant_cost import ConstantCost, trace_of
from tests.simulator.test_cluster import by_request, check_conservation, workloads

S = 1_000_000_000
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
"""Keys and values of one token of Llama-3.1-8B: 32 layers, 8 heads of 128, 16 bits."""

PREFILL, DECODE = {"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 1}


def run(trace, *pools, cost=None, seconds_per_1000_tokens=1.0, latency=0.5, **options):
    """A link that carries 1000 tokens of KV in the given time."""
    options.setdefault("num_blocks", 1000)
    config = ReplayConfig(
        pools=pools or (PREFILL, DECODE),
        kv_bandwidth=1000 * TOKEN_BYTES / seconds_per_1000_tokens,
        kv_latency_s=latency,
        **options,
    )
    return replay(trace, config, cost=cost or ConstantCost(device_ns=S))


def token_times(result, request):
    tables = result.tables
    times = {tuple(key): time for *key, time in zip(*tables.table("tokens").to_pydict().values())}
    rows = [row for row in zip(*tables.table("segments").to_pydict().values()) if row[0] == request]
    return [times[(*where, step)] for _, *where, start, end in rows for step in range(start, end)]


BIG = {"knobs": {"chunk_size": 2000}}


def test_the_second_token_waits_for_the_kv():
    """Prompt 1 s, transfer 1 s and half a second of latency, then a token a second."""
    result = run(trace_of([(0, 1000, 4)]), **BIG)
    assert token_times(result, 0) == [1, 3.5, 4.5, 5.5]
    requests = result.tables.table("requests").to_pylist()[0]
    assert (requests["replica"], requests["first_token_s"], requests["output_tokens"]) == (1, 1.0, 4)
    assert result.tables.column("segments", "replica").tolist() == [0, 1]
    kv = result.config["cluster"]["kv"]
    assert (kv["transfers"], kv["bytes"], kv["after_prompt_s_mean"]) == (1, 1000 * TOKEN_BYTES, 1.5)


def test_transfers_into_one_replica_share_its_link():
    """Two prompts done at once on two replicas: each transfer has half the decode replica's link."""
    trace = trace_of([(0, 1000, 2), (0, 1000, 2)])
    result = run(trace, {**PREFILL, "replicas": 2}, DECODE, **BIG)
    assert [token_times(result, row)[1] for row in (0, 1)] == [4.5, 4.5]
    apart = run(trace, {**PREFILL, "replicas": 2}, {**DECODE, "replicas": 2}, **BIG)
    assert [token_times(apart, row)[1] for row in (0, 1)] == [3.5, 3.5]


def test_a_transfer_that_ends_leaves_its_share_to_the_others():
    """1000 and 500 tokens at half the link each: the short one takes 1 s, the long one has the link alone then."""
    trace = trace_of([(0, 1000, 2), (0, 500, 2)])
    result = run(trace, {**PREFILL, "replicas": 2}, DECODE, latency=0, **BIG)
    assert [token_times(result, row)[1] for row in (1, 0)] == [3, 4]


def test_layer_by_layer_only_the_last_layer_is_left_when_the_prompt_ends():
    fast = run(trace_of([(0, 1000, 2)]), layerwise_kv=True, seconds_per_1000_tokens=0.5, **BIG)
    assert token_times(fast, 0) == pytest.approx([1, 1 + 0.5 / 32 + 0.5 + 1])
    slow = run(trace_of([(0, 1000, 2)]), layerwise_kv=True, seconds_per_1000_tokens=2.0, **BIG)
    assert token_times(slow, 0) == pytest.approx([1, 2.0 + 2 * 0.5 + 1]), "two transfers, each with its latency"


def test_an_answer_of_one_token_never_moves():
    result = run(trace_of([(0, 1000, 1)]), **BIG)
    assert (token_times(result, 0), result.config["cluster"]["kv"]["transfers"]) == ([1], 0)
    assert result.tables.column("requests", "replica").tolist() == [0]


def test_a_full_decode_pool_holds_prompts_back():
    """Room for one request at a time: the second transfer begins when the first request ends, at 5.5 s."""
    trace = trace_of([(0, 1000, 4), (0, 1000, 4)])
    result = run(trace, {**PREFILL, "replicas": 2}, {**DECODE, "num_blocks": 70}, **BIG)
    assert token_times(result, 0) == [1, 3.5, 4.5, 5.5]
    assert token_times(result, 1) == [1, 8, 9, 10]
    assert result.config["cluster"]["kv"]["wait_s_mean"] == 4.5 / 2


def test_blocks_of_a_prompt_under_way_are_not_given_to_the_next():
    """The prefill replica holds one prompt at a time: the second one starts when the first has left, at 2.5 s."""
    trace = trace_of([(0, 1000, 2), (0, 1000, 2)])
    result = run(trace, {**PREFILL, "num_blocks": 70}, DECODE, **BIG)
    assert by_request(result, "admitted_s").tolist() == [0, 2.5]


def test_a_request_that_no_decode_replica_could_hold_is_rejected_at_once():
    result = run(trace_of([(0, 1000, 4)]), PREFILL, {**DECODE, "num_blocks": 40}, **BIG)
    assert result.tables.column("requests", "status").tolist() == ["rejected"]
    assert result.tables.column("requests", "reason").tolist() == [
        "decode pool: needs 63 KV blocks, the pool has 40, 1 of them kept free by the watermark"
    ]


def test_a_client_may_go_while_its_kv_is_on_the_way():
    result = run(trace_of([(0, 1000, 4), (3, 1000, 4)]).with_timeout(2), **BIG)
    assert result.tables.column("requests", "status").tolist() == ["aborted", "aborted"]
    assert by_request(result, "output_tokens").tolist() == [1, 1]
    assert by_request(result, "finished_s").tolist() == [2, 5]


def test_pools_may_differ_in_gpu_parallelism_and_policy():
    pools = (
        parse_pool("role=prefill,replicas=2,gpu=h100,tp=2,policy=prefill_priority,max-prompts=1"),
        parse_pool("role=decode,gpu=h200,tp=4,layer_split=16+16,pp=2,policy=vllm_v1"),
    )
    config = ReplayConfig(pools=pools, knobs={"chunk_size": 256}, cost_model="roofline")
    plan = make_cluster_plan(config, trace_of([(0, 1000, 4)]))
    prefill, decode = plan.pools
    assert (prefill.devices, decode.devices, plan.devices) == (4, 8, 12)
    assert (prefill.engine.policy.max_prompts, decode.engine.config.layer_split) == (1, (16, 16))
    assert decode.engine.num_blocks > 3 * prefill.engine.num_blocks
    result = replay(trace_of([(0, 1000, 40), (0.1, 3000, 30)]), config)
    assert (result.config["gpu"], result.config["policy"]) == ("h100 + h200", "prefill_priority + vllm_v1")
    assert (result.config["num_blocks"], result.config["peaks"]["devices"]) == (None, 12)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ((PREFILL,), "found a prefill pool without a decode pool"),
        ((DECODE,), "found a decode pool without a prefill pool"),
        (({"role": "decoding"},), "pool 0: found role 'decoding', expected one of serve, prefill, decode"),
        (({"replicas": "two"},), "pool 0, replicas: found 'two', expected int"),
        (({"chunksize": 4},), "policy chunked has no knob 'chunksize'"),
    ],
)
def test_a_wrong_pool_is_one_clear_line(pools, message):
    with pytest.raises(ValueError, match=message):
        run(trace_of([(0, 4, 4)]), *pools)


def test_a_pool_text_is_key_value_pairs():
    with pytest.raises(SimulationError, match="--pool: found 'decode', expected key=value pairs"):
        parse_pool("decode,replicas=2")


COST = ConstantCost(S // 3, per_row_ns=1_000_003, per_context_ns=10_007, before_ns=50_000, after_ns=777)


@given(
    workloads(),
    st.sampled_from(["chunked", "prefill_priority", "vllm_v1", "decode_maximal", "orca"]),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(26, 60),
    st.integers(26, 60),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(["0@2.5+3", "1@4", "2@3.1+2", "3@1.7+9", "1@3.3+1"]), unique=True, max_size=4),
    st.sampled_from(["requeue", "fail"]),
)
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost_between_pools(
    trace, policy, prefills, decodes, room, decode_room, layerwise, impatient, deaths, on_failure
):
    if impatient:
        trace = trace.with_timeout(12.3)
    deaths = tuple(death for death in deaths if int(death[0]) < prefills + decodes)
    result = run(
        trace,
        {"role": "prefill", "replicas": prefills, "num_blocks": room},
        {"role": "decode", "replicas": decodes, "num_blocks": decode_room},
        cost=COST,
        seconds_per_1000_tokens=40.0,
        latency=0.01,
        block_size=4,
        policy=policy,
        layerwise_kv=layerwise,
        failures=deaths,
        on_failure=on_failure,
    )
    summary = check_conservation(trace, result)
    if not deaths and not impatient:
        assert summary["finished"] + summary["rejected"] == len(trace)


@pytest.mark.parametrize("layerwise", [False, True])
def test_who_has_a_first_token_is_not_turned_away_where_it_decodes(layerwise):
    """Rung `reject` is about the wait for a first token, and a decode replica gets requests that have theirs."""
    trace = trace_of([(row / 4, 100, 30) for row in range(20)])
    result = run(
        trace,
        {**PREFILL, "replicas": 2},
        DECODE,
        ladder="all",
        max_wait_s=1.0,
        num_blocks=60,
        layerwise_kv=layerwise,
    )
    ends = result.tables.table("requests").to_pylist()
    assert {end["status"] for end in ends} == {"finished", "rejected"}
    assert {end["output_tokens"] for end in ends if end["status"] == "rejected"} == {0}


def test_a_policy_that_reserves_answers_finds_them_reserved_when_the_kv_arrives():
    """Orca reserves 33 blocks of 52 for each: one request at a time is sent, decoded, and never computed again (it could
    not be: a prompt of 100 tokens is taken whole, and the budget is 64)."""
    result = run(
        trace_of([(0, 100, 30)] * 20),
        PREFILL,
        {**DECODE, "policy": "orca", "num_blocks": 52},
        token_budget=64,
        block_size=4,
        num_blocks=400,
        seconds_per_1000_tokens=0.01,
        latency=0.0,
    )
    assert set(result.tables.column("requests", "status")) == {"finished"}
    iterations = result.tables.table("iterations").to_pydict()
    decoding = [rows for rows, replica in zip(iterations["decodes"], iterations["replica"]) if replica == 1]
    assert set(decoding) == {0, 1}


@pytest.mark.parametrize("leaps", [True, False])
def test_a_request_that_gave_way_comes_back_before_a_new_pull(leaps):
    """Ten blocks, one kept free, one slot. A runs in 2 blocks, B waits with 5, C needs 3 and finds 2. A begins at 1.5 s
    and writes a token a second: at 65.5 s it asks for a sixth block and gives way to B, which writes its nine tokens in
    B's own blocks until 74.5 s. Then 9 blocks are free: 6 for A, which waits longest, and 3 for C, 73.5 s after its
    prompt ended."""
    result = run(
        trace_of([(0, 16, 100), (0, 64, 10), (0, 32, 10)]),
        PREFILL,
        {**DECODE, "num_blocks": 10, "max_num_seqs": 1},
        seconds_per_1000_tokens=1e-6,
        leaps=leaps,
        **BIG,
    )
    assert by_request(result, "finished_s")[1] == pytest.approx(74.5)
    assert result.config["cluster"]["kv"]["wait_s_mean"] == pytest.approx(73.5 / 3)
