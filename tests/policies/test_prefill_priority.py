"""vLLM before V1, by hand: whole prompts first, decodes wait."""

from tests.policies.worked import asked, batches, scheduler_for, token_seconds, work_through

A, B, C = 0, 1, 2


def test_prompts_run_first_and_running_decodes_stall_behind_them():
    scheduler = scheduler_for("prefill_priority", token_budget=8)
    log = work_through(scheduler, [asked(A, 0, 5, 3), asked(B, 0, 4, 3), asked(C, 1.5, 6, 2)])
    assert batches(log) == [
        (0, [(A, 5, 0)], 0),  # B's 4 tokens do not fit beside A's 5 in a budget of 8
        (1, [(B, 4, 0)], 0),  # A could decode, but a prompt waits
        (2, [(C, 6, 0)], 0),  # C has just come, and goes first again
        (3, [(A, 1, 5), (B, 1, 4), (C, 1, 6)], 0),
        (4, [(A, 1, 6), (B, 1, 5)], 0),
    ]
    assert token_seconds(log) == {A: [1, 4, 5], B: [2, 4, 5], C: [3, 4]}


def test_several_whole_prompts_share_a_batch_up_to_the_budget_and_the_knob():
    requests = [asked(A, 0, 3, 1), asked(B, 0, 3, 1), asked(C, 0, 2, 1)]
    assert batches(work_through(scheduler_for("prefill_priority", token_budget=8), requests)) == [
        (0, [(A, 3, 0), (B, 3, 0), (C, 2, 0)], 0)
    ]
    assert batches(work_through(scheduler_for("prefill_priority", token_budget=8, max_prompts=2), requests)) == [
        (0, [(A, 3, 0), (B, 3, 0)], 0),
        (1, [(C, 2, 0)], 0),
    ]


def test_the_last_arrived_is_preempted_and_recomputes_prompt_and_output():
    # 5 blocks of 4 tokens, one of them kept free at admission (1 %, rounded up).
    log = work_through(
        scheduler_for("prefill_priority", pool=5, token_budget=16), [asked(A, 0, 7, 4), asked(B, 0, 8, 3)]
    )
    assert batches(log) == [
        (0, [(A, 7, 0), (B, 8, 0)], 0),  # 2 + 2 blocks, 1 free
        (1, [(A, 1, 7), (B, 1, 8)], 0),  # B's ninth token takes the last block
        (2, [(A, 1, 8)], 0),  # A needs a block: B gives up its 3
        (3, [(A, 1, 9)], 0),  # B's 8 + 2 tokens need 3 blocks, 2 are free
        (4, [(B, 10, 0)], 0),  # A is done; B recomputes everything and samples its third token
    ]
    assert token_seconds(log) == {A: [1, 2, 3, 4], B: [1, 2, 5]}
    assert log.tracks[B].preemptions == 1


def test_a_budget_smaller_than_the_running_decodes_preempts_nobody():
    scheduler = scheduler_for("prefill_priority", token_budget=2)
    log = work_through(scheduler, [asked(A, 0, 2, 3), asked(B, 0, 2, 3), asked(C, 0, 2, 3)])
    assert batches(log) == [
        (0, [(A, 2, 0)], 0),
        (1, [(B, 2, 0)], 0),
        (2, [(C, 2, 0)], 0),
        (3, [(A, 1, 2), (B, 1, 2)], 0),  # two of three fit: the earliest
        (4, [(A, 1, 3), (B, 1, 3)], 0),
        (5, [(C, 1, 2)], 0),
        (6, [(C, 1, 3)], 0),
    ]
    assert scheduler.preemptions == 0
