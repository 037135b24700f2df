"""Calibration on a live run: what a step takes beyond its kernels, and what its host takes, read off a log of steps.

Operators keep what the profile measured. Only the terms that no profile of kernels can know are estimated: `step_us`
and, where the log tells them, the host's. The result says what it was calibrated on, and so does every output made
with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from policies.edges.input_file import read_json
from policies.work.batch import BatchShape
from profiler.errors import ProfileError
from profiler.measurements.bounded_parquet import log_rows, read_parquet
from profiler.specs.shape_columns import ShapeColumns

if TYPE_CHECKING:
    from profiler.cost_model import CostModel
    from profiler.operators.fitting.device_fit import DeviceFit

Array = NDArray[np.float64]

LEAST_STEPS = 20
LARGEST_CONTEXT = 10**8


@dataclass(frozen=True)
class StepLog:
    """Steps of a live engine, in seconds. before_s, after_s: host time, NaN where the log has none."""

    source: str
    shapes: ShapeColumns
    device_s: Array
    before_s: Array
    after_s: Array

    def __len__(self) -> int:
        return len(self.device_s)


def read_step_log(path: str | Path) -> StepLog:
    """A live run's folder (iterations.parquet) or a vLLM step log (.jsonl, .parquet)."""
    path = Path(path)
    if (path / "iterations.parquet").exists():
        return _from_run_folder(path)
    if path.suffix in (".jsonl", ".parquet") and path.exists():
        return _from_vllm_steps(path)
    raise ProfileError(f"{path}: found neither a run folder (iterations.parquet) nor a step log (.jsonl, .parquet)")


def _from_run_folder(path: Path) -> StepLog:
    table = read_parquet(path / "iterations.parquet")
    config = read_json(path / "config.json", ProfileError)
    if not isinstance(config, dict):
        raise ProfileError(f"{path}: found a config.json without settings, expected a run folder")
    if config.get("world") != "live":
        world = str(config.get("world"))[:40]
        raise ProfileError(f"{path}: found world {world!r}, expected a live run: others only repeat their costs")
    try:
        columns = {name: table.column(name).to_numpy() for name in ("device_s", "host_before_s", "host_after_s")}
        shapes = ShapeColumns.of_iterations(table)
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"{path}/iterations.parquet: {str(error)[:200]}, expected the table of a live run") from None
    return StepLog(f"run {path.name}", shapes, columns["device_s"], columns["host_before_s"], columns["host_after_s"])


def _from_vllm_steps(path: Path) -> StepLog:
    shapes, rows = [], []
    try:
        for _, step in log_rows(path):
            chunks = tuple((int(tokens), int(prefix)) for tokens, prefix in step["prefill"])
            contexts = [int(context) for context in step["decode"]]
            sampled = len(contexts) + len(chunks)
            shapes.append(BatchShape(chunks, len(contexts), sum(contexts), max(contexts, default=0), 0, sampled))
            if not all(0 <= n <= LARGEST_CONTEXT for n in (*contexts, *(n for chunk in chunks for n in chunk))):
                raise ValueError("found a length beyond all models")
            rows.append([float(step[name]) for name in ("exec_ms", "sched_ms", "update_ms")])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ProfileError):
            raise
        expected = "prefill, decode, exec_ms, sched_ms, update_ms in every line"
        raise ProfileError(f"{path}: row {len(shapes) + 1}: {repr(error)[:200]}, expected {expected}") from None
    times = np.array(rows, float).reshape(-1, 3) * 1e-3
    return StepLog(f"log {path.name}", ShapeColumns.of(shapes), times[:, 0], times[:, 1], times[:, 2])


def refined(fit: DeviceFit, cost: CostModel, log: StepLog) -> tuple[DeviceFit, dict[str, float]]:
    """The fit with terms estimated from a log, and what was found: terms, steps, error before and after.

    cost: the model composed from `fit` for the engine that made the log. Raises ProfileError for too short a log.
    """
    if len(log) < LEAST_STEPS:
        raise ProfileError(f"{log.source}: found {len(log)} steps to learn from, expected at least {LEAST_STEPS}")
    predicted = np.sum([cost.predict_ns(log.shapes, stage) for stage in range(cost.stages)], axis=0) * 1e-3
    measured = log.device_s * 1e6
    step = float(np.median(measured - predicted))
    terms: dict[str, float] = {"step_us": round(step, 1), **_host_terms(log)}
    found = {
        "steps": float(len(log)),
        "median_error_before": float(np.median(predicted / measured - 1)),
        "median_abs_error_after": float(np.median(np.abs((predicted + step) / measured - 1))),
        **terms,
    }
    provenance = {**fit.provenance, "calibrated_on": log.source, "calibration": found}
    return replace(fit, terms={**fit.terms, **terms}, provenance=provenance), found


def _host_terms(log: StepLog) -> dict[str, float]:
    """Host time as a line over sequences, where the log has it."""
    terms: dict[str, float] = {}
    sequences = (log.shapes.decodes + np.diff(log.shapes.chunk_offsets)).astype(float)
    parts = (
        (log.before_s, "host_before_us", "host_before_sequence_us"),
        (log.after_s, "host_after_us", "host_after_sample_us"),
    )
    for seconds, fixed, each in parts:
        known = np.isfinite(seconds) & (seconds > 0)
        if known.sum() >= LEAST_STEPS:
            design = np.column_stack([np.ones(known.sum()), sequences[known]])
            line, slope = np.linalg.lstsq(design, seconds[known] * 1e6, rcond=None)[0]
            terms |= {fixed: round(max(0.0, float(line)), 1), each: round(max(0.0, float(slope)), 2)}
    return terms


def describe(found: Mapping[str, Any]) -> str:
    """One line for people."""
    terms = ", ".join(f"{key} {value:g}" for key, value in found.items() if key.endswith("_us"))
    before, after = found["median_error_before"], found["median_abs_error_after"]
    return f"{found['steps']:.0f} steps: {terms}; median error {before:+.1%} before, {after:.1%} (absolute) after"
