"""Warm-up and overload against settings whose answer is known: a single server in closed form."""

from __future__ import annotations

import numpy as np
import pytest

from metrics.measures.steady_state import mser5, steady_state


class Requests:
    """Only the columns that steady_state reads."""

    def __init__(self, arrival, admitted, finished):
        self.columns = {"arrival_s": arrival, "admitted_s": admitted, "finished_s": finished}

    def column(self, table, name):
        assert table == "requests"
        return self.columns[name]


def single_server(load, count=4000, seed=1, poisson=True):
    """A queue with service time 1 and arrivals at rate `load`."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / load, count) if poisson else np.full(count, 1 / load)
    arrival = np.cumsum(gaps)
    start = np.empty(count)
    free = 0.0
    for row, at in enumerate(arrival):
        start[row] = max(at, free)
        free = start[row] + 1.0
    return Requests(arrival, start, start + 1.0)


@pytest.mark.parametrize("load", [1.05, 1.25, 2.0])
def test_overload_is_found_and_its_size_told(load):
    found = steady_state(single_server(load, poisson=False))
    assert found.overloaded
    assert found.delay_growth == pytest.approx(load - 1, rel=0.01)
    assert found.load == pytest.approx(load, rel=0.01)
    assert found.warmup_s == -1


def test_overload_shows_through_random_arrivals():
    assert all(steady_state(single_server(1.3, seed=seed)).overloaded for seed in range(8))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_a_stable_queue_is_no_overload(load, seed):
    assert not steady_state(single_server(load, seed=seed)).overloaded


def test_the_ramp_of_a_series_is_left_out():
    rng = np.random.default_rng(0)
    ramp = np.concatenate([np.linspace(0, 10, 100), np.full(900, 10.0)]) + rng.normal(0, 0.3, 1000)
    assert 60 <= mser5(ramp) <= 130


def test_a_series_that_never_settles_has_no_cut():
    assert mser5(np.linspace(0, 10, 1000) ** 2) is None


def test_a_short_run_says_that_it_does_not_know():
    found = steady_state(single_server(0.5, count=30))
    assert (found.warmup_s, found.overloaded) == (-1, False)
