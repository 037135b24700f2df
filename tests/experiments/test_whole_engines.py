"""Whole engines that others measured: what is predicted, on which side of the split, and how near it comes."""

import pytest

from experiments.vllm.whole_engines import (
    ABLATION,
    NO_ENGINE,
    known_loops,
    known_rates,
    median_errors,
    predict_loop,
    predict_rate,
)  # fmt: skip

PLAIN = {half: [run for run in known_loops(half) if run.dtype == "bf16"] for half in "ab"}
SMALL = [run for run in PLAIN["b"] if run.concurrency <= 16 and run.output_tokens == 128]


def test_halves_are_apart_and_copies_are_left_out():
    a, b = (known_loops(half) for half in "ab")
    assert not {run.id for run in a} & {run.id for run in b}
    assert [len(PLAIN[half]) for half in "ab"] == [42, 48]
    assert {run.half for run in a} == {"a"}
    assert not any(run.same_as for run in [*a, *b])


def test_small_loops_of_the_half_that_judges_come_within_what_is_claimed():
    found = [predict_loop(run, ABLATION[0]) for run in SMALL]
    assert median_errors(found)["e2e"] < 0.04
    assert median_errors([predict_loop(run, NO_ENGINE) for run in SMALL])["e2e"] > 0.1
    assert all(row.ttft_band is not None and row.ttft_band[0] < row.ttft_band[1] for row in found)


def test_a_rate_below_saturation_is_an_open_loop_and_one_beyond_it_tells_a_rate():
    slow, *_, fast = known_rates()
    assert set(predict_rate(slow, ABLATION[0]).predicted) == {"ttft", "tpot", "e2e"}
    found = predict_rate(fast, ABLATION[0])
    assert found.error("rate") == pytest.approx(0.0, abs=0.1)


def test_engines_with_experts_and_few_bits_come_near_what_was_measured_of_them():
    """One row of the half that judges of each of three models; nothing was fitted on any of them."""
    few = [run for run in known_loops("b") if run.dtype != "bf16" and run.output_tokens == 1024]
    one_each = {run.model: run for run in few if run.concurrency == 16}
    assert set(one_each) == {"gpt-oss-120b", "llama-3.1-70b", "minimax-m2.5"}
    for run in one_each.values():
        row = predict_loop(run, ABLATION[0])
        assert abs(row.error("e2e")) < 0.2
        assert abs(row.error("tpot")) < 0.2
