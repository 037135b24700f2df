"""The advice is the best of what was tried, starts where it says, and explains itself."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.studies.advise import advise, draw_frontier
from tests.simulator.constant_cost import trace_of
from workloads.generating.presets import PRESETS

BASE = ReplayConfig(cost_model="roofline", gpu="a100")


@pytest.fixture(scope="module")
def advice():
    trace = trace_of([(0.25 * i, 900 + 37 * i % 400, 60 + 11 * i % 50) for i in range(120)])
    return advise(trace, BASE, slo="ttft_p99=1,tbt_p99=0.03")


def test_the_choice_has_the_best_score_of_all_that_was_tried(advice):
    assert advice.best.score == max(candidate.score for candidate in advice.tried)
    assert advice.best.summary["slo_met"]
    assert {"chunked 256", "prefill_priority", "dynamic_chunk"} <= {c.label for c in advice.tried}


def test_a_tight_gap_objective_rules_out_prefill_priority(advice):
    by_label = {candidate.label: candidate for candidate in advice.tried}
    assert not by_label["prefill_priority"].summary["slo_met"]
    assert by_label["prefill_priority"].room < 0 < advice.best.room


def test_the_reasons_speak_in_tokens_and_milliseconds(advice):
    text = " ".join(advice.reasons)
    assert "P:D" in text
    assert "tokens" in text
    assert " ms" in text
    assert advice.vllm_flags["max_num_batched_tokens"] == advice.vllm.token_budget
    assert json.dumps(advice.as_dict()["vllm_flags"])
    # Far fewer ran than vLLM's own limit: no reason to lower it.
    assert advice.vllm.summary["running_max"] < 256
    assert "max_num_seqs" not in advice.vllm_flags


def test_the_frontier_is_drawn(advice, tmp_path):
    written = draw_frontier(advice, tmp_path)
    assert sorted(path.suffix for path in written) == [".pdf", ".png"]
    assert all(path.stat().st_size > 5000 for path in written)


def test_whatever_is_tried_is_measured_over_the_same_requests(advice):
    assert len({(c.summary["warmup_requests"], c.summary["measured"]) for c in advice.tried}) == 1


def test_advice_on_a_part_of_a_trace_speaks_of_that_part():
    trace = trace_of([(0.2 * i, 100, 10) for i in range(6)] + [(2 + 0.2 * i, 5000, 10) for i in range(200)])
    found = advise(trace, replace(BASE, limit=6))
    assert found.reasons[0].startswith("the trace has P:D 10.0 (100 prompt and 10 output tokens on average)")
    assert found.reasons[-1].startswith("all of this rests on 6 requests; that is little: P99 of fewer than 100")
    assert not any("room for more load" in reason for reason in found.reasons)


def test_advice_on_one_request_says_how_little_that_is_in_the_singular():
    found = advise(trace_of([(0.0, 300, 8)]), replace(BASE, pp=2))  # where no policy plans ahead
    assert "beside the 1 decode of a mean batch" in found.reasons[0]
    assert found.reasons[-1].startswith("all of this rests on 1 request; that is little")
    assert any(reason.startswith("as good by objective, goodput and room") for reason in found.reasons)


def test_an_overload_is_said_not_hidden():
    trace = trace_of([(0.004 * i, 2000, 40) for i in range(200)])
    found = advise(trace, BASE)
    assert any("overloaded" in reason for reason in found.reasons)


def test_an_objective_that_no_summary_holds_is_refused():
    with pytest.raises(SimulationError, match="ttft_s_p37"):
        advise(trace_of([(0, 10, 5)]), BASE, slo="ttft_p37=1")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gets_advice(name):
    preset = PRESETS[name]
    found = advise(preset.trace(duration_s=60), BASE, slo=",".join(f"{k}={v}" for k, v in preset.slo.items()))
    assert found.reasons
