"""Comparisons over several draws: Student's t by hand, common random numbers, honest resampling."""

from __future__ import annotations

import math

import numpy as np
import pytest

from simulator.config import ReplayConfig
from simulator.studies.compare_draws import SeededComparison, Spread, _cell, compare_over_draws
from tests.simulator.constant_cost import trace_of
from workloads import TraceError
from workloads.generating.resample import resample


@pytest.mark.parametrize(("count", "t"), [(2, 12.706), (31, 2.042), (41, 2.0211), (101, 1.9840), (1001, 1.9623)])
def test_intervals_of_few_and_of_many_draws_take_the_published_t(count, t):
    own = Spread.of([0.0] * (count - 1) + [1.0])
    assert own.half_width * math.sqrt(count) / own.deviation == pytest.approx(t, abs=1e-4)


def test_the_interval_of_four_draws_by_hand():
    """1, 2, 3, 6: mean 3, deviation sqrt(14/3), t(3) = 3.182."""
    spread = Spread.of([1, 2, 3, 6])
    assert spread.mean == 3
    assert spread.deviation == pytest.approx((14 / 3) ** 0.5)
    assert spread.half_width == pytest.approx(3.182 * (14 / 3) ** 0.5 / 2)


def test_differences_are_taken_pair_by_pair():
    """Both vary by far more than they differ, and the pairs differ by 1 exactly."""
    result = SeededComparison(3, {"a": {"ttft_s_p50": [1.0, 20.0, 5.0]}, "b": {"ttft_s_p50": [2.0, 21.0, 6.0]}})
    assert result.difference("b", "ttft_s_p50") == Spread(1.0, 0.0, 0.0)
    assert result.spread("a", "ttft_s_p50").half_width > 10


def test_every_policy_sees_the_same_draws():
    drawn = []

    def draw(number):
        drawn.append(number)
        return trace_of([(0.1 * i, 100 + number, 5) for i in range(10)])

    settings = {name: ReplayConfig(policy=name, cost_model="roofline") for name in ("chunked", "vllm_v1")}
    result = compare_over_draws(draw, settings, 3)
    assert drawn == [0, 1, 2]
    assert all(len(values) == 3 for row in result.values.values() for values in row.values())


def test_a_drawn_trace_has_the_rate_and_lengths_of_its_source():
    source = trace_of([(i / 5, 100 + i % 90, 10 + i % 7) for i in range(3000)])
    draws = [resample(source, seed) for seed in range(20)]
    assert not np.array_equal(draws[0].prompt_tokens, source.prompt_tokens)
    assert draws[0].same_requests(resample(source, 0))
    assert np.mean([len(draw) for draw in draws]) == pytest.approx(3000, rel=0.02)
    assert np.mean([draw.prompt_tokens.mean() for draw in draws]) == pytest.approx(
        source.prompt_tokens.mean(), rel=0.01
    )
    assert all(draw.arrival_ns[-1] <= source.arrival_ns[-1] for draw in draws)


def test_a_closed_loop_cannot_be_drawn_apart():
    from dataclasses import replace

    source = replace(trace_of([(0, 5, 5), (1, 5, 5)]), after_row=np.array([-1, 0]), think_ns=np.array([0, 5]))
    with pytest.raises(TraceError, match="closed-loop"):
        resample(source, 1)


@pytest.mark.parametrize(
    ("mean", "half_width", "key", "shown"),
    [
        (0.1984, 0.23, "ttft_s_p99", "198 ± 230 ms"),
        (0.1984, 0.0123, "ttft_s_p99", "198 ± 12 ms"),
        (0.1984, 0.00123, "ttft_s_p99", "198.4 ± 1.2 ms"),
        (2.34567, 0.0456, "goodput_requests_per_s", "2.346 ± 0.046"),
        (12345.6, 1234.5, "output_tokens_per_s", "12,346 ± 1,234"),
        (3.0, 0.0, "stalls", "3.0 ± 0.0"),
    ],
)
def test_a_mean_is_shown_to_the_digits_that_its_interval_leaves_it(mean, half_width, key, shown):
    assert _cell(Spread(mean, 0.0, half_width), key) == shown
