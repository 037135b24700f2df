"""Many validations in one command: what each model serves and measures, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.errors import ExperimentError
from experiments.validate_command import for_each_model, requests_of
from experiments.validate_full import ModelShare, parts_of
from experiments.validate_settings import Settings


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


def test_one_value_stands_for_all_models_and_any_other_count_is_refused() -> None:
    assert for_each_model("100", 3, "--limit") == ["100", "100", "100"]
    assert for_each_model("100, 30", 2, "--limit") == ["100", "30"]
    with pytest.raises(ExperimentError, match=r"--budget: found 2 values for 3 models"):
        for_each_model("1s,2s", 3, "--budget")


@pytest.mark.parametrize("text", ["", "0", "-3", "2.5", "²", "9" * 400, "ten"])
def test_a_limit_that_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ExperimentError, match="--limit"):
        requests_of(text)
