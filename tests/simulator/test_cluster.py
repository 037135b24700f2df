"""Clusters: queueing theory, equality with a single replica, and what must hold whatever happens to the replicas."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import Recorder
from simulator.cluster.pools import make_cluster_plan, parse_pool
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.routers import router_names
from simulator.simulation import replay, simulate
from tests.simulator.constant_cost import ConstantCost, trace_of
from workloads import Trace

S = 1_000_000_000
MS = 1_000_000


def run(trace, cost, **options):
    options.setdefault("num_blocks", 1000)
    return replay(trace, ReplayConfig(**options), cost=cost)


def by_request(result, column):
    order = np.argsort(result.tables.column("requests", "request"))
    return result.tables.column("requests", column)[order]


def latency(result):
    return by_request(result, "finished_s") - by_request(result, "arrival_s")


def queue(rate, outputs, seed):
    """Poisson arrivals of one-token prompts with the given answers."""
    rng = np.random.default_rng(seed)
    arrivals = np.rint(np.cumsum(rng.exponential(1e9 / rate, len(outputs)))).astype(np.int64)
    return Trace("queue", arrivals, np.ones(len(outputs), int), outputs, outputs)


def mean_and_half_width(values, batches=20):
    """Mean and 99.9 % confidence half-width by batch means (t = 3.88 at 19 degrees of freedom)."""
    means = np.array([part.mean() for part in np.array_split(values, batches)])
    return means.mean(), 3.88 * means.std(ddof=1) / math.sqrt(batches)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_batches_of_one_with_equal_service_are_an_m_d_1_queue(load):
    """Mean wait rho s / 2 (1 - rho) for service s (Pollaczek-Khinchine)."""
    trace = queue(load, np.ones(8_000, int), seed=3)
    waits = latency(run(trace, ConstantCost(device_ns=S), max_num_seqs=1)) - 1
    mean, half = mean_and_half_width(waits[1000:])
    assert abs(mean - load / (2 * (1 - load))) < half < 0.6


@pytest.mark.parametrize(("servers", "load"), [(1, 0.7), (3, 0.8)])
def test_sending_work_where_least_is_left_is_an_m_m_c_queue(servers, load):
    """Joining the least remaining work is one queue for all servers: its mean wait is Erlang's C formula."""
    rng = np.random.default_rng(5)
    # Exponential service of mean 1 s, in iterations of 20 ms (the prompt's included).
    outputs = np.maximum(1, np.rint(rng.exponential(50, 8_000))).astype(int)
    trace = queue(servers * load, outputs, seed=7)
    result = run(
        trace,
        ConstantCost(device_ns=20 * MS),
        replicas=servers,
        router="least_outstanding_tokens",
        max_num_seqs=1,
        num_blocks=100_000,
    )
    waits = by_request(result, "admitted_s") - by_request(result, "arrival_s")
    mean, half = mean_and_half_width(waits[1000:])
    offered = servers * load
    tail = offered**servers / math.factorial(servers) / (1 - load)
    erlang_c = tail / (sum(offered**k / math.factorial(k) for k in range(servers)) + tail)
    assert abs(mean - erlang_c / (servers * (1 - load))) < half < 0.8


def test_several_replicas_share_what_one_would_do_alone():
    """Two requests at once on two replicas: each as if it were alone."""
    trace = trace_of([(0, 4, 10), (0, 4, 10)])
    result = run(trace, ConstantCost(device_ns=S, per_row_ns=S), replicas=2)
    assert by_request(result, "replica").tolist() == [0, 1]
    alone = run(trace_of([(0, 4, 10)]), ConstantCost(device_ns=S, per_row_ns=S))
    assert set(by_request(result, "finished_s")) == set(by_request(alone, "finished_s"))


