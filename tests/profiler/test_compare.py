"""Ways of predicting beside each other: the learners, and a nested choice that never sees the answers."""

from __future__ import annotations

import numpy as np
import pytest

from profiler.compare import Structure, _compared, text
from profiler.residuals import GaussianProcess


def test_a_gaussian_process_carries_a_smooth_miss_between_its_points() -> None:
    rng = np.random.default_rng(2)
    points = rng.uniform(0, 6, (200, 2))
    wave = 0.2 * np.sin(points[:, 0]) + 0.05 * points[:, 1]
    learnt = GaussianProcess().fit(points[:150], wave[:150])
    assert learnt(points[150:]) == pytest.approx(wave[150:], abs=0.03)


def test_a_nested_choice_takes_the_law_where_the_law_is_right() -> None:
    decodes, context = (axis.ravel() for axis in np.meshgrid(2.0 ** np.arange(8), [16.0, 128.0, 1024.0, 4096.0]))
    us = 10 + decodes * context / 1000
    shape = Structure(
        "decode batch sizes", decodes, us, np.log2(np.stack([decodes, context], axis=1)), np.full(len(us), True),
        lambda known: (us, us * 1.1),
    )  # fmt: skip
    found = {row.method: row for row in _compared("decode batch sizes", [shape])}
    assert found["law"].p95 == 0.0
    assert found["law + table"].median == pytest.approx(0.1)
    assert found["nested"].chosen == ("law", "law")
    assert found["nested"].p95 == 0.0
    assert found["forest, no law"].median > 0.02
    assert "chosen inside: law, law" in text(list(found.values()))
