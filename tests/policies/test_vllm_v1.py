"""vLLM V1 by hand. The real thing is compared step by step in the parity experiment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Host, PolicyError, Request, make_policy
from policies.contract.queues import Queues
from policies.work.track import Track
from tests.policies.worked import asked, batches, scheduler_for, token_seconds, work_through

A, B, C = 0, 1, 2


def test_running_requests_first_then_waiting_ones_while_the_budget_lasts():
    log = work_through(
        scheduler_for("vllm_v1", token_budget=8), [asked(A, 0, 5, 3), asked(B, 0, 10, 2), asked(C, 1.5, 4, 2)]
    )
    assert batches(log) == [
        (0, [(A, 5, 0), (B, 3, 0)], 0),
        (1, [(A, 1, 5), (B, 7, 3)], 0),
        (2, [(A, 1, 6), (B, 1, 10), (C, 4, 0)], 0),
        (3, [(C, 1, 4)], 0),
    ]
    assert token_seconds(log) == {A: [1, 2, 3], B: [2, 3], C: [3, 4]}


def test_a_long_prompt_ahead_in_admission_order_starves_later_decodes():
    # No phases: B's prompt stands before C's decode and takes the whole budget.
    log = work_through(
        scheduler_for("vllm_v1", token_budget=4), [asked(A, 0, 1, 1), asked(B, 0, 12, 1), asked(C, 0, 1, 2)]
    )
    assert [rows for _, rows, _ in batches(log)] == [
        [(A, 1, 0), (B, 3, 0)],
        [(B, 4, 3)],
        [(B, 4, 7)],
        [(B, 1, 11), (C, 1, 0)],
        [(C, 1, 1)],
    ]


def test_the_last_admitted_is_preempted_and_nobody_is_admitted_in_that_step():
    requests = [asked(A, 0, 7, 4), asked(B, 0, 8, 3), asked(C, 1.5, 1, 1)]
    log = work_through(scheduler_for("vllm_v1", pool=5, token_budget=16), requests)
    assert batches(log) == [
        (0, [(A, 7, 0), (B, 8, 0)], 0),  # 2 + 2 blocks of 5: no watermark
        (1, [(A, 1, 7), (B, 1, 8)], 0),  # B's ninth token takes the last block
        (2, [(A, 1, 8)], 0),  # A needs one, B gives up 3; C's single block would fit, but not in this step
        (3, [(A, 1, 9)], 0),  # B's 8 + 2 tokens need 3 blocks, 2 are free; C stands behind it
        (4, [(B, 10, 0), (C, 1, 0)], 0),
    ]
    assert token_seconds(log) == {A: [1, 2, 3, 4], B: [1, 2, 5], C: [5]}


def test_a_request_that_is_itself_the_last_admitted_preempts_itself():
    # 4 blocks: B's own ninth token finds none free.
    log = work_through(scheduler_for("vllm_v1", pool=4, token_budget=16), [asked(A, 0, 6, 3), asked(B, 0, 8, 2)])
    assert batches(log) == [
        (0, [(A, 6, 0), (B, 8, 0)], 0),
        (1, [(A, 1, 6)], 0),
        (2, [(A, 1, 7)], 0),
        (3, [(B, 9, 0)], 0),
    ]
    assert token_seconds(log) == {A: [1, 2, 3], B: [1, 4]}


def test_the_whole_prompt_must_fit_unless_reserve_full_is_off():
    requests = [asked(A, 0, 8, 2), asked(B, 0, 8, 1)]
    # 3 blocks: A holds 2. B's 8 tokens need 2, its first chunk of 1 token (budget 9) only 1.
    careful = work_through(scheduler_for("vllm_v1", pool=3, token_budget=9), requests)
    assert batches(careful) == [(0, [(A, 8, 0)], 0), (1, [(A, 1, 8)], 0), (2, [(B, 8, 0)], 0)]
    eager = work_through(scheduler_for("vllm_v1", pool=3, token_budget=9, reserve_full=False), requests)
    assert batches(eager) == [
        (0, [(A, 8, 0), (B, 1, 0)], 0),
        (1, [(A, 1, 8)], 0),  # A's ninth token needs B's block
        (2, [(B, 8, 0)], 0),
    ]


def test_the_long_prefill_threshold_caps_a_prompt_unless_it_is_alone():
    scheduler = scheduler_for("vllm_v1", token_budget=8, long_prefill_token_threshold=4)
    log = work_through(scheduler, [asked(A, 0, 5, 1), asked(B, 0, 14, 1)])
    assert batches(log) == [
        (0, [(A, 4, 0), (B, 4, 0)], 0),
        (1, [(A, 1, 4), (B, 4, 4)], 0),
        (2, [(B, 6, 8)], 0),  # alone: 6 in one step
    ]


def test_priorities_order_the_waiting_and_choose_who_gives_way():
    """The trace's numbers, lowest first: A 5, B 0, C 1. Preempted A has no place of its own: C goes before it."""
    requests = [asked(A, 0, 7, 4, priority=5), asked(B, 0, 8, 3, priority=0), asked(C, 1.5, 1, 1, priority=1)]
    log = work_through(scheduler_for("vllm_v1", pool=5, token_budget=16, scheduling="priority"), requests)
    assert batches(log) == [
        (0, [(B, 8, 0), (A, 7, 0)], 0),
        (1, [(B, 1, 8), (A, 1, 7)], 0),  # B's ninth token takes the last block
        (2, [(B, 1, 9)], 0),  # A needs one and gives way to itself; C is not admitted in this step
        (3, [(C, 1, 0), (A, 9, 0)], 0),
        (4, [(A, 1, 9)], 0),
    ]
    assert token_seconds(log) == {A: [1, 2, 4, 5], B: [1, 2, 3], C: [4]}


