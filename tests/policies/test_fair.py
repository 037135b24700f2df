"""Whose turn it is: counters, quanta and predictions by hand; every iteration lasts one second."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CountingLedger, PolicyError, Request, Scheduler, Served, make_policy
from policies.fair.least_first import PER_TOKEN, LeastFirst, parse_weights
from policies.fair.vtc import Vtc
from tests.policies.driving import drive
from tests.policies.worked import asked, batches, scheduler_for, token_seconds, work_through

A, B, C, D, E, F, G = range(7)


def order(log) -> list[int]:
    return [row for _, rows, _ in batches(log) for row, _, _ in rows]


# VTC


def test_the_tenant_that_had_least_comes_next():
    # Each costs 4 + 2 x 1. t = 0: both have 0, x began to wait first. t = 1: x 6, y 0. t = 2: x 6, y done.
    requests = [*(asked(row, 0, 4, 1, tenant="x") for row in (A, B, C)), asked(D, 0, 4, 1, tenant="y")]
    log = work_through(scheduler_for("vtc", chunk_size=4), requests)
    assert order(log) == [A, D, B, C]
    assert token_seconds(log) == {A: [1], D: [2], B: [3], C: [4]}


def test_who_comes_back_has_no_credit_from_idling():
    # y is seen at 3, when x has 3 x 6 = 18, and is lifted to that; x waited first. t = 4: x 24, y 18; t = 5: both 24.
    requests = [asked(row, 0, 4, 1, tenant="x") for row in (A, B, C, D, E)]
    requests += [asked(row, 2.5, 4, 1, tenant="y") for row in (F, G)]
    log = work_through(scheduler_for("vtc", chunk_size=4), requests)
    assert order(log) == [A, B, C, D, F, E, G]


def test_into_an_empty_queue_one_comes_with_the_counter_of_who_left_it_last():
    # y finds nobody at 3.5 and is lifted to x's 2 x 6 = 12; its own request makes that 18.
    requests = [asked(A, 0, 4, 1, tenant="x"), asked(B, 1.5, 4, 1, tenant="x"), asked(C, 3.5, 4, 1, tenant="y")]
    scheduler = scheduler_for("vtc", chunk_size=4)
    work_through(scheduler, requests)
    assert scheduler.state.count == {"x": 12 * PER_TOKEN, "y": 18 * PER_TOKEN}


def test_a_weight_makes_service_count_less():
    # x counts half: 3 a request. t = 1: x 3, y 0; t = 2: x 3, y 6; t = 3: both 6, and x waited first.
    requests = [asked(row, 0, 4, 1, tenant="x") for row in (A, B, C)] + [
        asked(row, 0, 4, 1, tenant="y") for row in (D, E)
    ]
    log = work_through(scheduler_for("vtc", chunk_size=4, weights="x=2"), requests)
    assert order(log) == [A, D, B, C, E]


def test_a_preempted_prompt_is_charged_once():
    # Two of 8 + 8 tokens do not fit in 5 blocks of 4: B gives way, is computed again, and is not charged again.
    requests = [asked(A, 0, 8, 6, tenant="x"), asked(B, 0, 8, 6, tenant="y")]
    scheduler = scheduler_for("vtc", chunk_size=16, pool=5)
    work_through(scheduler, requests)
    assert scheduler.preemptions
    scheduler._tell_of_service()
    assert scheduler.state.count == {"x": 20 * PER_TOKEN, "y": 20 * PER_TOKEN}


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 20), st.integers(1, 20), st.sampled_from("xyz")),
        min_size=2,
        max_size=24,
    ),
    st.sampled_from([30, 60]),
    st.sampled_from([4, 16]),
)
@settings(max_examples=80, deadline=None)
def test_backlogged_tenants_get_service_within_the_bound(rows, pool, chunk_size):
    """Lemma 4.3 (counters of those who wait) and Theorem 4.4 (service in any interval in which two of them wait)."""
    policy = Vtc(chunk_size=chunk_size)
    scheduler = Scheduler(policy, CountingLedger(pool, 1), max_num_seqs=None)
    requests, at = [], 0
    for row, (gap, prompt, output, tenant) in enumerate(rows):
        at += gap
        requests.append((Request(row, at, prompt, output, tenant=tenant), output))
    longest = max(request.prompt_tokens for request, _ in requests)
    bound = max(policy.input_weight * longest, policy.output_weight * pool) * PER_TOKEN
    tracks: dict[int, object] = {}
    since: dict[tuple[str, str], tuple[float, float]] = {}

    def service(tenant: str) -> float:
        had = 0.0
        for track in tracks.values():
            if track.request.tenant == tenant and track.admitted_ns >= 0:
                had += track.request.prompt_tokens * policy.input_weight + track.delivered * policy.output_weight
        return had

    def look(engine: Scheduler) -> None:
        if engine.preemptions:
            return  # the paper has none: its proof counts what was admitted and lies in the pool
        tracks.update(engine.tracks)
        waiting = sorted({track.request.tenant for track in engine.queues.waiting})
        counts = [engine.state.count.get(tenant, 0) for tenant in waiting]
        assert not counts or max(counts) - min(counts) <= bound
        pairs = {(f, g) for f in waiting for g in waiting if f < g}
        for pair in set(since) - pairs:
            del since[pair]
        for f, g in pairs:
            gap = service(f) - service(g)
            low, high = since.get((f, g), (gap, gap))
            since[f, g] = min(low, gap), max(high, gap)
            assert (since[f, g][1] - since[f, g][0]) * PER_TOKEN <= 2 * bound

    drive(scheduler, requests, duration=lambda shape: 1, each_step=look)


# Deficit round robin


def test_tenants_take_turns_of_a_quantum():
    # A turn is worth 8 tokens; a request is charged 4 when it starts. x: A, B, then nothing is left; y: E; x again.
    requests = [asked(row, 0, 4, 1, tenant="x") for row in (A, B, C, D)] + [
        asked(row, 0, 4, 1, tenant="y") for row in (E, F, G)
    ]
    log = work_through(scheduler_for("weighted_fair", chunk_size=4, quantum=8, output_weight=0), requests)
    assert order(log) == [A, B, E, F, C, D, G]


def test_output_tokens_are_charged_as_they_are_delivered():
    # A's token is charged 4 more before t = 1: x has used up its 8, so y is next.
    requests = [asked(row, 0, 4, 1, tenant="x") for row in (A, B, C)] + [
        asked(row, 0, 4, 1, tenant="y") for row in (D, E)
    ]
    log = work_through(scheduler_for("weighted_fair", chunk_size=4, quantum=8, output_weight=4), requests)
    assert order(log) == [A, D, B, E, C]


def test_a_quantum_grows_with_the_weight():
    requests = [asked(row, 0, 4, 1, tenant="x") for row in (A, B, C)] + [
        asked(row, 0, 4, 1, tenant="y") for row in (D, E, F)
    ]
    options = {"chunk_size": 4, "quantum": 4, "output_weight": 0, "weights": "x=2"}
    assert order(work_through(scheduler_for("weighted_fair", **options), requests)) == [A, B, D, C, E, F]


def test_a_debt_larger_than_a_quantum_is_repaid_in_several_turns():
    # A's 12 tokens leave x at 4 - 12 = -8: its turns at 4 more come to 0 and then to 4, while y has one each.
    requests = [asked(A, 0, 12, 1, tenant="x"), asked(B, 0, 4, 1, tenant="x")]
    requests += [asked(row, 0, 4, 1, tenant="y") for row in (C, D, E, F)]
    log = work_through(
        scheduler_for("weighted_fair", chunk_size=12, quantum=4, output_weight=0, max_num_seqs=1), requests
    )
    assert order(log) == [A, C, D, E, B, F]


# Predicted lengths


def test_the_least_predicted_work_starts_first():
    # Work: A 4 + 2 x 9, B 4 + 2 x 2, C 8 + 2 x 1 = 10, D declares 3 and nobody predicts it: 4 + 2 x 3 = 10, later than C.
    predicted = {A: (4, 9), B: (4, 2), C: (8, 1), D: (4, 0)}
    requests = [
        asked(row, 0, prompt, 1, limit=3 if row == D else 20, tenant="x", predicted_tokens=tokens)
        for row, (prompt, tokens) in predicted.items()
    ]
    log = work_through(scheduler_for("predicted_sjf", chunk_size=8, max_num_seqs=1, ageing=0), requests)
    assert order(log) == [B, C, D, A]


def test_waiting_makes_a_job_shorter():
    # C comes 3 s after A and has 8 tokens less to do; at 2 tokens a second it goes first, at 4 it does not.
    rows = [(A, 0, 12), (B, 0, 4), (C, 3, 4)]
    requests = [asked(row, at, prompt, 1, predicted_tokens=1) for row, at, prompt in rows]
    requests.append(asked(D, 0, 2, 5, predicted_tokens=1))
    served = {}
    for ageing in (2.0, 4.0):
        log = work_through(scheduler_for("predicted_sjf", chunk_size=12, max_num_seqs=1, ageing=ageing), requests)
        served[ageing] = list(dict.fromkeys(order(log)))
    assert served == {2.0: [D, B, C, A], 4.0: [D, B, A, C]}


def test_a_preempted_request_is_ranked_by_what_is_left_of_it():
    """Its entry of before, which would put it elsewhere, is not looked at."""
    scheduler = scheduler_for("predicted_sjf", pool=8, chunk_size=40)
    requests = [asked(A, 0, 8, 9, predicted_tokens=9), asked(B, 0, 10, 9, predicted_tokens=9), asked(C, 1, 20, 2)]
    log = work_through(scheduler, requests)
    assert sorted(log.finished) == [A, B, C]
    assert scheduler.preemptions


# Programs


def test_a_program_that_began_first_goes_first_whatever_its_call() -> None:
    # p's first call runs until 2; q begins at 0.5, r at 0.6; p's next call comes at 1.2 and passes both.
    calls = [(A, 0, "p"), (B, 0.5, "q"), (C, 0.6, "r"), (D, 1.2, "p"), (E, 1.3, None)]
    requests = [asked(row, at, 4, 2, program=program) for row, at, program in calls]
    log = work_through(scheduler_for("program_fcfs", chunk_size=4, max_num_seqs=1), requests)
    assert list(dict.fromkeys(order(log))) == [A, D, B, C, E]


def test_the_program_that_has_had_least_goes_first() -> None:
    # A call costs 4 + 2 x 1 = 6: p is at level 1 after one (quantum 6), at 2 after two; r, which came last, at 0.
    calls = [(A, 0, "p"), (B, 0, "p"), (C, 0, "q"), (D, 0, "q"), (E, 0, "r")]
    requests = [asked(row, at, 4, 1, program=program) for row, at, program in calls]
    log = work_through(scheduler_for("least_attained", chunk_size=4, quantum=6), requests)
    assert order(log) == [A, C, E, B, D]


def test_levels_double() -> None:
    scheduler = scheduler_for("least_attained", chunk_size=4, quantum=6)
    policy, state = scheduler.policy, scheduler.state
    levels = []
    for _ in range(8):
        policy.hear(state, {"p": Served(4, 1), None: Served(100, 100)})
        levels.append(state.count["p"])
    assert levels == [1, 2, 2, 3, 3, 3, 3, 4]
    assert None not in state.count


# What they share


def test_the_least_is_found_among_those_that_wait():
    had = LeastFirst()
    for name, amount in (("a", 5), ("b", 3), ("c", 4)):
        had.add(name, amount)
        had.line_up(name)
    assert had.least({"a", "b", "c"}) == "b"
    had.add("b", 2)
    assert had.least({"a", "b", "c"}) == "c"
    assert had.least({"a", "b"}) == "a"
    had.line_up("c")
    assert had.least({"a", "b", "c"}) == "c"


@pytest.mark.parametrize("text", ["x", "x=0", "=2", "x=2,x=3", "x=nan", "x=1e9"])
def test_weights_that_make_no_sense_are_refused(text):
    for name in ("vtc", "weighted_fair"):
        with pytest.raises(PolicyError, match="weights: "):
            make_policy(name, {"weights": text})


def test_weights_may_have_an_equals_sign_in_their_names():
    assert parse_weights(" key=a=2 , free=0.5") == {"key=a": 2.0, "free": 0.5}
