"""Prediction against a live pipeline: stages costed one by one, batches that agree, bubbles side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.errors import ExperimentError
from experiments.validation.comparing.live_side import EngineChoice, PolicyChoice
from experiments.validation.comparing.pipeline_bubbles import ALL, BubbleComparison, bubbles_in_short, ranked
from experiments.validation.comparing.settings import Settings
from experiments.validation.existing_runs import validate_against
from experiments.validation.pages.report import write_report
from experiments.validation.stages import Validation
from policies import BatchShape
from profiler.errors import ProfileError
from profiler.iterations.iteration_model import AMOUNTS, ROW_TERMS, Bounds, IterationFit
from profiler.iterations.staged_model import StagedFit, StagedModel, fit_host, fit_sends, read_staged, write_staged
from tests.experiments.test_validate import small_trace


def stage_fit(step_ns: float) -> IterationFit:
    prices = (step_ns, *(0.0 for _ in AMOUNTS[1:]))
    bounds = Bounds(512, 64, 4, 512, 2048, 64, 2048, 100_000)
    return IterationFit(
        "cpu", "small", "float32", "native", (0.0,) * len(ROW_TERMS), prices, (0.0,) * 4, (0.0, 0.0), bounds
    )


def test_a_staged_model_costs_every_stage_and_send_and_comes_back_from_disk(tmp_path: Path) -> None:
    fit = StagedFit(
        (stage_fit(3e6), stage_fit(5e6)), ((2e5, 10.0),), (1e5, 0.0, 100.0, 1.0), (5e4, 1e3), {"from": "a test"}
    )
    write_staged(fit, tmp_path / "model.json")
    model = StagedModel(read_staged(tmp_path / "model.json"))
    assert model.fit == fit
    shape = BatchShape(((100, 0),), 20, 2000, 200, 0, 21)
    assert [model.stage_ns(shape, stage) for stage in range(2)] == [3_000_000, 5_000_000]
    assert [model.send_ns(shape, stage) for stage in range(2)] == [200_000 + 120 * 10, 0]
    assert model.host_ns(shape) == (100_000 + 20 * 100 + 100, 50_000 + 21_000)
    assert sum(model.breakdown(shape).values()) == 8_000_000 + 201_200 + 102_100 + 71_000
    assert model.predict_ns([shape] * 3, 1).tolist() == [5_000_000] * 3
    assert StagedModel(fit, speed=2.0).stage_ns(shape, 1) == 10_000_000
    with pytest.raises(ProfileError, match="found 0 sends"):
        StagedFit(fit.stages, (), fit.host_before, fit.host_after)
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ProfileError, match=r"model\.json"):
        read_staged(tmp_path / "model.json")


def test_sends_and_host_time_are_fitted_to_their_means() -> None:
    rows = np.array([1.0, 100.0, 400.0, 50.0])
    latency, each = fit_sends(rows, (3e5 + 20 * rows) / 1e9)
    assert latency == pytest.approx(3e5)
    assert each == pytest.approx(20.0)
    shapes = [
        BatchShape(((tokens, 0),), n, 10 * n, 10, 0, n + 1) for n, tokens in [(1, 10), (9, 200), (30, 5), (4, 90)]
    ]
    after = np.array([(2e4 + 300 * shape.sampled) / 1e9 for shape in shapes])
    _, found = fit_host(shapes, after, after)
    assert found == pytest.approx((2e4, 300.0))


def test_policies_are_ranked_by_bubbles_where_live_runs_tell_them_apart() -> None:
    def row(policy: str, simulated: float, low: float, high: float, cause: str = ALL) -> BubbleComparison:
        return BubbleComparison(policy, 0.9, cause, simulated, (low + high) / 2, low, high, 2)

    rows = [
        row("a", 0.10, 0.11, 0.12),
        row("b", 0.30, 0.20, 0.25),
        row("c", 0.05, 0.115, 0.13),
        row("a", 0, 0, 0, "pb1"),
    ]
    assert ranked(rows) == (2, 2)  # a and c are not told apart
    assert rows[0].verdict == "within aim"
    assert rows[1].verdict == "outside"
    (line,) = bubbles_in_short(rows)
    assert "1 of 1 shares by cause" in line
    assert "`a` 10.0% for 11.5%" in line
    (line,) = bubbles_in_short([*rows, replace(rows[0], load=0.625)])
    assert "`a` at 90% 10.0% for 11.5%" in line
    assert "`a` at 62.5% 10.0% for 11.5%" in line
    assert bubbles_in_short([]) == []


@pytest.mark.slow
def test_the_loop_over_two_stages_agrees_batch_by_batch(tmp_path: Path) -> None:
    settings = Settings(
        trace=str(small_trace(tmp_path, 6)),
        policies=("chunked:chunk_size=64", "prefill_priority"),
        rows=(0, 6),
        repeats=1,
        budget_s=1.0,
        ensemble=1,
        loads=(1.5,),
        engine=EngineChoice(model="nano", device="cpu", threads=1, max_num_seqs=4, token_budget=256, pp=2),
    )
    validation = Validation(settings, tmp_path / "out")
    result = validation.run()
    for name, found in result.agreements.items():
        assert found.exact, (name, found.divergence)
    assert result.lost == 0
    assert {row.policy for row in result.bubbles} == set(settings.policies)
    assert all(0 <= row.live <= 1 and 0 <= row.simulated <= 1 for row in result.bubbles)
    for policy in settings.policies:
        (total,) = [row for row in result.bubbles if row.policy == policy and row.cause == ALL]
        causes = [row.live for row in result.bubbles if row.policy == policy and row.cause != ALL]
        assert sum(causes) == pytest.approx(total.live)
    page = write_report(result, tmp_path / "out")[0].read_text()
    assert "## Bubbles" in page
    assert len(json.loads((tmp_path / "out" / "report.json").read_text())["bubbles"]) == len(result.bubbles)
    # A run of two stages is held against costs of two stages only.
    live = [validation._live_folder(0, 1.5, PolicyChoice.parse(settings.policies[0]))]
    options: dict[str, Any] = {"gpu": "h100", "model": None, "options": {}, "say": lambda _: None}
    again = validate_against(live, cost_model=str(tmp_path / "out" / "model.json"), **options)
    assert again.simulated is not None
    assert set(again.simulated.column("stages", "stage").tolist()) == {0, 1}
    one_device = tmp_path / "out" / "model.stage0.json"
    with pytest.raises(ProfileError, match="say nothing about tp 1, pp 2"):
        validate_against(live, cost_model=str(one_device), **options)
    with pytest.raises(ExperimentError, match="measures its own stages"):
        Validation(settings, tmp_path / "other", profile=tmp_path / "x.parquet")
