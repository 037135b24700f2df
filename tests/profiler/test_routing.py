"""Experts that a batch touches: worked out by hand, drawn, and as a term of whole iterations that a fit finds again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.work.batch import BatchShape
from profiler.errors import ProfileError
from profiler.experts.chances import ExpertChances, drawn_chances
from profiler.experts.routing import Spread
from profiler.iterations.expert_layers import ExpertLayers
from profiler.iterations.fit_iterations import fit_iterations
from profiler.iterations.iteration_file import read_fit, write_fit
from profiler.iterations.iteration_model import IterationFit, IterationModel
from profiler.measurements.profile import Profile, make_profile
from tests.profiler.test_fit_iterations import profile_of, shapes, some_shapes


def test_activated_experts_by_hand() -> None:
    """Two experts, one a token: the second token goes elsewhere half of the time."""
    assert ExpertChances.balanced(2, 1).touched([0, 1, 2, 3]).tolist() == [0, 1, 1.5, 1.75]
    # One expert that everybody goes to, beside three of a chance of a third: 1 + 3 (1 - (2/3)^2).
    always = ExpertChances.measured([[6, 2, 2, 2]], [6])
    assert always.touched([2]).tolist() == pytest.approx([1 + 3 * (1 - 4 / 9)])
    # 128 experts, 8 a token, 64 tokens: 128 (1 - (15/16)^64).
    assert ExpertChances.balanced(128, 8).touched([64])[0] == pytest.approx(128 * (1 - (15 / 16) ** 64))


@given(experts=st.integers(1, 64), top_k=st.integers(1, 8), alpha=st.floats(0, 3), rows=st.lists(st.integers(0, 10**6)))
@settings(max_examples=40, deadline=None)
def test_more_tokens_touch_more_experts_and_skew_touches_fewer(
    experts: int, top_k: int, alpha: float, rows: list[int]
) -> None:
    top_k = min(top_k, experts)
    chances = ExpertChances.power_law(experts, top_k, alpha)
    assert sum(chances.layers[0]) == pytest.approx(top_k)
    rows = sorted({0, 1, *rows})
    found = chances.touched(rows)
    assert found[0] == 0
    assert found[1] == pytest.approx(top_k)
    assert (np.diff(found) >= -1e-9).all()
    assert (found <= np.minimum(experts, np.array(rows, float) * top_k) + 1e-6).all()
    assert (found <= ExpertChances.balanced(experts, top_k).touched(rows) + 1e-6).all()


def test_chances_of_a_power_law_are_those_of_draws_without_putting_back() -> None:
    """Exact for two of three experts of popularity 1/2, 1/4, 1/4: the first is missed by 1/4 * 1/3 twice."""
    exact = np.array([1 - 2 * (1 / 4 * 1 / 3), 0.0, 0.0])
    exact[1:] = (2 - exact[0]) / 2
    assert drawn_chances(np.array([0.5, 0.25, 0.25]), 2) == pytest.approx(exact, abs=0.02)
    assert drawn_chances(np.ones(10), 3) == pytest.approx(0.3)


def test_balanced_chances_touch_as_many_as_evenly_drawn_batches() -> None:
    """The spread that kernel tables call uniform is this law drawn."""
    drawn = Spread("uniform").counts(24, 32, 4, draws=400)
    touched = (drawn > 0).sum(axis=-1)
    assert touched.mean() == pytest.approx(ExpertChances.balanced(32, 4).touched([24])[0], rel=0.01)


LAYERS = ExpertLayers(7_000.0, ExpertChances.power_law(16, 2, 0.8), True)


def three(layers: ExpertLayers) -> ExpertLayers:
    return replace(layers, chances=ExpertChances(layers.chances.layers * 3))


@pytest.fixture(scope="module")
def dense() -> IterationFit:
    return fit_iterations(profile_of(some_shapes(0, 60)), resamples=2)


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(shapes(), min_size=1, max_size=6), trimmed=st.booleans())
def test_scalar_vector_and_breakdown_give_equal_integers(
    dense: IterationFit, batch: list[BatchShape], trimmed: bool
) -> None:
    layers = replace(three(LAYERS), trimmed=trimmed)
    model = IterationModel(replace(dense, experts=layers), speed=1.037)
    plain = IterationModel(dense, speed=1.037)
    assert model.predict_ns(batch).tolist() == [model.stage_ns(shape) for shape in batch]
    for shape in batch:
        assert sum(model.breakdown(shape).values()) == sum(model.host_ns(shape)) + model.stage_ns(shape)
        added = model.stage_ns(shape) - plain.stage_ns(shape)
        factor = 1.037 * (1 + dense.disturbance)
        touched = layers.touched([shape.rows], [shape.sampled])[0] if shape.rows else 0.0
        assert added == pytest.approx(touched * 7_000 * factor, abs=2)
    mean = model.activated_experts(batch)
    assert ((mean >= 0) & (mean <= 16)).all()
    assert np.isnan(plain.activated_experts(batch)).all()


def expert_profile(price_ns: float) -> Profile:
    """`profile_of` beside three layers of 16 experts: batches of one shape touch more of them and fewer."""
    base = profile_of(some_shapes(0, 150), repeats=4)
    table = base.table.copy()
    rng = np.random.default_rng(3)
    most = np.minimum(16, 2 * table["rows"].to_numpy())
    table["experts"] = np.round(3 * (2 + (most - 2) * rng.uniform(0, 1, len(table)))).astype(int)
    table["median_s"] += table["experts"] * price_ns / 1e9
    table["min_s"] = table["max_s"] = table["median_s"]
    rows = [1000, 1000, 400]
    counts = [[round(chance * seen) for chance in LAYERS.chances.layers[0]] for seen in rows]
    return make_profile(table, {"source": "test", "routing": {"counts": counts, "rows": rows, "trimmed": True}})


def test_the_price_of_an_expert_comes_back_and_the_file_keeps_it(tmp_path: Path) -> None:
    fit = fit_iterations(expert_profile(20_000.0), resamples=4)
    assert fit.experts is not None
    assert fit.experts.price_ns == pytest.approx(20_000, rel=0.02)
    assert fit.errors["held_out_median"] < 0.01
    assert np.allclose(fit.experts.chances.layers, LAYERS.chances.layers * 3, atol=2e-3)
    path = tmp_path / "model.json"
    write_fit(fit, path)
    assert read_fit(path) == fit
    drawn = IterationModel(fit).perturbed(1)
    assert drawn.fit.experts is not None
    assert drawn.fit.experts.price_ns == pytest.approx(20_000, rel=0.05)
    assert drawn.fit.experts.chances == fit.experts.chances


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trimmed": 1}, "expected price_ns, chances of layers, trimmed"),
        ({"chances": {"layers": []}}, "experts: found"),
        ({"chances": {"layers": [[0.5, 0.5], [0.5]]}}, "expected 2 numbers"),
        ({"chances": {"layers": [[0.5, 1.5]]}}, "expected one top k"),
        ({"chances": {"layers": [[0.5, 0.5], [1.0, 1.0]]}}, "expected one top k"),
        ({"price_ns": -1}, "price_ns"),
    ],
)
def test_a_file_with_other_experts_is_refused(
    dense: IterationFit, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    fit = replace(dense, experts=LAYERS, resampled=())
    path = tmp_path / "model.json"
    write_fit(fit, path)
    document = json.loads(path.read_text())
    document["experts"] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=says):
        read_fit(path)


def test_a_profile_that_says_nothing_sensible_of_its_routing_is_refused() -> None:
    profile = expert_profile(1.0)
    bad = make_profile(profile.table, {**profile.provenance, "routing": {"counts": [[1, 2]], "rows": [3, 4]}})
    with pytest.raises(ProfileError, match="routing: found no counts"):
        fit_iterations(bad)
