"""The cost model of a live pipeline: stages measured at work together, sends and host time from the capacity run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.validation.comparing.statistics import shapes_of_run

if TYPE_CHECKING:
    from experiments.validation.comparing.live_side import LiveSide
    from profiler.iterations.staged_model import StagedModel
    from profiler.measurements.plan import MeasurementPlan


def pipeline_model(
    live_side: LiveSide, plan: MeasurementPlan, out: Path, say: Callable[[str], None], progress: Any, seed: int
) -> StagedModel:
    """Measured and fitted; read back where an earlier run has done so. `out` holds the capacity run."""
    from metrics import read_run
    from profiler.iterations.fit_iterations import fit_iterations
    from profiler.iterations.staged_model import StagedFit, StagedModel, fit_host, fit_sends, read_staged, write_staged

    file = out / "model.json"
    if file.exists():
        return StagedModel(read_staged(file))
    say(f"profile: {plan.budget_s:.0f} s of measuring all stages, {len(plan.points)} batches planned")
    profiles = live_side.measure_stages(plan, out / "profile.parquet", progress)
    fits = tuple(fit_iterations(profile, seed=seed) for profile in profiles)
    run = read_run(out / "capacity")
    shapes = shapes_of_run(run)
    rows = np.array([shape.rows for shape in shapes], float)
    stage, sent = run.column("stages", "stage"), run.column("stages", "send_s")
    sends = tuple(fit_sends(rows, sent[stage == number]) for number in range(len(fits) - 1))
    before, after = fit_host(
        shapes, run.column("iterations", "host_before_s"), run.column("iterations", "host_after_s")
    )
    fit = StagedFit(fits, sends, before, after, {"sends_and_host": "means of the capacity run"})
    write_staged(fit, file)
    for number, one in enumerate(fits):
        say(
            f"fit of stage {number}: {one.errors['shapes']:.0f} shapes, held-out structures "
            f"{one.errors['held_out_median']:.1%} median, {one.errors['held_out_p95']:.1%} P95"
        )
    return StagedModel(fit)
