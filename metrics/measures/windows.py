"""For how long the state after a plan held, and how much of an iteration lies in the measured window."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from metrics.run_folder.tables import RunTables


def held_ns(run: RunTables) -> NDArray[np.int64]:
    """Per iteration, nanoseconds from its plan until its engine's next plan, or until its end if that is sooner."""
    replica = run.engines("iterations")
    planned, end = run.column_ns("iterations", "planned_s"), run.column_ns("iterations", "end_s")
    order = _in_order(replica, run.column("iterations", "iteration"))
    until = end[order]
    same = replica[order][1:] == replica[order][:-1]
    until[:-1] = np.where(same, np.minimum(until[:-1], planned[order][1:]), until[:-1])
    held = np.empty_like(until)
    held[order] = np.maximum(until - planned[order], 0)
    return held


def _in_order(replica: NDArray[np.integer], number: NDArray[np.integer]) -> NDArray[np.intp]:
    """Where the iterations of each replica stand, by number. They are written in that order, replica by replica or with
    those of others between: then replicas are told apart, and nothing is sorted."""
    few = len(replica) and int(replica.min()) >= 0 and int(replica.max()) < 1 << 15
    order = np.argsort(replica.astype(np.int16) if few else replica, kind="stable")
    numbers, replicas = number[order], replica[order]
    if np.any((numbers[1:] < numbers[:-1]) & (replicas[1:] == replicas[:-1])):
        return np.lexsort((number, replica))
    return order


def share_inside(run: RunTables, start_s: float) -> NDArray[np.float64]:
    """Per iteration, the share of its device time that lies after the start of a window: 1 for most, 0 for what ended
    before, and a part of 1 for what runs while the window opens (counted stage by stage).
    """
    start_ns = round(start_s * 1e9)
    begun, ended = run.column_ns("iterations", "start_s"), run.column_ns("iterations", "end_s")
    share = (ended > start_ns).astype(np.float64)
    straddling = np.flatnonzero((begun < start_ns) & (ended > start_ns))
    if not len(straddling):
        return share
    stage = {"engine": run.engines("stages"), "iteration": run.column("stages", "iteration")}
    stage |= {name: run.column_ns("stages", name) for name in ("start_s", "end_s")}
    late = stage["end_s"] > start_ns
    engine, number = run.engines("iterations"), run.column("iterations", "iteration")
    for row in straddling.tolist():
        mine = (stage["iteration"] == number[row]) & (stage["engine"] == engine[row])
        whole = int((stage["end_s"] - stage["start_s"])[mine].sum())
        inside = int((stage["end_s"] - np.maximum(stage["start_s"], start_ns))[mine & late].sum())
        share[row] = inside / whole if whole else 0.0
    return share
