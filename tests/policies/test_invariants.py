"""What must hold for any trace, any policy, any pool: nothing lost, nothing leaked, leaps equal to the plain path."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import BlockLedger, CountingLedger, Host, Request, Scheduler, make_policy, policy_names
from tests.policies.driving import drive, held_blocks

BLOCK = 4

# Every policy as it is, and with knobs that fit the small traces below, so that chunks, targets and windows bite.
POLICIES = [(name, {}) for name in policy_names()] + [
    ("request_level", {"max_batch_size": 3, "keep_finished": False, "max_delay_s": 5e-6}),
    ("orca", {"max_batch_size": 3, "reserve": "longest"}),
    ("prefill_priority", {"max_prompts": 2}),
    ("decode_maximal", {"chunk_size": 16, "align": "shrink"}),
    ("decode_maximal", {"chunk_size": 3, "align": "none"}),
    ("dynamic_chunk", {"large": 32, "middle": 24, "small": 16, "merge": True}),
    ("dynamic_chunk", {"rule": "tbt_slo", "tbt_target_s": 1.3e-6, "largest": 64}),
    ("dynamic_chunk", {"rule": "prefix_aware", "first": 32, "merge": True, "align": "shrink"}),
    ("chunked", {"chunk_size": 12}),
    ("vllm_v1", {"long_prefill_token_threshold": 7}),
    ("vllm_v1", {"reserve_full": False}),
    ("shortest_prompt_first", {"chunk_size": 12, "window": 3, "ageing": 1e7}),
    ("slo_aware", {"chunk_size": 32, "classes": "chat:ttft=2e-6,tbt=1.4e-6;batch:ttft=1e-3", "window": 2}),
    ("slo_aware", {"chunk_size": 32, "ttft_s": 1e-5, "relegate": False}),
    ("predicted_sjf", {"chunk_size": 12, "ageing": 1e7}),
    ("least_attained", {"chunk_size": 12, "quantum": 9}),
    ("program_fcfs", {"chunk_size": 12}),
    ("vtc", {"chunk_size": 12, "weights": "x=0.3,y=3", "output_weight": 1.7}),
    ("weighted_fair", {"chunk_size": 12, "quantum": 20, "weights": "x=0.3,y=3"}),
]


@st.composite
def traces(draw):
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 4000),
                st.integers(1, 60),
                st.integers(1, 30),
                st.integers(0, 6),
                st.sampled_from([0, 0, 1, -1]),
                st.sampled_from([None, "chat", "batch"]),
                st.sampled_from([None, "x", "y"]),
            ),
            min_size=1,
            max_size=14,
        )
    )
    requests, now = [], 0
    for row, (gap, prompt, output, slack, priority, slo, tenant) in enumerate(rows):
        now += gap
        more = {"priority": priority, "slo": slo, "tenant": tenant, "program": tenant, "predicted_tokens": 7 * row % 31}
        requests.append((Request(row, now, prompt, output + slack, **more), output))
    return requests


@st.composite
def engines(draw, pools=st.integers(24, 60) | st.integers(24, 240)):
    return {
        "policy": draw(st.sampled_from(POLICIES)),
        "pool": draw(pools),
        "token_budget": draw(st.sampled_from([None, 8, 40, 100])),
        "max_num_seqs": draw(st.sampled_from([None, 3, 8])),
        "depth": draw(st.sampled_from([1, 1, 1, 2, 3])),
    }


def scheduler_for(engine, *, by_id=False, prefix_caching=False, chase=False):
    policy = make_policy(*engine["policy"])
    # The decode-maximal family and static batching ask for whole slots: longest request of the traces above.
    longest = 96
    ledger = (
        BlockLedger(engine["pool"], BLOCK, longest, prefix_caching=prefix_caching)
        if by_id
        else CountingLedger(engine["pool"], BLOCK, longest)
    )
    host = Host(micro_batches=engine["depth"], tile=16, estimator=lambda shape: 1000 + 10 * shape.rows)
    if chase:
        host = Host(tile=16, chase_chunks=True, chase_decodes=True)
    return Scheduler(policy, ledger, host, token_budget=engine["token_budget"], max_num_seqs=engine["max_num_seqs"])


def check_conservation(log, requests, scheduler):
    outputs = {request.id: output for request, output in requests}
    assert set(log.finished) | set(log.rejected) == set(outputs), "every request ends"
    assert not set(log.finished) & set(log.rejected)
    delivered = 0
    gaps = Counter()
    for request_id, times in log.token_times.items():
        if request_id in log.finished:
            assert len(times) == outputs[request_id], "as many tokens as the trace says"
        assert (log.tracks[request_id].status == "rejected") <= (not times)
        assert all(a <= b for a, b in pairwise(times))
        gaps.update(b - a for a, b in pairwise(times))
        delivered += len(times)
    assert log.first_tokens == sum(1 for times in log.token_times.values() if times)
    assert gaps == log.gaps, "gaps rebuilt from cohorts and segments are the gaps that were reported"
    assert log.first_tokens + sum(log.gaps.values()) == delivered
    queues = scheduler.queues
    assert scheduler.ledger.free_blocks == scheduler.ledger.total_blocks, "no block leaked"
    assert (queues.num_running, queues.in_flight_batches, len(queues.waiting)) == (0, 0, 0)
    assert (queues.prefill_tokens, queues.decode_tokens_promised) == (0, 0)
    assert queues.parts == []
    assert queues.running_by_slo == {}
    assert not queues.waiting_by_class
    assert log.ends == sorted(log.ends)


def no_block_lost(scheduler):
    ledger = scheduler.ledger
    assert ledger.free_blocks >= 0
    assert ledger.free_blocks + held_blocks(scheduler) == ledger.total_blocks
    queues = scheduler.queues
    assert queues.prefill_tokens >= 0
    by_class = {}
    for track in queues.waiting:
        by_class.setdefault((track.request.priority, track.request.slo), []).append(track)
    assert {key: list(tracks) for key, tracks in queues.waiting_by_class.items()} == by_class
    running = Counter(track.request.slo for track in scheduler.tracks.values() if track.status == "running")
    assert queues.running_by_slo == running


@given(traces(), engines())
@settings(max_examples=300, deadline=None)
def test_every_token_is_delivered_and_no_block_leaks(requests, engine):
    scheduler = scheduler_for(engine)
    log = drive(scheduler, requests, depth=engine["depth"], each_step=no_block_lost)
    check_conservation(log, requests, scheduler)


@given(traces(), engines())
@settings(max_examples=200, deadline=None)
def test_leaping_equals_the_plain_path(requests, engine):
    engine = {**engine, "depth": 1}
    plain = drive(scheduler_for(engine), requests)
    scheduler = scheduler_for(engine)
    leaping = drive(scheduler, requests, leaping=True)
    check_conservation(leaping, requests, scheduler)
    for name in ("batches", "ends", "gaps", "finished", "rejected", "token_times"):
        assert getattr(leaping, name) == getattr(plain, name), name


@given(traces(), engines())
@settings(max_examples=200, deadline=None)
def test_counting_and_by_id_ledgers_plan_alike(requests, engine):
    counting = drive(scheduler_for(engine), requests, depth=engine["depth"])
    scheduler = scheduler_for(engine, by_id=True)

    def tables_are_disjoint(scheduler):
        held = [
            block for track in scheduler.tracks.values() if track.order >= 0 for block in scheduler.ledger.table(track)
        ]
        assert len(held) == len(set(held))
        assert len(held) + scheduler.ledger.free_blocks == scheduler.ledger.total_blocks

    by_id = drive(scheduler, requests, depth=engine["depth"], each_step=tables_are_disjoint)
    assert by_id.batches == counting.batches
    assert by_id.token_times == counting.token_times


@given(traces(), engines(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_prefix_caching_loses_nothing(requests, engine, leaping):
    engine = {**engine, "depth": 1}
    shared = [
        (request._replace(prefix_hashes=tuple(range(request.prompt_tokens)), hash_tokens=1), output)
        for request, output in requests
    ]
    scheduler = scheduler_for(engine, by_id=True, prefix_caching=True)
    log = drive(scheduler, shared, leaping=leaping)
    check_conservation(log, shared, scheduler)


@given(traces(), engines(st.integers(24, 40)))
@settings(max_examples=150, deadline=None)
def test_planning_one_step_ahead_loses_nothing(requests, engine):
    engine = {**engine, "policy": ("vllm_v1", {}), "token_budget": None}
    scheduler = scheduler_for(engine, chase=True)
    log = drive(scheduler, requests, depth=2)
    check_conservation(log, requests, scheduler)


@given(traces(), engines())
@settings(max_examples=100, deadline=None)
def test_a_withdrawn_request_leaves_nothing_behind(requests, engine):
    scheduler = scheduler_for(engine)
    steps = 0

    def withdraw_some(scheduler):
        nonlocal steps
        steps += 1
        if steps % 3 == 0 and scheduler.tracks:
            victim = sorted(scheduler.tracks)[steps % len(scheduler.tracks)]
            scheduler.withdraw([victim], "client gone")
        no_block_lost(scheduler)

    log = drive(scheduler, requests, depth=engine["depth"], each_step=withdraw_some)
    queues = scheduler.queues
    assert scheduler.ledger.free_blocks == scheduler.ledger.total_blocks
    assert (queues.num_running, queues.in_flight_batches, len(queues.waiting)) == (0, 0, 0)
    assert (queues.prefill_tokens, queues.decode_tokens_promised) == (0, 0)
    ended = {track.status for track in log.tracks.values()}
    assert ended <= {"finished", "aborted", "rejected"}


@pytest.mark.parametrize(
    "name", ["request_level", "orca", "prefill_priority", "decode_maximal", "dynamic_chunk", "chunked", "vllm_v1"]
)
@given(requests=traces())
@settings(max_examples=40, deadline=None)
def test_first_come_first_served(name, requests):
    scheduler = Scheduler(make_policy(name), CountingLedger(1000, BLOCK, 96), Host(tile=16), max_num_seqs=4)
    log = drive(scheduler, requests)
    first = [log.tracks[request.id].first_token_ns for request, _ in requests]
    assert first == sorted(first)
