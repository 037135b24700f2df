"""Flicker noise by its textbook numbers, and intervals that grow with the time between profile and run."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from policies import BatchShape
from profiler.iterations.flicker import Later, deviation, flicker_of
from profiler.iterations.iteration_model import IterationModel
from tests.profiler.test_fit_iterations import model  # noqa: F401


def test_two_windows_in_a_row_have_allans_variance() -> None:
    # Half of the squared difference's mean is 2 ln 2 h, whatever the length.
    for length in (1.0, 60.0):
        assert deviation(0.01, length, Later(0.0, length)) ** 2 / 2 == pytest.approx(2 * math.log(2) * 0.01)


def test_windows_far_apart_differ_by_the_logarithm_of_their_distance() -> None:
    # 2 h (ln(distance / length) + 3 / 2) in the limit.
    assert deviation(1.0, 1.0, Later(9_999.0, 1.0)) ** 2 == pytest.approx(2 * (math.log(10_000) + 1.5), rel=1e-6)
    assert deviation(1.0, 100.0, Later(0.0, 1e9)) < deviation(1.0, 1.0, Later(0.0, 1e9))


@pytest.mark.parametrize("count", [3, 20])
def test_the_level_is_what_that_many_windows_in_a_row_are_expected_to_vary_by(count: int) -> None:
    # The mean of the pairs' differences is the sample variance: N ln N / (N - 1) for h = 1, and flicker_of divides it out.
    pairs = [
        deviation(1.0, 1.0, Later(float(later - first - 1), 1.0)) ** 2
        for first in range(count)
        for later in range(first + 1, count)
    ]
    sample_variance = sum(pairs) / (count * (count - 1))
    assert sample_variance == pytest.approx(count * math.log(count) / (count - 1))
    levels = np.linspace(-1, 1, count)
    assert flicker_of(levels) == pytest.approx(np.var(levels, ddof=1) * (count - 1) / (count * math.log(count)))
    assert flicker_of(levels[:2]) == 0


def test_what_overlaps_or_takes_no_time_is_refused() -> None:
    for seen, later in ((10.0, Later(-1.0, 1.0)), (0.0, Later(1.0, 1.0)), (10.0, Later(1.0, 0.0))):
        with pytest.raises(ValueError, match="expected lengths above 0"):
            deviation(1.0, seen, later)


def test_a_run_much_later_has_the_wider_interval(model: IterationModel) -> None:  # noqa: F811
    shape = BatchShape(((200, 100),), 20, 20_000, 1000, 0, 21)
    wandering = IterationModel(replace(model.fit, drift=0.03, phases=20.0, seen_s=240.0, flicker=0.0003, resampled=()))

    def width(later: Later | None) -> float:
        return float(np.std(np.log([wandering.perturbed(seed, later).stage_ns(shape) for seed in range(31)])))

    assert width(None) == pytest.approx(0.03, rel=0.1)
    assert width(Later(600.0, 30.0)) == pytest.approx(deviation(0.0003, 240.0, Later(600.0, 30.0)), rel=0.1)
    assert width(Later(600.0, 30.0)) < width(Later(6000.0, 30.0))
    steady = IterationModel(replace(model.fit, drift=0.0, flicker=0.0, resampled=()))
    assert steady.perturbed(1, Later(600.0, 30.0)).speed == 1.0
