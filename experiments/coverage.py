"""Do the intervals of `replay --runs` hold what they promise? Measured where the answer is known.

Half of the structures of a profile (every second batch size, chunk size, context or row count) are left out and a model
is fitted to the rest; it replays a workload under draws from its error. The model of the whole profile, which has seen
the left-out half, replays the same: what it says is the truth that a 90 % interval should hold nine times in ten. The
width comes from the *other* half's held-out errors, so no structure judges itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import ExperimentError
from metrics.statistics import interval_of_draws

if TYPE_CHECKING:
    import pandas as pd

    from profiler.fitted import FittedModel
    from profiler.profile import Profile
    from workloads import Trace

STATISTICS = tuple(f"{family}_s_{name}" for family in ("ttft", "tpot", "e2e") for name in ("mean", "p50", "p90"))
AXES = ("rows", "tokens", "decodes", "context")
"""What is left out: row counts of GEMMs; chunk sizes, batch sizes, contexts of attention."""
LEVEL = 0.9


@dataclass(frozen=True)
class Covered:
    """One statistic of one left-out half: the interval, and what the whole profile says."""

    axis: str
    half: int
    statistic: str
    low: float
    high: float
    predicted: float
    truth: float

    @property
    def inside(self) -> bool:
        return self.low <= self.truth <= self.high

    @property
    def width(self) -> float:
        """Half of the interval over its prediction."""
        return (self.high - self.low) / 2 / self.predicted


@dataclass(frozen=True)
class CoveredAxis:
    """What was found about one axis: intervals that held, and medians and the worst over its statistics and halves."""

    axis: str
    held: int
    count: int
    median_width: float
    median_error: float
    worst_error: float


def by_axis(found: Sequence[Covered]) -> list[CoveredAxis]:
    """One row per axis, in the order found."""
    rows = []
    for axis in dict.fromkeys(row.axis for row in found):
        mine = [row for row in found if row.axis == axis]
        errors = [abs(row.predicted / row.truth - 1) for row in mine]
        width, error = float(np.median([row.width for row in mine])), float(np.median(errors))
        rows.append(CoveredAxis(axis, sum(row.inside for row in mine), len(mine), width, error, max(errors)))
    return rows


def measure_coverage(
    folder: str | Path, trace: Trace, *, gpu: str | None = None, tp: int | None = None, runs: int = 20, **options: Any
) -> list[Covered]:
    """Every statistic of STATISTICS for both halves of every axis.

    folder: a profile folder of LLMServingSim. options: of `simulator.replay`, the policy among them.
    """
    from profiler.commands_profiles import gpu_name
    from profiler.compose import compose
    from profiler.device_fit import fit_device
    from profiler.hardware import load_hardware
    from profiler.holdout import held_out
    from profiler.importers import import_profile
    from profiler.intervals import half_widths
    from profiler.model_config import load_model_spec
    from simulator import replay

    profile = import_profile("llmservingsim", folder, tensor_parallel=tp)
    degree = int(profile.table["tensor_parallel"].min())
    profile = profile.only(tensor_parallel=degree)
    hardware = load_hardware(gpu or gpu_name(str(profile.table["device"].iloc[0])))
    spec = load_model_spec(str(profile.table["model"].iloc[0]))
    tables = held_out(profile, hardware, iterations=False)

    def summary(cost: FittedModel) -> dict[str, Any]:
        return replay(trace, cost=cost, model=spec.name, gpu=hardware.name, tp=degree, **options).summary

    truth = summary(compose(fit_device(profile, hardware), spec, hardware, tp=degree))
    found = []
    for axis, half, part in left_out_halves(profile):
        model = compose(fit_device(part, hardware), spec, hardware, tp=degree)
        widths = half_widths(_errors_of(tables, 1 - half), model.engine.region.composed)
        model = type(model)(replace(model.engine, half_widths=widths))
        predicted = summary(model)
        draws = [summary(model.perturbed(seed)) for seed in range(runs)]
        for name in STATISTICS:
            low, high = interval_of_draws([draw[name] for draw in draws], LEVEL)
            found.append(Covered(axis, half, name, low, high, predicted[name], truth[name]))
    return found


def left_out_halves(profile: Profile) -> Iterator[tuple[str, int, Profile]]:
    """(axis, half, the profile without that half) of every axis that has enough values."""
    from profiler.attention_fit import batch_columns
    from profiler.holdout import USED_ROWS, folds

    table = profile.table
    batches = batch_columns(table)
    attention = (table["operator"] == "attention").to_numpy()
    gemms = ((table["k"] > 0) & (table["operator"] != "head")).to_numpy()
    for axis in AXES:
        mine = gemms if axis == "rows" else attention & ~batches["twin"].to_numpy()
        values = table["rows"].to_numpy(float) if axis == "rows" else batches[axis].to_numpy(float)
        most = USED_ROWS if axis == "rows" else np.inf  # contexts beyond that many tokens are left out like any other
        for half, chosen in enumerate(folds(values[mine], most=most)):
            out = mine & np.isin(values, chosen)
            if not out.any() or out[mine].all():
                raise ExperimentError(f"coverage: {axis}: too few values were measured to leave half of them out")
            yield axis, half, type(profile)(table[~out].reset_index(drop=True), profile.provenance)


def _errors_of(tables: dict[str, pd.DataFrame], half: int) -> dict[str, dict[str, float]]:
    from profiler.holdout import summary

    mine = {name: table[table["fold"] == half] for name, table in tables.items()}
    return summary({name: table for name, table in mine.items() if len(table)})
