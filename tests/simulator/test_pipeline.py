"""Pipelines against closed forms and hand-worked schedules, and what must hold in any pipeline."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics.pipelines.bubbles import find_bubbles
from metrics.run_folder.columns import to_ns
from policies import policy_names
from simulator.config import ReplayConfig
from simulator.simulation import replay
from tests.simulator.constant_cost import ConstantCost, trace_of

S = 1_000_000_000


def run(trace, cost, policy="prefill_priority", **options):
    return replay(trace, ReplayConfig(policy=policy, num_blocks=1000, pp=cost.stages, **options), cost=cost)


def one_prompt_a_batch(prompts, cost, **options):
    """Prompts with one-token answers, all there at 0, each of them a micro-batch of its own."""
    return run(trace_of([(0, tokens, 1) for tokens in prompts]), cost, knobs={"max_prompts": 1}, **options)


def stage_rows(result):
    """stage -> [(iteration, start, end, send)] in ns."""
    rows = defaultdict(list)
    table = result.tables.table("stages").to_pydict()
    times = [to_ns(table[name]) for name in ("start_s", "end_s", "send_s")]
    for stage, iteration, *row in zip(table["stage"], table["iteration"], *times):
        rows[stage].append((iteration, *map(int, row)))
    return rows


def idle_shares(result):
    """Per stage, share of the in-flight time that is idle; and the share of all stages' time by cause."""
    bubbles = find_bubbles(result.tables)
    return (bubbles.idle_ns.sum(axis=1) / bubbles.in_flight_ns).tolist(), bubbles.cause_shares


