"""Latencies of requests: the one place that says what TTFT, TPOT and the others are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrics.run_folder.columns import to_ns
from metrics.run_folder.tables import RunTables

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

COLUMNS = ("arrival_s", "admitted_s", "first_token_s", "finished_s", "output_tokens", "status")


def own_latencies(requests: Mapping[str, NDArray[Any]], finished: Bools) -> dict[str, Floats]:
    """Latencies of each request in seconds; NaN unless it is among the finished ones and has such a value.

    requests: columns of the requests table, COLUMNS among them.
    """
    moments = {name: requests[f"{name}_s"] for name in ("arrival", "admitted", "first_token", "finished")}

    def between(start: str, end: str) -> Floats:
        known = finished & ~np.isnan(moments[start]) & ~np.isnan(moments[end])
        span = np.full(len(finished), np.nan)
        span[known] = (to_ns(moments[end][known]) - to_ns(moments[start][known])) / 1e9
        return span

    output = requests["output_tokens"]
    e2e = between("arrival", "finished")
    return {
        "ttft": between("arrival", "first_token"),
        "tpot": np.where(output > 1, between("first_token", "finished"), np.nan) / np.where(output > 1, output - 1, 1),
        "e2e": e2e,
        "normalized_latency": e2e / np.maximum(output, 1),
        "scheduling_delay": between("arrival", "admitted"),
    }


def finished_latencies(run: RunTables, wanted: Bools | None = None) -> dict[str, Floats]:
    """Of the wanted requests that finished (all of them by default): each latency's values, in the table's order."""
    requests = {name: run.column("requests", name) for name in COLUMNS}
    finished = requests["status"] == "finished"
    own = own_latencies(requests, finished if wanted is None else finished & wanted)
    return {name: values[~np.isnan(values)] for name, values in own.items()}
