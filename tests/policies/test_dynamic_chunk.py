"""Dynamic chunk sizes by hand: tiles of 4 rows, B = 2 slots (pool of 8 blocks, longest request 16 tokens)."""

import pytest

from policies import BatchShape, Host
from policies.sized_by_time import ChunkTime, rows_within
from tests.policies.worked import asked, batches, scheduler_for, token_seconds, work_through

A, B, C = 0, 1, 2


def dynamic(**knobs):
    settings = {"pool": 8, "longest": 16, "align": "none", **knobs}
    return scheduler_for("dynamic_chunk", **settings)


def test_pd_ratio_follows_the_prefill_share_of_the_work_at_hand():
    log = work_through(
        dynamic(large=8, middle=6, small=4), [asked(A, 0, 14, 2), asked(B, 0, 4, 12), asked(C, 12.5, 15, 1)]
    )
    assert batches(log) == [
        (0, [(A, 5, 0)], 0),  # p = 18 / (18 + 14) = 0.56: C = 6, chunk 5
        (1, [(A, 5, 5)], 0),  # 13 / 27
        (2, [(A, 4, 10)], 0),  # 8 / 22
        (3, [(A, 1, 14), (B, 3, 0)], 0),  # 4 / 17 = 0.24: C = 4, chunk 3
        (4, [(B, 1, 3)], 0),
        *[(second, [(B, 1, second - 1)], 0) for second in range(5, 13)],
        (13, [(B, 1, 12), (C, 7, 0)], 0),  # 15 / (15 + 4) = 0.79: C = 8, chunk 7
        (14, [(B, 1, 13), (C, 7, 7)], 0),  # 8 / 11 = 0.73
        (15, [(B, 1, 14), (C, 1, 14)], 0),  # 1 / 3
    ]


def test_tbt_slo_takes_the_most_tiles_that_keep_the_target():
    # Every row costs 10 ms, every token of a chunk's prefix 1 ms: 0.2 s while anybody decodes.
    def estimate(shape: BatchShape) -> int:
        return 10_000_000 * shape.rows + 1_000_000 * sum(prefix for _, prefix in shape.chunks)

    scheduler = dynamic(
        pool=24, longest=48, estimator=estimate, rule="tbt_slo", tbt_target_s=0.2, largest=32, align="pad"
    )
    log = work_through(scheduler, [asked(A, 0, 31, 9), asked(B, 0, 40, 1)])
    assert batches(log)[:5] == [
        (0, [(A, 31, 0)], 1),  # nobody decodes: C = 32, chunk 31, and a dummy token
        # With the decode: 20 rows take 200 ms, 24 would take 240: C = 20, chunk 19
        (1, [(A, 1, 31), (B, 19, 0)], 0),
        (2, [(A, 1, 32), (B, 15, 19)], 0),  # 16 rows + prefix 19: 179 ms; 20 rows: 219
        (3, [(A, 1, 33), (B, 6, 34)], 1),  # 8 rows hold the rest
        (4, [(A, 1, 34)], 0),
    ]


def test_tbt_slo_keeps_a_chunk_of_one_tile_when_no_batch_keeps_the_target():
    scheduler = dynamic(
        pool=24, longest=48, estimator=lambda shape: 10**9, rule="tbt_slo", tbt_target_s=0.1, largest=32
    )
    log = work_through(scheduler, [asked(A, 0, 31, 3), asked(B, 0, 6, 1)])
    assert [rows for _, rows, _ in batches(log)] == [
        [(A, 31, 0)],
        [(A, 1, 31), (B, 3, 0)],
        [(A, 1, 32), (B, 3, 3)],
    ]


