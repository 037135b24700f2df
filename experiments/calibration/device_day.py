"""A day with a device that is lent for minutes: everything worth knowing of it, most valuable first, in short calls.

Each stage is a process of its own with a limit, and leaves one tar below 16 MiB, whole or cut off. The next call, on
this machine or on a fresh one that has been given the tars, goes on: stages that are done are passed over, those cut
off continue in their own folders. Nothing is fetched: what a stage needs is in the checkout, or a wheel beside it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.errors import ExperimentError
from experiments.running.stage_files import read_json, write_json
from policies.edges.output_file import whole_file

MAX_BYTES = 16 << 20
LEAST_S = 20.0
"""A stage is not begun with less time than this."""
PACKING_S = 5.0
"""Kept back for the tar of a stage that was cut off."""
TRACE = "profiler/data/facts/traces/azure2023_conv.parquet"
POLICIES = "chunked,prefill_priority,vllm_v1,decode_maximal"
FAILED_OR_NONE = (1, 5)
"""Exit codes of pytest: tests have failed, or none was selected."""
STATES = ("done", "cut off", "failed")


@dataclass(frozen=True)
class DayPlan:
    """What the day is about. calibrate_s: budget of the calibration. requests: of the replay of Azure's conversations.

    runner: how a module of Python is started; its arguments follow.
    """

    model: str = "llama-3.1-8b"
    calibrate_s: float = 150.0
    calibrate_requests: int = 60
    requests: int = 200
    policies: str = POLICIES
    runner: tuple[str, ...] = (sys.executable, "-m")
    wheels: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Stage:
    """One process. arguments: of the runner. {out} in them is the stage's folder, {NAME} that of another stage.

    limit_s: most seconds of one call. told_by: exit codes that are a result too, as when a test has failed.
    """

    name: str
    what: str
    arguments: tuple[str, ...]
    limit_s: float
    told_by: tuple[int, ...] = ()


def stages_of(plan: DayPlan) -> list[Stage]:
    """Most valuable first."""
    engine = ("--model", plan.model, "--device", "cuda")
    return [
        Stage(
            "tests",
            "right answers on this device",
            ("pytest", "tests/executor", "-m", "cuda and not slow", "-q", "-p", "no:cacheprovider",
                "--continue-on-collection-errors", "-rfEs",
             "--junitxml={out}/tests.xml"),
            180.0,
            FAILED_OR_NONE,
        ),
        Stage(
            "self_test",
            "kernels against float64, for several shapes of heads",
            ("executor.checks.self_test", "--device", "cuda", "--out", "{out}/self_test.json"),
            60.0,
            (1,),
        ),
        Stage(
            "calibrate",
            "ceilings, judged batches, host time, profile, fit, a first validation",
            ("experiments", "calibrate", *engine, "--budget", f"{plan.calibrate_s:g}s", "--repeats", "1",
             "--requests", str(plan.calibrate_requests), "--max-num-seqs", "64", "--out", "{out}/calib"),
            2.0 * plan.calibrate_s + 120.0,
        ),
        Stage(
            "replay",
            "Azure conversations under four policies, and what was predicted of them",
            ("experiments", "validate", TRACE, *engine, "--policies", plan.policies, "--limit", str(plan.requests),
             "--repeats", "1", "--max-num-seqs", "128", "--threads", "0", "--ensemble", "9",
             "--profile", "{calibrate}/calib/validation/profile.parquet", "--out", "{out}/replay"),
            300.0,
        ),
        Stage(
            "slow_tests",
            "the aims once more, as tests",
            ("pytest", "tests/executor", "-m", "cuda and slow", "-q", "-p", "no:cacheprovider",
                "--continue-on-collection-errors", "-rfEs",
             "--junitxml={out}/tests.xml"),
            120.0,
            FAILED_OR_NONE,
        ),
    ]  # fmt: skip


class DeviceDay:
    """The stages in one folder: FOLDER/NAME.tar of each, FOLDER/day.json, and FOLDER/work/NAME while they run."""

    def __init__(self, plan: DayPlan, out: Path, say: Callable[[str], None]) -> None:
        self.plan, self.out, self.say = plan, out, say
        self.stages = stages_of(plan)
        out.mkdir(parents=True, exist_ok=True)
        for stage in self.stages:
            self._unpack(stage)

    def run(self, limit_s: float, wanted: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Stages that are not done yet, for so many seconds in all; returns what is known of every stage.

        wanted: only these, those that are done as well. Stages never tried come before those that failed.
        """
        unknown = set(wanted) - {stage.name for stage in self.stages}
        if unknown:
            names = ", ".join(stage.name for stage in self.stages)
            raise ExperimentError(f"--stages: found {sorted(unknown)[0]!r}, expected some of {names}")
        until = time.monotonic() + limit_s
        if wanted:
            todo = [stage for stage in self.stages if stage.name in wanted]
        else:
            todo = [stage for stage in self.stages if self.state(stage) != "done"]
            todo.sort(key=lambda stage: self.state(stage) == "failed")
        for number, stage in enumerate(todo):
            left = until - time.monotonic() - PACKING_S
            if left < LEAST_S:
                names = ", ".join(each.name for each in todo[number:])
                self.say(f"time is up: {names} left; the same command goes on")
                break
            self._run(stage, min(left, stage.limit_s))
            write_json(self.out / "day.json", self.states())
        write_json(self.out / "day.json", self.states())
        return self.states()

    def folder(self, name: str) -> Path:
        return self.out / "work" / name

    def state(self, stage: Stage) -> str:
        """One of STATES, or "" if it was never run."""
        return str(self._known(stage).get("state", ""))

    def states(self) -> list[dict[str, Any]]:
        return [{"stage": stage.name, "what": stage.what, **self._known(stage)} for stage in self.stages]

    def _known(self, stage: Stage) -> dict[str, Any]:
        file = self.folder(stage.name) / "stage.json"
        return dict(read_json(file)) if file.exists() else {}

    def _run(self, stage: Stage, seconds: float) -> None:
        folder = self.folder(stage.name)
        folder.mkdir(parents=True, exist_ok=True)
        known = self._known(stage)
        command = [*self.plan.runner, *self._arguments(stage)]
        self.say(f"{stage.name}: {stage.what}, at most {seconds:.0f} s")
        since = time.monotonic()
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            code = run_limited(command, seconds, log, self._environment())
        took = time.monotonic() - since
        state = "cut off" if code is None else "done" if code == 0 else "failed"
        if code in stage.told_by:
            state = "done"
        found = {
            "state": state, "code": code, "seconds": round(float(known.get("seconds", 0.0)) + took, 1),
            "calls": int(known.get("calls", 0)) + 1, "last_line": last_line(folder / "log.txt"),
        }  # fmt: skip
        write_json(folder / "stage.json", found)
        left_out = pack_folder(folder, self.out / f"{stage.name}.tar.gz")
        if left_out:
            self.say(f"{stage.name}: {len(left_out)} files are not in its tar, which would be over 16 MiB")
        self.say(f"{stage.name}: {state} after {took:.0f} s; {found['last_line']}")

    def _arguments(self, stage: Stage) -> list[str]:
        places = {each.name: str(self.folder(each.name)) for each in self.stages}
        places["out"] = places[stage.name]
        arguments = list(stage.arguments)
        for name, place in places.items():
            arguments = [argument.replace("{" + name + "}", place) for argument in arguments]
        if "--profile" in arguments:
            at = arguments.index("--profile")
            if not Path(arguments[at + 1]).exists():
                # Without a calibration the replay measures its own, smaller profile.
                self.say(f"{stage.name}: no profile from the calibration, it measures its own")
                arguments[at : at + 2] = ["--budget", f"{self.plan.calibrate_s / 4:g}s"]
        return arguments

    def _environment(self) -> dict[str, str]:
        paths = [str(Path.cwd()), *(str(wheel.resolve()) for wheel in self.plan.wheels)]
        before = os.environ.get("PYTHONPATH")
        return {
            **os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([*paths, *([before] if before else [])]),
        }  # fmt: skip

    def _unpack(self, stage: Stage) -> None:
        packed = self.out / f"{stage.name}.tar.gz"
        if packed.exists() and not self.folder(stage.name).exists():
            target = self.folder(stage.name).parent
            target.mkdir(parents=True, exist_ok=True)
            try:
                with tarfile.open(packed, "r:gz") as tar:
                    tar.extractall(target, filter="data")
            except (tarfile.TarError, OSError, EOFError) as error:
                raise ExperimentError(
                    f"{packed}: cannot be unpacked ({str(error).splitlines()[0]}); remove it to begin anew"
                ) from None


