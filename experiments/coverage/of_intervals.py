"""Do the intervals of `replay --runs` hold what they promise? Measured where the answer is known.

Half of the structures of a profile (every second batch size, chunk size, prefix, context, row count, width or depth, or
all of these at once) are left out and a model is fitted to the rest; it replays workloads under draws from its error.
The model of the whole profile, which has seen the left-out half, replays the same: what it says is the truth that a
90 % interval should hold nine times in ten. The errors that are drawn come from the *other* half, so no structure
judges itself. What both models share is not drawn: host, norms, what was never measured, and the scatter of repeats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import ExperimentError
from metrics.measures.statistics import interval_of_draws

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from profiler.measurements.profile import Profile
    from profiler.operators.fitted_model import FittedModel
    from workloads import Trace

STATISTICS = tuple(f"{family}_s_{name}" for family in ("ttft", "tpot", "e2e") for name in ("mean", "p50", "p90"))
GEMM_AXES = ("rows", "n", "k")
ATTENTION_AXES = ("tokens", "prefix", "decodes", "context")
EVERYTHING = "all at once"
"""What is left out: row counts, widths, depths of GEMMs; chunk sizes, prefixes, batch sizes, contexts of attention."""
MANY_SHAPES = 100
"""A profile with more shapes of GEMMs than this is a grid, whose widths and depths can be left out."""
LEVEL = 0.9


@dataclass(frozen=True)
class Covered:
    """One statistic of one workload and left-out half: the interval, and what the whole profile says."""

    axis: str
    half: int
    workload: str
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
class CoveredPart:
    """What was found about one axis, or one statistic: intervals that held, their mean width, errors."""

    name: str
    held: int
    count: int
    mean_width: float
    median_error: float
    worst_error: float


def by_axis(found: Sequence[Covered]) -> list[CoveredPart]:
    """One row per axis, in the order found."""
    return [
        _part(axis, [row for row in found if row.axis == axis]) for axis in dict.fromkeys(row.axis for row in found)
    ]


def by_statistic(found: Sequence[Covered]) -> list[CoveredPart]:
    """One row per family of statistics (TTFT, TPOT, E2E), over all axes."""
    families = dict.fromkeys(row.statistic.split("_")[0] for row in found)
    return [_part(family, [row for row in found if row.statistic.startswith(family)]) for family in families]


def _part(name: str, rows: Sequence[Covered]) -> CoveredPart:
    errors = [abs(row.predicted / row.truth - 1) for row in rows]
    width = float(np.mean([row.width for row in rows]))
    return CoveredPart(name, sum(row.inside for row in rows), len(rows), width, float(np.median(errors)), max(errors))


def share_held(found: Sequence[Covered]) -> tuple[float, float]:
    """Share of intervals that held, and its standard error: statistics of one half move together, so halves count as
    independent answers, and statistics do not."""
    halves: dict[tuple[str, int], list[bool]] = {}
    for row in found:
        halves.setdefault((row.axis, row.half), []).append(row.inside)
    shares = [float(np.mean(held)) for held in halves.values()]
    error = float(np.std(shares, ddof=1)) / len(shares) ** 0.5 if len(shares) > 1 else float("nan")
    return float(np.mean(shares)), error


def measure_coverage(
    profile: Profile,
    workloads: Mapping[str, Trace],
    *,
    gpu: str,
    model: str = "",
    runs: int = 20,
    one_factor: bool = False,
    **options: Any,
) -> list[Covered]:
    """Every statistic of STATISTICS for every workload and both halves of every axis.

    model: what is replayed where the profile is not that of a model. one_factor: every operator off by one factor at
    all shapes instead (an ablation). options: of `simulator.replay`, the policy among them.
    """
    from profiler.judging.holdout import held_out
    from profiler.operators.compose import compose
    from profiler.operators.fitting.device_fit import fit_device
    from profiler.operators.fitting.error_factors import GEMM_OPERATORS, half_widths
    from profiler.operators.fitting.error_sizes import measured_spreads
    from profiler.specs.hardware import load_hardware
    from profiler.specs.model_config import load_model_spec
    from simulator import replay

    degree = 1
    if profile.table["model"].iloc[0]:
        degree = int(profile.table.loc[profile.table["tensor_parallel"] > 0, "tensor_parallel"].min())
        profile = profile.only(tensor_parallel=degree)
    hardware = load_hardware(gpu)
    spec = load_model_spec(model or str(profile.table["model"].iloc[0]))

    def summary(cost: FittedModel, trace: Trace) -> dict[str, Any]:
        return replay(trace, cost=cost, model=spec.name, gpu=hardware.name, tp=degree, **options).summary

    whole = compose(fit_device(profile, hardware), spec, hardware, tp=degree)
    truth = {workload: summary(whole, trace) for workload, trace in workloads.items()}
    tables = held_out(profile, hardware, iterations=False)
    found = []
    for axis, half, part in left_out_halves(profile):
        cost = compose(fit_device(part, hardware), spec, hardware, tp=degree)
        mine = {name: table[table["fold"] != half] for name, table in tables.items()}
        mine = {name: table for name, table in mine.items() if len(table)}
        spreads = {} if one_factor else measured_spreads(mine, part)
        widths = half_widths(errors_of(mine), cost.engine.region.composed, frozenset(spreads))
        if not one_factor:
            spreads = {name: spread for name, spread in spreads.items() if axis in (spread.axis, EVERYTHING)}
            # What was not measured itself is off by a factor besides: linear layers of other widths, mixed batches.
            apart = (*GEMM_OPERATORS, "mixed")
            apart = apart if axis == EVERYTHING else apart[:-1] if axis in GEMM_AXES else apart[-1:]
            widths = {name: width for name, width in widths.items() if name in apart}
        cost = type(cost)(replace(cost.engine, half_widths=widths, spreads=spreads))
        drawn = [cost.perturbed(seed) for seed in range(runs)]
        for workload, trace in workloads.items():
            predicted = summary(cost, trace)
            draws = [summary(one, trace) for one in drawn]
            for name in STATISTICS:
                low, high = interval_of_draws([draw[name] for draw in draws], LEVEL)
                found.append(Covered(axis, half, workload, name, low, high, predicted[name], truth[workload][name]))
    return found


def left_out_halves(profile: Profile) -> Iterator[tuple[str, int, Profile]]:
    """(axis, half, the profile without that half) of every axis that has enough values, and of all of them at once."""
    table = profile.table
    everything = [np.zeros(len(table), bool), np.zeros(len(table), bool)]
    for axis in (*GEMM_AXES, *ATTENTION_AXES):
        for half, out in enumerate(_halves(table, axis)):
            everything[half] |= out
            yield axis, half, type(profile)(table[~out].reset_index(drop=True), profile.provenance)
    if not everything[1].any():
        raise ExperimentError("coverage: too few values were measured to leave half of any axis out")
    for half, out in enumerate(everything):
        yield EVERYTHING, half, type(profile)(table[~out].reset_index(drop=True), profile.provenance)


def _halves(table: pd.DataFrame, axis: str) -> list[NDArray[np.bool_]]:
    """Rows of each half of an axis; none where it has too few values to leave half of them out."""
    from profiler.judging.holdout import USED_ROWS, folds
    from profiler.operators.fitting.attention_fit import batch_columns
    from profiler.operators.fitting.noise_floor import USED_WIDTHS

    if axis in GEMM_AXES:
        mine = ((table["k"] > 0) & (table["operator"] != "head")).to_numpy()
        if axis != "rows" and len(table.loc[mine, ["n", "k"]].drop_duplicates()) <= MANY_SHAPES:
            return []
        values = table[axis].to_numpy(float)
        bounds: Any = (-np.inf, USED_ROWS) if axis == "rows" else USED_WIDTHS
    else:
        batches = batch_columns(table)
        mine = (table["operator"] == "attention").to_numpy() & ~batches["twin"].to_numpy()
        # Contexts beyond as many tokens as GEMMs are left out to are left out like any other.
        values, bounds = batches[axis].to_numpy(float), (-np.inf, np.inf)
    parts = [mine & np.isin(values, chosen) for chosen in folds(values[mine], *bounds)]
    return parts if len(parts) == 2 and all(out.any() and not out[mine].all() for out in parts) else []


def errors_of(tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[str, float]]:
    from profiler.judging.holdout import summary

    return summary(tables)
