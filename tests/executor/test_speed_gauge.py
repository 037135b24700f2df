"""The gauge: samples between batches, few enough, and a speed told from two of its means."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from executor.machine.speed_gauge import EVERY_S, SpeedGauge, typical_ns
from experiments.running.stage_files import read_json
from experiments.validation.comparing.machine_drift import gauged_speed, write_gauge


def test_samples_lie_apart_and_are_short() -> None:
    gauge = SpeedGauge()
    since = time.monotonic()
    while time.monotonic() - since < 5 * EVERY_S:
        gauge()
    assert 1 <= len(gauge.samples) <= 6
    assert all(sample > 0 for sample in gauge.samples)


def test_a_speed_is_one_mean_over_the_other(tmp_path: Path) -> None:
    assert typical_ns([100] * 9) is None
    assert typical_ns([100, 400] * 5) == pytest.approx(200)
    gauge = SpeedGauge()
    gauge.samples, gauge.moments_ns = [100, 400] * 5, [10**9 + number * 10**8 for number in range(10)]
    write_gauge(tmp_path / "g.json", gauge)
    assert read_json(tmp_path / "g.json")["at_s"][:3] == [0.0, 0.1, 0.2]
    model = SimpleNamespace(fit=SimpleNamespace(provenance={"gauge": {"typical_s": 160e-9, "power": 2.0}}))
    assert gauged_speed(tmp_path / "g.json", model) == pytest.approx(1.25**2)
    model.fit.provenance = {"gauge": {}}  # a profile from before there was a gauge
    assert gauged_speed(tmp_path / "g.json", model) is None
    assert gauged_speed(tmp_path / "none.json", model) is None
