"""SARATHI's decode-maximal batching by hand: C = 8, tiles of 4 rows, B = 3 slots, so chunks of 8 - (3 - 1) = 6."""

import pytest

from policies.decode_maximal import chunk_beside_decodes
from tests.policies.worked import asked, batches, scheduler_for, token_seconds, work_through

A, B, C, D = 0, 1, 2, 3
REQUESTS = [asked(A, 0, 10, 2), asked(B, 0, 5, 5), asked(C, 0, 3, 3), asked(D, 0, 7, 2)]


def decode_maximal(**knobs):
    # The longest request has 12 tokens = 3 blocks, the pool 9: B = 3.
    return scheduler_for("decode_maximal", pool=9, longest=12, chunk_size=8, **knobs)


def test_one_chunk_a_batch_decodes_ride_along_and_the_last_tile_is_padded():
    log = work_through(decode_maximal(), REQUESTS)
    assert batches(log) == [
        (0, [(A, 6, 0)], 2),
        (1, [(A, 4, 6)], 0),
        (2, [(A, 1, 10), (B, 5, 0)], 2),
        (3, [(B, 1, 5), (C, 3, 0)], 0),
        (4, [(B, 1, 6), (C, 1, 3), (D, 6, 0)], 0),  # B - 1 decodes and the chunk: exactly C rows
        (5, [(B, 1, 7), (C, 1, 4), (D, 1, 6)], 1),
        (6, [(B, 1, 8), (D, 1, 7)], 0),  # no prompt left: decodes alone are not padded
    ]
    assert token_seconds(log) == {A: [2, 3], B: [3, 4, 5, 6, 7], C: [4, 5, 6], D: [6, 7]}


def test_shrink_takes_a_smaller_chunk_where_that_fills_the_tile():
    log = work_through(decode_maximal(align="shrink"), REQUESTS)
    assert batches(log) == [
        (0, [(A, 4, 0)], 0),
        (1, [(A, 4, 4)], 0),
        (2, [(A, 2, 8)], 2),  # no whole tile in two tokens: padded
        (3, [(A, 1, 10), (B, 3, 0)], 0),
        (4, [(B, 2, 3)], 2),
        (5, [(B, 1, 5), (C, 3, 0)], 0),
        (6, [(B, 1, 6), (C, 1, 3), (D, 6, 0)], 0),
        (7, [(B, 1, 7), (C, 1, 4), (D, 1, 6)], 1),
        (8, [(B, 1, 8), (D, 1, 7)], 0),
    ]


def test_none_leaves_the_last_tile_as_it_is():
    padded = batches(work_through(decode_maximal(), REQUESTS))
    plain = batches(work_through(decode_maximal(align="none"), REQUESTS))
    assert plain == [(second, rows, 0) for second, rows, _ in padded]


def test_a_slot_is_held_from_the_first_chunk_to_the_last_token():
    # B = 2: D's 4 + 1 tokens would find blocks, but no slot until A is done.
    scheduler = scheduler_for("decode_maximal", pool=7, longest=12, chunk_size=8)
    log = work_through(scheduler, [asked(A, 0, 2, 4), asked(B, 0, 2, 5), asked(D, 0, 4, 1)])
    assert batches(log) == [
        (0, [(A, 2, 0)], 2),
        (1, [(A, 1, 2), (B, 2, 0)], 1),
        (2, [(A, 1, 3), (B, 1, 2)], 0),
        (3, [(A, 1, 4), (B, 1, 3)], 0),
        (4, [(B, 1, 4), (D, 4, 0)], 3),
        (5, [(B, 1, 5)], 0),
    ]


def test_with_more_slots_than_c_the_chunk_is_what_the_decodes_leave_of_whole_tiles():
    # C = 4 and B = 6 (24 tokens = 6 blocks each): the paper's C - (B - 1) would be negative.
    scheduler = scheduler_for("decode_maximal", pool=36, longest=24, chunk_size=4)
    log = work_through(scheduler, [asked(row, 0, 3, 20) for row in range(6)])
    assert batches(log)[:10] == [
        (0, [(0, 3, 0)], 1),
        (1, [(0, 1, 3), (1, 3, 0)], 0),
        (2, [(0, 1, 4), (1, 1, 3), (2, 2, 0)], 0),
        (3, [(0, 1, 5), (1, 1, 4), (2, 1, 2)], 1),
        (4, [(0, 1, 6), (1, 1, 5), (2, 1, 3), (3, 1, 0)], 0),
        (5, [(0, 1, 7), (1, 1, 6), (2, 1, 4), (3, 1, 1)], 0),
        (6, [(0, 1, 8), (1, 1, 7), (2, 1, 5), (3, 1, 2)], 0),
        # 4 decodes = C: the batch becomes two tiles, and the chunk has four rows again.
        (7, [(0, 1, 9), (1, 1, 8), (2, 1, 6), (3, 1, 3), (4, 3, 0)], 1),
        (8, [(0, 1, 10), (1, 1, 9), (2, 1, 7), (3, 1, 4), (4, 1, 3), (5, 3, 0)], 0),
        (9, [(0, 1, 11), (1, 1, 10), (2, 1, 8), (3, 1, 5), (4, 1, 4), (5, 1, 3)], 0),
    ]


@pytest.mark.parametrize(
    ("rows", "slots", "decodes", "chunk"),
    [
        (256, 18, 17, 239),  # SARATHI's LLaMA-13B on an A6000: B = 18 at 1K
        (256, 18, 3, 239),  # fewer decodes than B - 1 leave the chunk as it is
        (256, 256, 255, 1),
        (256, 300, 10, 246),
        (256, 300, 255, 1),
        (256, 300, 256, 128),
        (256, 300, 299, 85),
        (16, 300, 0, 16),  # C below a tile: C rows, not a whole tile of prompt
        (32, 300, 20, 12),
        (32, 300, 32, 96),
    ],
)
def test_chunk_sizes_at_tiles_of_128(rows, slots, decodes, chunk):
    assert chunk_beside_decodes(rows, slots, decodes, 128) == chunk


def test_in_a_pipeline_b_counts_per_micro_batch():
    # 6 slots over 2 micro-batches: B = 3 in each, chunks of 8 - 2 = 6, one prompt in each.
    scheduler = scheduler_for("decode_maximal", pool=18, longest=12, depth=2, chunk_size=8, align="none")
    log = work_through(scheduler, [asked(row, 0, 6, 6) for row in range(6)])
    rows = [rows for _, rows, _ in batches(log)]
    assert rows[:4] == [
        [(0, 6, 0)],
        [(1, 6, 0)],
        [(0, 1, 6), (2, 6, 0)],
        [(1, 1, 6), (3, 6, 0)],
    ]
    assert max(len(row) for row in rows) == 3


def test_no_more_slots_than_requests_that_may_run():
    """Memory would hold B = 3; two requests may run, so chunks are of 8 - (2 - 1) = 7."""
    scheduler = scheduler_for("decode_maximal", pool=9, longest=12, chunk_size=8, align="none", max_num_seqs=2)
    assert scheduler.ledger.slots == 2
    log = work_through(scheduler, REQUESTS[:2])
    assert [rows for _, rows, _ in batches(log)][:3] == [[(A, 7, 0)], [(A, 3, 7)], [(A, 1, 10), (B, 5, 0)]]
