"""Intervals over draws hold what they say."""

from __future__ import annotations

import math

import pytest

from metrics.measures.statistics import interval_of_draws, level_held


@pytest.mark.parametrize("count", [19, 39, 59])
def test_one_more_draw_lies_inside_nine_times_in_ten(count: int) -> None:
    draws = [float(number) for number in range(count)]
    low, high = interval_of_draws(draws[::-1])
    # One more draw falls into each of the count + 1 gaps (before the first, between two, after the last) equally often.
    inside = sum(low <= gap - 0.5 <= high for gap in range(count + 1))
    assert inside == pytest.approx(0.9 * (count + 1))
    assert level_held(count) == pytest.approx(0.9)


def test_few_draws_tell_their_extremes_and_how_much_these_hold() -> None:
    assert interval_of_draws([3.0, 1.0, 2.0, math.nan]) == (1.0, 3.0)
    assert level_held(3) == 0.5
    assert all(math.isnan(end) for end in interval_of_draws([]))
