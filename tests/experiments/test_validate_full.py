"""Many validations in one command: what each model serves and measures, and what is refused before anything runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.errors import ExperimentError
from experiments.validation.command import for_each_model, requests_of
from experiments.validation.comparing.settings import Settings
from experiments.validation.comparing.statistics import Comparison
from experiments.validation.many_models import ModelShare, counted, in_a_cell, parts_of


def test_a_slow_model_serves_fewer_requests_and_is_measured_for_longer() -> None:
    base = Settings(trace="", policies=("chunked",))
    parts = parts_of(
        base,
        [Path("a/conv.csv"), Path("code.csv")],
        [ModelShare("nano", (5, 85), 240.0), ModelShare("tiny", (5, 25), 480.0)],
    )
    assert [part.name for part in parts] == ["nano-conv", "nano-code", "tiny-conv", "tiny-code"]
    assert [part.settings.rows for part in parts] == [(5, 85), (5, 85), (5, 25), (5, 25)]
    assert [part.settings.budget_s for part in parts] == [240.0, 240.0, 480.0, 480.0]
    assert [part.settings.engine.model for part in parts] == ["nano", "nano", "tiny", "tiny"]


def test_a_part_has_a_folder_of_its_own_below_the_whole_whatever_models_and_traces_are_called() -> None:
    parts = parts_of(
        Settings(trace="", policies=("chunked",)),
        [Path("days/day.one.csv"), Path("days/day.two.csv")],
        [ModelShare(name, (0, 9), 1.0) for name in ("/models/mine", "/old/mine", "..")],
    )
    assert [part.name for part in parts] == [
        "models-mine-day.one.csv", "models-mine-day.two.csv", "old-mine-day.one.csv", "old-mine-day.two.csv",
        "--day.one.csv", "--day.two.csv",
    ]  # fmt: skip


def test_one_value_stands_for_all_models_and_any_other_count_is_refused() -> None:
    assert for_each_model("100", 3, "--limit") == ["100", "100", "100"]
    assert for_each_model("100, 30", 2, "--limit") == ["100", "30"]
    with pytest.raises(ExperimentError, match=r"--budget: found 2 values for 3 models"):
        for_each_model("1s,2s", 3, "--budget")


@pytest.mark.parametrize("text", ["", "0", "-3", "2.5", "²", "9" * 400, "ten"])
def test_a_limit_that_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ExperimentError, match="--limit"):
        requests_of(text)


def test_a_cell_shows_both_errors_and_the_spread() -> None:
    row = Comparison(
        policy="chunked",
        load=0.6,
        statistic="tpot_s_mean",
        simulated=1.1,
        low=1.0,
        high=1.2,
        live=1.0,
        live_low=0.9,
        live_high=1.1,
        rescaled=0.98,
        at_live_speed=0.01,
        repeats=2,
        aim=0.03,
    )
    assert in_a_cell(row) == "+10.0, -2.0% (20.0%)"
    assert in_a_cell(replace(row, rescaled=float("nan"))) == "+10.0% (20.0%)"
    assert counted([row.verdict, row.rescaled_verdict, "outside"]) == "1 within aim, 1 within spread, 1 outside"
