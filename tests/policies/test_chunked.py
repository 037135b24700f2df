"""Sarathi-Serve, Algorithm 3, by hand: decodes, then partial prompts, then new ones, in one token budget."""

from tests.policies.worked import asked, batches, scheduler_for, token_seconds, work_through

A, B, C, D = 0, 1, 2, 3


def test_decodes_never_wait_and_prompts_fill_the_rest_of_the_budget():
    log = work_through(
        scheduler_for("chunked", chunk_size=6), [asked(A, 0, 5, 4), asked(B, 0, 8, 2), asked(C, 2.5, 3, 2)]
    )
    assert batches(log) == [
        (0, [(A, 5, 0), (B, 1, 0)], 0),
        (1, [(A, 1, 5), (B, 5, 1)], 0),
        (2, [(A, 1, 6), (B, 2, 6)], 0),  # B's last two prompt tokens give its first token
        (3, [(A, 1, 7), (B, 1, 8), (C, 3, 0)], 0),
        (4, [(C, 1, 3)], 0),
    ]
    assert token_seconds(log) == {A: [1, 2, 3, 4], B: [3, 4], C: [4, 5]}


def test_with_as_many_decodes_as_budget_nothing_is_prefilled():
    log = work_through(
        scheduler_for("chunked", chunk_size=2),
        [asked(A, 0, 1, 4), asked(B, 0, 1, 3), asked(C, 1.5, 2, 2), asked(D, 1.5, 1, 1)],
    )
    assert batches(log) == [
        (0, [(A, 1, 0), (B, 1, 0)], 0),
        (1, [(A, 1, 1), (B, 1, 1)], 0),
        (2, [(A, 1, 2), (B, 1, 2)], 0),  # C and D wait: two decodes are the whole budget
        (3, [(A, 1, 3), (C, 1, 0)], 0),
        (4, [(C, 1, 1), (D, 1, 0)], 0),
        (5, [(C, 1, 2)], 0),
    ]


def test_the_whole_prompt_is_reserved_on_admission():
    # 4 blocks, one kept free at admission: A takes 2 for its 8 tokens at once, and B finds only 1 to take.
    log = work_through(scheduler_for("chunked", pool=4, chunk_size=6), [asked(A, 0, 8, 1), asked(B, 0, 8, 1)])
    assert batches(log) == [
        (0, [(A, 6, 0)], 0),
        (1, [(A, 2, 6)], 0),
        (2, [(B, 6, 0)], 0),
        (3, [(B, 2, 6)], 0),
    ]


def test_the_last_admitted_is_preempted_and_comes_back_in_chunks():
    log = work_through(scheduler_for("chunked", pool=5, chunk_size=8), [asked(A, 0, 7, 4), asked(B, 0, 8, 3)])
    assert batches(log) == [
        (0, [(A, 7, 0), (B, 1, 0)], 0),  # 2 + 2 blocks, 1 free
        (1, [(A, 1, 7), (B, 7, 1)], 0),
        (2, [(A, 1, 8)], 0),  # both need a block, one is free: B is stopped
        (3, [(A, 1, 9)], 0),  # B's 8 + 1 tokens need 3 blocks, 2 are free
        (4, [(B, 8, 0)], 0),
        (5, [(B, 1, 8)], 0),  # the last of its nine tokens: B's second output token
        (6, [(B, 1, 9)], 0),
    ]
    assert token_seconds(log) == {A: [1, 2, 3, 4], B: [2, 6, 7]}


def test_in_a_pipeline_every_micro_batch_takes_its_share_of_the_decodes():
    scheduler = scheduler_for("chunked", depth=2, chunk_size=4)
    log = work_through(scheduler, [asked(A, 0, 2, 3), asked(B, 0, 2, 3), asked(C, 0, 2, 3), asked(D, 0, 2, 3)])
    first, second, *later = [rows for _, rows, _ in batches(log)]
    assert (first, second) == ([(A, 2, 0), (B, 2, 0)], [(C, 2, 0), (D, 2, 0)])
    assert later == [
        [(A, 1, 2), (B, 1, 2)],
        [(C, 1, 2), (D, 1, 2)],
        [(A, 1, 3), (B, 1, 3)],
        [(C, 1, 3), (D, 1, 3)],
    ]
