"""Bubbles: one worked example per cause, the textbook's formulas, and sums that are exact."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import MetricsError, Recorder
from metrics.measures.bubble_causes import CAUSES
from metrics.pipelines.bubbles import find_bubbles
from metrics.pipelines.request_bubbles import request_bubble_ns
from policies.work.batch import BatchShape
from policies.work.request import Request
from tests.metrics.pipelines import MicroBatch, run_pipeline
from tests.metrics.sample_runs import three_requests


def by_cause(run) -> dict[str, int]:
    """Idle stage-nanoseconds by cause, those that occur."""
    idle = find_bubbles(run).idle_ns.sum(axis=0)
    return {name: int(ns) for name, ns in zip(CAUSES, idle) if ns}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("stages", "batches"), [(2, 2), (4, 4), (4, 10), (8, 100)])
def test_equal_micro_batches_leave_the_textbooks_bubble(stages, batches, eager) -> None:
    run = run_pipeline([MicroBatch([7] * stages, decodes=1)] * batches, eager=eager)
    bubbles = find_bubbles(run)
    assert bubbles.share == pytest.approx((stages - 1) / (batches + stages - 1))
    assert by_cause(run) == {"fill_drain": 7 * stages * (stages - 1)}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_two_alternating_times_leave_half_their_difference(stages, eager) -> None:
    # Long ones follow one another without waiting, one per stage and 2 in `stages`: a stage works L + S in every 2 L.
    long, short, rounds = 10, 4, 50
    pair = [MicroBatch([long] * stages, prefill=100), MicroBatch([short] * stages, decodes=9)]
    run = run_pipeline(pair * (rounds * stages // 2), eager=eager)
    found = by_cause(run)
    cycle = long * stages
    whole = find_bubbles(run)
    assert abs(int(whole.in_flight_ns[0]) - rounds * cycle) <= cycle
    idle_per_cycle = stages * (cycle - stages // 2 * (long + short))
    assert found["pb2"] == pytest.approx(rounds * idle_per_cycle, rel=0.05)
    assert found.keys() <= {"pb2", "fill_drain"}


def alternating(first: MicroBatch, second: MicroBatch) -> dict[str, int]:
    """Three rounds of two micro-batches that take 5 and 3 on two stages: (5 - 3) idle, twice in each full cycle."""
    run = run_pipeline([first._replace(times=[5, 5]), second._replace(times=[3, 3])] * 3)
    found = by_cause(run)
    # stage 0:  A 0-5   B 5-8  idle 8-10  A 10-15  B 15-18  idle 18-20  A 20-25  B 25-28  drain 28-33
    # stage 1:  fill 0-5  A 5-10  B 10-13  idle 13-15  A 15-20  B 20-23  idle 23-25  A 25-30  B 30-33
    assert found.pop("fill_drain") == 5 + 5
    return found


def test_pb1_is_charged_to_unequal_prefills() -> None:
    assert alternating(MicroBatch([], prefill=512), MicroBatch([], prefill=256)) == {"pb1": 8}


def test_pb2_is_charged_to_a_prefill_beside_a_decode() -> None:
    assert alternating(MicroBatch([], prefill=512, decodes=3), MicroBatch([], decodes=4)) == {"pb2": 8}


def test_pb3_is_charged_to_decodes_with_unequal_contexts() -> None:
    assert alternating(MicroBatch([], decodes=8), MicroBatch([], decodes=8)) == {"pb3": 8}


def test_hybrid_batches_of_one_budget_differ_by_their_contexts() -> None:
    # 250 + 6 and 252 + 4 tokens: as many rows, so what takes longer is attention.
    assert alternating(MicroBatch([], prefill=250, decodes=6), MicroBatch([], prefill=252, decodes=4)) == {"pb3": 8}
    assert alternating(MicroBatch([], prefill=250, decodes=6), MicroBatch([], prefill=100, decodes=4)) == {"pb1": 8}


def test_uneven_stages_are_told_apart_from_uneven_batches() -> None:
    # Stage 1 takes 5, stage 0 takes 3; two in flight: stage 0 waits 2 for every batch after the second.
    run = run_pipeline([MicroBatch([3, 5], decodes=1)] * 4)
    # stage 0: 0-3 3-6 idle 6-8 8-11 idle 11-13 13-16 drain 16-23;  stage 1: fill 0-3, then busy until 23
    assert by_cause(run) == {"stage_split": 4, "fill_drain": 3 + 7}


def test_a_transfer_is_charged_where_it_leaves_a_stage_empty() -> None:
    run = run_pipeline([MicroBatch([5, 5], decodes=1, send=2)] * 4)
    # stage 0: 0-5 5-10 idle 10-12 12-17 17-22 drain 22-29;  stage 1: fill 0-7, 7-12 12-17 idle 17-19 19-24 24-29
    found = find_bubbles(run)
    assert dict(zip(CAUSES, found.idle_ns[0].tolist()))["transfer"] == 2
    assert dict(zip(CAUSES, found.idle_ns[1].tolist()))["transfer"] == 2
    assert by_cause(run) == {"transfer": 4, "fill_drain": 7 + 7}


def test_host_time_is_charged_when_no_stage_has_anything_else_to_do() -> None:
    run = run_pipeline([MicroBatch([6], decodes=1, host_before=2, host_after=1)] * 3)
    assert by_cause(run) == {"host": 9}
    assert find_bubbles(run).share == pytest.approx(9 / 27)


def test_a_pipeline_with_too_little_to_do_starves() -> None:
    run = run_pipeline([MicroBatch([4, 4, 4], decodes=1)] * 5, depth=1)
    assert by_cause(run) == {"starvation": 5 * 4 * 6}


def test_a_lull_in_a_full_pipeline_is_starvation() -> None:
    # stage 0: 0-4 4-8, nothing until the arrival at 10, 10-14, drain 14-18
    # stage 1: fill 0-4, 4-8 8-12, idle 12-14, 14-18
    run = run_pipeline([MicroBatch([4, 4], decodes=1, ready=ready) for ready in (0, 0, 10)])
    assert by_cause(run) == {"fill_drain": 4 + 4, "starvation": 2 + 2}


def test_waiting_for_stage_0_begins_with_the_arrival() -> None:
    # A and B take 4, C 10, D 4; D arrives at 14 while C is on stage 0 (8 to 18). Stage 1 is idle from 12 to 18: until
    # 14 nothing else was there to run, from then on D was held up by the long prefill in front of it.
    lengths, prefills, arrivals = (4, 4, 10, 4), (100, 100, 300, 100), (0, 0, 0, 14)
    batches = [MicroBatch([n, n], prefill=p, ready=r) for n, p, r in zip(lengths, prefills, arrivals)]
    assert by_cause(run_pipeline(batches)) == {"fill_drain": 4 + 10, "starvation": 2, "pb1": 4}


def test_an_empty_replica_has_no_bubbles() -> None:
    run = run_pipeline([MicroBatch([4], decodes=1, ready=ready) for ready in (0, 100)])
    bubbles = find_bubbles(run)
    assert (bubbles.in_flight_ns.tolist(), bubbles.idle_ns.sum()) == ([8], 0)
    assert find_bubbles(Recorder().tables()).in_flight_ns.sum() == 0


def test_lost_device_seconds_count_every_device_of_a_stage() -> None:
    run = run_pipeline([MicroBatch([10**9] * 2, decodes=1)] * 2)  # tp 2 in its config
    assert find_bubbles(run).lost_device_s == 2 * 2


def test_bubble_time_of_a_request_covers_all_its_micro_batches() -> None:
    # Batches and what the stages waited for them: A 5 (fill of stage 1), B 0, A 2 + 2, B 0, A 2 + 2, B 0.
    shapes = [BatchShape(((8, 0),)), BatchShape(((8, 0),)), BatchShape((), 1), BatchShape((), 1), BatchShape((), 1)]
    recorder = Recorder()
    spans = [((0, 5), (5, 10)), ((5, 8), (10, 13)), ((10, 15), (15, 20)), ((15, 18), (20, 23)), ((20, 25), (25, 30))]
    members = [
        (((0, 8, 0, True),), ()),
        (((1, 8, 0, True),), ()),
        ((), ((0, 1, 1),)),
        ((), ((1, 1, 1),)),
        ((), ((0, 2, 1),)),
    ]
    for number, ((first, second), shape, (chunks, cohorts)) in enumerate(zip(spans, shapes, members)):
        stages = ((*first, 0), (*second, 0))
        recorder.iteration(
            0,
            number,
            first[0],
            first[0],
            second[1],
            shape,
            chunks,
            cohorts,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            True,
            stages=stages,
        )
    recorder.cohort_times(0, 0, [10, 20, 30])
    recorder.cohort_times(0, 1, [13, 23])
    recorder.request(Request(1, 0, 8, 2), 0, "finished", "", 2, 5, 13, 23, 0, 0, ((1, 0, 2),))
    recorder.request(Request(0, 0, 8, 3), 0, "finished", "", 3, 0, 10, 30, 0, 0, ((0, 0, 3),))
    run = recorder.tables()
    assert request_bubble_ns(run, find_bubbles(run)).tolist() == [5 + 4 + 4, 0]


def test_a_chunk_that_samples_beside_decodes_is_counted_once() -> None:
    run = three_requests()
    bubbles = find_bubbles(run)
    # The last batch waited 0.5 s for the host; R1 was in it with a chunk, and got its token from it.
    assert bubbles.batch_ns.tolist() == [0, 0, 0, 0, 500_000_000]
    assert request_bubble_ns(run, bubbles).tolist() == [0, 500_000_000, 0, 0]


def test_stages_that_contradict_the_iterations_are_an_error() -> None:
    recorder = Recorder()
    for number in range(2):
        recorder.iteration(
            0, number, 0, 0, 9, BatchShape((), 1), (), (), 0, 0, 0, 0, 0, 0, 0, 9, True, stages=((0, 9, 0),)
        )
    with pytest.raises(MetricsError, match="found batch 1 starting on a stage that is still busy"):
        find_bubbles(recorder.tables())


micro_batches = st.integers(1, 4).flatmap(
    lambda stages: st.lists(
        st.builds(
            MicroBatch,
            st.lists(st.integers(1, 9), min_size=stages, max_size=stages),
            st.sampled_from([0, 0, 64, 100]),
            st.integers(1, 5),
            st.integers(0, 3),
            st.integers(0, 2),
            st.integers(0, 2),
            st.integers(0, 60),
        ),
        min_size=1,
        max_size=12,
    )
)


@settings(max_examples=150, deadline=None)
@given(micro_batches, st.booleans(), st.integers(0, 2))
def test_causes_sum_to_idle_and_idle_and_busy_to_in_flight(batches, eager, ahead) -> None:
    run = run_pipeline(batches, depth=len(batches[0].times) + ahead, eager=eager)
    bubbles = find_bubbles(run)
    assert (bubbles.idle_ns.sum(axis=1) + bubbles.busy_ns == bubbles.in_flight_ns).all()
    (gaps,) = bubbles.gaps
    assert (gaps.cause_ns.sum(axis=1) == gaps.end - gaps.start).all()
    assert (gaps.cause_ns >= 0).all()
    assert bubbles.batch_ns.sum() == (gaps.end - gaps.start)[gaps.batch >= 0].sum()
    if not any(batch.send for batch in batches):
        assert bubbles.idle_ns[:, CAUSES.index("transfer")].sum() == 0
    if not any(batch.host_before or batch.host_after for batch in batches):
        assert bubbles.idle_ns[:, CAUSES.index("host")].sum() == 0
