"""Replicas simulated one after another: the tables of replicas simulated side by side, wherever that may be done."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import Recorder
from metrics.run_folder.columns import TABLES
from simulator import simulation
from simulator.cluster import in_turn as independent
from simulator.cluster.pools import make_cluster_plan
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.simulation import simulate
from tests.simulator.constant_cost import ConstantCost, trace_of
from workloads import Trace

S = 1_000_000_000
BY_SESSION = """
from dataclasses import dataclass, field
from zlib import crc32
from simulator.routers import Router

@dataclass
class BySession(Router):
    oblivious = True

    def choose(self, request, replicas, rng):
        name = request.session
        return replicas[crc32(name.encode()) % len(replicas)] if name else rng.choice(replicas)
"""
POLICIES = [
    {"policy": "chunked", "knobs": {"chunk_size": 7}},
    {"policy": "vllm_v1", "prefix_caching": True},
    {"policy": "vllm_v1", "knobs": {"async_scheduling": True}},
    {"policy": "request_level", "knobs": {"max_batch_size": 3, "max_delay_s": 0.7, "keep_finished": True}},
    {"policy": "orca", "knobs": {"max_batch_size": 4}},
    {"policy": "slo_aware", "knobs": {"chunk_size": 16, "ttft_s": 4.0, "tbt_s": 1.0}},
    {"policy": "chunked", "knobs": {"chunk_size": 16}, "pp": 3},
    {"policy": "vllm_v1", "preemption": "swap", "swap_bandwidth": 1e8, "model": "llama-3.1-8b"},
]


def cost_of(stages):
    return ConstantCost(
        S // 3,
        per_row_ns=1_000_003,
        per_context_ns=10_007,
        before_ns=50_000,
        after_ns=777,
        transfer_ns=9_001,
        stages=stages,
        tile=8,
    )


@st.composite
def traces(draw):
    """Arrivals whole seconds apart or at once, so that moments meet; sessions, prefixes, clients that give up."""
    row = st.tuples(
        st.sampled_from([0, 0, 1, 2, 9]), st.integers(1, 60), st.integers(1, 40), st.sampled_from([None, "a", "b"])
    )
    gaps, prompts, outputs, sessions = zip(*draw(st.lists(row, min_size=1, max_size=16)))
    trace = trace_of(list(zip(np.cumsum(gaps).tolist(), prompts, outputs)))
    if draw(st.booleans()):
        hashes = [tuple(range(tokens // 4)) for tokens in prompts]
        trace = replace(trace, session=sessions, prefix_hashes=hashes, hash_tokens=4)
    return trace.with_timeout(9.0) if draw(st.booleans()) else trace


def run(trace, recorder=None, **options):
    """(tables, cluster, whether the replicas had their turns one after another)"""
    config = ReplayConfig(**{"num_blocks": 40, "block_size": 4, **options})
    plan = make_cluster_plan(config, trace, cost_of(config.pp))
    recorder = recorder or Recorder()
    with patch.object(simulation, "run_in_turn", wraps=independent.run_in_turn) as in_turn:
        cluster = simulate(trace, plan, recorder)
    return recorder.tables(), cluster, in_turn.called


def side_by_side(trace, **options):
    with patch.object(simulation, "are_independent", lambda cluster, trace: False):
        tables, cluster, in_turn = run(trace, **options)
    assert not in_turn
    return tables, cluster


def by_replica(tables, name):
    """The rows of a table, those of each replica in their own order."""
    rows = tables.table(name).to_pylist()
    return list(map(repr, rows if name in ("requests", "segments") else sorted(rows, key=lambda row: row["replica"])))


@given(traces(), st.sampled_from(["round_robin", "random", "by_session"]), st.sampled_from(POLICIES), st.integers(2, 4))
@settings(max_examples=150, deadline=None)
def test_replicas_in_turn_write_the_rows_of_replicas_side_by_side(router_file, trace, router, policy, replicas):
    options = {**policy, "replicas": replicas, "router": str(router_file) if router == "by_session" else router}
    tables, cluster, in_turn = run(trace, **options)
    assert in_turn
    others = side_by_side(trace, **options), side_by_side(trace, leaps=False, **options)
    for other, other_cluster in others:
        assert cluster.facts() == other_cluster.facts()
        for name in TABLES:
            assert by_replica(tables, name) == by_replica(other, name), name


@pytest.fixture(scope="module")
def router_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("routers") / "by_session.py"
    file.write_text(BY_SESSION)
    return f"{file}:BySession"


CROWD = trace_of([(row / 7, 5 + row % 50, 1 + row % 30) for row in range(60)])


def test_unequal_pools_and_records_that_are_streamed_agree_too(tmp_path):
    options = {
        "pools": ({"policy": "chunked", "replicas": 2}, {"policy": "orca", "num_blocks": 60, "replicas": 1}),
        "router": "round_robin",
    }
    tables, _, in_turn = run(CROWD, Recorder(part_rows=7, stream_to=tmp_path), **options)
    other, _ = side_by_side(CROWD, **options)
    assert in_turn
    for name in TABLES:
        assert by_replica(tables, name) == by_replica(other, name), name


def test_every_end_is_told_and_counted_as_it_comes():
    told = []
    plan = make_cluster_plan(ReplayConfig(replicas=3, router="random", num_blocks=40, block_size=4), CROWD, cost_of(1))
    simulate(CROWD, plan, Recorder(), lambda ended, total: told.append((ended, total)))
    assert told == [(ended + 1, 60) for ended in range(60)]


SHARED_LINK = {"preemption": "swap", "swap_bandwidth": 1e8, "replicas_per_link": 2, "model": "llama-3.1-8b"}
POOLS = ({"role": "prefill", "replicas": 2}, {"role": "decode", "replicas": 2})


@pytest.mark.parametrize(
    "joined",
    [
        {"router": "least_outstanding_requests"},
        {"failures": ("1@3+2",)},
        {"autoscale": {"most": 4}},
        {"pools": POOLS, "replicas": 1, "decode_router": "round_robin"},
        {"kv_store_gib": 1.0, "policy": "vllm_v1", "prefix_caching": True},
        {"policy": "vllm_v1", **SHARED_LINK},
        {"leaps": False},
        {"replicas": 1},
    ],
    ids=lambda joined: "-".join(joined),
)
def test_what_joins_replicas_keeps_them_side_by_side(joined):
    assert not run(CROWD, **{"replicas": 4, "router": "round_robin", **joined})[2]


def test_an_answer_that_makes_a_request_arrive_keeps_them_side_by_side():
    """Whose turn it is depends on which answer ends first."""
    closed = Trace(
        "closed",
        CROWD.arrival_ns,
        CROWD.prompt_tokens,
        CROWD.output_tokens,
        CROWD.max_output_tokens,
        after_row=np.array([-1] * 30 + list(range(30))),
        think_ns=np.full(60, S),
    )
    assert not run(closed, replicas=3, router="round_robin")[2]


def test_a_router_that_looks_although_it_says_it_does_not_is_one_clear_line(tmp_path):
    file = tmp_path / "peeping.py"
    file.write_text(
        BY_SESSION.replace("name = request.session", "return min(replicas, key=lambda one: one.num_requests)")
    )
    with pytest.raises(SimulationError, match="router BySession says that it is oblivious, but looked"):
        run(CROWD, replicas=3, router=f"{file}:BySession")
