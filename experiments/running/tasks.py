"""The work that other processes do: a task is plain data in, plain data out, so that any transport can carry it.

Errors come back as data too: a point that cannot be run is a result, not the end of a sweep.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from experiments.errors import ExperimentError
from policies.edges.input_digests import changed_inputs, digests_of
from policies.edges.user_code import PACKAGES, place_in_user_code, raised_in_ours

Task = Mapping[str, Any]
Result = dict[str, Any]

KINDS = {
    "point": "experiments.sweeps.point:run_point",
    "capacity": "experiments.capacity.search:run_task",
    "saturated": "experiments.capacity.search:run_saturated",
    "cluster_size": "experiments.capacity.cluster_size:run_task",
    "experiment": "experiments.papers.figure_files:run_task",
    "arena": "experiments.arena.match:run_match",
    "arena_knee": "experiments.arena.match:run_knee",
    "claim": "experiments.papers.claim:run_task",
}
"""What a task's `kind` may be, and who does it."""


def perform(task: Task) -> Result:
    """Do one task: {"status": "ok", "result": ...} or {"status": "failed", "error": one line}; never raises."""
    from metrics.run_folder.folder import json_ready

    began = time.perf_counter()
    try:
        _refuse_other_inputs(task)
        module, _, name = KINDS[task["kind"]].partition(":")
        work: Callable[[Task], Result] = getattr(import_module(module), name)
        done: Result = {"status": "ok", "error": "", "result": json_ready(work(task))}
    except Exception as error:
        done = {"status": "failed", "error": error_line(error), "result": {}}
        if not is_ours(error):
            done["traceback"] = traceback.format_exc()
    done["wall_s"] = time.perf_counter() - began
    return done


def with_inputs(task: Task) -> dict[str, Any]:
    """The same task, with what it is made from: the digest of every file that it names."""
    return {**task, "inputs": digests_of({key: value for key, value in task.items() if key != "inputs"})}


def _refuse_other_inputs(task: Task) -> None:
    """Files may be edited between the moment when a task was made and the one when it is done."""
    if expected := task.get("inputs"):
        if changed := changed_inputs(expected, digests_of({**task, "inputs": None})):
            raise ExperimentError(f"found inputs that changed while the work went on: {', '.join(changed)}")


def is_ours(error: BaseException) -> bool:
    """Whether an exception is one of this project's own types, whose message is meant for users."""
    return type(error).__module__.split(".")[0] in PACKAGES


def error_line(error: BaseException) -> str:
    """An exception as one line: its type unless the message was written for users, its place in their own code."""
    text = " ".join(str(error).split())
    line = text if is_ours(error) and text else f"{type(error).__name__}: {text}".rstrip(": ")
    place = place_in_user_code(error)
    ours = None if is_ours(error) else raised_in_ours(error)
    if ours:
        place = f"{place}; raised in Charioteer's own {ours}"
    return f"{line} ({place})" if place else line


def one_thread_each() -> None:
    """Keep numerical libraries of a worker from competing for the cores of its siblings."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
