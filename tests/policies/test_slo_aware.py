"""Slack, targets and relegation by hand; every iteration lasts one second whatever is estimated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import NS_PER_S, PolicyError, Track, make_policy
from policies.slo_aware import Targets, parse_classes
from tests.policies.worked import asked, batches, scheduler_for, token_seconds, work_through

A, B, C, D, E = 0, 1, 2, 3, 4


def order(log) -> list[int]:
    return [row for _, rows, _ in batches(log) for row, _, _ in rows]


def test_the_least_slack_goes_first_whatever_the_order_of_arrival():
    # A runs first. Then at t = 1: B is due at 20.1, C at 4.2, D at 10.3 (D's priority is the same).
    classes = "chat:ttft=4;code:ttft=10;batch:ttft=20"
    requests = [
        asked(A, 0, 4, 1),
        asked(B, 0.1, 4, 1, slo="batch"),
        asked(C, 0.2, 4, 1, slo="chat"),
        asked(D, 0.3, 4, 1, slo="code"),
    ]
    log = work_through(scheduler_for("slo_aware", chunk_size=4, classes=classes, ttft_s=9), requests)
    assert order(log) == [A, C, D, B]


def test_priority_goes_before_slack():
    requests = [asked(A, 0, 4, 1), asked(B, 0.1, 4, 1), asked(C, 0.2, 4, 1, priority=-1), asked(D, 0.3, 4, 1)]
    log = work_through(scheduler_for("slo_aware", chunk_size=4, ttft_s=9), requests)
    assert order(log) == [A, C, B, D]


@pytest.mark.parametrize(("relegate", "served", "in_time"), [(True, [A, C, D, E, B], 4), (False, [A, B, C, D, E], 1)])
def test_what_is_already_late_steps_back_for_what_can_be_saved(relegate, served, in_time):
    # Every prompt takes a second. B is due at 1.9, but cannot be done before 2; C, D and E are due at 2.3, 3.2 and 4.1.
    classes = "b:ttft=1.8;c:ttft=2.1;d:ttft=2.9;e:ttft=3.7"
    requests = [
        asked(A, 0, 4, 1),
        asked(B, 0.1, 4, 1, slo="b"),
        asked(C, 0.2, 4, 1, slo="c"),
        asked(D, 0.3, 4, 1, slo="d"),
        asked(E, 0.4, 4, 1, slo="e"),
    ]

    def estimate(shape):
        return shape.prefill_tokens * NS_PER_S // 4

    scheduler = scheduler_for("slo_aware", chunk_size=4, classes=classes, relegate=relegate, estimator=estimate)
    log = work_through(scheduler, requests)
    assert order(log) == served
    due = {A: 2, B: 1.9, C: 2.3, D: 3.2, E: 4.1}
    assert sum(times[0] <= due[row] for row, times in token_seconds(log).items()) == in_time


def test_late_is_also_who_could_not_be_done_behind_the_more_urgent():
    # At t = 1, 4 tokens a second: B's 3 are done at 2. C (due 2.9) behind it would be done at 3, D (due 4) as well.
    requests = [
        asked(A, 0, 4, 1),
        asked(B, 0.1, 3, 1, slo="b"),
        asked(C, 0.2, 4, 1, slo="c"),
        asked(D, 0.3, 4, 1, slo="d"),
    ]

    def estimate(shape):
        return shape.prefill_tokens * NS_PER_S // 4

    scheduler = scheduler_for("slo_aware", chunk_size=4, classes="b:ttft=2.8;c:ttft=2.7;d:ttft=3.7", estimator=estimate)
    assert batches(work_through(scheduler, requests)) == [
        (0, [(A, 4, 0)], 0),
        (1, [(B, 3, 0), (D, 1, 0)], 0),
        (2, [(D, 3, 1), (C, 1, 0)], 0),
        (3, [(C, 3, 1)], 0),
    ]


def test_prompts_take_what_the_tightest_target_among_the_running_leaves():
    # 10 ms a row in tiles of 4: 8 rows keep 0.1 s (chat), 16 keep 0.16 s (the default).
    settings = {
        "chunk_size": 32,
        "classes": "chat:tbt=0.1",
        "tbt_s": 0.16,
        "ttft_s": 100,
        "estimator": lambda shape: 10_000_000 * shape.rows,
    }
    chat = work_through(scheduler_for("slo_aware", **settings), [asked(A, 0, 2, 3, slo="chat"), asked(B, 0.5, 40, 1)])
    assert batches(chat) == [
        (0, [(A, 2, 0)], 0),
        (1, [(A, 1, 2), (B, 7, 0)], 0),
        (2, [(A, 1, 3), (B, 7, 7)], 0),
        (3, [(B, 26, 14)], 0),  # nobody decodes any more: up to the chunk size
    ]
    other = work_through(scheduler_for("slo_aware", **settings), [asked(A, 0, 2, 3), asked(B, 0.5, 40, 1)])
    assert [rows for _, rows, _ in batches(other)] == [
        [(A, 2, 0)],
        [(A, 1, 2), (B, 15, 0)],
        [(A, 1, 3), (B, 15, 15)],
        [(B, 10, 30)],
    ]


def test_a_prompt_moves_on_by_a_tile_even_if_no_batch_keeps_the_target():
    scheduler = scheduler_for("slo_aware", tbt_s=0.1, estimator=lambda shape: NS_PER_S)
    log = work_through(scheduler, [asked(A, 0, 2, 3), asked(B, 0.5, 6, 1)])
    assert [rows for _, rows, _ in batches(log)] == [[(A, 2, 0)], [(A, 1, 2), (B, 3, 0)], [(A, 1, 3), (B, 3, 3)]]


def test_short_of_blocks_the_least_important_is_preempted_not_the_last():
    # 6 blocks of 4, one kept free at admission. B is of lower priority than C, which came later.
    requests = [asked(A, 0, 4, 4), asked(B, 0, 4, 4, priority=1), asked(C, 0, 4, 4, priority=-1)]
    log = work_through(scheduler_for("slo_aware", pool=5, chunk_size=16, ttft_s=100, tbt_s=100), requests)
    assert batches(log)[:2] == [
        (0, [(C, 4, 0), (A, 4, 0), (B, 4, 0)], 0),
        (1, [(C, 1, 4), (A, 1, 4)], 0),  # three need a block, two are free: B gives up its own
    ]
    assert {row: track.preemptions for row, track in log.tracks.items()} == {A: 0, B: 1, C: 0}


def test_who_waits_for_memory_keeps_its_turn():
    # A holds 3 of 5 blocks; B (due first) needs 3 and is refused, C would fit but must not overtake.
    requests = [asked(A, 0, 11, 2), asked(B, 0.1, 9, 1), asked(C, 0.2, 2, 1)]
    log = work_through(scheduler_for("slo_aware", pool=5, chunk_size=16, ttft_s=9), requests)
    assert order(log) == [A, A, B, C]


def test_the_first_in_time_is_found_behind_a_long_queue_of_late_ones():
    late = [asked(row, 0, 4, 1, slo="chat") for row in range(500)]
    fresh = asked(500, 2.5, 4, 1, slo="chat")
    log = work_through(scheduler_for("slo_aware", chunk_size=4, classes="chat:ttft=2", window=4), [*late, fresh])
    assert order(log)[:5] == [0, 1, 2, 500, 3]


def test_classes_are_parsed_and_mistakes_named():
    assert parse_classes("chat:ttft=1,tbt=0.1; batch:ttft=60") == {
        "chat": Targets(1.0, 0.1),
        "batch": Targets(60.0, None),
    }
    for wrong in (
        "chat",
        "chat:",
        ":ttft=1",
        "chat:ttft",
        "chat:ttft=-1",
        "chat:ttft=nan",
        "chat:e2e=1",
        "a:tbt=1;a:tbt=1",
    ):
        with pytest.raises(PolicyError, match="SLO classes"):
            make_policy("slo_aware", {"classes": wrong})


def test_who_comes_late_from_another_replica_is_found_among_those_that_are_in_time():
    """Requests that start over after a failure arrive here behind younger ones; their class stays sorted by arrival.

    At t = 0 the queue holds arrivals 8, 9 and then 1 to 4 (all of them in time, deadlines in that order).
    """
    scheduler = scheduler_for("slo_aware", chunk_size=4, ttft_s=30, window=2)
    for row, arrival_s in enumerate((8, 9, 1, 2, 3, 4)):
        scheduler.add(asked(row, arrival_s, 4, 1)[0], arrival_s * NS_PER_S, ends_after=1)
    served = []
    now_ns = 10 * NS_PER_S
    while (batch := scheduler.plan(now_ns)) is not None:
        served += [track.request.id for track, *_ in batch.chunks]
        scheduler.complete(batch, now_ns)
    assert served == [2, 3, 4, 5, 0, 1]


@given(st.lists(st.tuples(st.sampled_from(["new", "front", "go"]), st.integers(0, 20)), max_size=60), st.booleans())
def test_a_class_stays_sorted_by_arrival_behind_those_that_were_put_in_front(steps, early):
    """The order that `bisect_left` in slo_aware relies on, whoever comes, is put in front or goes, in whatever order."""
    queues = scheduler_for("slo_aware").queues
    if early:
        _ = queues.waiting_by_class
    for row, (what, number) in enumerate(steps):
        if what == "go":
            if queues.waiting:
                queues.dequeue(queues.waiting[number % len(queues.waiting)])
            continue
        track = Track(asked(row, number, 4, 1, slo="ab"[row % 2])[0], 1)
        queues.enqueue(track) if what == "new" else queues.enqueue_in_front(track)
    for _, waiting in queues.waiting_by_class.items():
        front = [track in queues.in_front for track in waiting]
        assert front == sorted(front, reverse=True)
        behind = [track.request.arrival_ns for track in waiting if track not in queues.in_front]
        assert behind == sorted(behind)
    assert sorted(t.request.id for w in queues.waiting_by_class.values() for t in w) == sorted(
        track.request.id for track in queues.waiting
    )
