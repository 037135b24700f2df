"""A calibration started a second time: it goes on where it ended, and never with another workload's trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.calibration import stages as calibrate
from experiments.calibration.stages import Calibration, folder_bytes, settings_of, slim
from experiments.errors import ExperimentError
from experiments.validation.comparing.live_side import EngineChoice
from metrics import read_run
from metrics.run_folder.tables import TABLES
from simulator import replay
from workloads import generate, read_trace

WHAT = Calibration(EngineChoice(device="cpu"), requests=20, prompt="uniform:5,50", output="fixed:3")


def test_a_folder_keeps_its_trace_and_refuses_another_workload(tmp_path: Path) -> None:
    trace = read_trace(settings_of(WHAT, tmp_path).trace)
    assert len(trace) == 20
    assert read_trace(settings_of(WHAT, tmp_path).trace).same_requests(trace)
    for other in (
        replace(WHAT, prompt="uniform:5,60"),
        replace(WHAT, output="fixed:4"),
        replace(WHAT, requests=19),
        replace(WHAT, engine=replace(WHAT.engine, seed=1)),
    ):
        with pytest.raises(ExperimentError, match="another --prompt, --output, --requests or --seed"):
            settings_of(other, tmp_path)


def test_a_folder_that_is_too_large_loses_nothing_that_a_second_start_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replay(generate(requests=300, arrivals="poisson:5", prompt="uniform:100,900", output="uniform:20,60", seed=1))
    run.write(tmp_path / "live")
    (tmp_path / "figures").mkdir()
    for name in ("a.pdf", "a.png"):
        (tmp_path / "figures" / name).write_bytes(b"1234")
    said: list[str] = []
    slim(tmp_path, said.append)
    assert said == []
    before = folder_bytes(tmp_path)
    monkeypatch.setattr(calibrate, "MAX_BYTES", 1000)
    slim(tmp_path, said.append)
    assert said[0].startswith("removed 1 figures for print")
    assert "fewer --requests" in said[1]
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["a.png"]
    assert folder_bytes(tmp_path) < 0.8 * before
    again = read_run(tmp_path / "live")
    for name in TABLES:
        one, other = (repr(each.table(name).to_pylist()) for each in (again, run.tables))  # NaN is not equal to NaN
        assert one == other, name
