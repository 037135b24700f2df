"""`python -m experiments coverage`: how often the intervals of `replay --runs` hold the truth, where it is known."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.errors import ExperimentError
from policies.edges.command_line import tell_notes
from policies.edges.distinct_names import distinct_names, file_forms

if TYPE_CHECKING:
    from profiler.measurements.profile import Profile

PUBLIC = {
    "rtx4090": "rtx4090_llama-3.1-8b",
    "rtxpro6000": "rtxpro6000_llama-3.1-8b",
    "a6000": "a6000_llama-3.1-8b",
    "a100": "a100",
    "h100": "h100",
    "h200": "h200",
}
"""The measurements of the fits that ship: GPU -> carried profile."""
LEAST_RUNS = 2


def register(app: typer.Typer) -> None:
    app.command("coverage")(coverage)


def coverage(
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="GPU with public measurements, profile (.parquet, .csv) or LLMServingSim folder (repeatable); "
            "default: the two RTX cards."
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None, typer.Option(help="Trace to replay (repeatable); default: both of Azure's.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model, where the profile is not one's own.")] = "llama-3.1-8b",
    limit: Annotated[int, typer.Option(help="Requests of each trace.")] = 300,
    rate_scale: Annotated[float, typer.Option(help="Speeds arrivals up or down.")] = 0.5,
    policy: Annotated[str, typer.Option(help="Policy.")] = "vllm_v1",
    runs: Annotated[int, typer.Option(help="Draws for each interval.")] = 20,
    one_factor: Annotated[
        bool, typer.Option("--one-factor", help="Draw one factor an operator, for all shapes, instead (an ablation).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Leave half of a profile's structures out, and see whether 90 % intervals hold what the whole profile says."""
    from experiments.coverage.of_intervals import by_axis, by_statistic, measure_coverage, share_held
    from profiler.measurements.facts import TRACES
    from workloads import read_trace

    # Before minutes of fitting: a replay would say some of this only then.
    if runs < LEAST_RUNS:
        raise ExperimentError(f"--runs: found {runs}, expected at least {LEAST_RUNS} draws for an interval")
    if limit < 1:
        raise ExperimentError(f"--limit: found {limit}, expected at least 1 request of each trace")
    if not 0 < rate_scale < float("inf"):
        raise ExperimentError(f"--rate-scale: found {rate_scale}, expected a number above 0")
    traces = trace or [TRACES / f"azure2023_{name}.parquet" for name in ("conv", "code")]
    names = distinct_names([str(path) for path in traces], file_forms)
    workloads = {name: read_trace(path, limit=limit) for name, path in zip(names, traces)}
    tell_notes(f"{name}: {note}" for name, workload in workloads.items() for note in workload.notes)
    reports = {}
    for name in dict.fromkeys(profile or ["rtx4090", "rtxpro6000"]):
        measured, gpu = _profile(name)
        found = measure_coverage(
            measured,
            workloads,
            gpu=gpu,
            model=model,
            runs=runs,
            one_factor=one_factor,
            policy=policy,
            rate_scale=rate_scale,
        )
        reports[name] = found
        if as_json:
            continue
        print(f"{name}: {policy}, {limit} requests of each trace, {runs} draws, 90 % intervals")
        print(f"  {'left out':24}{'held':>10}{'mean width':>12}{'median error':>14}{'worst error':>14}")
        for row in (*by_axis(found), *by_statistic(found)):
            cells = f"{row.held} of {row.count}"
            print(
                f"  {row.name:24}{cells:>10}{row.mean_width:>11.2%} {row.median_error:>13.2%} {row.worst_error:>13.2%}"
            )
        share, error = share_held(found)
        halves = len({(row.axis, row.half) for row in found})
        print(f"  held in all: {share:.0%}, standard error {error:.0%} of {halves} halves, not of {len(found)} cells\n")
    if as_json:
        plain = {name: [asdict(row) | {"inside": row.inside} for row in rows] for name, rows in reports.items()}
        print(json.dumps(plain))


def _profile(name: str) -> tuple[Profile, str]:
    """The measurements, and the GPU's name in the hardware table."""
    from profiler.commands.profiles import gpu_name
    from profiler.measurements.facts import carried_profile
    from profiler.measurements.importers import import_profile
    from profiler.measurements.profile import read_profile

    if name in PUBLIC:
        return carried_profile(PUBLIC[name]), name
    path = Path(name)
    if not path.exists():
        raise ExperimentError(
            f"coverage: --profile {name}: found no such file; expected one of {', '.join(PUBLIC)}, or a profile"
        )
    found = import_profile("llmservingsim", path) if path.is_dir() else read_profile(path)
    return found, gpu_name(str(found.table["device"].iloc[0]))
