"""Code that a user brought, a policy or a router, and where in it something went wrong.

An exception that passes through it is told as one line with the place in the user's file: sixty lines of our own
frames say nothing to its author. Where it was raised in our own code, which the user's had called, the line says so: it
may be our fault. `CHARIOTEER_TRACEBACKS=1` shows all frames all the same.
"""

from __future__ import annotations

import traceback
from importlib.util import find_spec
from pathlib import Path

TRACEBACKS = "CHARIOTEER_TRACEBACKS"
"""The environment variable with which whole tracebacks are printed too."""

PACKAGES = frozenset(("policies", "workloads", "metrics", "profiler", "simulator", "experiments", "executor"))
"""Ours. Their own exceptions are messages for the user; each folder has one type."""

HOME = Path(__file__).resolve().parents[2]
"""Where all of them lie side by side: a checkout, or site-packages."""

MODULES: set[str] = set()
"""Names of the modules that were loaded from a user's file or another package's entry point."""


def foreign_package() -> tuple[str, str] | None:
    """Name and file of a module that stands in front of one of ours on the import path, None if none does.

    `python -m` puts the current folder first: a `metrics.py` there would run in place of ours.
    """
    for name in sorted(PACKAGES):
        spec = find_spec(name)
        origin = None if spec is None else spec.origin
        if origin is not None and Path(origin).resolve().parent.parent != HOME:
            return name, origin
    return None


def place_in_user_code(error: BaseException) -> str | None:
    """`file.py:LINE, in FUNCTION` of the innermost frame of user code that the exception passed, None if none."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") in MODULES:
            found = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    return found


def raised_in_ours(error: BaseException) -> str | None:
    """`policies/contract/draft.py:LINE, in FUNCTION` where user code called ours and the exception began there; None
    elsewhere.

    What ours calls in turn, the standard library or NumPy, counts as ours; a callback of the user's does not.
    """
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__"))
        if name in MODULES:
            found = ""
        elif found is not None and name.partition(".")[0] in PACKAGES:
            found = f"{name.replace('.', '/')}.py:{line}, in {frame.f_code.co_name}"
    return found or None


def place_in_file(error: BaseException, path: Path) -> str:
    """`LINE` of that file where it failed while it was run or read, "" where it is not known."""
    # The importer makes the name absolute, whatever the user typed.
    names = (str(path), str(path.absolute()))
    if isinstance(error, SyntaxError) and error.filename in names:
        return f":{error.lineno}"
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename in names]
    return f":{lines[-1]}" if lines else ""
