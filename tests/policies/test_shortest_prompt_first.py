"""Shortest prompt first by hand: one prompt fills a batch of 8 tokens; the decodes are over at once."""

from hypothesis import given
from hypothesis import strategies as st

from policies import NS_PER_S, Request
from policies.shortest_prompt_first import ShortestPromptFirst
from policies.work.track import Track
from tests.policies.worked import asked, batches, scheduler_for, work_through

A, B, C, D = 0, 1, 2, 3


def order(log) -> list[int]:
    return [row for _, rows, _ in batches(log) for row, _, _ in rows]


def test_the_shortest_waiting_prompt_starts_next():
    requests = [asked(A, 0, 8, 1), asked(B, 0.2, 7, 1), asked(C, 0.4, 5, 1), asked(D, 0.6, 6, 1)]
    log = work_through(scheduler_for("shortest_prompt_first", chunk_size=8, ageing=0), requests)
    assert batches(log) == [
        (0, [(A, 8, 0)], 0),
        (1, [(C, 5, 0), (D, 3, 0)], 0),
        (2, [(D, 3, 3), (B, 5, 0)], 0),  # a prompt that has begun goes on
        (3, [(B, 2, 5)], 0),
    ]


def test_waiting_makes_a_long_prompt_short():
    # Every second a prompt of 4 tokens arrives, and 4 tokens run. B's 8 tokens count 4 once it has waited 4 s.
    rest = [asked(row, row - 1.5, 4, 1) for row in range(2, 8)]
    requests = [asked(A, 0, 8, 1), asked(B, 0.1, 8, 1), *rest]
    starving = order(work_through(scheduler_for("shortest_prompt_first", chunk_size=4, ageing=0), requests))
    assert starving == [0, 0, 2, 3, 4, 5, 6, 7, 1, 1]
    ageing = order(work_through(scheduler_for("shortest_prompt_first", chunk_size=4, ageing=1), requests))
    # Those that arrived at 0.5 to 3.5 s rank 4.5 to 7.5, before B's 8.1; the next one ranks 8.5.
    assert ageing == [0, 0, 2, 3, 4, 5, 1, 1, 6, 7]


def test_only_the_head_of_a_long_queue_is_compared():
    requests = [asked(row, 0, tokens, 1) for row, tokens in enumerate((32, 24, 16, 8))]
    log = work_through(scheduler_for("shortest_prompt_first", chunk_size=8, ageing=0, window=2), requests)
    assert order(log) == [1, 1, 1, 2, 2, 3, 0, 0, 0, 0]


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 10**12)), min_size=2, max_size=8),
    st.integers(10**12, 10**13),
)
def test_the_rank_orders_as_the_aged_lengths_do_at_any_moment(prompts, now_ns):
    """The rank leaves the time out; the definition has it in."""
    policy = ShortestPromptFirst(ageing=2.0)
    tracks = [Track(Request(row, at, tokens, 1), 1) for row, (tokens, at) in enumerate(prompts)]

    def aged_tenths(track: Track) -> int:
        return track.request.prompt_tokens * NS_PER_S - 2 * (now_ns - track.request.arrival_ns)

    first = min(tracks, key=policy.rank)
    assert aged_tenths(first) <= min(map(aged_tenths, tracks)) + NS_PER_S // 10**6
