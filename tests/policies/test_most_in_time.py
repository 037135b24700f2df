"""Moore and Hodgson's rule by hand: every iteration lasts one second, and prefills four tokens by the estimate."""

from hypothesis import given, settings
from hypothesis import strategies as st

from policies import NS_PER_S
from tests.policies.worked import asked, batches, scheduler_for, token_seconds, work_through

A, B, C, D = 0, 1, 2, 3


def four_a_second(shape):
    return shape.prefill_tokens * NS_PER_S // 4


def served(requests, **knobs):
    scheduler = scheduler_for("most_in_time", chunk_size=4, estimator=four_a_second, **knobs)
    return work_through(scheduler, requests)


def order(log) -> list[int]:
    return [row for _, rows, _ in batches(log) for row, _, _ in rows]


def test_the_longest_steps_back_where_not_all_can_be_in_time():
    # A is done at 1. Then B needs two seconds, C and D one each; all three are due between 3.6 and 3.8, in this order.
    # By deadline B ends at 3, C at 4 and so late, D at 5. Without B, C ends at 2 and D at 3: one is late instead of two.
    requests = [asked(A, 0, 4, 1), asked(B, 0.1, 8, 1), asked(C, 0.2, 4, 1), asked(D, 0.3, 4, 1)]
    log = served(requests, ttft_s=3.5)
    assert order(log) == [A, C, D, B, B]
    assert token_seconds(log) == {A: [1], C: [2], D: [3], B: [5]}


def test_all_come_by_deadline_where_all_can_be_in_time():
    requests = [asked(A, 0, 4, 1), asked(B, 0.1, 8, 1), asked(C, 0.2, 4, 1), asked(D, 0.3, 4, 1)]
    assert order(served(requests, ttft_s=9)) == [A, B, B, C, D]


def test_what_is_late_already_waits_behind_whoever_is_not():
    # B came with A and is late at 2; it starts once C, which is in time, is done.
    requests = [asked(A, 0, 4, 1), asked(B, 0, 8, 1), asked(C, 0.9, 4, 1)]
    assert order(served(requests, ttft_s=1.5)) == [A, C, B, B]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 40)), min_size=1, max_size=7), st.integers(10, 120))
def test_no_choice_of_prompts_would_have_more_in_time(jobs, ttft_tenths):
    """All arrive before the first plan ends, as whole seconds of work: as many are in time as the best subset allows."""
    jobs = sorted((0.01 + at / 50, seconds) for seconds, at in jobs)
    requests = [asked(0, 0, 4, 1), *(asked(row, at, 4 * seconds, 1) for row, (at, seconds) in enumerate(jobs, 1))]
    due = [at + ttft_tenths / 10 for at, _ in jobs]
    times = token_seconds(served(requests, ttft_s=ttft_tenths / 10))
    done = sum(times[row][0] <= due_s for row, due_s in enumerate(due, 1))
    best = 0
    for subset in range(1 << len(jobs)):
        chosen = [row for row in range(len(jobs)) if subset >> row & 1]
        # By deadline, which is by arrival; the first second is A's.
        ends = [1 + sum(jobs[row][1] for row in chosen[: count + 1]) for count in range(len(chosen))]
        if all(end <= due[row] for end, row in zip(ends, chosen, strict=True)):
            best = max(best, len(chosen))
    assert done == best
