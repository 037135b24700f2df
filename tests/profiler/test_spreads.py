"""Errors from shape to shape: what held-out tables say of them, and that draws say the same again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from policies.work.batch import BatchShape
from profiler.errors import ProfileError
from profiler.load import load_cost_model
from profiler.measurements.profile import make_profile
from profiler.operators.drawn_errors import ErrorField
from profiler.operators.fitted_model import find_fitted
from profiler.operators.fitting.error_sizes import LEVELS, Spread, likeness, measured_spreads
from profiler.operators.fitting.model_file import read_model, write_model

KNOTS = np.array([1.0, 2, 4, 8, 16, 32, 64, 128, 256, 512])


def spread(sizes: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.16, 0.2, 0.25, 0.3), **changes: object) -> Spread:
    rows = np.array([sizes, np.array(sizes) * 0.1])
    given = {"common": np.zeros(2), "reach": {"context": 2.0}, **changes}
    return Spread("decode batch sizes", KNOTS, np.array([2.0, 7.0]), rows, **given)  # type: ignore[arg-type]


def held_out_table(errors: np.ndarray, rows: np.ndarray, depths: np.ndarray) -> pd.DataFrame:
    grid = [(r, k, e) for r, line in zip(rows, errors, strict=True) for k, e in zip(depths, line, strict=True)]
    frame = pd.DataFrame(grid, columns=["rows", "k", "error"]).assign(
        operator="qkv", n=4096.0, heads=0.0, kv_heads=0.0, us=100.0
    )
    frame["fold"] = (frame["rows"].rank(method="dense") % 2).astype(int)
    return frame.assign(predicted_us=100.0 * np.exp(frame["error"]))


def profile_of(rows: np.ndarray) -> object:
    table = pd.DataFrame({"operator": "qkv", "rows": rows, "n": 4096, "k": 4096}).assign(device="a gpu", median_s=1e-3)
    return make_profile(table, {})


def test_an_error_is_nothing_where_was_measured_and_whole_halfway_between() -> None:
    field = ErrorField([spread()], 3)
    assert field.factors(KNOTS, [1000]) == pytest.approx(1.0)
    middle = np.sqrt((KNOTS[1:] + 1) * (KNOTS[:-1] + 1)) - 1  # in octaves of one more, where places are counted
    off = np.abs(np.log(field.factors(middle, [1000])))[:, 0]
    assert (off > 1e-4).all()
    quarter = (KNOTS[1:] + 1) ** 0.25 * (KNOTS[:-1] + 1) ** 0.75 - 1
    assert np.abs(np.log(field.factors(quarter[:4], [1000])))[:, 0] == pytest.approx(off[:4] / 2)
    floor = np.abs(np.log(ErrorField([spread(floor=0.3)], 3).factors(KNOTS, [1000])))
    assert (floor > 0).all()


def test_sizes_are_those_that_were_measured_in_each_region() -> None:
    found = np.array([ErrorField([spread()], seed).factors([11, 180], [1000])[:, 0] for seed in range(600)])
    small, large = np.quantile(np.abs(np.log(found)), 0.9, axis=0)
    assert small == pytest.approx(0.16, rel=0.12)
    assert large == pytest.approx(0.016, rel=0.12)
    assert np.abs(np.log(found)).max() <= 0.3 + 1e-9
    assert np.log(found).mean(axis=0) == pytest.approx([0, 0], abs=0.02)


def test_neighbouring_gaps_are_independent_and_contexts_alike_as_far_as_the_reach() -> None:
    field = [ErrorField([spread()], seed).factors([5.7, 11.4, 22.8], [255, 1023, 16383]) for seed in range(500)]
    off = np.log(np.array(field))
    between_gaps = np.corrcoef(off[:, 0, 0], off[:, 1, 0])[0, 1]
    near, far = (np.corrcoef(off[:, 0, 0], off[:, 0, place])[0, 1] for place in (1, 2))
    assert abs(between_gaps) < 0.15
    assert near == pytest.approx(float(likeness(1.0)), abs=0.12)
    assert abs(far) < 0.15


def test_what_a_structure_has_in_common_is_drawn_in_its_region_alone() -> None:
    """Contexts far apart: alike where a region says that its batch sizes are off as a whole, independent elsewhere."""
    drawn = [ErrorField([spread(common=np.array([0.8, 0.0]))], seed) for seed in range(500)]
    off = np.log(np.array([field.factors([5.7, 180], [255, 16383]) for field in drawn]))
    here, there = (np.corrcoef(off[:, place, 0], off[:, place, 1])[0, 1] for place in (0, 1))
    assert here > 0.5
    assert abs(there) < 0.15


def test_a_structure_counts_by_how_alike_its_errors_are() -> None:
    """Twelve row counts of sixteen depths, smaller errors above 64 rows. Where each shape errs by itself, regions are
    fine enough to tell the two apart; where a whole row count errs alike it counts once and all is one region of
    neighbours, with its share found."""
    random = np.random.default_rng(1)
    rows, depths = 2.0 ** np.arange(1, 13), 2.0 ** np.arange(6, 14, 0.5)
    size = np.where(rows > 64, 0.01, 0.1)[:, None]
    single = size * random.normal(size=(len(rows), len(depths)))
    whole = size * random.normal(size=(len(rows), 1)) * np.ones(len(depths))

    def found(errors: np.ndarray) -> Spread:
        return measured_spreads({"gemm rows": held_out_table(errors, rows, depths)}, profile_of(rows))["gemm rows"]  # type: ignore[arg-type]

    p90 = LEVELS.index(0.9)
    own, alike = found(single), found(whole)
    assert own.sizes[0, p90] > 5 * own.sizes[-1, p90]
    assert alike.sizes[0, p90] < 2 * alike.sizes[-1, p90]
    assert own.common.max() < 0.2 < 0.9 < alike.common.min()


def test_what_held_out_errors_show_is_found_again() -> None:
    """Rows independent, sizes ten times larger above 64 rows, alike over some two octaves of depth."""
    random = np.random.default_rng(0)
    rows, depths = np.unique(np.geomspace(1, 4096, 100).astype(int)).astype(float), 2.0 ** np.arange(8, 16, 0.5)
    errors = np.array([np.interp(np.arange(16), np.arange(-2, 20, 4), random.normal(size=6)) for _ in rows])
    errors *= np.where(rows > 64, 0.1, 0.01)[:, None]
    found = measured_spreads({"gemm rows": held_out_table(errors, rows, depths)}, profile_of(rows))["gemm rows"]  # type: ignore[arg-type]
    p90 = dict(zip(found.centres, found.sizes[:, LEVELS.index(0.9)], strict=True))
    assert p90[3.0] < 0.02 < 0.1 < p90[10.0]
    assert 1.0 <= found.reach["k"] <= 3.0
    assert list(found.knots) == list(rows)


def test_a_spread_is_read_back_and_a_false_one_refused(tmp_path: Path) -> None:
    fit = read_model(find_fitted("rtx4090"))
    write_model(fit, tmp_path / "m.json")
    again = read_model(tmp_path / "m.json").spreads
    assert set(again) == set(fit.spreads) >= {"gemm rows", "decode contexts", "mixed batch sizes"}
    assert again["gemm rows"].sizes == pytest.approx(fit.spreads["gemm rows"].sizes)
    whole = json.loads((tmp_path / "m.json").read_text())
    for change in (
        {"name": "gemm colours"},
        {"floor": 2.0},
        {"reach": {"n": 1.0}},
        {"sizes": whole["spreads"][0]["knots"]},
        {"common": whole["spreads"][0]["sizes"]},
        {"common": 0.5},
    ):
        entry = {**whole["spreads"][0], **change}
        (tmp_path / "m.json").write_text(json.dumps({**whole, "spreads": [entry]}))
        with pytest.raises(ProfileError, match=next(iter(change))):
            read_model(tmp_path / "m.json")


def test_a_file_cannot_ask_for_more_random_values_than_memory_holds(tmp_path: Path) -> None:
    fit = read_model(find_fitted("rtx4090"))
    mixed = fit.spreads["mixed contexts"]
    reach = dict.fromkeys(mixed.reach, 0.5)
    huge = replace(mixed, knots=np.arange(1.0, 2000.0), reach=reach)
    write_model(replace(fit, spreads={"mixed contexts": huge}), tmp_path / "m.json")
    with pytest.raises(ProfileError, match="independent errors"):
        read_model(tmp_path / "m.json")


def test_a_file_without_spreads_draws_one_factor_an_operator(tmp_path: Path) -> None:
    write_model(read_model(find_fitted("rtx4090")), tmp_path / "m.json")
    whole = json.loads((tmp_path / "m.json").read_text())
    del whole["spreads"]
    (tmp_path / "m.json").write_text(json.dumps(whole))
    old = load_cost_model("llama-3.1-8b", "rtx4090", cost_model=tmp_path / "m.json")
    drawn = old.perturbed(4)  # type: ignore[attr-defined]
    shapes = [BatchShape((), 0, 0, 0, rows, 0) for rows in (16, 1040, 1048)]
    factors = [drawn.breakdown(shape)["ffn_up"] / old.breakdown(shape)["ffn_up"] for shape in shapes]
    assert factors == pytest.approx([factors[0]] * 3, rel=1e-4)
    assert factors[0] != pytest.approx(1.0, abs=1e-4)
