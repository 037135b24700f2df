"""A policy's state: made anew for whoever runs it, and told what was served, with or without leaps, in both worlds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import Recorder
from policies import NS_PER_S, CountingLedger, Promises, Scheduler, Served, StatefulPolicy, make_scheduler
from policies.registry import policy_class
from simulator.config import ReplayConfig
from simulator.replica.replica_kind import make_engine
from simulator.simulation import simulate
from tests.policies.driving import drive
from tests.policies.worked import asked, batches, work_through
from tests.simulator.constant_cost import ConstantCost, trace_of

A, B, C, D = 0, 1, 2, 3


@dataclass(frozen=True)
class Listening(StatefulPolicy):
    """Chunked prefill in miniature; writes down what it hears."""

    chunk: int = 8
    counts_by: ClassVar[str] = "slo"
    promises: ClassVar[Promises] = Promises(decodes=True, chunks=True, micro_batches=True, keeps_running=True)

    def new_state(self):
        return []

    def hear(self, state, served):
        state.append(served)

    def plan(self, queues, draft, kv, host, now_ns, state):
        left = self.chunk - draft.decode_all()
        for prompt in queues.partial:
            if left > 0:
                left -= draft.chunk(prompt, left)
        while left > 0 and queues.waiting and not draft.preempted:
            granted = draft.admit(queues.waiting[0], left, reserve=queues.waiting[0].known)
            if not granted:
                break
            left -= granted


def heard(scheduler):
    """All that a scheduler's policy has been or would be told, added up."""
    total = Counter()
    untold = {key: Served(*tally) for key, tally in scheduler.served.items()}
    for served in [*scheduler.state, untold]:
        for key, work in served.items():
            total[key, "prompt"] += work.prompt_tokens
            total[key, "output"] += work.output_tokens
    return total


def test_it_hears_before_each_plan_what_was_served_since_the_last():
    scheduler = Scheduler(Listening(), CountingLedger(100, 4))
    work_through(scheduler, [asked(A, 0, 10, 3, slo="chat"), asked(B, 0, 4, 2, slo="batch")])
    assert scheduler.state == [
        {"chat": Served(8, 0)},
        {"chat": Served(2, 1), "batch": Served(4, 1)},
        {"chat": Served(0, 1), "batch": Served(0, 1)},
        {"chat": Served(0, 1)},
    ]


CLASSES = st.sampled_from(["chat", "batch", None])
REQUESTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(1, 25), CLASSES), min_size=1, max_size=8
)


@given(REQUESTS, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([8, 60]))
@settings(max_examples=60, deadline=None)
def test_it_hears_of_every_token_once(rows, by_id, leaping, ahead, pool):
    """Prompt tokens may be computed again after a preemption; output tokens are delivered once."""
    requests = [asked(row, at / 10, prompt, output, slo=slo) for row, (at, prompt, output, slo) in enumerate(rows)]
    scheduler = make_scheduler(
        Listening(), num_blocks=max(pool, 14), block_size=4, max_model_len=55, by_id=by_id, ahead=ahead
    )
    drive(scheduler, requests, leaping=leaping, depth=scheduler.depth, duration=lambda shape: NS_PER_S)
    total, expected = heard(scheduler), Counter()
    for request, output in requests:
        expected[request.slo] += output
        assert total[request.slo, "prompt"] >= request.prompt_tokens
    assert {key: total[key, "output"] for key in expected} == expected


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_and_runs_have_states_of_their_own_and_leaps_change_nothing(pp, replicas):
    rows = [(row * 7.3, 5 + 9 * row % 40, 3 + 11 * row % 50) for row in range(14)]
    trace = replace(trace_of(rows), slo=["chat" if row % 3 else "batch" for row in range(14)])
    policy = Listening()
    told = []
    for leaps in (True, False, True):
        config = ReplayConfig(num_blocks=60, replicas=replicas, pp=pp, leaps=leaps)
        engine = replace(make_engine(config, trace, ConstantCost(device_ns=NS_PER_S, stages=pp)), policy=policy)
        cluster = simulate(trace, engine, Recorder())
        schedulers = [replica.scheduler for replica in cluster.replicas]
        assert len({id(scheduler.state) for scheduler in schedulers}) == replicas
        told.append([heard(scheduler) for scheduler in schedulers])
    assert told[0] == told[1] == told[2]


def test_the_example_serves_the_class_that_had_least():
    """A and B of `chat` are served first; then `batch` has had nothing, so D comes before C."""
    fair = policy_class("examples/fair_share.py:FairShare")
    requests = [
        asked(A, 0, 4, 1, slo="chat"),
        asked(B, 1, 4, 1, slo="chat"),
        asked(C, 1, 4, 1, slo="chat"),
        asked(D, 1, 4, 1, slo="batch"),
    ]
    log = work_through(Scheduler(fair(chunk_size=4), CountingLedger(100, 4)), requests)
    assert [row for _, rows, _ in batches(log) for row, _, _ in rows] == [A, D, B, C]


def test_an_engine_that_serves_live_tells_the_same():
    pytest.importorskip("torch")
    from executor.model.loading import load_model
    from executor.serving.replay import replay_live

    trace = replace(trace_of([(0, 20, 6), (0, 9, 4)]), slo=["chat", "batch"])
    run = replay_live(
        trace,
        loaded=load_model("tiny", device="cpu"),
        policy="examples/fair_share.py:FairShare",
        as_fast_as_possible=True,
    )
    assert np.array_equal(np.sort(run.tables.column("requests", "output_tokens")), [4, 6])
