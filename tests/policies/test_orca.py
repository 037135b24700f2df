"""Orca's iteration-level batching by hand."""

from tests.policies.worked import asked, batches, scheduler_for, token_seconds, work_through

A, B, C = 0, 1, 2
REQUESTS = [asked(A, 0, 5, 3), asked(B, 0, 3, 2), asked(C, 0.5, 4, 2)]


def test_whole_prompts_join_running_decodes_at_every_iteration():
    log = work_through(scheduler_for("orca"), REQUESTS)
    assert batches(log) == [
        (0, [(A, 5, 0), (B, 3, 0)], 0),
        (1, [(A, 1, 5), (B, 1, 3), (C, 4, 0)], 0),
        (2, [(A, 1, 6), (C, 1, 4)], 0),
    ]
    assert token_seconds(log) == {A: [1, 2, 3], B: [1, 2], C: [2, 3]}


def test_memory_for_input_and_declared_output_is_reserved_on_admission():
    # 2 blocks each: A 8 tokens, B 5, C 6. With 5 blocks C waits for B to end, though its prompt would fit before.
    log = work_through(scheduler_for("orca", pool=5), REQUESTS)
    assert batches(log) == [
        (0, [(A, 5, 0), (B, 3, 0)], 0),
        (1, [(A, 1, 5), (B, 1, 3)], 0),
        (2, [(A, 1, 6), (C, 4, 0)], 0),
        (3, [(C, 1, 4)], 0),
    ]


def test_the_limit_counts_not_what_is_really_produced():
    early = [asked(A, 0, 5, 3), asked(B, 0, 3, 2, limit=20), asked(C, 0.5, 4, 2)]
    # B reserves 6 blocks for its limit of 23 tokens: with 9, C waits until B has ended after two tokens.
    log = work_through(scheduler_for("orca", pool=9), early)
    assert [rows for _, rows, _ in batches(log)][1:3] == [[(A, 1, 5), (B, 1, 3)], [(A, 1, 6), (C, 4, 0)]]


def test_reserving_for_the_longest_length_admits_fewer():
    limit = scheduler_for("orca", pool=6, longest=12)
    longest = scheduler_for("orca", pool=6, longest=12, reserve="longest")
    assert len(batches(work_through(limit, REQUESTS))[1][1]) == 3
    assert batches(work_through(longest, REQUESTS))[1] == (1, [(A, 1, 5), (B, 1, 3)], 0)


def test_a_batch_holds_at_most_max_batch_size_requests_earliest_first():
    log = work_through(scheduler_for("orca", max_batch_size=2), REQUESTS)
    assert batches(log) == [
        (0, [(A, 5, 0), (B, 3, 0)], 0),
        (1, [(A, 1, 5), (B, 1, 3)], 0),
        (2, [(A, 1, 6), (C, 4, 0)], 0),
        (3, [(C, 1, 4)], 0),
    ]


def test_in_a_pipeline_what_is_not_in_flight_joins_up_to_the_batch_size():
    log = work_through(scheduler_for("orca", depth=2, max_batch_size=2), [*REQUESTS[:2], asked(C, 0, 4, 2)])
    assert [rows for _, rows, _ in batches(log)] == [
        [(A, 5, 0), (B, 3, 0)],
        [(C, 4, 0)],
        [(A, 1, 5), (B, 1, 3)],
        [(C, 1, 4)],
        [(A, 1, 6)],
    ]


def test_a_prompt_longer_than_the_token_budget_is_rejected_with_its_reason():
    log = work_through(scheduler_for("orca", token_budget=4), REQUESTS)
    assert sorted(log.finished) == [B, C]
    assert "Orca cannot start it on an idle engine" in log.rejected[A]
