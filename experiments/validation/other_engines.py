"""Runs of other engines as something to compare with: a load client's result, or a log with one request a line.

What such a file can give is who was asked for what, when, and how long it took; there are no batches in it, so nothing
but the statistics can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.errors import ExperimentError
from metrics.measures.statistics import statistics
from policies.edges.input_file import LOG_BYTES, parse_json, read_text
from policies.edges.settings import check_value
from workloads import Trace
from workloads.reading.client_results import ClientRun, bench_run, client_tool, read_client_run

Array = NDArray[np.float64]


@dataclass(frozen=True)
class OtherRun:
    """The requests as they were sent, and each one's latencies in seconds (TPOT: NaN where there is one token)."""

    trace: Trace
    ttft_s: Array
    tpot_s: Array
    e2e_s: Array

    def summary(self) -> dict[str, float]:
        """Statistics under the names of a run's summary."""
        found = {}
        for family in ("ttft_s", "tpot_s", "e2e_s"):
            values = getattr(self, family)
            found |= {f"{family}_{name}": value for name, value in statistics(values[~np.isnan(values)]).items()}
        end = self.trace.arrival_ns / 1e9 + self.e2e_s
        span = float(np.max(end) - self.trace.arrival_ns[0] / 1e9)
        found["output_tokens_per_s"] = float(self.trace.output_tokens.sum()) / span if span > 0 else float("nan")
        return found


def read_other_run(path: Path) -> OtherRun:
    """A load client's result (vLLM's benchmark, guidellm, aiperf), or a JSON-lines request log.

    The log's keys: input_toks, output_toks, arrival_time, first_token_ts, last_token_ts and queued_ts (seconds; the
    last three on one clock), as serving logs of vLLM give them. Raises ExperimentError naming file and entry.
    """
    if client_tool(path) is not None:
        return _of_client(read_client_run(path, ExperimentError))
    text = read_text(path, ExperimentError, LOG_BYTES)
    if path.suffix == ".jsonl":
        return _request_log(path, text)
    content = parse_json(text, str(path), ExperimentError, constants=True)
    if not isinstance(content, dict):
        raise ExperimentError(f"{path}: found a JSON {type(content).__name__}, expected a benchmark's result")
    return _of_client(bench_run(path, content, ExperimentError))


def _of_client(run: ClientRun) -> OtherRun:
    if run.sent_s is None:
        raise ExperimentError(f"{run.name}: {run.tool} keeps no times of sending, so no run of it can be replayed")
    return OtherRun(run.trace(), run.ttft_s, run.tpot_s, run.e2e_s)


def _request_log(path: Path, text: str) -> OtherRun:
    needed = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        entry = parse_json(line, f"{path}, line {number}", ExperimentError, constants=True)
        missing = [key for key in needed if key not in entry] if isinstance(entry, dict) else list(needed)
        if missing:
            raise ExperimentError(f"{path}, line {number}: found no {missing[0]}, expected {', '.join(needed)}")
        for key in needed:
            wanted = (int,) if key.endswith("_toks") else (float,)
            check_value(f"{path}, line {number}: {key}", entry[key], wanted, ExperimentError)
        output, queued = int(entry["output_toks"]), float(entry["queued_ts"])
        first, last = float(entry["first_token_ts"]) - queued, float(entry["last_token_ts"]) - queued
        tpot = (last - first) / (output - 1) if output > 1 else float("nan")
        rows.append((float(entry["arrival_time"]), int(entry["input_toks"]), output, first, tpot, last))
    return _run_of(path, rows)


def _run_of(path: Path, rows: Sequence[tuple[float, int, int, float, float, float]]) -> OtherRun:
    if not rows:
        raise ExperimentError(f"{path}: found no request that got an answer")
    table = np.array(sorted(rows, key=lambda row: row[0]), float)
    arrival = np.rint((table[:, 0] - table[0, 0]) * 1e9).astype(np.int64)
    prompts, outputs = table[:, 1].astype(np.int64), table[:, 2].astype(np.int64)
    trace = Trace(path.stem, arrival, prompts, outputs, outputs, source_format="other engine's log")
    return OtherRun(trace, table[:, 3], table[:, 4], table[:, 5])
