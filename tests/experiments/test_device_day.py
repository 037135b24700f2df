"""The day of a lent device: short calls, stages that go on where they were cut off, tars that come back."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest

from experiments.calibration import device_day
from experiments.calibration.device_day import DayPlan, DeviceDay, Stage, last_line, pack_folder, stages_of
from experiments.errors import ExperimentError

COUNTS = (
    "import pathlib, sys, time\n"
    "folder = pathlib.Path(sys.argv[1])\n"
    "done = len(list(folder.glob('step-*')))\n"
    "for step in range(done, 6):\n"
    "    (folder / f'step-{step}').write_text('x')\n"
    "    print('step', step, flush=True)\n"
    "    if len(sys.argv) > 2 and step == int(sys.argv[2]):\n"
    "        time.sleep(60)\n"
)
"""Six steps, each on disk as soon as it is done; it hangs after the one that it is told."""


def day(folder: Path, stages: list[Stage], monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceDay, list[str]]:
    monkeypatch.setattr(device_day, "stages_of", lambda plan: stages)
    monkeypatch.setattr(device_day, "LEAST_S", 0.5)
    monkeypatch.setattr(device_day, "PACKING_S", 0.0)
    said: list[str] = []
    return DeviceDay(DayPlan(runner=(sys.executable, "-c")), folder, said.append), said


def test_a_stage_that_is_cut_off_goes_on_in_the_next_call_on_a_fresh_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = [Stage("long", "six steps", (COUNTS, "{out}", "2"), 3.0)]
    first, said = day(tmp_path / "first", hanging, monkeypatch)
    (state,) = first.run(60.0)
    assert (state["state"], state["last_line"]) == ("cut off", "step 2")
    assert said[-1].startswith("long: cut off after")
    # Only the tar comes along.
    second_folder = tmp_path / "second"
    second_folder.mkdir()
    (second_folder / "long.tar.gz").write_bytes((tmp_path / "first" / "long.tar.gz").read_bytes())
    second, _ = day(second_folder, [Stage("long", "six steps", (COUNTS, "{out}"), 60.0)], monkeypatch)
    (state,) = second.run(60.0)
    assert (state["state"], state["calls"], state["last_line"]) == ("done", 2, "step 5")
    log = (second.folder("long") / "log.txt").read_text()
    assert [line for line in log.splitlines() if line.startswith("step")] == [f"step {n}" for n in range(6)]
    # What is done is not done again, unless it is asked for.
    assert second.run(60.0)[0]["calls"] == 2
    assert second.run(60.0, ["long"])[0]["calls"] == 3
    with pytest.raises(ExperimentError, match="--stages: found 'lunch', expected some of long"):
        second.run(60.0, ["lunch"])


def test_a_stage_that_fails_waits_behind_those_never_tried_and_time_ends_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [
        Stage("broken", "fails", ("import sys; print('no device'); sys.exit(3)",), 30.0),
        Stage("tested", "a test failed", ("import sys; print('1 failed'); sys.exit(1)",), 30.0, (1, 5)),
        Stage("last", "sleeps", ("import time; time.sleep(30)",), 30.0),
    ]
    here, said = day(tmp_path, stages, monkeypatch)
    states = here.run(1.5, ["broken", "tested"])
    assert [state.get("state") for state in states] == ["failed", "done", None]
    assert states[0]["last_line"] == "no device"
    states = here.run(3.0)
    assert [state.get("state") for state in states] == ["failed", "done", "cut off"]
    assert states[0]["calls"] == 1, "the stage never tried came first, and took all the time"
    assert said[-1] == "time is up: broken left; the same command goes on"
    assert (tmp_path / "day.json").exists()


def test_a_tar_stays_below_its_limit_and_says_what_it_lacks(tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    (folder / "deep" / "er").mkdir(parents=True)
    noise = bytes((7919 * n * n + n // 3) % 251 for n in range(60_000))
    (folder / "deep" / "er" / "large.bin").write_bytes(noise)
    (folder / "figure.pdf").write_bytes(noise[:20_000])
    (folder / "stage.json").write_text("{}")
    target = tmp_path / "stage.tar.gz"
    assert pack_folder(folder, target) == []
    whole = target.stat().st_size
    gone = pack_folder(folder, target, whole - 1)
    assert gone == ["figure.pdf"], "a figure for print can be drawn again"
    assert target.stat().st_size < whole
    with tarfile.open(target) as tar:
        assert set(tar.getnames()) == {"stage/LEFT_OUT.json", "stage/deep/er/large.bin", "stage/stage.json"}
    assert pack_folder(folder, target, 500) == ["figure.pdf", "deep/er/large.bin"]


def test_a_broken_tar_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long.tar.gz").write_bytes(b"nothing")
    with pytest.raises(ExperimentError, match=r"long\.tar\.gz: cannot be unpacked.*remove it"):
        day(tmp_path, [Stage("long", "", ("",), 1.0)], monkeypatch)


def test_the_stages_are_commands_that_exist_most_valuable_first() -> None:
    from typer.testing import CliRunner

    from experiments.__main__ import build

    stages = stages_of(DayPlan())
    assert [stage.name for stage in stages] == ["tests", "self_test", "calibrate", "replay", "slow_tests"]
    assert len(stages) + 1 <= 8, "so many files come back from a machine"
    for stage in stages[2:4]:
        options = [argument for argument in stage.arguments[2:] if argument.startswith("--")]
        shown = CliRunner().invoke(build(), [stage.arguments[1], "--help"], env={"COLUMNS": "200"}).output
        assert [option for option in options if option not in shown] == []
    assert Path(stages[3].arguments[2]).exists(), "the trace travels with the checkout"


def test_the_last_word_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(b"$ command\nfirst\n\xff second \n\n")
    assert last_line(tmp_path / "log.txt").endswith("second")
