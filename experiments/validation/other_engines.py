"""Runs of other engines as something to compare with: a vLLM benchmark's JSON, or a log with one request a line.

What such a file can give is who was asked for what, when, and how long it took; there are no batches in it, so nothing
but the statistics can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.errors import ExperimentError
from metrics.measures.statistics import statistics
from policies.edges.input_file import LOG_BYTES, parse_json, read_text
from policies.edges.settings import check_value
from workloads import Trace

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
    """A vLLM benchmark's result (`vllm bench serve --save-result --save-detailed`), or a JSON-lines request log.

    The log's keys: input_toks, output_toks, arrival_time, first_token_ts, last_token_ts and queued_ts (seconds; the
    last three on one clock), as serving logs of vLLM give them. Raises ExperimentError naming file and entry.
    """
    text = read_text(path, ExperimentError, LOG_BYTES)
    if path.suffix == ".jsonl":
        return _request_log(path, text)
    content = parse_json(text, str(path), ExperimentError, constants=True)
    if not isinstance(content, dict):
        raise ExperimentError(f"{path}: found a JSON {type(content).__name__}, expected a benchmark's result")
    return _benchmark(path, content)


def _benchmark(path: Path, content: Mapping[str, Any]) -> OtherRun:
    needed = ("input_lens", "output_lens", "ttfts", "itls")
    for key in needed:
        if not isinstance(content.get(key), list):
            raise ExperimentError(f"{path}: found no list {key!r}; run the benchmark with --save-detailed")
    count = len(content["input_lens"])
    if not count or any(len(content[key]) != count for key in needed):
        raise ExperimentError(f"{path}: found lists of unequal length, expected one entry a request in each")
    errors, began = content.get("errors") or [""] * count, content.get("start_times")
    if not isinstance(errors, list) or len(errors) != count:
        raise ExperimentError(f"{path}: errors: expected a list of {count} texts")
    for key in ("input_lens", "output_lens"):
        for value in content[key]:
            check_value(f"{path}: {key}", value, (int,), ExperimentError)
    spans = [("ttfts", content["ttfts"]), ("start_times", began or []), *(("itls", row) for row in content["itls"])]
    for key, values in spans:
        if not isinstance(values, list):
            raise ExperimentError(f"{path}: {key}: found {str(values)[:40]!r}, expected a list of seconds")
        for value in values:
            check_value(f"{path}: {key}", value, (float,), ExperimentError)
    if began:
        starts = np.array(began, float)
        if len(starts) != count:
            raise ExperimentError(f"{path}: start_times: found {len(starts)}, expected {count}")
    elif content.get("request_rate") in ("inf", float("inf"), None):
        starts = np.zeros(count)
    else:
        raise ExperimentError(f"{path}: found no start_times, expected them (a newer vLLM writes them)")
    rows = []
    for row in range(count):
        gaps = content["itls"][row]
        if errors[row] or content["output_lens"][row] < 1:
            continue
        ttft, decode = float(content["ttfts"][row]), float(sum(gaps))
        output = int(content["output_lens"][row])
        tpot = decode / (output - 1) if output > 1 else float("nan")
        rows.append((starts[row], int(content["input_lens"][row]), output, ttft, tpot, ttft + decode))
    return _run_of(path, rows)


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
