"""Fits of whole iterations: known prices come back, scalar and vector forms agree, files are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.work.batch import BatchShape
from profiler.cost_model import CostModel
from profiler.errors import ProfileError
from profiler.iterations.fit_iterations import disagreement, fit_iterations, own_seconds, predicted_device_s
from profiler.iterations.iteration_file import is_iteration_fit, read_fit, write_fit
from profiler.iterations.iteration_model import IterationModel, _deviations
from profiler.iterations.machine_speed import phases_of
from profiler.load import load_cost_model
from profiler.measurements.profile import Profile, chunk_text, make_profile

LAW_NS = {"step": 400_000, "row": 20_000, "pair": 12, "decode": 30_000, "context": 300, "sampled": 40_000}


def law_s(shape: BatchShape) -> float:
    """A machine with round prices, and a matrix rate that halves beyond 128 rows."""
    pairs = sum(t * p + t * (t + 1) // 2 for t, p in shape.chunks)
    rows = shape.rows + max(0, shape.rows - 128)
    ns = LAW_NS["step"] + rows * LAW_NS["row"] + pairs * LAW_NS["pair"] + shape.sampled * LAW_NS["sampled"]
    return (ns + shape.decodes * LAW_NS["decode"] + shape.decode_context_total * LAW_NS["context"]) / 1e9


def some_shapes(seed: int, count: int) -> list[BatchShape]:
    rng = np.random.default_rng(seed)
    shapes = []
    for _ in range(count):
        tokens, decodes = int(2 ** rng.uniform(0, 9)), int(2 ** rng.uniform(0, 6))
        kind = int(rng.integers(3))
        decodes = 0 if kind == 0 else decodes
        chunks = () if kind == 1 else ((tokens, int(rng.integers(0, 2000))),)
        context = int(rng.integers(1, 2000))
        shapes.append(
            BatchShape(chunks, decodes, decodes * context, context if decodes else 0, 0, decodes + len(chunks))
        )
    return shapes


def profile_of(shapes: list[BatchShape], *, noise: float = 0.0, repeats: int = 3, **extra: Any) -> Profile:
    rng = np.random.default_rng(1)
    rows = []
    for number, shape in enumerate(shapes * repeats):
        seconds = law_s(shape) * float(np.exp(noise * rng.standard_normal()))
        rows.append(
            {
                "device": "box",
                "model": "nano",
                "dtype": "float32",
                "backend": "native",
                "operator": "iteration",
                "rows": shape.rows,
                "chunks": chunk_text(shape.chunks),
                "decodes": shape.decodes,
                "decode_context_total": shape.decode_context_total,
                "decode_context_max": shape.decode_context_max,
                "sampled": shape.sampled,
                "repeats": 1,
                "outlier": 0,
                "median_s": seconds,
                "at_s": float(number),
                "host_before_s": (300_000 + 9_000 * shape.decodes) / 1e9,
                "host_after_s": 12e-6,
                **extra,
            }
        )
    return make_profile(pd.DataFrame(rows), {"source": "test"})


@pytest.fixture(scope="module")
def model() -> IterationModel:
    return IterationModel(fit_iterations(profile_of(some_shapes(0, 150))))


def test_prices_come_back_on_shapes_that_were_never_measured(model: IterationModel) -> None:
    others = some_shapes(99, 200)
    errors = np.array([model.stage_ns(shape) / (law_s(shape) * 1e9) - 1 for shape in others])
    assert np.median(np.abs(errors)) < 0.005
    assert np.quantile(np.abs(errors), 0.95) < 0.05
    assert model.host_ns(BatchShape((), 10, 500, 50, 0, 10)) == pytest.approx((390_000, 12_000), rel=1e-3)


@st.composite
def shapes(draw: st.DrawFn) -> BatchShape:
    chunks = draw(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 100_000)), max_size=4))
    decodes = draw(st.integers(0, 300))
    total = draw(st.integers(decodes, 300_000)) if decodes else 0
    dummy, executed = draw(st.integers(0, 200)), draw(st.integers(0, 5000))
    return BatchShape(tuple(chunks), decodes, total, total and -(-total // decodes), dummy, decodes, executed)


@settings(max_examples=200)
@given(st.lists(shapes(), min_size=1, max_size=8))
def test_scalar_vector_and_breakdown_give_equal_integers(batch: list[BatchShape]) -> None:
    model = IterationModel(_FIT, speed=1.037)
    assert model.predict_ns(batch).tolist() == [model.stage_ns(shape) for shape in batch]
    for shape in batch:
        assert sum(model.breakdown(shape).values()) == sum(model.host_ns(shape)) + model.stage_ns(shape)
        steps = [
            shape._replace(
                decode_context_total=shape.decode_context_total + ahead * shape.decodes,
                decode_context_max=shape.decode_context_max + ahead * (shape.decodes > 0),
            )
            for ahead in range(3)
        ]
        assert model.repeat_ns(shape, 3).tolist() == [model.stage_ns(step) for step in steps]


_FIT = fit_iterations(profile_of(some_shapes(3, 60), noise=0.05), resamples=4)


def test_it_is_a_cost_model_and_knows_its_region(model: IterationModel) -> None:
    assert isinstance(model, CostModel)
    assert model.inside(BatchShape(((100, 50),), 4, 400, 100, 0, 5))
    assert not model.inside(BatchShape(((100, 500_000),), 0, 0, 0, 0, 1))
    assert not model.inside(BatchShape((), 4000, 4000, 1, 0, 4000))


def test_outliers_are_kept_but_do_not_move_the_prices() -> None:
    clean = profile_of(some_shapes(0, 80))
    table = clean.table.copy()
    spoilt = table.index % 3 == 0
    table.loc[spoilt, ["median_s"]] *= 7
    table["min_s"] = table["max_s"] = table["median_s"]
    table.loc[spoilt, "outlier"] = 1
    fit = fit_iterations(make_profile(table, {}))
    some = some_shapes(5, 50)
    assert np.allclose(predicted_device_s(fit, some), [law_s(shape) for shape in some], rtol=0.03)
    assert fit.noise["outlier_share"] == pytest.approx(1 / 3, abs=0.01)
    # A third of the measurements took 7 times as long: on average an iteration takes three times as long.
    assert fit.disturbance == pytest.approx(2.0, rel=0.2)


def test_perturbed_models_spread_as_far_as_the_measurements_allow() -> None:
    shape = BatchShape(((200, 100),), 20, 20_000, 1000, 0, 21)
    spreads = []
    for noise in (0.0, 0.2):
        fit = fit_iterations(profile_of(some_shapes(0, 60), noise=noise, repeats=1))
        model = IterationModel(fit)
        times = [model.perturbed(seed).stage_ns(shape) for seed in range(16)]
        assert times == [model.perturbed(seed).stage_ns(shape) for seed in range(16)]
        spreads.append(float(np.std(np.log(times))))
        assert len(disagreement(fit, [shape])) == 1
    assert spreads[0] < 0.02 < spreads[1]


def test_a_fit_reads_back_and_is_loaded_like_any_cost_model(tmp_path: Path, model: IterationModel) -> None:
    file = tmp_path / "nano.json"
    write_fit(model.fit, file)
    assert is_iteration_fit(file)
    assert read_fit(file) == model.fit
    loaded = load_cost_model("nano", "h100", cost_model=file)
    shape = BatchShape(((64, 0),), 2, 90, 50, 0, 3)
    assert loaded.stage_ns(shape) == model.stage_ns(shape)
    assert loaded.kind == "fitted"
    with pytest.raises(ProfileError, match="measured with nano, not with tiny"):
        load_cost_model("tiny", "h100", cost_model=file)
    with pytest.raises(ProfileError, match="tp 1, pp 2"):
        load_cost_model("nano", "h100", cost_model=file, pp=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "expected 'charioteer fitted iterations' version 1"),
        ({"prices": [1.0]}, "prices: found .* expected 15 numbers"),
        ({"prices": ["a"] * 15}, "prices: found"),
        ({"drift": -1}, "drift: found"),
        ({"bounds": {"rows": 3}}, "bounds: found"),
        ({"amounts": ["steps"]}, "not those of this version"),
    ],
)
def test_a_bad_file_is_refused_with_its_entry(
    tmp_path: Path, model: IterationModel, change: dict[str, object], message: str
) -> None:
    file = tmp_path / "nano.json"
    write_fit(model.fit, file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ProfileError, match=message):
        read_fit(file)


@pytest.mark.parametrize("shapes", [150, 50])  # a short profile, of a slow model, has too few stretches of full length
def test_a_gauge_is_told_by_how_much_iterations_follow_it(shapes: int) -> None:
    table = profile_of(some_shapes(0, shapes)).table
    assert fit_iterations(make_profile(table, {})).provenance["gauge"] == {}
    slow = 1.2 ** np.sign(np.sin(table["at_s"].to_numpy() / 30))  # now a fifth slower, now a fifth faster
    table["median_s"] *= slow
    table["min_s"] = table["max_s"] = np.nan
    table["gauge_s"] = 40e-6 * np.sqrt(slow)
    gauge = fit_iterations(make_profile(table, {})).provenance["gauge"]
    assert gauge["power"] == pytest.approx(2.0, abs=0.1)
    assert gauge["typical_s"] == pytest.approx(40e-6, rel=0.03)


def test_pairs_beyond_a_cache_have_a_price_of_their_own() -> None:
    """A machine on which a pair costs half as much again once its key lies 2,048 tokens back."""
    rng = np.random.default_rng(3)
    shapes = [
        BatchShape(((int(2 ** rng.uniform(4, 9)), int(rng.integers(0, 7000))),), 0, 0, 0, 0, 1) for _ in range(120)
    ]
    profile = profile_of(shapes)

    def over(tokens: int, prefix: int) -> int:
        return sum(max(0, position - 2048) for position in range(prefix + 1, prefix + tokens + 1))

    profile.table["median_s"] += [over(*shape.chunks[0]) * 6e-9 for shape in shapes * 3]
    model = IterationModel(fit_iterations(profile))
    for tokens, prefix in ((256, 0), (300, 1900), (512, 6000)):
        shape = BatchShape(((tokens, prefix),), 0, 0, 0, 0, 1)
        expected = law_s(shape) * 1e9 + 6 * over(tokens, prefix)
        assert model.stage_ns(shape) == pytest.approx(expected, rel=0.01)
        assert model.stage_ns(shape) == model.predict_ns([shape])[0]
        assert model.breakdown(shape).get("chunk_pairs_over_2048", 0) == pytest.approx(
            6 * over(tokens, prefix), rel=0.05
        )


def test_a_disturbed_measurement_is_cut_to_its_share_of_the_processor_unless_its_clock_stood_still() -> None:
    table = profile_of(some_shapes(0, 12), outlier=1, cpu_s=0.0).table
    assert own_seconds(table) == pytest.approx(table["median_s"])
    wall = table["median_s"] + table["host_before_s"] + table["host_after_s"]
    table["cpu_s"] = wall / 2
    assert own_seconds(table) == pytest.approx(table["median_s"] / 2)


def test_too_few_iterations_are_no_profile() -> None:
    with pytest.raises(ProfileError, match="found 3 distinct iterations, expected at least 8"):
        fit_iterations(profile_of(some_shapes(0, 3)))


def test_few_phases_of_the_machine_make_wide_intervals() -> None:
    at = np.arange(280.0)
    # Ten stretches of 28: five slow ones after five quick ones are hardly two phases, alternating ones are ten.
    quick = [0.1, 0.101, 0.102, 0.103, 0.104]
    apart, together = (np.repeat(speeds, 28) for speeds in ([0.1, -0.1] * 5, quick + [-speed for speed in quick]))
    assert phases_of(at, apart) == 10
    assert phases_of(at, together) == 3
    assert phases_of(at, np.zeros(280)) == 0
    # Student's 95 % point with 2 degrees of freedom is 2.92 standard deviations; one value yet to come, of three known.
    assert _deviations(0.95, 3) == pytest.approx(2.920 * np.sqrt(4 / 2), rel=1e-3)
    assert _deviations(0.95, 0) == pytest.approx(1.645, rel=1e-3)
