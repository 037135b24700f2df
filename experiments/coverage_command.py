"""`python -m experiments coverage`: how often the intervals of `replay --runs` hold the truth, where it is known."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

PROFILES = ("RTX4090/Llama-3.1-8B", "RTXPRO6000/Llama-3.1-8B")


def register(app: typer.Typer) -> None:
    app.command("coverage")(coverage)


def coverage(
    profile: Annotated[
        list[Path] | None, typer.Option(help="LLMServingSim profile folder (repeatable); default: the public ones.")
    ] = None,
    trace: Annotated[
        Path, typer.Option(help="Trace to replay.", show_default="Azure's conversations in ../shared/data")
    ] = Path(
        "../shared/data/traces/azure2023/AzureLLMInferenceTrace_conv.csv"
    ),
    limit: Annotated[int, typer.Option(help="Requests of the trace.")] = 300,
    rate_scale: Annotated[float, typer.Option(help="Speeds arrivals up or down.")] = 0.5,
    policy: Annotated[str, typer.Option(help="Policy.")] = "vllm_v1",
    runs: Annotated[int, typer.Option(help="Draws for each interval.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Leave half of a profile's structures out, and see whether 90 % intervals hold what the whole profile says."""
    from experiments.coverage import by_axis, measure_coverage
    from experiments.fidelity import PROFILES as PUBLIC
    from workloads import read_trace

    requests = read_trace(trace).head(limit)
    reports = {}
    for folder in profile or [PUBLIC / name for name in PROFILES]:
        found = measure_coverage(folder, requests, runs=runs, policy=policy, rate_scale=rate_scale)
        reports[str(folder)] = found
        if as_json:
            continue
        print(f"{folder}: {policy}, {limit} requests, {runs} draws, 90 % intervals")
        print(f"  {'left out':12}{'held':>10}{'median width':>14}{'median error':>14}{'worst error':>14}")
        for row in by_axis(found):
            cells = f"{row.held} of {row.count}"
            medians = f"{row.median_width:>13.1%} {row.median_error:>13.1%}"
            print(f"  {row.axis:12}{cells:>10}{medians} {row.worst_error:>13.1%}")
        print(f"  held in all: {sum(row.inside for row in found) / len(found):.0%}\n")
    if as_json:
        plain = {name: [asdict(row) | {"inside": row.inside} for row in rows] for name, rows in reports.items()}
        print(json.dumps(plain))
