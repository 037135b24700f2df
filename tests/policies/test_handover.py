"""KV that moves between engines: blocks kept until they are read, taken before they are filled, never lost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest

from policies import BlockLedger, CountingLedger, Host, Policy, PolicyError, Request, Scheduler, make_policy
from policies.vllm_v1 import VllmV1

BLOCK = 4


def scheduler(blocks=20, policy="chunked", by_id=False, watermark=0.0):
    ledger = BlockLedger(blocks, BLOCK, 64) if by_id else CountingLedger(blocks, BLOCK, 64)
    return Scheduler(make_policy(policy), ledger, Host(tile=16), watermark=watermark)


def finish(engine, now=0, most=200):
    """Run until nothing can be planned; returns who finished, in order."""
    done = []
    for _ in range(most):
        batch = engine.plan(now)
        if batch is None:
            return done
        now += 10
        done += [track.request.id for track in engine.complete(batch, now).finished]
    raise AssertionError("does not end")


@pytest.mark.parametrize("by_id", [False, True])
def test_blocks_of_a_handed_over_prompt_stay_taken_until_they_are_read(by_id):
    engine = scheduler(by_id=by_id)
    engine.add(Request(0, 0, 10, 1), 0, ends_after=1, hands_over=True)
    assert finish(engine) == [0]
    assert (engine.ledger.free_blocks, engine.queues.num_running, engine.tracks) == (17, 0, {})
    engine.handover.release(0)
    assert engine.ledger.free_blocks == 20


def test_a_queue_behind_held_blocks_waits_instead_of_being_rejected():
    engine = scheduler(blocks=5)
    engine.add(Request(0, 0, 16, 1), 0, ends_after=1, hands_over=True)
    engine.add(Request(1, 0, 16, 1), 0, ends_after=1)
    assert finish(engine) == [0]
    assert engine.reject_stuck(0) is None
    engine.handover.release(0)
    assert finish(engine) == [1]


@pytest.mark.parametrize(
    ("policy", "free"),
    [
        ("chunked", 17),
        ("prefill_priority", 17),
        ("vllm_v1", 17),
        ("orca", 16),
        ("decode_maximal", 4),
        ("dynamic_chunk", 4),
    ],
)
@pytest.mark.parametrize("by_id", [False, True])
def test_a_received_request_goes_on_with_its_next_token(by_id, policy, free):
    """Its room is taken before its KV is sent: for 11 tokens, for its limit of 16, or for a slot of the longest, 64."""
    engine = scheduler(by_id=by_id, policy=policy)
    track = engine.handover.receive(Request(0, 0, 10, 6), 0, ends_after=4, computed=10, produced=1)
    assert engine.plan(0) is None, "its KV is not here"
    assert engine.handover.reserve(track)
    assert engine.ledger.free_blocks == free
    engine.handover.arrive(track)
    batch = engine.plan(0)
    assert (batch.shape.chunks, batch.shape.sampled) == (((1, 10),), 1), "one token on top of ten handed over"
    engine.complete(batch, 10)
    assert finish(engine, 10) == [0]
    assert (track.delivered, sum(end - start for _, start, end in track.segments)) == (4, 3)
    queues = engine.queues
    assert (engine.ledger.free_blocks, queues.prefill_tokens, queues.decode_tokens_promised) == (20, 0, 0)


def test_no_blocks_are_reserved_where_there_is_no_room():
    engine = scheduler(blocks=5, watermark=0.2)
    first = engine.handover.receive(Request(0, 0, 8, 2), 0, ends_after=2, computed=8, produced=1)
    second = engine.handover.receive(Request(1, 0, 8, 2), 0, ends_after=2, computed=8, produced=1)
    assert engine.handover.reserve(first)
    assert not engine.handover.reserve(second)
    assert engine.ledger.free_blocks == 2
    engine.handover.arrive(first)
    assert finish(engine) == [0]
    assert engine.handover.reserve(second)


def test_kv_that_lies_here_is_used_before_a_preempted_request_recomputes_its_own():
    """The preempted request needs 6 blocks of 8; the one whose KV has arrived holds 3 and needs no more."""
    engine = scheduler(blocks=8)
    engine.add(Request(0, 0, 16, 8), 0, ends_after=8)
    engine.complete(engine.plan(0), 10)
    arrived = engine.handover.receive(Request(1, 0, 10, 4), 10, ends_after=4, computed=10, produced=1)
    assert engine.handover.reserve(arrived)
    engine.handover.arrive(arrived)
    engine.stop(engine.tracks[0])
    assert [track.request.id for track in engine.queues.waiting] == [1, 0]
    assert finish(engine, 10) == [1, 0]
    assert (arrived.computed, arrived.delivered, engine.ledger.free_blocks) == (10, 4, 8)
    assert (engine.queues.prefill_tokens, engine.queues.decode_tokens_promised) == (0, 0)


def test_free_blocks_are_kept_for_a_preempted_request_that_waits_longer():
    """10 blocks: the preempted request needs 5, so that one expected request of 3 blocks finds room, a second does not
    until the preempted one has ended."""
    engine = scheduler(blocks=10)
    engine.add(Request(0, 0, 16, 4), 0, ends_after=4)
    engine.complete(engine.plan(0), 10)
    engine.stop(engine.tracks[0])
    first, second = (
        engine.handover.receive(Request(number, 0, 10, 2), 10, ends_after=2, computed=10, produced=1)
        for number in (1, 2)
    )
    assert engine.handover.reserve(first)
    assert not engine.handover.reserve(second)
    assert finish(engine, 10) == [0]
    assert engine.handover.reserve(second)


@dataclass(frozen=True)
class Greedy(Policy):
    """Admits with more blocks than it says that it will reserve."""

    def plan(self, queues, draft, kv, host, now_ns):
        draft.decode_all()
        for track in list(queues.waiting):
            draft.admit(track, track.lacking, reserve=24)


def test_blocks_that_wait_in_the_queue_are_taken_back_when_nothing_else_could_run():
    """Both hold 3 of 8 blocks and need 6: the later one gives its own back and recomputes."""
    engine = Scheduler(Greedy(), CountingLedger(8, BLOCK, 64))
    tracks = [
        engine.handover.receive(Request(number, 0, 10, 4), 0, ends_after=4, computed=10, produced=1)
        for number in (0, 1)
    ]
    for track in tracks:
        assert engine.handover.reserve(track)
        engine.handover.arrive(track)
    assert finish(engine, 10) == [0, 1]
    assert [track.computed for track in tracks] == [10, 0]
    assert engine.handover.gave_back
    assert (engine.queues.prefill_tokens, engine.queues.decode_tokens_promised) == (0, 0)


@dataclass(frozen=True)
class Patient(Policy):
    """Admits nobody before a moment that it names."""

    def plan(self, queues, draft, kv, host, now_ns):
        if now_ns < 100:
            draft.wait_until(100)
            return
        draft.decode_all()
        for track in list(queues.waiting):
            draft.admit(track, track.lacking)


def test_kv_is_not_taken_back_from_a_request_that_the_policy_means_to_start_later():
    engine = Scheduler(Patient(), CountingLedger(8, BLOCK, 64))
    track = engine.handover.receive(Request(0, 0, 10, 4), 0, ends_after=4, computed=10, produced=1)
    assert engine.handover.reserve(track)
    engine.handover.arrive(track)
    assert engine.plan(0) is None
    assert (track.computed, engine.alarm_ns) == (10, 100)
    assert finish(engine, 100) == [0]


def test_a_request_that_runs_alone_gives_way_to_kv_that_lies_here_instead_of_dropping_its_tokens_for_ever():
    """Planned ahead and with its own blocks found again, request 0 would be preempted and admitted in every plan, its
    token in flight dropped each time: the two behind it hold the last 6 of 12 blocks. They go first."""
    policy = VllmV1(prefix_caching=True, async_scheduling=True, reserve_full=False)
    host = Host(chase_chunks=True, chase_decodes=True)
    engine = Scheduler(policy, BlockLedger(12, BLOCK, 64, prefix_caching=True), host, token_budget=64)
    engine.add(Request(0, 0, 20, 20), 0, ends_after=20)
    flight = deque([engine.plan(0)])
    for number in (1, 2):
        behind = engine.handover.receive(Request(number, 0, 10, 4), 0, ends_after=4, computed=10, produced=1)
        assert engine.handover.reserve(behind)
        engine.handover.arrive(behind)
    engine.max_num_seqs = 1
    done = []
    for now in range(10, 2000, 10):
        batch = engine.plan(now)
        flight += [batch] if batch is not None else []
        if not flight:
            break
        done += [track.request.id for track in engine.complete(flight.popleft(), now + 9).finished]
    assert done == [1, 2, 0]
    assert (engine.ledger.free_blocks, engine.queues.num_running) == (12, 0)


def test_a_withdrawn_request_gives_back_what_it_reserved():
    engine = scheduler()
    expected = engine.handover.receive(Request(0, 0, 10, 4), 0, ends_after=4, computed=10, produced=1)
    engine.handover.reserve(expected)
    waiting = engine.handover.receive(Request(1, 0, 10, 4), 0, ends_after=4, computed=10, produced=1)
    engine.handover.reserve(waiting)
    engine.handover.arrive(waiting)
    assert len(engine.withdraw([0, 1], "client gone")) == 2
    assert (engine.ledger.free_blocks, len(engine.queues.waiting), engine.handover.expected) == (20, 0, {})
    assert (engine.queues.prefill_tokens, engine.queues.decode_tokens_promised) == (0, 0)


def test_kv_of_a_whole_request_cannot_be_handed_over():
    with pytest.raises(PolicyError, match="KV of 11 tokens handed over, expected 1 to 10"):
        scheduler().handover.receive(Request(0, 0, 10, 4), 0, ends_after=4, computed=11, produced=1)


@pytest.mark.parametrize("by_id", [False, True])
def test_an_engine_that_died_has_nothing_left_and_can_start_again(by_id):
    engine = scheduler(by_id=by_id)
    for row in range(3):
        engine.add(Request(row, 0, 10, 9), 0, ends_after=9)
    engine.add(Request(3, 0, 4, 1), 0, ends_after=1, hands_over=True)
    engine.complete(engine.plan(0), 10)
    assert engine.handover.held
    engine.complete(engine.plan(10), 20)
    engine.plan(20)
    gone = engine.abandon("it burnt", 25)
    assert [(track.request.id, track.status, track.delivered) for track in gone] == [
        (row, "failed", 2) for row in range(3)
    ]
    queues = engine.queues
    assert (engine.ledger.free_blocks, queues.num_running, queues.in_flight_batches) == (20, 0, 0)
    assert (queues.prefill_tokens, queues.decode_tokens_promised, queues.parts) == (0, 0, [])
    assert [cohort.times for cohort in engine.take_retired()] == [[10, 20]]
    again = engine.add(Request(0, 0, 10, 9), 30, ends_after=9, produced=2)
    assert finish(engine, 30) == [0]
    assert again.delivered == 9


def test_withdrawing_a_request_whose_last_token_is_on_its_way_drops_that_token():
    """Planning ahead sets a request aside once its declared limit is planned; the client may still go."""
    policy = make_policy("vllm_v1", {"async_scheduling": True})
    engine = Scheduler(policy, CountingLedger(20, BLOCK, 64), Host(chase_chunks=True, chase_decodes=True))
    engine.add(Request(0, 0, 4, 2), 0, ends_after=2)
    engine.add(Request(1, 0, 4, 9), 0, ends_after=9)
    first, second = engine.plan(0), engine.plan(0)
    engine.complete(first, 10)
    third = engine.plan(10)
    assert engine.tracks[0].closing
    (gone,) = engine.withdraw([0], "client gone", 12)
    assert gone.delivered == 1
    for batch, now in ((second, 20), (third, 30)):
        outcome = engine.complete(batch, now)
        assert (sum(count for _, count in outcome.gaps), outcome.finished) == (1, [])
    assert finish(engine, 30) == [1]
    assert (engine.ledger.free_blocks, engine.queues.decode_tokens_promised) == (20, 0)