@pytest.mark.parametrize("derived", [False, True])
def test_prefix_aware_chunks_shrink_so_that_iterations_take_equal_time(derived):
    # t(L, x) = 1000 + 5 L + 100 x + 2 (2 L x + x^2), B = 1, C = 32 at the start: t(0, 32) = 6248.
    time = ChunkTime(1000, 5, 100, 2)

    def estimate(shape: BatchShape) -> int:
        ((tokens, prefix),) = shape.chunks
        return int(time.ns(prefix, tokens))

    knobs = {"estimator": estimate} if derived else {"c_ns": 1000, "g_ns": 5, "b_ns": 100, "a_ns": 2}
    scheduler = dynamic(pool=50, longest=200, rule="prefix_aware", first=32, **knobs)
    log = work_through(scheduler, [asked(A, 0, 150, 1)])
    chunks = [(tokens, prefix) for _, ((_, tokens, prefix),), _ in batches(log)]
    # By hand: t(32, 20) = 6520 is too much, t(32, 16) = 5320 is not; t(72, 12) = 6304; t(L, 8) = 1928 + 37 L.
    assert chunks == [
        *[(32, 0), (16, 32), (12, 48), (12, 60)],
        *[(8, prefix) for prefix in range(72, 120, 8)],
        *[(4, prefix) for prefix in range(120, 148, 4)],
        (2, 148),
    ]
    for tokens, prefix in chunks[:-1]:
        assert time.ns(prefix, tokens) <= 6248 < time.ns(prefix, tokens + 4)


def test_merge_gives_what_one_prompt_leaves_to_the_next():
    requests = [asked(A, 0, 3, 1), asked(B, 0, 2, 1), asked(C, 0, 9, 1)]
    settings = {"pool": 100, "longest": 12, "large": 8, "middle": 8, "small": 8, "max_num_seqs": 9}
    # B = 9 requests that may run > C: the chunk is what the decodes leave of 8 rows.
    alone = work_through(dynamic(**settings, align="pad"), requests)
    assert batches(alone) == [
        (0, [(A, 3, 0)], 1),
        (1, [(B, 2, 0)], 2),
        (2, [(C, 8, 0)], 0),
        (3, [(C, 1, 8)], 3),
    ]
    merged = work_through(dynamic(**settings, align="pad", merge=True), requests)
    assert batches(merged) == [(0, [(A, 3, 0), (B, 2, 0), (C, 3, 0)], 0), (1, [(C, 6, 3)], 2)]
    assert token_seconds(merged) == {A: [1], B: [1], C: [2]}


def test_merging_and_shrinking_align_the_last_of_the_merged_chunks():
    requests = [asked(A, 0, 3, 1), asked(B, 0, 4, 1)]
    scheduler = dynamic(pool=100, longest=12, large=8, middle=8, small=8, merge=True, align="shrink")
    assert batches(work_through(scheduler, requests)) == [(0, [(A, 3, 0), (B, 1, 0)], 0), (1, [(B, 3, 1)], 1)]


@pytest.mark.parametrize("a", [0.0, 0.5, 3.0])
def test_chunk_time_inverts_and_is_recovered_from_estimates(a):
    time = ChunkTime(50_000, 20, 900, a)
    for prefix in (0, 1, 777, 30_000):
        limit = time.ns(prefix, 1234)
        assert time.tokens_within(limit, prefix) == pytest.approx(1234)
    host = Host(estimator=lambda shape: round(1000 * time.ns(shape.chunks[0][1], shape.chunks[0][0])))
    found = ChunkTime.from_estimates(host, 4096, 1024)
    assert (found.c, found.g, found.b, found.a) == pytest.approx((50e6, 20e3, 900e3, 1000 * a), rel=1e-6)


def test_chunk_time_leaves_nothing_when_the_prefix_alone_takes_too_long():
    assert ChunkTime(10, 1, 1, 0).tokens_within(100, 90) == 0


def test_rows_within_agrees_with_trying_every_tile():
    host = Host(tile=4, estimator=lambda shape: 7 * shape.rows + shape.rows**2)
    for limit in range(0, 3000, 37):
        tried = [rows for rows in range(8, 49, 4) if 7 * rows + rows**2 <= limit]
        found = rows_within(host, limit, 8, 48, lambda rows: BatchShape(((rows, 0),)))
        assert found == max(tried, default=8)
