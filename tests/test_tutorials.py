"""The three tutorials do what their pages say, on less where they take long."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def main_of(name: str) -> Any:
    return runpy.run_path(str(ROOT / "examples" / "tutorials" / f"{name}.py"))["main"]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_comparing_policies_writes_runs_and_figures_and_names_the_best(tmp_path, capsys):
    summaries = main_of("compare_policies")(out=str(tmp_path))
    best = max(summaries, key=lambda policy: summaries[policy]["goodput_requests_per_s"])
    assert f": {best}. Costs: " in capsys.readouterr().out
    assert summaries["chunked"]["tbt_s_p99"] < summaries["prefill_priority"]["tbt_s_p99"]
    assert (tmp_path / best / "summary.json").exists()
    assert list((tmp_path / "figures").glob("*.png"))


def test_the_policy_of_ones_own_passes_its_checks(capsys):
    checks = main_of("own_policy")(seconds=3.0)
    assert checks
    assert not [check.name for check in checks if check.failure]
    assert "GatheredPrefills" in capsys.readouterr().out


def test_a_larger_load_needs_no_fewer_replicas(capsys):
    size = main_of("size_cluster")
    light, heavy = size(requests_per_s=2.0, requests=150), size(requests_per_s=60.0, requests=150)
    assert 1 == light <= heavy
    assert "1 x H100: 100.0%" in capsys.readouterr().out.partition("\n")[0]
