"""For how long the state after a plan held: what time-weighted means and curves over time are made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from metrics.tables import RunTables


def held_ns(run: RunTables) -> NDArray[np.int64]:
    """Per iteration, nanoseconds from its plan until its replica's next plan, or until its end if that is sooner."""
    replica = run.column("iterations", "replica")
    planned, end = run.column_ns("iterations", "planned_s"), run.column_ns("iterations", "end_s")
    order = np.lexsort((run.column("iterations", "iteration"), replica))
    until = end[order]
    same = replica[order][1:] == replica[order][:-1]
    until[:-1] = np.where(same, np.minimum(until[:-1], planned[order][1:]), until[:-1])
    held = np.empty_like(until)
    held[order] = np.maximum(until - planned[order], 0)
    return held
