"""Measuring a plan: the batch that runs is the batch that was asked for, and an interrupted measurement goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.measuring.batch_rig import FOLLOWERS, BatchRig
from executor.measuring.measure_plan import measure_plan, unsure_by_fit
from executor.measuring.operator_stopwatch import watching
from executor.model.loading import Loaded
from executor.serving.replay import load_for
from policies import BatchShape
from profiler.iterations.fit_iterations import fit_iterations
from profiler.iterations.iteration_model import IterationModel
from profiler.measurements.plan import MeasurementPlan, Point, make_plan
from profiler.measurements.profile import read_profile
from profiler.measurements.region import Region


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_for(LiveConfig(model="nano"), 600)
    torch.set_num_threads(threads)


def small_plan(**options: object) -> MeasurementPlan:
    return make_plan(Region.of_bounds(chunk=64, decodes=8, context=200), points=12, repeats=1, per_round=8, **options)


@pytest.mark.parametrize(
    "shape",
    [
        BatchShape((), 1, 2, 2, 0, 1),
        BatchShape((), 7, 900, 333, 0, 7),
        BatchShape((), 7, 900, 333, 25, 7),
        BatchShape(((17, 200), (5, 0)), 3, 90, 40, 100, 4),
        BatchShape(((64, 0),), 0, 0, 0, 0, 1),
        BatchShape(((17, 200), (5, 0)), 0, 0, 0, 0, 0),
        BatchShape(((30, 90), (16, 0), (1, 12)), 4, 500, 200, 0, 6),
    ],
)
def test_the_step_that_runs_is_the_one_that_was_planned(loaded: Loaded, shape: BatchShape) -> None:
    rig = BatchRig(loaded, most_tokens=4000, longest=500)
    for _ in range(2):
        timing = rig.measure(Point(shape, "visited"))
        assert timing.shape == shape
        assert timing.device_ns > 0
        assert timing.wall_ns >= timing.before_ns + timing.device_ns
    assert not rig.scheduler.tracks
    assert rig.scheduler.ledger.free_blocks == rig.scheduler.ledger.total_blocks


def test_a_plan_becomes_a_profile_that_can_be_fitted(loaded: Loaded, tmp_path: Path) -> None:
    plan = small_plan(budget_s=6.0)
    said: list[str] = []
    profile = measure_plan(
        loaded,
        plan,
        tmp_path / "p.parquet",
        adapt=unsure_by_fit,
        progress=lambda spent, budget, doing: said.append(doing),
    )
    table = read_profile(tmp_path / "p.parquet").table
    assert len(table) == len(profile.table)
    iterations = table[table["operator"] == "iteration"]
    # Every planned point at least once, and more where a fit was unsure; on a machine that is busy the first round.
    entries = [json.loads(line) for line in (tmp_path / "p.parquet.log").read_text().splitlines()]
    measured = [entry for entry in entries if "key" in entry]
    assert len(measured) >= plan.per_round + len(plan.noise)
    time_was_up = measured[-1]["at_s"] > 0.9 * (1 - plan.unsure_share) * plan.budget_s
    assert len(measured) > len(plan.points) + len(plan.noise) or time_was_up
    assert (iterations[["host_before_s", "host_after_s", "cpu_s", "at_s"]].notna()).all(axis=None)
    assert {"qkv", "attention", "head", "sampler", "norm", "rotary"} <= set(table["operator"])
    assert said[-1] == "operators"
    fit = fit_iterations(profile)
    assert fit.model == "nano"
    assert sum(fit.prices) + sum(fit.row_prices) > 0


def test_a_profile_of_experts_holds_batches_that_touch_more_and_fewer_of_them(tmp_path: Path) -> None:
    with load_for(LiveConfig(model="nano-moe"), 600) as loaded:
        profile = measure_plan(loaded, small_plan(budget_s=2.0), tmp_path / "p.parquet")
        read = read_profile(tmp_path / "p.parquet")
        cost = IterationModel(fit_iterations(read, resamples=2))
        counted = loaded.model.routing.read()
    assert read.provenance["routing"] == profile.provenance["routing"]
    rows, counts = read.provenance["routing"]["rows"], read.provenance["routing"]["counts"]
    assert [sum(layer) for layer in counts] == [4 * seen for seen in rows]  # top 4
    assert rows[0] == rows[1] == rows[2] > rows[3]  # sampled rows alone reach the last layer
    iterations = read.rows_of("iteration")
    # Four layers; the last one touches none where nothing is sampled.
    assert ((iterations["experts"] >= 3 * 4) & (iterations["experts"] <= 4 * 32)).all()
    several = iterations.groupby(["chunks", "decodes", "decode_context_total"])["experts"]
    assert (several.max() > 1.2 * several.min())[several.count() > 1].any()
    assert "experts" in set(read.table["operator"])
    assert "ffn_up" not in set(read.table["operator"])
    (one, many) = cost.activated_experts([BatchShape((), 1, 50, 50, 0, 1), BatchShape(((64, 0),), 0, 0, 0, 0, 1)])
    assert one == pytest.approx(4, rel=0.01)
    assert 10 < many <= 32
    assert counted.shape == (4, 32)


@pytest.mark.parametrize("adapt", [None, unsure_by_fit])
def test_a_budget_in_which_nothing_is_measured_is_said_so(loaded: Loaded, tmp_path: Path, adapt: Any) -> None:
    with pytest.raises(ExecutorError, match="nothing was measured within 1e-09 s; give it longer"):
        measure_plan(loaded, small_plan(budget_s=1e-9), tmp_path / "p.parquet", adapt=adapt)


def test_an_interrupted_measurement_goes_on_where_it_stopped(loaded: Loaded, tmp_path: Path) -> None:
    plan, out = small_plan(budget_s=30.0), tmp_path / "p.parquet"
    total = sum(len(points) for points in plan.rounds())

    counted = []

    def interrupt(spent: float, budget: float, doing: str) -> None:
        counted.append(doing)
        if len(counted) == 5:
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        measure_plan(loaded, plan, out, operators=False, progress=interrupt)
    assert not out.exists()
    with (tmp_path / "p.parquet.log").open("a") as log:
        log.write('{"key": [0, 9')  # a line cut off by a kill
    profile = measure_plan(loaded, plan, out, operators=False, progress=lambda *_: counted.append("again"))
    assert len(profile.rows_of("iteration")) == total
    # After a batch with chunks whoever can decode does, and is timed too.
    led = profile.rows_of("after_chunks")
    assert set(led["steps_since"]) == set(range(1, FOLLOWERS + 1))
    assert led["chunks"].ne("").all()
    assert led["sampled"].gt(0).all()
    assert counted.count("again") == total - 5
    with pytest.raises(ExecutorError, match="belongs to another plan"):
        measure_plan(loaded, small_plan(budget_s=30.0, seed=1), out)


def test_the_stopwatch_leaves_no_trace(loaded: Loaded) -> None:
    before = {name: type(getattr(loaded.model.layers[0], name)) for name in ("qkv", "down")}
    rig = BatchRig(loaded, most_tokens=1000, longest=200)
    point = Point(BatchShape(((16, 0),), 2, 60, 40, 0, 3), "visited")
    with watching(loaded.model) as watch:
        rig.measure(point, watch.take)
        times = watch.take()
    layers = len(loaded.model.layers)
    assert {name: len(times[name]) for name in ("qkv", "attention", "ffn_up", "head")} == {
        "qkv": layers,
        "attention": layers,
        "ffn_up": layers,
        "head": 1,
    }
    assert {name: type(getattr(loaded.model.layers[0], name)) for name in before} == before
    assert "rms_norm" not in vars(loaded.model.kernels)
    assert "attend" not in vars(loaded.model.attention)


def test_a_context_beyond_the_model_is_refused(loaded: Loaded) -> None:
    with pytest.raises(ExecutorError, match="contexts of 5000 tokens, nano reaches 600"):
        BatchRig(loaded, most_tokens=6000, longest=5000)


def test_a_chunk_beside_as_many_decodes_as_a_run_admits_is_measured_with_its_chunk(loaded: Loaded) -> None:
    """A default of 256 requests at once would leave the 257th waiting, and a batch without a chunk would be timed."""
    shape = BatchShape(((3, 0),), 256, 512, 2, 0, 257)
    rig = BatchRig(loaded, most_tokens=1000, longest=40, most_requests=257)
    assert rig.measure(Point(shape, "visited")).shape == shape
    with pytest.raises(ExecutorError, match="1 chunks were asked for beside 256 decodes, 0 were granted"):
        BatchRig(loaded, most_tokens=1000, longest=40, most_requests=256).measure(Point(shape, "visited"))
