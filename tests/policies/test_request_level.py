"""FasterTransformer's static batching by hand: a batch forms, pads, and runs until its last request is done."""

from policies import NS_PER_S
from tests.policies.driving import drive
from tests.policies.worked import asked, batches, scheduler_for, token_seconds, work_through

A, B, C, D, E = 0, 1, 2, 3, 4
REQUESTS = [asked(A, 0, 5, 3), asked(B, 0, 3, 1), asked(C, 0, 4, 2)]


def test_prompts_are_padded_to_the_longest_and_nobody_joins_before_all_are_done():
    log = work_through(scheduler_for("request_level", max_batch_size=2), REQUESTS)
    assert batches(log) == [
        (0, [(A, 5, 0), (B, 3, 0)], 2),  # 2 rows of 5
        (1, [(A, 1, 5)], 1),  # B is done, but its row runs on
        (2, [(A, 1, 6)], 1),
        (3, [(C, 4, 0)], 0),
        (4, [(C, 1, 4)], 0),
    ]
    assert token_seconds(log) == {A: [1, 2, 3], B: [1], C: [4, 5]}


def test_finished_rows_may_be_dropped():
    log = work_through(scheduler_for("request_level", max_batch_size=2, keep_finished=False), REQUESTS)
    assert [dummies for _, _, dummies in batches(log)] == [2, 0, 0, 0, 0]


def test_a_batch_takes_no_more_than_the_padded_budget_and_the_memory_hold():
    # 3 prompts padded to 5 would be 15 rows.
    log = work_through(scheduler_for("request_level", token_budget=14), REQUESTS)
    assert batches(log)[0] == (0, [(A, 5, 0), (B, 3, 0)], 2)
    # A's 8 tokens take 2 blocks, B's 4 one; C's 6 would take 2 more.
    log = work_through(scheduler_for("request_level", pool=4), REQUESTS)
    assert batches(log)[0] == (0, [(A, 5, 0), (B, 3, 0)], 2)
    # Slots for the longest request (8 tokens, 2 blocks): two of them.
    log = work_through(scheduler_for("request_level", pool=5, longest=8, reserve="longest"), REQUESTS)
    assert batches(log)[0] == (0, [(A, 5, 0), (B, 3, 0)], 2)


def test_the_oldest_request_waits_for_its_batch_to_fill_but_not_longer_than_the_delay():
    requests = [asked(A, 1, 2, 1), asked(B, 2, 2, 1), asked(C, 7, 2, 1), asked(D, 7, 2, 1), asked(E, 7.5, 2, 1)]
    log = work_through(scheduler_for("request_level", max_batch_size=2, max_delay_s=3), requests)
    assert batches(log) == [
        (2, [(A, 2, 0), (B, 2, 0)], 0),  # full
        (7, [(C, 2, 0), (D, 2, 0)], 0),
        (10.5, [(E, 2, 0)], 0),  # alone, when its delay is over
    ]


def test_in_a_pipeline_micro_batches_start_together_after_all_have_finished():
    scheduler = scheduler_for("request_level", depth=2, max_batch_size=2)
    requests = [asked(A, 0, 2, 1), asked(B, 0, 2, 1), asked(C, 0, 2, 3), asked(D, 0.5, 2, 1), asked(E, 0.5, 2, 1)]
    log = work_through(scheduler, requests)
    assert batches(log) == [
        (0, [(A, 2, 0), (B, 2, 0)], 0),  # three requests over two micro-batches
        (0, [(C, 2, 0)], 0),
        (2, [(C, 1, 2)], 0),  # the first micro-batch is done; D and E wait for the second
        (3, [(C, 1, 3)], 0),
        (4, [(D, 2, 0)], 0),
        (4, [(E, 2, 0)], 0),
    ]


