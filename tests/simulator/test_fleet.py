"""Replicas each in its own time: the tables of replicas simulated side by side, whatever a router looks at."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import Recorder
from metrics.run_folder.columns import TABLES
from simulator import simulation
from simulator.clock.virtual_time import VirtualTime
from simulator.cluster import in_own_time as fleet
from simulator.cluster.in_own_time import LeastOf
from simulator.cluster.pools import make_cluster_plan
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.routers import Load, router_names
from simulator.simulation import simulate
from tests.simulator.constant_cost import ConstantCost, trace_of
from tests.simulator.test_independent import POLICIES, by_replica, cost_of, traces
from workloads import Trace

# What a user writes who knows of nothing else: it goes through all, remembers a replica, and asks that one later.
REMEMBERS = """
from dataclasses import dataclass, field
from simulator.routers import Router

@dataclass
class Remembers(Router):
    last: object = field(default=None, init=False)

    def choose(self, request, replicas, rng):
        if self.last in replicas and self.last.num_requests < 3 and self.last.decode_tokens_promised % 3:
            return self.last
        self.last = min(replicas[1:] or replicas, key=lambda one: (one.num_running, -one.free_blocks, one.prefill_tokens))
        return self.last
"""
# The same loads by way of `Load`, and one that is not built in.
WEIGHS = """
from dataclasses import dataclass
from simulator.routers import Load, Router, least

def work(replica):
    return 3 * replica.num_waiting + 2 * replica.decode_tokens_promised + replica.total_blocks - replica.free_blocks

WORK = Load(work, falls=2)

@dataclass
class Weighs(Router):
    on_demand = True

    def choose(self, request, replicas, rng):
        return least(replicas, WORK)
