"""A live run is stopped at any moment: while it loads, serves or writes, alone or over several processes.

Every moment has the same three rules: the exit code says what happened, no process stays, no half file stays.
`LIVE_ROUNDS=30` draws that many moments for each layout; otherwise one of each.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hardening.command_line import needs_posix
from tests.hardening.test_ways_to_end import litter

pytestmark = [needs_posix, pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")]
ROUNDS = int(os.environ.get("LIVE_ROUNDS", "1"))
LAYOUTS = {"alone": (), "tp": ("--tp", "2"), "pp": ("--pp", "2")}


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    words = [
        "executor",
        "replay",
        "examples/trace.csv",
        "--model",
        "nano",
        "--limit",
        "40",
        "--threads",
        "1",
        "--out",
        str(out),
        *more,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def members(session: int) -> set[int]:
    """The living processes of a session: the command and its ranks."""
    found = set()
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.add(int(place.parent.name))
    return found


def serving(process: subprocess.Popen[str]) -> bool:
    """Wait for the line that says that serving begins."""
    assert process.stderr is not None
    return any(line.startswith("serving") for line in iter(process.stderr.readline, ""))


def wait_for_cpu(process: subprocess.Popen[str], seconds: float) -> None:
    """Until the process has computed so long, however busy the machine is."""
    tick = os.sysconf("SC_CLK_TCK")
    while process.poll() is None:
        fields = (
            Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        if sum(map(int, fields[11:13])) / tick >= seconds:
            return
        time.sleep(0.005)


def check(process: subprocess.Popen[str], number: int, out: Path, early: str = "") -> None:
    from metrics import read_run

    rest = early + process.communicate(timeout=120)[1]
    # -2: some library's own look at Ctrl-C makes Python end by the signal itself, after our message.
    codes = {signal.SIGINT: (0, 130, -2), signal.SIGTERM: (0, 143), signal.SIGKILL: (0, -9)}
    assert process.returncode in codes[signal.Signals(number)], rest
    assert "Traceback" not in rest
    assert process.returncode != -2 or "interrupted" in rest
    until = time.monotonic() + 10
    while (left := members(process.pid)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left
    if number != signal.SIGKILL:
        assert litter(out.parent) == []
    if out.exists():
        assert len(read_run(out).column("requests", "status")) == 40
    elif process.returncode == 0:
        raise AssertionError("success without a run folder")


EACH = [(layout, number) for layout in LAYOUTS for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)]


@pytest.mark.parametrize(("layout", "number"), EACH if ROUNDS > 1 else EACH[3::4])
def test_a_run_that_is_stopped_while_it_serves(layout: str, number: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    process = start(tmp_path / "run", *LAYOUTS[layout])
    assert serving(process)
    time.sleep(0.3)
    os.kill(process.pid, number)
    check(process, number, tmp_path / "run")
    if number != signal.SIGKILL:
        assert (tmp_path / "run").exists(), "what was done so far is written"
        assert not list(tmp_path.glob("*.jsonl"))
    else:
        assert (tmp_path / "run.unfinished.jsonl").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_is_stopped_at_any_moment(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    draw = random.Random(f"{layout} {ROUNDS}")
    for turn in range(ROUNDS):
        number = draw.choice((signal.SIGTERM, signal.SIGINT, signal.SIGKILL))
        process = start(tmp_path / f"run{turn}", *LAYOUTS[layout], "--as-fast-as-possible")
        wait_for_cpu(process, draw.uniform(0.2, 4))  # before that Python itself starts
        if draw.random() < 0.3:
            os.killpg(process.pid, number)  # as Ctrl-C in a terminal does
        else:
            os.kill(process.pid, number)
        try:
            check(process, number, tmp_path / f"run{turn}")
        except AssertionError as error:
            raise AssertionError(f"round {turn}, {signal.Signals(number).name}: {error}") from error