@pytest.mark.parametrize("router", ["least_outstanding_tokens", "least_kv"])
def test_routing_does_not_stop_the_leaps_of_replicas_that_are_only_looked_at(router):
    """A thousand arrivals pass by a replica in the middle of a long answer: it still leaps over it in one go."""
    rows = [(0, 4, 3000)] + [(1 + i * 0.01, 4, 1) for i in range(1000)]
    config = ReplayConfig(replicas=2, router=router, num_blocks=1000)
    leaps = []

    class Watched(Recorder):
        def leap(self, replica, *args, **options):
            leaps.append(replica)
            super().leap(replica, *args, **options)

    cost = ConstantCost(device_ns=MS)
    trace = trace_of(rows)
    simulate(trace, make_cluster_plan(config, trace, cost), Watched())
    assert leaps == [0]


@pytest.mark.parametrize("leaps", [True, False])
@pytest.mark.parametrize(("long", "short", "admitted"), [(0, 1, 6), (1, 0, 5)])
def test_replicas_that_complete_in_one_moment_do_so_by_number(leaps, long, short, admitted):
    """Both complete at 5 s. An answer ends on one of them, and the next turn comes at once, to the other: replica 0 has
    planned again by then if the answer ended on replica 1, replica 1 has not if it ended on replica 0."""
    outputs = {long: 50, short: 5}
    trace = trace_of([(0, 4, outputs[0]), (0, 4, outputs[1]), (0, 4, 1)])
    trace = replace(
        trace,
        after_row=np.array([-1, -1, short]),
        think_ns=np.array([0, 0, 0]),
        session=[f"s{long}" if row == long else "other" for row in range(2)] + [f"s{long}"],
    )
    result = run(trace, ConstantCost(device_ns=S), replicas=2, router="session_affinity", leaps=leaps)
    assert by_request(result, "replica").tolist() == [0, 1, long]
    assert by_request(result, "admitted_s")[2] == admitted


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=6), st.integers(1, 4000))
@settings(max_examples=60, deadline=None)
def test_a_view_of_a_leaping_replica_is_what_settling_it_would_show(outputs, look_ms):
    """Looking first and settling afterwards give the same numbers."""
    from simpy import Environment

    from simulator.clock.virtual_time import ARRIVAL, Moment
    from simulator.replica.running_ahead import Replica
    from simulator.simulation import make_engine

    trace = trace_of([(0, 4, output) for output in outputs])
    engine = make_engine(ReplayConfig(num_blocks=5000), trace, ConstantCost(device_ns=MS))
    env = Environment()
    replica = Replica(env, 0, engine.scheduler(), engine.cost, Recorder())
    for row, output in enumerate(outputs):
        replica.submit(trace.request(row), output)

    def look(event):
        def seen():
            return (
                replica.num_running,
                replica.num_waiting,
                replica.prefill_tokens,
                replica.decode_tokens_promised,
                replica.free_blocks,
            )

        before = seen()
        replica.settle()
        assert seen() == before

    Moment(env, look_ms * MS, look, ARRIVAL)
    env.run()