def test_a_micro_batch_planned_later_takes_only_who_had_arrived_when_the_round_formed():
    """A host may plan the second micro-batch when the first stage is free again, a while after the first."""
    scheduler = scheduler_for("request_level", depth=2, max_batch_size=2)
    for request, output in [asked(A, 0, 2, 2), asked(B, 0, 2, 2)]:
        scheduler.add(request, 0, ends_after=output)
    first = scheduler.plan(0)
    late, output = asked(C, 0.5, 2, 2)
    scheduler.add(late, NS_PER_S // 2, ends_after=output)
    second = scheduler.plan(NS_PER_S)
    assert [part.track.request.id for part in first.parts] == [A]
    assert [part.track.request.id for part in second.parts] == [B]
    scheduler.complete(first, 2 * NS_PER_S)
    third = scheduler.plan(2 * NS_PER_S)
    assert [(part.cohort.number, part.size) for part in third.parts] == [(0, 1)]


def test_the_micro_batch_that_waited_longest_decodes_next():
    scheduler = scheduler_for("request_level", depth=2, max_batch_size=1)
    log = drive(scheduler, [asked(A, 0, 2, 3), asked(B, 0, 2, 3)], depth=2, duration=lambda shape: NS_PER_S)
    assert [row for _, rows, _ in batches(log) for row, _, _ in rows] == [A, B, A, B, A, B]


def ends(log):
    """When each request was reported as finished."""
    return {row: end // NS_PER_S for row, end in log.finished.items()}


def test_answers_of_a_batch_are_returned_together():
    """A and B form the first batch: B's only token is there at second 1, its answer is returned with A's at 3."""
    assert ends(work_through(scheduler_for("request_level", max_batch_size=2), REQUESTS)) == {A: 3, B: 3, C: 5}
    early = work_through(scheduler_for("request_level", max_batch_size=2, early_return=True), REQUESTS)
    assert ends(early) == {B: 1, A: 3, C: 5}


def test_in_a_pipeline_a_micro_batch_returns_its_answers_together():
    """A and B are one micro-batch, C the other one."""
    scheduler = scheduler_for("request_level", depth=2, max_batch_size=2)
    log = work_through(scheduler, [asked(A, 0, 2, 3), asked(B, 0, 2, 1), asked(C, 0, 2, 2)])
    finished = ends(log)
    assert finished[A] == finished[B] > finished[C]


def test_an_answer_waits_no_longer_for_a_client_that_has_gone():
    scheduler = scheduler_for("request_level", max_batch_size=3)
    for request, output in [asked(A, 0, 2, 9), asked(B, 0, 2, 1), asked(C, 0, 2, 1)]:
        scheduler.add(request, 0, ends_after=output)
    assert list(scheduler.complete(scheduler.plan(0), NS_PER_S).finished) == []
    assert (scheduler.queues.num_running, len(scheduler.tracks)) == (1, 3)
    assert scheduler.ledger.free_blocks == scheduler.ledger.total_blocks - 5, "blocks are kept"
    (gone,) = scheduler.withdraw([C], "client gone", NS_PER_S)
    assert (gone.status, gone.delivered) == ("aborted", 1)
    gone, done = scheduler.withdraw([A], "client gone", 2 * NS_PER_S)
    assert (gone.status, done.status, done.finished_ns) == ("aborted", "finished", 2 * NS_PER_S)
    queues = scheduler.queues
    assert (queues.num_running, queues.decode_tokens_promised, queues.prefill_tokens) == (0, 0, 0)
    assert scheduler.ledger.free_blocks == scheduler.ledger.total_blocks


def test_answers_that_wait_for_their_batch_when_the_engine_dies_have_finished():
    scheduler = scheduler_for("request_level", max_batch_size=2)
    for request, output in REQUESTS[:2]:
        scheduler.add(request, 0, ends_after=output)
    scheduler.complete(scheduler.plan(0), NS_PER_S)
    gone = {track.request.id: track.status for track in scheduler.abandon("it burnt", 2 * NS_PER_S)}
    assert gone == {A: "failed", B: "finished"}
