"""Attention and FFN apart: the closed form against the same schedule played event by event."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import BatchShape
from profiler import load_hardware, load_model_spec
from simulator.config import ReplayConfig
from simulator.replica.attention_ffn_apart import Apart, AttentionFfnApart, Layer, attention_blocks, make_apart
from simulator.replica.replica_kind import make_engine
from simulator.simulation import replay
from tests.simulator.constant_cost import trace_of
from workloads import generate

MODEL, GPU = "llama-3.1-70b", "h100"


def engine(**afd):
    config = ReplayConfig(model=MODEL, gpu=GPU, cost_model="roofline", afd=afd)
    return make_engine(config, trace_of([(0, 1000, 100)]))


def played(attention, ffn, transfer, micro_batches, layers):
    """Every micro-batch through every layer, first come first served on both groups."""
    free = {"attention": 0, "ffn": 0}
    events = [(0, number, 0, "attention") for number in range(micro_batches)]
    last = 0
    while events:
        now, number, layer, group = heapq.heappop(events)
        free[group] = max(now, free[group]) + (attention if group == "attention" else ffn)
        arrives = free[group] + transfer
        if group == "attention":
            heapq.heappush(events, (arrives, number, layer, "ffn"))
        elif layer + 1 < layers:
            heapq.heappush(events, (arrives, number, layer + 1, "attention"))
        else:
            last = max(last, arrives)
    return last


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(1, 6), st.integers(1, 12))
@settings(max_examples=300, deadline=None)
def test_the_closed_form_is_the_schedule(attention, ffn, transfer, micro_batches, layers):
    cost = object.__new__(AttentionFfnApart)
    cost.apart, cost.layers = Apart(micro_batches=micro_batches), layers
    closed = cost._iteration(Layer(attention, ffn, transfer, 0))
    assert closed == played(attention, ffn, transfer, micro_batches, layers)


shapes = st.builds(
    lambda chunks, decodes, context: BatchShape(
        tuple(chunks), decodes, decodes * context, context if decodes else 0, 0, decodes + len(chunks)
    ),
    st.lists(st.tuples(st.integers(1, 600), st.integers(0, 3000)), max_size=3),
    st.integers(1, 200),
    st.integers(1, 4000),
)


@given(shapes, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_scalar_and_vector_forms_agree_and_the_breakdown_adds_up(shape, micro_batches):
    cost = engine(attention=4, ffn=4, micro_batches=micro_batches).cost
    before, after = cost.host_ns(shape)
    assert sum(cost.breakdown(shape).values()) == before + after + cost.stage_ns(shape)
    decodes = shape._replace(chunks=(), sampled=shape.decodes)
    longer = [
        decodes._replace(
            decode_context_total=decodes.decode_context_total + step * decodes.decodes,
            decode_context_max=decodes.decode_context_max + step,
        )
        for step in range(5)
    ]
    assert cost.repeat_ns(decodes, 5).tolist() == [cost.stage_ns(each) for each in longer]
    assert cost.predict_ns(longer).tolist() == [cost.stage_ns(each) for each in longer]


def test_one_micro_batch_and_a_perfect_link_cost_what_one_group_of_devices_does():
    """4 + 4 devices in turn do what 4 devices do, plus two hops a layer."""
    shape = BatchShape((), 64, 64_000, 1000, 0, 64)
    together = make_engine(
        ReplayConfig(model=MODEL, gpu=GPU, cost_model="roofline", tp=4), trace_of([(0, 1000, 100)])
    ).cost.stage_ns(shape)
    apart = engine(attention=4, ffn=4, micro_batches=1, link_bandwidth=1e18, link_latency_us=7).cost.stage_ns(shape)
    assert apart == pytest.approx(together + 80 * 2 * 7_000, abs=200)


def test_groups_overlap_with_two_micro_batches():
    cost = engine(attention=4, ffn=4, micro_batches=2).cost
    shape = BatchShape((), 1024, 1024 * 1000, 1000, 0, 1024)
    shares = cost.group_shares(shape)
    assert shares["attention"] + shares["ffn"] > 1.5
    in_turn = engine(attention=4, ffn=4, micro_batches=1).cost.group_shares(shape)
    assert in_turn["attention"] + in_turn["ffn"] < 1


def test_without_ffn_weights_attention_has_more_room_for_kv():
    """80 layers of gate, up and down of 8192 x 28672 are 105 GiB, a quarter of it on each of four devices."""
    model, hardware = load_model_spec(MODEL), load_hardware(GPU)
    settings = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "block_size": 16, "share": 0.9}
    apart = attention_blocks(model, hardware, Apart(4, 4), **settings)
    together = make_engine(
        ReplayConfig(model=MODEL, gpu=GPU, cost_model="roofline", tp=4), trace_of([(0, 1000, 100)])
    ).num_blocks
    freed = 80 * 3 * 8192 * 28672 * 2 / 4
    assert apart - together == pytest.approx(freed / (16 * 80 * 2 * 2 * 128 * 2), abs=1)


def test_a_replay_runs_on_it_with_equal_tables_leaping_or_not():
    trace = trace_of([(0.1 * i, 100 + 37 * i, 20 + 9 * i) for i in range(12)])
    runs = [
        replay(trace, model=MODEL, gpu=GPU, cost_model="roofline", afd={"attention": 4, "ffn": 4}, leaps=leaps)
        for leaps in (True, False)
    ]
    assert runs[0].summary["finished"] == 12
    assert runs[0].config["peaks"]["devices"] == 8
    for name in ("requests", "iterations", "tokens"):
        one, two = (run.tables.table(name).to_pydict() for run in runs)
        assert {column: repr(values) for column, values in one.items()} == {c: repr(v) for c, v in two.items()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": 4, "fnn": 4}, "--afd: unknown key 'fnn'; known keys: attention, ffn"),
        ({"attention": 0}, "--afd, knob attention: found 0, expected at least 1"),
        ({"attention": 4, "ffn": 1}, "the FFN of llama-3.1-70b does not fit on 1 x h100"),
    ],
)
def test_wrong_groups_are_one_clear_line(settings, message):
    with pytest.raises(ValueError, match=message):
        engine(**settings)


def test_numbers_may_come_as_text():
    assert make_apart({"attention": "4", "ffn": "2"}) == Apart(4, 2)
    assert np.isclose(Apart(4, 2).bytes_per_s(load_hardware(GPU), load_hardware(GPU)), 2 * 50e9)


def test_keys_and_values_and_their_links_belong_to_the_attention_group():
    """Llama-3.1-70B: 8 KV heads of 128 in 80 layers, two of them on each of 4 attention devices; blocks of 16 tokens."""
    from simulator.cluster.kv_transfer import port_bandwidth
    from simulator.cluster.pools import ClusterPlan
    from simulator.provenance import run_config

    apart = engine(attention=4, ffn=2, ffn_gpu="h200")
    assert apart.memory.device_block_bytes == 16 * 2 * 80 * 2 * 128 * 2
    assert port_bandwidth(ClusterPlan.of(apart).pools[0], 50e9) == 4 * 50e9
    # Peaks of a device: four of 3.35 TB/s and two of 4.8 TB/s.
    peaks = run_config(trace_of([(0, 8, 8)]), ClusterPlan.of(apart), {})["peaks"]
    assert peaks == {"peak_flops": 989.5e12, "peak_bytes_per_s": (4 * 3350e9 + 2 * 4800e9) / 6, "devices": 6}


def test_a_run_says_that_its_groups_were_measured_and_the_link_between_them_was_not():
    run = replay(
        generate(requests=3), model="llama-3.1-8b", gpu="h100", cost_model="auto", afd={"attention": 1, "ffn": 1}
    )
    assert run.config["calibrated"] is True
    assert "fitted llama-3.1-8b h100" in run.config["cost_model"]
    assert run.config["cost_model"].endswith("transfers by the link's specification")
