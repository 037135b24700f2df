"""A cohort's block needs, kept by remainder, against counting them member by member."""

from __future__ import annotations

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CountingLedger, Request, Track
from policies.work.cohort import Cohort

members = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 6), st.integers(0, 30)), min_size=1, max_size=8
)  # context, spare blocks held, step at which it joins


@given(members, st.integers(1, 6), st.lists(st.integers(1, 25), min_size=1, max_size=6), st.booleans())
@settings(max_examples=200, deadline=None)
def test_each_member_takes_a_block_when_its_own_are_full(rows, block_size, leaps, one_leaves):
    cohort = Cohort(0, block_size)
    ledger = CountingLedger(10_000, block_size)
    joining = sorted(((step, context, spare) for context, spare, step in rows), reverse=True)
    held: dict[Track, list[int]] = {}
    numbers = count()

    def join():
        while joining and joining[-1][0] <= cohort.planned:
            _, context, spare = joining.pop()
            number = next(numbers)
            track = Track(Request(number, 0, context, 1000), 1000)
            track.order, track.own_context = number, context
            track.blocks = -(-context // block_size) + spare
            cohort.join(track, cohort.planned, cohort.planned)
            held[track] = [context, track.blocks]

    def expected():
        taken = 0
        for state in held.values():
            state[0] += 1
            if state[0] > state[1] * block_size:
                state[1] += 1
                taken += 1
        return taken

    join()
    for steps in leaps:
        before = ledger.free_blocks
        within = cohort.steps_within(before, steps)
        assert within == steps
        assert cohort.growth == sum(context >= blocks * block_size for context, blocks in held.values())
        foreseen = [cohort.growth_within(some) for some in range(steps + 1)]
        taken = cohort.plan_steps(steps, ledger)
        assert foreseen == [sum(taken[:some]) for some in range(steps + 1)]
        assert taken == [expected() for _ in range(steps)]
        assert ledger.free_blocks == before - sum(taken)
        if held:
            assert cohort.context_max == max(context for context, _ in held.values())
        join()
        if one_leaves and len(held) > 1:
            cohort.times.extend(range(len(cohort.times), cohort.planned))
            track = max(held, key=lambda track: held[track][0])
            cohort.leave(track)
            assert track.blocks == held.pop(track)[1]


def test_leaving_members_do_not_stay_behind_in_memory():
    """A cohort that lives long must not remember everybody who was ever in it."""
    cohort = Cohort(0, 16)
    before = None
    for number in range(5_000):
        track = Track(Request(number, 0, 10, 1000), 5)
        track.order, track.own_context, track.blocks = number, 10 + number, 1 + number // 16 + 1
        cohort.join(track, cohort.planned, cohort.planned)
        if before is not None:
            cohort.leave(before)
        before = track
    assert len(cohort._by_base) < 100
