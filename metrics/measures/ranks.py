"""How evenly the data-parallel ranks of a replica are loaded, and how long they wait for each other.

Ranks that step together end each step with the slowest of them. What a rank is done before that is time in which it
waits; a step without requests of its own is a dummy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrics.run_folder.tables import RunTables

Ints = NDArray[np.int64]


def met_ns(run: RunTables) -> Ints | None:
    """Per iteration, when the slowest rank of its step was done on the device; None where no ranks step together.

    Ranks that step together share the number, the start and the end of an iteration, and have one stage each.
    """
    if run.ranks == 1 or np.any(run.column("stages", "stage")):
        return None
    names = ("replica", "iteration")
    start, end = run.column_ns("iterations", "start_s"), run.column_ns("iterations", "end_s")
    keys = [run.column("iterations", name).astype(np.int64) for name in names] + [start, end]
    done = start + run.column_ns("iterations", "device_s")
    order = np.lexsort(keys[::-1])
    new = np.concatenate([[True], np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)])
    step = np.cumsum(new) - 1
    latest = np.zeros(int(step[-1]) + 1 if len(step) else 0, np.int64)
    np.maximum.at(latest, step, done[order])
    met = np.empty_like(done)
    met[order] = latest[step]
    return met


def rank_rows(run: RunTables) -> list[dict[str, Any]]:
    """One row per rank that ran anything, by replica and rank; none where no replica has ranks.

    requests: that it served. steps, dummy_steps: of it. tokens: prefill and decode. in_steps_s: device start to the
    last rank's end, added up; busy_s: its own part of that; waiting_s: the rest, waiting_share of it. kv_use_max: the
    largest share of its KV blocks in use, NaN where their number is not known.
    """
    if run.ranks == 1:
        return []
    engine, served = run.engines("iterations"), run.engines("requests")
    device = run.column_ns("iterations", "device_s")
    done = run.column_ns("iterations", "start_s") + device
    met = met_ns(run)
    waiting = np.zeros(len(device), np.int64) if met is None else met - done
    tokens = run.column("iterations", "chunk_tokens").astype(np.int64) + run.column("iterations", "decodes")
    free, blocks = run.column("iterations", "free_blocks"), run.config.get("num_blocks")
    rows = []
    for number in np.unique(engine).tolist():
        own = engine == number
        busy, waited = int(device[own].sum()), int(waiting[own].sum())
        replica, rank = divmod(number, run.ranks)
        rows.append(
            {
                "replica": replica,
                "rank": rank,
                "requests": int((served == number).sum()),
                "steps": int(own.sum()),
                "dummy_steps": int((tokens[own] == 0).sum()),
                "tokens": int(tokens[own].sum()),
                "in_steps_s": (busy + waited) / 1e9,
                "busy_s": busy / 1e9,
                "waiting_s": waited / 1e9,
                "waiting_share": waited / (busy + waited) if busy + waited else 0.0,
                "kv_use_max": float(1 - free[own].min() / blocks) if blocks else float("nan"),
            }
        )
    return rows


def rank_summary(run: RunTables) -> dict[str, float]:
    """The keys of a summary that are about ranks: nothing where no replica has any."""
    rows = rank_rows(run)
    if not rows:
        return {}
    in_steps = sum(row["in_steps_s"] for row in rows)
    steps = sum(row["steps"] for row in rows)
    tokens = [row["tokens"] for row in rows]
    return {
        "ranks": run.ranks,
        "rank_waiting_share": sum(row["waiting_s"] for row in rows) / in_steps if in_steps else float("nan"),
        "rank_waiting_share_max": max(row["waiting_share"] for row in rows),
        "rank_dummy_share": sum(row["dummy_steps"] for row in rows) / steps if steps else float("nan"),
        "rank_imbalance": max(tokens) * len(tokens) / sum(tokens) if sum(tokens) else float("nan"),
    }
