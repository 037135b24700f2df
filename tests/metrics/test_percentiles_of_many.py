"""Percentiles of very many counted values are those of all of them in order, although few are sorted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics.measures import statistics
from metrics.measures.statistics import percentiles

Q = (0, 1, 50, 90, 99.9, 100)


@given(
    st.lists(st.tuples(st.integers(-(10**12), 10**12) | st.integers(0, 5), st.integers(0, 9)), min_size=3, max_size=60),
    st.sampled_from([1, 1e-9]),
)
@settings(max_examples=150, deadline=None)
def test_counted_values_have_the_percentiles_of_as_many_single_ones(rows, unit) -> None:
    values = np.array([value for value, _ in rows]) * unit
    counts = np.array([count for _, count in rows])
    if not counts.sum():
        counts[0] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "MANY", 2)
        found = percentiles(values, Q, counts)
    assert found == percentiles(np.repeat(values, counts), Q)


def test_a_few_far_values_do_not_hide_the_others_in_one_bin() -> None:
    draw = np.random.default_rng(4)
    values = np.append(draw.integers(5_000_000, 7_000_000, 150_000), [10**15, 3])
    counts = draw.integers(1, 40, len(values))
    assert percentiles(values, Q, counts) == percentiles(np.repeat(values, counts), Q)