@st.composite
def workloads(draw):
    rows = draw(
        st.lists(
            st.tuples(st.floats(0, 4), st.integers(1, 60), st.integers(1, 40), st.sampled_from([None, "a", "b"])),
            min_size=1,
            max_size=16,
        )
    )
    at, requests = 0.0, []
    for gap, prompt, output, _ in rows:
        at += gap
        requests.append((at, prompt, output))
    trace = trace_of(requests)
    sessions = [session for *_, session in rows]
    return Trace(
        "test",
        trace.arrival_ns,
        trace.prompt_tokens,
        trace.output_tokens,
        trace.max_output_tokens,
        session=sessions,
        prefix_hashes=[tuple(range(int(n) // 16)) for n in trace.prompt_tokens],
        hash_tokens=16,
    )


def check_conservation(trace, result):
    """Every request ends once, with as many tokens as it says, at times that only go forward."""
    summary = result.summary
    ends = summary["finished"] + summary["rejected"] + summary["failed"] + summary["aborted"]
    assert ends == summary["requests"] == len(trace)
    requests = result.tables.table("requests").to_pydict()
    assert sorted(requests["request"]) == list(range(len(trace)))
    for request, status, tokens in zip(requests["request"], requests["status"], requests["output_tokens"]):
        assert tokens == trace.output_tokens[request] if status == "finished" else tokens < trace.output_tokens[request]
    times = {}
    for *where, step, time in zip(*result.tables.table("tokens").to_pydict().values()):
        times[(*where, step)] = time
    segments = result.tables.table("segments").to_pydict()
    tokens: dict[int, list[float]] = {}
    for request, *where, start, end in zip(*segments.values()):
        tokens.setdefault(request, []).extend(times[(*where, step)] for step in range(start, end))
    for request, status, first, last in zip(
        requests["request"], requests["status"], requests["first_token_s"], requests["finished_s"]
    ):
        delivered = tokens.get(request, [])
        assert delivered == sorted(delivered)
        if status == "finished":
            assert (delivered[0], delivered[-1]) == (first, last)
    return summary


COST = ConstantCost(S // 3, per_row_ns=1_000_003, per_context_ns=10_007, before_ns=50_000, after_ns=777)


@given(workloads(), st.sampled_from(router_names()), st.integers(1, 4), st.booleans())
@settings(max_examples=80, deadline=None)
def test_no_router_loses_a_request_and_leaps_change_nothing(trace, router, replicas, impatient):
    if impatient:
        trace = trace.with_timeout(9.7)
    tables = []
    for leaps in (True, False):
        result = run(trace, COST, router=router, replicas=replicas, leaps=leaps, block_size=4, num_blocks=40)
        check_conservation(trace, result)
        tables.append(result.tables)
    for name in ("requests", "iterations", "tokens", "segments", "stages"):
        rows = [sorted(map(repr, table.table(name).to_pylist())) for table in tables]
        assert rows[0] == rows[1], name


def test_an_unknown_router_is_one_clear_line():
    with pytest.raises(ValueError, match="router: found 'roundrobin', expected one of random, round_robin"):
        run(trace_of([(0, 4, 4)]), COST, router="roundrobin")


@pytest.mark.parametrize("leaps", [True, False])
@pytest.mark.parametrize("router", router_names())
def test_among_unequal_pools_a_request_goes_where_it_can_run(router, leaps):
    """Every second request is longer than the small pool's 4 blocks of 16; one is longer than any pool."""
    trace = trace_of([(at / 4, 100 if at % 2 else 20, 4) for at in range(20)] + [(6, 1000, 4)])
    pools = ({"role": "serve", "replicas": 3, "num_blocks": 4}, {"role": "serve", "replicas": 1, "num_blocks": 20})
    result = run(trace, ConstantCost(device_ns=MS), pools=pools, router=router, leaps=leaps)
    rows = sorted(result.tables.table("requests").to_pylist(), key=lambda row: row["request"])
    assert [row["status"] for row in rows] == ["finished"] * 20 + ["rejected"]
    assert {row["replica"] for row in rows[1:20:2]} == {3}
    if router in ("random", "round_robin"):
        assert {row["replica"] for row in rows[0:20:2]} & {0, 1, 2}


IDLE = """
from dataclasses import dataclass
from policies.contract.policy import Policy

@dataclass(frozen=True)
class Idle(Policy):
    def plan(self, queues, draft, kv, host, now_ns):
        if queues.waiting:
            draft.admit(queues.waiting[0], 8)
        for track in queues.partial:
            draft.chunk(track, 8)
"""


def test_whom_a_policy_leaves_waiting_is_told_with_how_far_it_came(tmp_path):
    """It computes prompts and never decodes."""
    (tmp_path / "idle.py").write_text(IDLE)
    said = (
        r"2 requests never ended: the policy left them waiting \(such as request 0, running on replica 0 under Idle, with "
        r"20 of 20 prompt tokens computed and 1 of 4 answered\)"
    )
    with pytest.raises(SimulationError, match=said):
        run(trace_of([(0, 20, 4), (0, 20, 4)]), ConstantCost(device_ns=MS), policy=f"{tmp_path / 'idle.py'}:Idle")


def test_a_pool_named_by_its_role_is_told_how_to_say_so():
    with pytest.raises(SimulationError, match="found 'prefill=1', expected role=prefill, beside replicas=N"):
        parse_pool("prefill=1")
