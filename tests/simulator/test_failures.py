"""Replicas that die, come back, are added and drained: hand-worked, with nobody lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.config import ReplayConfig
from simulator.simulation import replay
from tests.simulator.constant_cost import ConstantCost, trace_of
from tests.simulator.test_cluster import by_request, check_conservation
from tests.simulator.test_disaggregation import token_times

S = 1_000_000_000
CACHING = {"policy": "vllm_v1", "knobs": {"prefix_caching": True}}


def run(trace, **options):
    options.setdefault("num_blocks", 1000)
    return replay(trace, ReplayConfig(**options), cost=ConstantCost(device_ns=S))


def alike(rows):
    """A trace whose prompts are the same text."""
    trace = trace_of(rows)
    return type(trace)(
        "alike",
        trace.arrival_ns,
        trace.prompt_tokens,
        trace.output_tokens,
        trace.max_output_tokens,
        prefix_hashes=[(1, 2, 3, 4)] * len(rows),
        hash_tokens=16,
    )


def lives(result):
    return [(life["replica"], life["ordered_s"], life["up_s"], life["down_s"]) for life in facts(result)["lives"]]


def facts(result):
    return result.config["cluster"]


def test_a_request_goes_on_elsewhere_with_the_tokens_it_has():
    """Two tokens by 2 s; its replica dies in the third iteration; the other one recomputes 6 tokens and goes on."""
    result = run(trace_of([(0, 4, 5)]), replicas=2, failures=("0@2.5",))
    assert token_times(result, 0) == [1, 2, 3.5, 4.5, 5.5]
    assert result.tables.column("segments", "replica").tolist() == [0, 1]
    chunks = result.tables.chunks()
    assert chunks["tokens"].tolist() == [4, 6]
    assert lives(result) == [(0, 0, 0, 2.5), (1, 0, 0, None)]
    check_conservation(trace_of([(0, 4, 5)]), result)


def test_requests_of_a_dead_replica_may_fail_instead():
    result = run(trace_of([(0, 4, 5), (0, 4, 5)]), replicas=2, failures=("0@2.5",), on_failure="fail")
    assert by_request(result, "status").tolist() == ["failed", "finished"]
    assert by_request(result, "reason").tolist() == ["replica 0 died", ""]
    assert (by_request(result, "output_tokens")[0], by_request(result, "finished_s")[0]) == (2, 2.5)


def test_who_finds_no_replica_large_enough_in_the_middle_of_an_answer_has_failed():
    """At the door it would have been rejected."""
    pools = ({"num_blocks": 2}, {"num_blocks": 100})
    trace = trace_of([(0, 4, 1), (0, 100, 5), (3, 100, 5)])
    result = run(trace, pools=pools, router="round_robin", failures=("1@2.5",), watermark=0.0)
    assert by_request(result, "status").tolist() == ["finished", "failed", "rejected"]
    assert by_request(result, "output_tokens").tolist() == [1, 2, 0]
    assert by_request(result, "reason")[1] == by_request(result, "reason")[2] == "needs 7 KV blocks, the pool has 2"


def test_whoever_arrives_while_all_are_down_waits_for_the_one_that_comes_back():
    result = run(trace_of([(0, 4, 2), (2.2, 4, 2)]), failures=("0@1.5+8.5",))
    assert token_times(result, 0) == [1, 11]
    assert token_times(result, 1) == [11, 12]
    assert lives(result) == [(0, 0, 0, 1.5), (0, 10, 10, None)]


def test_who_waits_by_priority_starts_over_when_its_replica_is_back():
    """The heap of waiting requests holds those of the dead replica until they come to its top."""
    trace = trace_of([(0, 8, 30)] * 5)
    knobs = {"scheduling": "priority"}
    result = run(trace, policy="vllm_v1", knobs=knobs, num_blocks=12, block_size=4, failures=("0@3+2",))
    assert result.summary["finished"] == 5


def test_nobody_waits_for_a_replica_that_will_not_come_back():
    result = run(trace_of([(0, 4, 9), (20, 4, 2)]).with_timeout(100), failures=("0@1.5",))
    assert by_request(result, "status").tolist() == ["failed", "failed"]
    assert set(by_request(result, "reason")) == {"no replica is up and none will come back"}
    assert by_request(result, "finished_s").tolist() == [1.5, 20]


def test_a_dead_replica_loses_its_prefix_cache():
    trace = alike([(0, 64, 2), (10, 64, 2)])
    assert by_request(run(trace, **CACHING), "cached_tokens").tolist() == [0, 48]
    assert by_request(run(trace, failures=("0@5+1",), **CACHING), "cached_tokens").tolist() == [0, 0]


def test_what_a_request_finds_cached_counts_where_it_was_admitted_first():
    """It finds 48 of its 64 tokens on replica 0, and all on replica 1 when replica 0 has died and it comes with an answer."""
    trace = alike([(0, 64, 2), (0, 64, 2), (10, 64, 9)])
    found = run(trace, replicas=2, failures=("0@12.5",), **CACHING)
    assert found.tables.column("iterations", "cached_tokens").sum() == 48 + 64
    assert by_request(found, "cached_tokens").tolist() == [0, 0, 48]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0@ten", "--fail: found '0@ten', expected REPLICA@SECONDS"),
        ("2@10", "--fail 2@10: found replica 2, expected 0 to 1"),
    ],
)
def test_a_wrong_failure_is_one_clear_line(text, message):
    with pytest.raises(ValueError, match=message):
        run(trace_of([(0, 4, 4)]), replicas=2, failures=(text,))


GROW = {"most": 3, "interval_s": 5, "startup_s": 7, "queue_high": 4, "patience_s": 10, "running_low": 2}


def test_a_pool_grows_with_the_queue_and_shrinks_when_it_is_idle():
    """30 requests, one at a time, 4 s each: 29 wait at 5 s, two more replicas are up at 12 s. Idle from 120 s on."""
    trace = trace_of([(0, 4, 4)] * 30 + [(200, 4, 4)])
    result = run(trace, max_num_seqs=1, autoscale=GROW)
    check_conservation(trace, result)
    # Requests that arrived before the new ones were up stay with the first replica: routing is not undone.
    assert lives(result)[1:] == [(1, 5, 12, 145), (2, 5, 12, 130)]
    assert facts(result)["device_seconds"] == 204 + 140 + 125
    assert by_request(result, "finished_s").max() == 204


def test_an_order_that_the_run_does_not_live_to_see_costs_its_time_all_the_same():
    result = run(trace_of([(0, 4, 4)] * 10), max_num_seqs=1, autoscale={**GROW, "startup_s": 100})
    assert lives(result) == [(0, 0, 0, None), (-1, 5, None, None)]
    assert facts(result)["device_seconds"] == 40 + 35
    assert facts(result)["replicas"] == 1
    assert result.summary["device_busy_share"] == 40 / (40 + 35)


def test_new_replicas_take_what_arrives_after_them():
    trace = trace_of([(0.5 * i, 4, 4) for i in range(60)])
    fixed = run(trace, max_num_seqs=1)
    scaled = run(trace, max_num_seqs=1, autoscale=GROW)
    assert scaled.summary["duration_s"] < 0.7 * fixed.summary["duration_s"]
    assert len(set(by_request(scaled, "replica"))) == 3


def test_a_pool_grows_when_the_objective_is_missed():
    trace = trace_of([(0.5 * i, 4, 4) for i in range(60)])
    result = run(trace, max_num_seqs=1, autoscale={**GROW, "by": "slo", "ttft_s": 3.0})
    check_conservation(trace, result)
    assert [life[1] for life in lives(result)] == [0, 5, 10]


def test_a_drained_replica_ends_its_requests_first():
    trace = trace_of([(0, 4, 100), (0, 4, 100)])
    result = run(trace, replicas=2, autoscale={**GROW, "running_low": 3, "patience_s": 0})
    assert lives(result) == [(0, 0, 0, None), (1, 0, 0, 100)]
    assert by_request(result, "finished_s").tolist() == [100, 100]


def test_a_drained_replica_can_die_and_does_not_come_back():
    """Drained at 5 s, it would have been there until 100 s. Its request goes on with what it has: 20 tokens by 20 s."""
    trace = trace_of([(0, 4, 100), (0, 4, 100)])
    options = {"replicas": 2, "autoscale": {**GROW, "running_low": 3, "patience_s": 0}}
    result = run(trace, **options, failures=("1@20.5+10",))
    assert lives(result) == [(0, 0, 0, None), (1, 0, 0, 20.5)]
    assert token_times(result, 1)[19:21] == [20, 22]
    check_conservation(trace, result)
    failed = run(trace, **options, failures=("1@20.5",), on_failure="fail")
    assert by_request(failed, "status").tolist() == ["finished", "failed"]


def test_a_replica_that_comes_back_counts_among_the_most_that_a_pool_may_have():
    """Two at most: while one is down for 30 s, its place is not given to another that it would find there."""
    trace = trace_of([(0.5 * i, 4, 4) for i in range(120)])
    result = run(trace, max_num_seqs=1, replicas=2, autoscale={**GROW, "most": 2}, failures=("1@3+30",))
    check_conservation(trace, result)
    assert [life[:3] for life in lives(result)] == [(0, 0, 0), (1, 0, 0), (1, 33, 33)]
    gone_for_good = run(trace, max_num_seqs=1, replicas=2, autoscale={**GROW, "most": 2}, failures=("1@3",))
    assert [life[:3] for life in lives(gone_for_good)] == [(0, 0, 0), (1, 0, 0), (2, 5, 12)]


def test_replicas_stand_by_number_whoever_died_and_came_back():
    """Round robin finds the next number by searching; 0 and 2 return in the other order, 3 was never gone."""
    trace = trace_of([(0, 4, 2)] * 4 + [(50 + 10 * i, 4, 2) for i in range(8)])
    result = run(trace, replicas=4, router="round_robin", failures=("2@10+20", "0@12+8"))
    assert by_request(result, "replica").tolist() == [0, 1, 2, 3] * 3


def test_a_drained_replica_is_there_until_its_last_batch_is_over():
    """Planning ahead, it computes a token beyond an end that only the answer knew: 5 tokens by 5 s, a sixth until 6."""
    trace = trace_of([(0, 4, 50), (0, 4, 5)])
    trace = replace(trace, max_output_tokens=np.array([50, 9]))
    options = {
        "policy": "vllm_v1",
        "knobs": {"async_scheduling": True},
        "autoscale": {**GROW, "interval_s": 2, "running_low": 3, "patience_s": 0},
    }
    result = run(trace, replicas=2, router="round_robin", **options)
    assert lives(result)[1] == (1, 0, 0, 6)
    assert result.tables.frame("iterations").query("replica == 1")["end_s"].max() == 6


@pytest.mark.parametrize("leaps", [True, False])
def test_a_controller_looks_before_what_ends_in_the_same_moment(leaps):
    """Two wait behind one that ends as the controller looks: both are seen, however the iterations were walked."""
    trace = trace_of([(0, 4, 5), (0, 4, 5), (0, 4, 5)])
    result = run(
        trace, max_num_seqs=1, leaps=leaps, autoscale={**GROW, "queue_high": 1, "interval_s": 5, "startup_s": 0}
    )
    assert lives(result)[:2] == [(0, 0, 0, None), (1, 5, 5, None)]


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"maximum": 3}, "--autoscale: unknown key 'maximum'; known keys: pool, least, most"),
        ({"most": "many"}, "--autoscale, knob most: found 'many', expected int"),
        ({"least": 2}, "--autoscale: found 1 replicas to start with, expected 2"),
        ({"pool": 1}, "--autoscale: found pool 1, expected 0 to 0"),
    ],
)
def test_a_wrong_scaling_is_one_clear_line(scaling, message):
    with pytest.raises(ValueError, match=message):
        run(trace_of([(0, 4, 4)]), autoscale=scaling)