"""


class FlooredCost(ConstantCost):
    """One that says what an iteration takes at least: exactly that of the smallest."""

    def least_ns(self):
        return self.before_ns + self.device_ns + self.per_row_ns + self.after_ns


def run(trace, *, apart=True, floored=True, few=0, **options):
    """(tables, cluster, whether the replicas kept their own time)"""
    config = ReplayConfig(**{"num_blocks": 40, "block_size": 4, **options})
    plan = make_cluster_plan(config, trace, (FlooredCost if floored else ConstantCost)(**vars(cost_of(config.pp))))
    recorder = Recorder()
    with (
        patch.object(fleet, "FEW", few),
        patch.object(simulation, "only_arrivals_join", simulation.only_arrivals_join if apart else lambda *_: False),
        patch.object(simulation, "are_independent", simulation.are_independent if apart else lambda *_: False),
    ):
        cluster = simulate(trace, plan, recorder)
    return recorder.tables(), cluster, cluster.fleet is not None


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routers")
    (folder / "remembers.py").write_text(REMEMBERS)
    (folder / "weighs.py").write_text(WEIGHS)
    return {"remembers": f"{folder}/remembers.py:Remembers", "weighs": f"{folder}/weighs.py:Weighs"}


ROUTERS = [
    *((name, {}) for name in router_names()),
    ("power_of_two", {"by": "tokens", "choices": 3}),
    ("session_affinity", {"spill": 1}),
    ("prefix_affinity", {"uneven_requests": 1}),
    ("weighted_scores", {"remembered": 5}),
    ("least_outstanding_tokens", {"decode_weight": 0.3}),
    ("least_outstanding_tokens", {"decode_weight": 0.0}),
    ("remembers", {}),
    ("weighs", {}),
]
OTHERS = [{"policy": name} for name in ("prefill_priority", "shortest_prompt_first", "decode_maximal", "dynamic_chunk")]
FAILURES = st.lists(
    st.builds("{}@{}{}".format, st.integers(0, 1), st.integers(0, 20), st.sampled_from(["", "+0.5", "+1", "+7"])),
    max_size=3,
).map(tuple)


@given(
    traces(),
    st.sampled_from(ROUTERS),
    st.sampled_from([*POLICIES, *OTHERS]),
    st.integers(2, 5),
    FAILURES,
    st.booleans(),
    st.sampled_from([40, 17]),
    st.booleans(),
    st.sampled_from([0, 4]),
)
@settings(max_examples=300, deadline=None)
def test_replicas_in_their_own_time_write_the_rows_of_replicas_side_by_side(
    files, trace, router, policy, replicas, failures, requeue, num_blocks, floored, few
):
    name, knobs = router
    options = {
        **policy,
        "replicas": replicas,
        "router": files.get(name, name),
        "router_knobs": knobs,
        "failures": failures,
        "on_failure": "requeue" if requeue else "fail",
        "num_blocks": num_blocks,
    }
    tables, cluster, apart = run(trace, floored=floored, few=few, **options)
    assert apart != (name in ("round_robin", "random") and not failures), "those take turns"
    for other, other_cluster, other_apart in (run(trace, apart=False, **options), run(trace, leaps=False, **options)):
        assert not other_apart
        assert cluster.facts() == other_cluster.facts()
        for table in TABLES:
            assert by_replica(tables, table) == by_replica(other, table), table


CROWD = trace_of([(row / 7, 5 + row % 50, 1 + row % 30) for row in range(80)])


@pytest.mark.parametrize("router", ["least_outstanding_requests", "least_kv", "power_of_two", "session_affinity"])
def test_replicas_are_played_only_when_it_matters(router):
    """Far fewer times than there are iterations, although every arrival asks for the least loaded of ten."""
    with patch.object(VirtualTime, "play", autospec=True, side_effect=VirtualTime.play) as play:
        tables, _, apart = run(CROWD, replicas=10, router=router, num_blocks=400)
    assert apart
    assert len(CROWD) < play.call_count < tables.rows("iterations") / 2


def test_unequal_pools_agree_and_every_end_is_told_once():
    options = {
        "pools": ({"policy": "chunked", "replicas": 2}, {"policy": "orca", "num_blocks": 60, "replicas": 2}),
        "router": "least_kv",
    }
    tables, cluster, apart = run(CROWD, **options)
    other, _, _ = run(CROWD, apart=False, **options)
    assert apart
    assert cluster.ended == len(CROWD)
    for table in TABLES:
        assert by_replica(tables, table) == by_replica(other, table), table


def test_what_joins_replicas_keeps_them_side_by_side():
    closed = Trace(
        "closed",
        CROWD.arrival_ns,
        CROWD.prompt_tokens,
        CROWD.output_tokens,
        CROWD.max_output_tokens,
        after_row=np.array([-1] * 40 + list(range(40))),
        think_ns=np.full(80, 1_000_000_000),
    )
    assert not run(closed, replicas=3)[2], "an answer makes the next request arrive"
    assert not run(CROWD, replicas=3, autoscale={"most": 4})[2]
    assert not run(CROWD, replicas=1)[2]
    assert run(CROWD, replicas=3)[2]


def test_a_cost_model_that_takes_less_than_it_says_is_one_clear_line():
    with (
        patch.object(FlooredCost, "least_ns", lambda self: 10 * self.device_ns),
        pytest.raises(SimulationError, match=r"replica \d: a request ended at \d+ ns, not before \d+ ns was expected"),
    ):
        run(CROWD, replicas=3, num_blocks=400)


@dataclass
class View:
    number: int
    load: float


@given(st.lists(st.lists(st.integers(0, 6), min_size=4, max_size=4), min_size=1, max_size=12))
def test_the_least_is_found_whatever_bounds_are_told(steps):
    """Loads that rise unseen, and are told when they fall: the first of the smallest, as `min` has it."""
    views = [View(number, 0) for number in range(4)]
    index = LeastOf(Load(lambda view: view.load), 4)
    for view in views:
        index.note(view, 0)
    for step in steps:
        for view, load in zip(views, step):
            fell = load < view.load
            view.load = load
            if fell:
                index.note(view, 0)
        assert index.number(views, 0) == min(views, key=lambda view: view.load).number


def test_a_load_that_is_no_number_ends_all_the_same():
    views = [View(number, float("nan")) for number in range(3)]
    for falls in (0.0, 1.0):
        index = LeastOf(Load(lambda view: view.load, falls=falls), 3)
        assert index.number(views, 5) in range(3)