def test_an_urgent_request_overtakes_those_that_wait_and_stops_none_that_runs():
    requests = [asked(A, 0, 3, 2, priority=5), asked(B, 0, 3, 1, priority=5), asked(C, 0.5, 3, 1, priority=0)]
    for scheduling, order in (("fcfs", [A, A, B, C]), ("priority", [A, A, C, B])):
        log = work_through(scheduler_for("vllm_v1", max_num_seqs=1, scheduling=scheduling), requests)
        assert [rows[0][0] for _, rows, _ in batches(log)] == order


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.booleans()), min_size=1, max_size=40))
def test_the_most_urgent_is_always_the_least_by_priority_arrival_and_row(steps):
    queues = Queues(Host())
    for row, (priority, arrival_ns, leaves) in enumerate(steps):
        track = Track(Request(row, arrival_ns, 1, 1, priority=priority), 1)
        queues.enqueue_in_front(track) if arrival_ns % 2 else queues.enqueue(track)
        least = min(queues.waiting, key=lambda each: (each.request.priority, each.request.arrival_ns, each.request.id))
        assert queues.most_urgent is least
        if leaves and len(queues.waiting) > 1:
            queues.dequeue(least)
            if priority == 3:
                queues.enqueue_in_front(least)


@pytest.mark.parametrize(
    ("knobs", "engine", "ahead"),
    [
        ({}, {"on_gpu": True, "stages": 1}, True),
        ({"engine_version": "0.14.0"}, {"on_gpu": True, "stages": 1}, True),
        ({"engine_version": "0.13"}, {"on_gpu": True, "stages": 1}, False),
        ({"engine_version": "0.9.2"}, {"on_gpu": True, "stages": 1}, False),
        ({}, {"on_gpu": False, "stages": 1}, False),
        ({}, {"on_gpu": True, "stages": 2}, False),
        ({}, {"on_gpu": True, "stages": 1, "speculation": "ngram"}, False),
        ({}, {"on_gpu": True, "stages": 1, "speculation": "eagle"}, True),
        ({"async_scheduling": "false"}, {"on_gpu": True, "stages": 1}, False),
        ({"async_scheduling": "auto"}, {"on_gpu": True, "stages": 1}, True),
        ({"async_scheduling": True, "engine_version": "0.11"}, {"on_gpu": False, "stages": 1}, True),
    ],
)
def test_it_plans_ahead_where_its_version_does(knobs, engine, ahead):
    """By vLLM's release notes: since 0.14 by default, not on CPUs, not in pipelines then, not with n-gram drafts."""
    assert make_policy("vllm_v1", knobs).plans_ahead(**engine) is ahead


def test_a_version_that_is_none_is_refused():
    with pytest.raises(PolicyError, match=r"engine_version: found 'latest', expected a version such as 0.14"):
        make_policy("vllm_v1", {"engine_version": "latest"})
