"""A machine that wanders: its gauge's samples become factors in time, and iterations are as slow as their moment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.running.stage_files import write_json
from experiments.validation.comparing.machine_speed_in_time import WINDOW, slowness_over_time, wandering_run
from profiler.iterations.iteration_model import AMOUNTS, ROW_TERMS, Bounds, IterationFit, IterationModel
from simulator import ReplayConfig, replay
from tests.simulator.constant_cost import trace_of

BOUNDS = Bounds(4096, 64, 8, 4096, 4096, 64, 4096, 65536)


def model() -> IterationModel:
    """Every iteration takes 10 ms, and 1 ms of host time before it."""
    prices = tuple(1e7 if name == "steps" else 0.0 for name in AMOUNTS)
    gauge = {"gauge": {"typical_s": 1e-6, "power": 2.0}}
    return IterationModel(
        IterationFit(
            "cpu",
            "nano",
            "float32",
            "native",
            (0.0,) * len(ROW_TERMS),
            prices,
            (1e6, 0.0, 0.0, 0.0),
            (0.0, 0.0),
            BOUNDS,
            provenance=gauge,
        )
    )


def test_iterations_are_as_slow_as_their_moment() -> None:
    trace = trace_of([(0.0, 8, 20)])
    config = ReplayConfig(model="nano", num_blocks=100, max_num_seqs=4)
    steady = wandering_run(trace, config, model(), np.array([0.0]), np.array([1.0]))
    assert steady["e2e_s_mean"] == replay(trace, config, cost=model()).summary["e2e_s_mean"] == pytest.approx(0.22)
    # Twice as slow from 0.11 s on: ten iterations of 11 ms, then ten of 22 ms.
    slower = wandering_run(trace, config, model(), np.array([0.0, 0.11e9]), np.array([1.0, 2.0]))
    assert slower["e2e_s_mean"] == pytest.approx(0.11 + 0.22)


def test_a_gauge_tells_speeds_in_time(tmp_path: Path) -> None:
    file = tmp_path / "g.json"
    samples = [1000] * 60 + [2000] * 60
    write_json(
        file, {"typical_ns": 1414, "samples": 120, "at_s": [0.02 * number for number in range(120)], "ns": samples}
    )
    found = slowness_over_time(file, model(), first_ns=10**9)
    assert found is not None
    at_ns, slowness = found
    assert (at_ns[0], at_ns[-1]) == (1e9, pytest.approx(1e9 + 2.38e9))
    # The power is 2: what doubles the gauge makes iterations four times as long; in between the window passes over.
    assert slowness[0] == pytest.approx(1.0)
    assert slowness[-1] == pytest.approx(4.0)
    assert slowness[60] == pytest.approx(4 ** (13 / WINDOW))
    write_json(file, {"typical_ns": 1414, "samples": 120})  # older files do not say when
    assert slowness_over_time(file, model(), 0) is None
    assert slowness_over_time(tmp_path / "none.json", model(), 0) is None
