"""Speculating decodes: widths, budget, blocks, what is taken back, and ends in the middle of a draft."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import (
    BlockLedger,
    CountingLedger,
    Host,
    PolicyError,
    Request,
    Scheduler,
    Speculation,
    Track,
    Verified,
    make_policy,
    policy_names,
)
from policies.goodput_drafts import GoodputDrafts, expected_tokens
from policies.kv_memory.swap import HostMemory, Swap

BLOCK = 4


def engine(method="ngram:4", *, blocks=100, budget=64, longest=256, policy="vllm_v1", ledger=None, **knobs):
    ledger = ledger or CountingLedger(blocks, BLOCK, longest)
    host = Host(speculation=Speculation.parse(method))
    return Scheduler(make_policy(policy, knobs), ledger, host, token_budget=budget, max_model_len=longest)


def step(scheduler, now_ns, accepted=None, proposed=None):
    """Plan and complete one batch; returns (request, tokens, context) of its speculating decodes, and the outcome."""
    batch = scheduler.plan(now_ns)
    batch.accepted, batch.proposed = accepted or {}, proposed or {}
    rows = [(part.track.request.id, part.tokens, part.context) for part in batch.verified]
    return batch, rows, scheduler.complete(batch, now_ns + 10)


def test_a_width_counts_everywhere_and_rejected_drafts_are_taken_back():
    scheduler = engine()
    track = scheduler.add(Request(0, 0, 5, 20), 0)
    step(scheduler, 0, proposed={0: 4})
    assert (track.context, track.known, track.drafts) == (5, 6, 4)
    batch, rows, outcome = step(scheduler, 10, accepted={0: 2}, proposed={0: 3})
    assert rows == [(0, 5, 5)]
    shape = batch.shape
    assert (shape.decodes, shape.tokens, shape.sampled) == (1, 5, 5)
    assert (shape.draft_tokens, shape.draft_context_total, shape.drafting) == (4, 4 * 5, 4)
    assert (shape.decode_context_total, shape.decode_context_max) == (5, 5)
    # Ten tokens were computed, two of them rejected: the context is eight, the blocks of ten stay.
    assert (track.context, track.delivered, track.blocks) == (8, 4, 3)
    # Tokens that come together are one delivery, with one gap.
    assert list(outcome.gaps) == [(10, 1)]
    assert track.cohort.times == [10, 20, 20, 20]
    assert step(scheduler, 20)[1] == [(0, 4, 8)]


def test_an_answer_ends_in_the_middle_of_a_draft():
    scheduler = engine()
    track = scheduler.add(Request(0, 0, 5, 3), 0)
    step(scheduler, 0, proposed={0: 4})
    # max_tokens does not clip the drafts: accepted tokens beyond it are dropped.
    _, rows, outcome = step(scheduler, 10, accepted={0: 4}, proposed={0: 4})
    assert rows == [(0, 5, 5)]
    assert list(outcome.finished) == [track]
    assert (track.produced, track.segments) == (3, [(0, 0, 3)])
    assert scheduler.ledger.free_blocks == 100
    assert scheduler.queues.decode_tokens_promised == scheduler.queues.prefill_tokens == 0


def test_drafts_are_cut_from_the_end_by_the_budget_and_by_the_longest_sequence():
    scheduler = engine(budget=12, longest=20)
    for number in range(3):
        scheduler.add(Request(number, 0, 4, 12), 0)
    step(scheduler, 0, proposed={0: 4, 1: 4, 2: 4})
    _, rows, _ = step(scheduler, 10, accepted={0: 4, 1: 4}, proposed={0: 4, 1: 4})
    # 12 tokens: two whole widths, and two of the third.
    assert rows == [(0, 5, 4), (1, 5, 4), (2, 2, 4)]
    _, rows, _ = step(scheduler, 20, accepted={0: 4, 1: 4}, proposed={0: 4, 1: 4})
    assert rows == [(0, 5, 9), (1, 5, 9), (2, 1, 5)]
    # A context of 14 leaves 20 - 14 - 1 = 5 positions; one of 16 leaves 3.
    scheduler = engine(longest=20)
    scheduler.add(Request(0, 0, 16, 4), 0)
    step(scheduler, 0, proposed={0: 4})
    assert step(scheduler, 10)[1] == [(0, 3, 16)]


def test_who_is_left_out_keeps_its_drafts_and_who_is_preempted_loses_them():
    scheduler = engine(budget=5)
    tracks = [scheduler.add(Request(number, 0, 2, 12), 0) for number in range(2)]
    step(scheduler, 0, proposed={0: 4, 1: 2})
    _, rows, _ = step(scheduler, 10, proposed={0: 4})
    assert rows == [(0, 5, 2)]
    assert tracks[1].drafts == 2
    # 4 blocks of 4: two prompts of 5 hold them all, and a width of 5 from 5 on needs a third.
    scheduler = engine(blocks=4)
    tracks = [scheduler.add(Request(number, 0, 5, 8), 0) for number in range(2)]
    step(scheduler, 0, proposed={0: 4, 1: 4})
    batch, rows, _ = step(scheduler, 10)
    assert rows == [(0, 5, 5)]
    assert (batch.preempted, tracks[1].drafts, tracks[1].context) == ([tracks[1]], 0, 0)


def test_a_draft_model_takes_lookahead_slots_and_one_token_of_the_budget_for_everybody_scheduled():
    scheduler = engine("draft:3", budget=16)
    tracks = [scheduler.add(Request(number, 0, 5, 12), 0) for number in range(3)]
    batch = scheduler.plan(0)
    # 5 + 1, 5 + 1, and of the last four one is its slot.
    assert [chunk.tokens for chunk in batch.chunks] == [5, 5, 3]
    # Slots for 5 + 3 and 3 + 3 tokens.
    assert [track.blocks for track in tracks] == [2, 2, 2]
    batch.proposed = {0: 3, 1: 3}
    scheduler.complete(batch, 10)
    batch, rows, _ = step(scheduler, 10)
    # 15 - 5 - 5 leaves 4 for the rest of the third prompt, one of which is its slot.
    assert rows == [(0, 4, 5), (1, 4, 5)]
    assert [chunk.tokens for chunk in batch.chunks] == [2]
    # 5 + 4 + 3 tokens.
    assert tracks[0].blocks == 3


def test_lookahead_ends_at_the_longest_sequence():
    scheduler = engine("eagle:4", longest=20)
    track = scheduler.add(Request(0, 0, 18, 2), 0)
    step(scheduler, 0, proposed={0: 4})
    assert track.blocks == 5
    assert step(scheduler, 10)[1] == [(0, 1, 18)]
    assert scheduler.ledger.free_blocks == 100


def test_one_token_left_of_a_prefix_hit_is_padded_to_a_whole_width():
    def cached(**more):
        ledger = BlockLedger(100, BLOCK, 64, prefix_caching=True)
        scheduler = engine(ledger=ledger, longest=64, **more)
        hashes = (11, 12)
        scheduler.add(Request(0, 0, 9, 2, hashes, BLOCK), 0)
        step(scheduler, 0)
        return scheduler, hashes

    scheduler, hashes = cached()
    track = scheduler.add(Request(1, 10, 9, 4, hashes, BLOCK), 10)
    batch, rows, outcome = step(scheduler, 10, accepted={1: 4}, proposed={1: 2})
    assert rows == [(0, 1, 9), (1, 5, 8)]
    assert batch.parts[1].placeholders
    # Placeholders are accepted by nobody; its first token came.
    assert (track.context, track.delivered, track.first_token_ns, track.drafts) == (9, 1, 20, 2)
    assert list(outcome.first_tokens) == [track]
    # Beside a running prompt it is a chunk of one token.
    scheduler, hashes = cached(budget=9)
    step(scheduler, 5)
    scheduler.add(Request(2, 10, 12, 4), 10)
    scheduler.add(Request(3, 10, 9, 4, hashes, BLOCK), 10)
    assert [chunk.tokens for chunk in step(scheduler, 10)[0].chunks] == [9]
    batch = scheduler.plan(20)
    assert [(chunk.track.request.id, chunk.tokens) for chunk in batch.chunks] == [(2, 3), (3, 1)]
    assert not batch.verified
    # Rather not at all than with less than a whole width: a decode leaves four of five tokens.
    scheduler, hashes = cached(budget=9)
    scheduler.token_budget = 5
    scheduler.add(Request(4, 10, 9, 4, hashes, BLOCK), 10)
    assert step(scheduler, 10)[1] == [(0, 1, 9)]
    assert step(scheduler, 20)[1] == [(4, 5, 8)]


def test_eagle_computes_the_last_block_of_a_hit_again():
    hashes = (1, 2, 3)
    for method, hit in (("ngram:2", 8), ("eagle:2", 4)):
        ledger = BlockLedger(
            50, BLOCK, 64, prefix_caching=True, drops_last_hit=Speculation.parse(method).drops_last_hit
        )
        scheduler = engine(method, ledger=ledger)
        scheduler.add(Request(0, 0, 12, 1, hashes, BLOCK), 0)
        step(scheduler, 0)
        scheduler.add(Request(1, 0, 11, 1, hashes, BLOCK), 0)
        batch = scheduler.plan(10)
        assert batch.chunks[0].prefix == hit


def test_speculation_that_makes_no_sense_is_refused():
    for text in ("", "ngram", "ngram:0", "ngram:-1", "ngram:65", "medusa:3", "draft:x", "eagle:²"):
        with pytest.raises(PolicyError, match="speculation: found"):
            Speculation.parse(text)


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(policy_names()[:9]),
    method=st.sampled_from(["ngram:4", "draft:3", "eagle:2"]),
    seed=st.integers(0, 10**6),
    by_id=st.booleans(),
    micro_batches=st.sampled_from([1, 1, 2]),
    ahead=st.booleans(),
    blocks=st.sampled_from([24, 40, 400]),
    swaps=st.booleans(),
)
def test_no_token_or_block_is_lost_whatever_is_accepted(
    policy, method, seed, by_id, micro_batches, ahead, blocks, swaps
):
    draws = random.Random(seed)
    longest = 64
    caching = by_id and draws.random() < 0.5
    ledger = (
        BlockLedger(blocks, BLOCK, longest, prefix_caching=caching) if by_id else CountingLedger(blocks, BLOCK, longest)
    )
    speculation = Speculation.parse(method)
    ahead = ahead and micro_batches == 1
    host = Host(
        micro_batches=micro_batches,
        chase_chunks=ahead,
        chase_decodes=ahead,
        speculation=speculation,
        estimator=lambda shape: 1000 + 10 * shape.rows,
    )
    swap = Swap(HostMemory(20, 1), "swap") if swaps else None
    scheduler = Scheduler(
        make_policy(policy), ledger, host, token_budget=48, max_num_seqs=8, max_model_len=longest, swap=swap
    )
    lengths = {}
    waiting, flights, now, gone = list(range(14)), [], 0, set()
    tracks = {}
    for _ in range(3000):
        now += 100
        while waiting and draws.random() < 0.4:
            number = waiting.pop(0)
            prompt, limit = draws.randint(1, 30), draws.randint(1, 30)
            lengths[number] = draws.randint(1, limit)
            hashes = tuple(range(prompt // BLOCK)) if draws.random() < 0.5 else tuple(range(900, 900 + prompt // BLOCK))
            request = Request(number, now, prompt, limit, hashes, BLOCK if hashes else 0)
            tracks[number] = scheduler.add(request, now, ends_after=lengths[number])
        while len(flights) < scheduler.depth and (batch := scheduler.plan(now)) is not None:
            assert batch.shape.tokens <= 48 or policy in ("chunked",)
            assert batch.shape.draft_tokens == sum(part.drafts for part in batch.verified)
            for part in batch.verified:
                assert isinstance(part, Verified)
                assert 1 <= part.tokens <= 1 + speculation.tokens
            flights.append(batch)
        if flights and draws.random() < 0.9:
            batch = flights.pop(0)
            batch.accepted = {part.track.request.id: draws.randint(0, part.drafts) for part in batch.verified}
            sampled = [part.track for part in batch.verified] + [track for track, _ in batch.joins]
            batch.proposed = {track.request.id: draws.randint(0, batch.shape.drafting) for track in sampled}
            scheduler.complete(batch, now)
        elif not flights and scheduler.tracks and scheduler.alarm_ns is None:
            scheduler.reject_stuck(now)
        if draws.random() < 0.02 and scheduler.tracks:
            victim = draws.choice(list(scheduler.tracks))
            scheduler.withdraw([victim], "client gone", now)
            gone.add(victim)
        assert 0 <= ledger.free_blocks <= blocks
        if not waiting and not scheduler.tracks and not flights:
            break
    assert not scheduler.tracks
    for number, track in tracks.items():
        times = sum(end - start for _, start, end in track.segments)
        assert track.produced == times
        if track.status == "finished":
            assert track.produced == lengths[number]
        else:
            assert number in gone or track.status in ("rejected", "failed")
    assert ledger.free_blocks == blocks
    assert scheduler.queues.decode_tokens_promised == scheduler.queues.prefill_tokens == 0
    assert scheduler.queues.num_running == scheduler.queues.in_flight_batches == 0


def test_goodput_drafts_as_many_as_are_worth_their_rows():
    """Time 10 + a row each: with acceptance a, k drafts give (1 - a^(k+1)) / (1 - a) tokens a request in 10 + n (1 + k).

    One request, a = 0.8: 1 / 11, 1.8 / 12, 2.44 / 13, 2.952 / 14 and 3.3616 / 15 rise to k = 4. A hundred: 1 / 110
    against 1.8 / 210 and less: none is worth it.
    """
    policy = GoodputDrafts(expected=0.8)
    host = Host(speculation=Speculation.parse("ngram:4"), estimator=lambda shape: 10 + shape.rows)
    tracks = [Track(Request(number, 0, 5, 20), 20) for number in range(100)]
    assert policy.drafts_worth(tracks[:1], host) == 4
    assert policy.drafts_worth(tracks, host) == 0
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert expected_tokens(1.0, 4) == 5
    # Four counted on with 0.8; three rejections and no acceptance since: 3.2 / 7.
    tracks[0].rejections = 3
    assert policy.acceptance_of(tracks[:1]) == pytest.approx(3.2 / 7)


def test_goodput_drafts_less_the_more_run():
    def drafted(requests):
        scheduler = Scheduler(
            make_policy("goodput_drafts", {"expected": 0.7}),
            CountingLedger(5000, BLOCK, 256),
            Host(speculation=Speculation.parse("ngram:4"), estimator=lambda shape: 40 + shape.rows),
            token_budget=2048,
            max_model_len=256,
        )
        for number in range(requests):
            scheduler.add(Request(number, 0, 5, 50), 0)
        step(scheduler, 0)
        batch, _, _ = step(scheduler, 10)
        return batch.shape.drafting

    few, many = drafted(2), drafted(100)
    assert (few, many) == (4, 0)


def test_who_may_have_come_to_the_longest_sequence_is_left_out_of_a_plan_ahead_and_not_preempted():
    """A context of 14 with a width of 5 in flight may be 19 of 20: the next plan waits for what was accepted."""
    scheduler = Scheduler(
        make_policy("vllm_v1"),
        CountingLedger(100, BLOCK, 20),
        Host(chase_chunks=True, chase_decodes=True, speculation=Speculation.parse("eagle:4")),
        token_budget=64,
        max_model_len=20,
    )
    track = scheduler.add(Request(0, 0, 14, 6), 0)
    first, second = scheduler.plan(0), scheduler.plan(0)
    assert [part.tokens for part in second.verified] == [5]
    scheduler.complete(first, 10)
    assert scheduler.plan(10) is None
    assert (scheduler.preemptions, track.status) == (0, "running")
    second.accepted = {0: 1}
    scheduler.complete(second, 20)
    assert [(part.context, part.tokens) for part in scheduler.plan(20).verified] == [(16, 3)]