@pytest.mark.parametrize(("stages", "batches"), [(2, 1), (2, 7), (4, 4), (4, 21), (8, 40)])
def test_equal_micro_batches_leave_the_textbook_share_idle(stages, batches):
    """(p - 1) / (m + p - 1): nothing but filling and draining."""
    result = one_prompt_a_batch([4] * batches, ConstantCost(device_ns=S, stages=stages))
    assert result.summary["duration_s"] == batches + stages - 1
    share = (stages - 1) / (batches + stages - 1)
    shares, by_cause = idle_shares(result)
    assert shares == pytest.approx([share] * stages)
    assert by_cause["fill_drain" if batches >= stages else "starvation"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("stages", "rounds", "long", "short"), [(2, 3, 9, 4), (4, 1, 9, 4), (4, 5, 7, 2), (8, 3, 5, 3)]
)
def test_two_alternating_times_give_the_closed_form(stages, rounds, long, short):
    """With p (even) in flight, a long micro-batch (a) holds up the short one (b) after it: p of them take p a.

    So each stage idles (a - b) / 2a of a long run; m = rounds x p of them end after (m + p/2 - 1) a + p/2 b.
    """
    batches = rounds * stages
    result = one_prompt_a_batch([long, short] * (batches // 2), ConstantCost(0, per_row_ns=S, stages=stages))
    lasts = (batches + stages // 2 - 1) * long + stages // 2 * short
    assert result.summary["duration_s"] == lasts
    shares, by_cause = idle_shares(result)
    assert shares == pytest.approx([1 - batches / 2 * (long + short) / lasts] * stages)
    assert by_cause["pb1"] + by_cause["fill_drain"] == pytest.approx(shares[0])
    assert (by_cause["pb1"] > 0) == (rounds > 1)


def test_a_send_delays_the_next_stage_and_may_overlap_the_next_batch():
    cost = ConstantCost(device_ns=S, transfer_ns=S // 2, stages=2)
    overlapped = stage_rows(one_prompt_a_batch([4, 4], cost))
    assert [row[1:] for row in overlapped[0]] == [(0, S, S // 2), (S, 2 * S, S // 2)]
    assert [row[1:] for row in overlapped[1]] == [(1.5 * S, 2.5 * S, 0), (2.5 * S, 3.5 * S, 0)]
    in_turn = stage_rows(one_prompt_a_batch([4, 4], cost, pp_overlap=False))
    assert [row[1] for row in in_turn[0]] == [0, 1.5 * S]
    assert [row[1] for row in in_turn[1]] == [1.5 * S, 3 * S]


def test_host_time_is_charged_once_and_hidden_behind_a_busy_first_stage():
    cost = ConstantCost(device_ns=S, before_ns=S // 4, after_ns=S // 2, stages=2)
    result = one_prompt_a_batch([4, 4, 4], cost)
    rows = stage_rows(result)
    # The second batch is prepared while the first one runs; the third only when the first has been handed out.
    assert [row[1] for row in rows[0]] == [0.25 * S, 1.25 * S, 3 * S]
    assert result.tables.column("iterations", "end_s").tolist() == [2.75, 3.75, 5.5]


def test_a_prompts_next_chunk_waits_for_its_last_one_unless_chased():
    cost = ConstantCost(device_ns=S, stages=2)
    trace = trace_of([(0, 16, 1)])
    waiting = run(trace, cost, policy="chunked", knobs={"chunk_size": 4})
    chasing = run(trace, cost, policy="chunked", knobs={"chunk_size": 4}, chase_chunks=True)
    assert (waiting.summary["e2e_s_max"], chasing.summary["e2e_s_max"]) == (8, 5)


def test_every_micro_batch_takes_its_share_of_the_decodes():
    cost = ConstantCost(device_ns=S, stages=4)
    result = run(trace_of([(0, 4, 40)] * 16), cost, policy="chunked", knobs={"chunk_size": 64})
    decodes = result.tables.column("iterations", "decodes")
    assert set(decodes[len(decodes) // 3 : 2 * len(decodes) // 3].tolist()) == {4}


def test_layers_are_split_as_given_and_embedding_and_head_cost_where_they_live():
    from policies import BatchShape
    from profiler import load_cost_model

    shape = BatchShape(chunks=((512, 0),), sampled=1)
    whole = load_cost_model("llama-3.1-8b", "h100", cost_model="roofline")
    split = load_cost_model("llama-3.1-8b", "h100", cost_model="roofline", pp=4, layer_split=(8, 8, 8, 8))
    stages = [split.stage_ns(shape, stage) for stage in range(4)]
    assert stages[1] == stages[2] < min(stages[0], stages[3])
    parts = whole.breakdown(shape)
    assert stages[0] - stages[1] == pytest.approx(parts["embedding"], abs=2)
    assert stages[3] - stages[1] == pytest.approx(parts["head"] + parts["sampling"], abs=2)
    uneven = load_cost_model("llama-3.1-8b", "h100", cost_model="roofline", pp=2, layer_split=(24, 8))
    assert uneven.stage_ns(shape, 0) - parts["embedding"] == pytest.approx(3 * stages[1], abs=4)


def test_planning_ahead_of_a_pipeline_is_refused():
    with pytest.raises(ValueError, match="--async with --pp 2"):
        run(trace_of([(0, 4, 4)]), ConstantCost(S, stages=2), policy="vllm_v1", knobs={"async_scheduling": True})


@st.composite
def workloads(draw):
    rows = draw(st.lists(st.tuples(st.floats(0, 4), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=14))
    at, requests = 0.0, []
    for gap, prompt, output in rows:
        at += gap
        requests.append((at, prompt, output))
    return trace_of(requests)


@given(
    workloads(), st.sampled_from(policy_names()), st.integers(2, 4), st.integers(26, 60), st.booleans(), st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_a_pipeline_loses_nothing_and_keeps_its_order(trace, policy, stages, num_blocks, chase, overlap):
    cost = ConstantCost(
        S // 3,
        per_row_ns=1_000_003,
        per_context_ns=10_007,
        before_ns=50_000,
        after_ns=70_000,
        transfer_ns=5_000_000,
        stages=stages,
    )
    config = ReplayConfig(
        policy=policy, pp=stages, num_blocks=num_blocks, block_size=4, chase_chunks=chase, pp_overlap=overlap
    )
    result = replay(trace, config, cost=cost)
    summary = result.summary
    assert summary["finished"] + summary["rejected"] == summary["requests"] == len(trace)
    requests = result.tables.table("requests").to_pydict()
    for request, status, tokens in zip(requests["request"], requests["status"], requests["output_tokens"]):
        assert tokens == (trace.output_tokens[request] if status == "finished" else 0)
    _stages_follow_the_recurrence(stage_rows(result), stages, overlap)
    _one_micro_batch_a_request(result, chase)


def _stages_follow_the_recurrence(rows, stages, overlap):
    """Batches pass every stage in plan order, one at a time, each after its input has arrived."""
    for stage in range(stages):
        free = 0
        assert [row[0] for row in rows[stage]] == sorted(row[0] for row in rows[stage])
        for at, (_, start, end, send) in enumerate(rows[stage]):
            if stage:
                _, _, left, sent = rows[stage - 1][at]
                assert start == max(free, left + sent)
            assert free <= start <= end
            free = end if overlap else end + send


def _one_micro_batch_a_request(result, chase):
    table = result.tables.table("iterations").to_pydict()
    planned, ends = to_ns(table["planned_s"]), to_ns(table["end_s"])
    assert ends.tolist() == sorted(ends.tolist())
    requests = result.tables.table("requests").to_pydict()
    # A victim's part in flight is dropped, so it may be planned again at once.
    victims = {row for row, times in zip(requests["request"], requests["preemptions"]) if times}
    in_flight_until: dict[int, int] = {}
    cohort_until: dict[int, int] = {}
    for at, chunks in enumerate(table["chunks"]):
        for chunk in chunks:
            if not chase and chunk["request"] not in victims:
                assert in_flight_until.get(chunk["request"], 0) <= planned[at]
            in_flight_until[chunk["request"]] = ends[at]
        for cohort in table["cohorts"][at]:
            assert cohort_until.get(cohort["cohort"], 0) <= planned[at]
            cohort_until[cohort["cohort"]] = ends[at]
