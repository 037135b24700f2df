"""Runs a package's command in this process, the way `python -m PACKAGE` does, and says how it ended.

The command line is built once: building it again takes twice as long as most refusals, and these are run by thousands. A command may end in success, or in one clear line and exit code 2 (`assert_refused`); whatever else it does is a fault.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import typer

from policies.edges.command_line import INTERRUPTED, TERMINATED, run_command

PACKAGES = ("workloads", "simulator", "metrics", "profiler", "experiments", "executor")


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float
    """Of this process's work, not on the clock."""


def run(package: str, *arguments: object) -> Ended:
    """The command's exit code and what it printed; an exception that escapes its main is raised as it is."""
    out, err = io.StringIO(), io.StringIO()
    old = sys.argv
    sys.argv = [package, *map(os.fspath, map(_text, arguments))]
    started = time.process_time()
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_command(lambda: group_of(package), package)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1 if error.code else 0
    finally:
        sys.argv = old
    # Nobody here interrupts a command in this process: the signal was meant for the tests, and ends them.
    if code == TERMINATED:
        os.kill(os.getpid(), signal.SIGTERM)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return Ended(code, out.getvalue(), err.getvalue(), time.process_time() - started)


def _text(argument: object) -> str:
    return (
        argument
        if isinstance(argument, str)
        else os.fspath(argument)
        if hasattr(argument, "__fspath__")
        else str(argument)
    )


def assert_refused(ended: Ended, *, seconds: float = 20.0) -> str:
    """The one line of a refusal."""
    text = ended.err
    assert ended.code == 2, f"exit code {ended.code}; stdout {ended.out[-300:]!r}, stderr {text[-600:]!r}"
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    if not lines and "Usage:" in text:  # click's own refusal: a frame around one message
        return text
    assert len(lines) == 1, text[-600:]
    assert text.rstrip("\n").endswith(lines[0]), f"the message goes on over several lines: {text[-600:]!r}"
    assert len(lines[0]) < 1500, f"a message of {len(lines[0])} characters: {lines[0][:300]}"
    assert ended.seconds < seconds, f"took {ended.seconds:.1f} s"
    return lines[0]


def assert_sound(ended: Ended) -> None:
    """Either it worked, or it was refused as it should be."""
    if ended.code != 0:
        assert_refused(ended)


needs_posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX system")


@cache
def group_of(package: str) -> Any:
    """The click group behind `python -m PACKAGE`."""
    return typer.main.get_command(import_module(f"{package}.__main__").build())


class TooLong(BaseException):
    """A command that goes on for a senseless value."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises `TooLong` after so many seconds of this process's own work, or ten times as many on the clock.

    Work and not the clock, so that a machine whose cores others use finds no hangs where there are none.
    """

    def ring(number: int, frame: Any) -> None:
        raise TooLong(
            f"still running after {seconds} s of work"
            if number == signal.SIGPROF
            else f"still there after {10 * seconds} s"
        )

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, 10 * seconds))
    before = [signal.signal(number, ring) for _, number, _ in timers]
    for timer, _, until in timers:
        signal.setitimer(timer, until)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