def run_limited(command: Sequence[str], seconds: float, log: Any, environment: dict[str, str]) -> int | None:
    """Exit code of a process, None if it was ended because its time was up, with whatever it had started."""
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(3.0)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def last_line(file: Path) -> str:
    """The last line of a log that says anything, cut to 200 characters."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line[:200] for line in reversed(lines) if line and not line.startswith("$ ")), "")


def pack_folder(folder: Path, target: Path, most_bytes: int = MAX_BYTES) -> list[str]:
    """Write a folder as a tar of at most `most_bytes`; returns files that had to be left out, the largest first.

    Figures for print go before anything else; a list of what is missing is in the tar.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "LEFT_OUT.json")
    gone: list[Path] = []
    while True:
        kept = [path for path in files if path not in gone]
        names = [str(path.relative_to(folder)) for path in gone]
        if names:
            (folder / "LEFT_OUT.json").write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
            kept.append(folder / "LEFT_OUT.json")
        with whole_file(target, ExperimentError) as part, tarfile.open(part, "w:gz") as tar:
            for path in kept:
                tar.add(path, f"{folder.name}/{path.relative_to(folder)}", recursive=False)
        excess = target.stat().st_size - most_bytes
        candidates = sorted(
            (path for path in files if path not in gone and path.name != "stage.json"),
            key=lambda path: (path.suffix != ".pdf", -path.stat().st_size),
        )
        if excess <= 0 or not candidates:
            return names
        for path in candidates:
            gone.append(path)
            excess -= path.stat().st_size
            if excess <= 0:
                break


def table_of(states: Sequence[dict[str, Any]]) -> list[str]:
    """One line a stage, as a person reads it."""
    return [
        f"{state['stage']:<12} {state.get('state') or 'not yet':<8} {state.get('seconds', 0):>7.1f} s  "
        f"{state.get('last_line') or state['what']}"
        for state in states
    ]
