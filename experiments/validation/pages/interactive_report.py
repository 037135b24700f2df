"""The interactive report of a validation: predicted and live runs side by side, every compared statistic as a row."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from experiments.validation.comparing.settings import load_name
from experiments.validation.comparing.statistics import verdict_of
from experiments.validation.pages.report import in_short

if TYPE_CHECKING:
    from experiments.validation.comparing.result import Result
    from experiments.validation.comparing.statistics import Comparison
    from experiments.validation.existing_runs import AgainstResult
    from metrics.html_report import RowTable

_SHOWN = (
    "policy",
    "load",
    "statistic",
    "simulated",
    "low",
    "high",
    "live",
    "live_low",
    "live_high",
    "error",
    "spread",
    "aim",
    "verdict",
)
"""Columns of the table of statistics."""


def write_explorable(path: Path, result: Result) -> Path:
    """One HTML file: each policy's predicted run and first live run at the highest load, and the statistics of all.

    The highest load is where policies differ most; the others are in the validation's own folder.
    """
    from metrics.html_report import write_report

    load = max(load for load, _ in result.simulated)
    runs = {}
    for (at, policy), predicted in result.simulated.items():
        if at == load:
            runs[f"{policy} predicted"] = predicted
            runs[f"{policy} live"] = result.live[at, policy][0]
    settings = result.settings
    notes = [
        f"Runs are those at {load_name(load)} of the measured capacity of {result.capacity:.3g} requests/s; of the "
        f"live ones the first of {settings.repeats} repeats.",
        f"Model {settings.engine.model}; rows {settings.rows[0]} to {settings.rows[1]} of {result.trace_name}.",
        *in_short(result),
    ]
    question = f"Does the prediction hold for {settings.engine.model} on {result.trace_name}?"
    tables = [_statistics(result.comparisons)]
    return write_report(
        path, runs, question=question, verdict=verdict_of(result.comparisons), tables=tables, notes=notes
    )


def write_explorable_against(path: Path, result: AgainstResult) -> Path:
    """The same for existing live runs, where they have a run folder; of other engines' logs the statistics alone."""
    from experiments.validation.existing_runs import against_short
    from metrics.html_report import write_report

    runs = dict(result.runs) if result.simulated is None else {"predicted": result.simulated, **result.runs}
    return write_report(
        path,
        runs,
        question="Does the prediction hold for these runs?",
        verdict=verdict_of(result.comparisons),
        tables=[_statistics(result.comparisons)],
        notes=against_short(result),
    )


def _statistics(comparisons: list[Comparison]) -> RowTable:
    from metrics.html_report import RowTable
    from metrics.run_folder.folder import json_ready

    rows = [{key: json_ready(row.as_dict())[key] for key in _SHOWN} for row in comparisons]
    return RowTable(
        "Statistics",
        rows,
        ["policy", "load", "statistic"],
        "low and high: 5 to 95 % of an ensemble of cost models; live_low and live_high: range of the repeats; error: "
        "predicted over live, minus 1; spread: range of the repeats over their mean.",
    )
