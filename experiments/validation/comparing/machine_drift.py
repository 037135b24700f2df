"""Drift: is the machine still the one that was profiled? A few probe batches before, between and after live runs tell.

A probe is a handful of batches from the plan, each measured several times, held against the fit. Its `speed` compares
medians (how fast the machine is when left alone), its `mean_speed` means (what a long run pays, disturbances included).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.running.stage_files import read_json, write_json

if TYPE_CHECKING:
    from executor.machine.speed_gauge import SpeedGauge
    from executor.measuring.batch_rig import BatchRig
    from profiler.iterations.iteration_model import IterationFit
    from profiler.measurements.plan import Point

REPEATS = 6
LEAST_CHANGE = 0.03


@dataclass(frozen=True)
class Probe:
    """One probe. when: what it came before or after. speed, mean_speed: measured over fitted, 1 as profiled; above 1
    is slower. processor_share: processor time over wall time (below 1 on one thread: others had the processor)."""

    when: str
    at_s: float
    speed: float
    mean_speed: float
    processor_share: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def take_probe(rig: BatchRig, points: Sequence[Point], fit: IterationFit, when: str, began: float) -> Probe:
    """Measure the probe batches now. began: `time.monotonic()` at the start of the experiment."""
    from executor.measuring.batch_rig import probe
    from profiler.iterations.fit_iterations import predicted_device_s

    probe(rig, points, 1)  # caches and clocks come back from whatever was done before
    timings = probe(rig, points, REPEATS)
    fitted = predicted_device_s(fit, [timing.shape for timing in timings])
    ratios = np.array([timing.device_ns for timing in timings]) / 1e9 / fitted
    # On one thread: without the time that others had the processor. On several the share is mostly above 1.
    own = ratios * [min(1.0, timing.cpu_ns / timing.wall_ns) for timing in timings]
    by_point, own_by_point = (each.reshape(REPEATS, len(points)) for each in (ratios, own))
    wall = sum(timing.wall_ns for timing in timings)
    return Probe(
        when,
        round(time.monotonic() - began, 3),
        float(np.exp(np.log(np.median(own_by_point, axis=0)).mean())),
        float(np.exp(np.log(by_point.mean(axis=0)).mean()) / (1.0 + fit.disturbance)),
        float(sum(timing.cpu_ns for timing in timings) / wall) if wall else 1.0,
    )


def changed(probes: Sequence[Probe], noise: float) -> bool:
    """Whether the machine's speed moved by more than 3 % (or three times the repeats' own noise) over the probes, or
    away from the profile."""
    if not probes:
        return False
    speeds = [probe.speed for probe in probes]
    bound = max(LEAST_CHANGE, 3 * noise)
    return max(speeds) / min(speeds) - 1 > bound or max(abs(speed - 1) for speed in speeds) > bound


def write_gauge(path: Path, gauge: SpeedGauge) -> None:
    """What a speed gauge took beside a live run: {"typical_ns": ..., "samples": n, "at_s": [...], "ns": [...]}; at_s
    counts from the first sample, which is taken when the first batch is done."""
    from executor.machine.speed_gauge import typical_ns

    samples, moments = gauge.samples, gauge.moments_ns
    at_s = [round((moment - moments[0]) / 1e9, 4) for moment in moments]
    write_json(path, {"typical_ns": typical_ns(samples), "samples": len(samples), "at_s": at_s, "ns": samples})


def gauged_speed(path: Path, model: Any) -> float | None:
    """How slow the machine was during a live run by its gauge, over the time of the profile that `model` was fitted to,
    1 as profiled; None if either is not known."""
    live = read_json(path).get("typical_ns") if path.exists() else None
    gauge = getattr(model.fit, "provenance", {}).get("gauge") or {}
    return float((live / 1e9 / gauge["typical_s"]) ** gauge["power"]) if live and gauge else None


def speed_around(probes: Sequence[Probe], name: str) -> float:
    """What a live run paid, over what the model charges: the mean of the probes right before and right after it.

    name: of the run, as in `when` of the probe before it; the last such probe counts, since an interrupted experiment
    probes again. The median of all where there is none.
    """
    at = max((place for place, probe in enumerate(probes) if probe.when == f"before {name}"), default=None)
    return typical_speed(probes) if at is None else float(np.mean([probe.mean_speed for probe in probes[at : at + 2]]))


def typical_speed(probes: Sequence[Probe]) -> float:
    """What live runs between the probes paid, over what the model charges: the median of the means."""
    return float(np.median([probe.mean_speed for probe in probes])) if probes else 1.0
