"""Intervals over draws of the cost model's own error: where they come from is told, and by hand they are right."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from policies.work.batch import BatchShape
from simulator.cluster.pools import make_cluster_plan
from simulator.commands.printing import print_intervals
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.studies.prediction_intervals import Interval, Prediction, predict_intervals
from tests.simulator.constant_cost import ConstantCost, trace_of

TRACE = trace_of([(0.2 * i, 300, 10) for i in range(30)])


@dataclass
class UnsureCost(ConstantCost):
    """Off by up to 10 % either way, evenly."""

    def perturbed(self, seed: int) -> ConstantCost:
        factor = 0.9 + 0.2 * np.random.default_rng(seed).random()
        return replace(self, device_ns=round(self.device_ns * factor))


def test_the_interval_is_that_of_the_drawn_costs(monkeypatch):
    """An empty engine's gap between tokens is the iteration: its 90 % interval is that of the factor, 0.91 to 1.09."""
    cost = UnsureCost(device_ns=10_000_000)
    import simulator.studies.prediction_intervals as intervals

    monkeypatch.setattr(intervals, "make_cluster_plan", lambda config, trace: make_cluster_plan(config, trace, cost))
    found = predict_intervals(TRACE, ReplayConfig(num_blocks=1000), 60)["tbt_s_p50"]
    assert found.value == 0.01
    assert found.low < found.median < found.high
    assert not found.outside
    assert found.low == pytest.approx(0.0091, abs=0.0003)
    assert found.high == pytest.approx(0.0109, abs=0.0003)


def test_the_table_has_units_and_marks_a_prediction_outside_of_its_interval(monkeypatch, capsys):
    import simulator.studies.prediction_intervals as intervals

    found = {
        "ttft_s_p50": Interval(0.0123, 0.011, 0.0141, 0.0125),
        "inside_share": Interval(0.5, 0.6, 0.7, 0.65),
        "finished": Interval(9.0, 9.0, 9.0, 9.0),
    }
    summary = {"cost_model": "fitted [x]", "calibrated": True, "inside_share": 0.5}
    summary |= {"measured_share": 0.5, "cost_basis": "partly measured: 50 %"}
    monkeypatch.setattr(intervals, "predict", lambda *arguments: Prediction(summary, found))
    print_intervals(TRACE, ReplayConfig(), 20, as_json=False)
    printed = capsys.readouterr().out
    assert "costs: fitted [x] (partly measured: 50 %)" in printed.splitlines()
    rows = [line.replace("│", " ").split() for line in printed.splitlines()]
    assert ["ttft_s_p50", "12.3", "ms", "11", "ms", "14.1", "ms", "12.5", "ms"] in rows
    assert ["inside_share", "50.0%", "*", "60.0%", "70.0%", "65.0%"] in rows
    assert not any(row[:1] == ["finished"] for row in rows)
    assert any(row[:5] == ["*", "1", "of", "2", "lie"] for row in rows)


def test_a_policy_plans_by_the_fitted_costs_and_is_charged_the_drawn_ones():
    engine = make_cluster_plan(ReplayConfig(num_blocks=1000), TRACE, UnsureCost(device_ns=10_000_000)).engine
    drawn = engine.drawn(3)
    shape = BatchShape(((64, 0),))
    assert drawn.cost.stage_ns(shape) != engine.cost.stage_ns(shape)
    assert drawn.estimate_ns(shape) == drawn.scheduler().host.estimate_ns(shape) == engine.estimate_ns(shape)


def test_every_pool_draws_from_its_own_costs():
    pools = ({"role": "prefill", "gpu": "h100"}, {"role": "decode", "gpu": "rtx4090"})
    plan = make_cluster_plan(ReplayConfig(num_blocks=1000, cost_model="auto", pools=pools), TRACE).drawn(1)
    assert ["h100" in pool.engine.cost.name for pool in plan.pools] == [True, False]
    assert all("draw 1" in pool.engine.cost.name for pool in plan.pools)


def test_a_shipped_fit_gives_intervals_and_the_same_ones_again():
    config = ReplayConfig(gpu="h100", cost_model="auto")
    one, two = (predict_intervals(TRACE, config, 5) for _ in range(2))
    assert one == two
    assert one["e2e_s_mean"].low < one["e2e_s_mean"].value < one["e2e_s_mean"].high
    assert one["requests"].low == one["requests"].high == 30


def test_a_cost_model_that_was_not_measured_has_no_interval():
    with pytest.raises(SimulationError, match="roofline"):
        predict_intervals(TRACE, ReplayConfig(cost_model="roofline"), 5)
