"""The first sentence of a report: who did best, by how much, or why nobody can be called best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from metrics.drawing.text_tables import format_value
from metrics.html_report.comparison import number_of, setting_of
from metrics.run_folder.tables import RunTables

ALIKE = 0.01
"""Runs whose statistic lies within this share of the best one's are named with it."""


def verdict_of(runs: Mapping[str, RunTables]) -> str:
    """One or two sentences about these runs; empty for none."""
    if not runs:
        return ""
    if len(runs) == 1:
        return _alone(*next(iter(runs.items())))
    if len({setting_of(run) for run in runs.values()}) > 1:
        return (
            "These runs cannot be ranked: they differ in world, model, hardware, costs or trace. The table holds them "
            "side by side."
        )
    return " ".join(filter(None, [_ranked(runs), _not_sound(runs)]))


def _alone(label: str, run: RunTables) -> str:
    summary = run.summary
    told = f"{label} finished {summary.get('finished', 0):,} of {summary.get('requests', 0):,} requests"
    waits = [
        f"{title} {format_value(key, value)}"
        for key, title in (("ttft_s_p50", "TTFT P50"), ("ttft_s_p99", "P99"), ("tbt_s_p99", "TBT P99"))
        if (value := number_of(summary.get(key))) is not None
    ]
    met = number_of(summary.get("slo_attainment"))
    objective = "" if met is None else f"; {met:.1%} of them met the objective"
    return " ".join(filter(None, [f"{told}: {', '.join(waits)}{objective}.", _not_sound({label: run})]))


def _ranked(runs: Mapping[str, RunTables]) -> str:
    goodput = _leaders(runs, "goodput_requests_per_s", 1)
    if goodput:
        value = format_value("goodput_requests_per_s", runs[goodput[0]].summary["goodput_requests_per_s"])
        if len(goodput) == len(runs):
            return f"All {len(runs)} runs serve within the objective alike: {value} requests/s each."
        return f"{_named(goodput)} {_serve(goodput)} most within the objective: {value} requests/s."
    first, between = _leaders(runs, "ttft_s_p99", -1), _leaders(runs, "tbt_s_p99", -1)
    both = [label for label in first if label in between]
    if not first or not between:
        return "No request finished in enough runs to rank them."
    ttft = format_value("ttft_s_p99", runs[(both or first)[0]].summary["ttft_s_p99"])
    tbt = format_value("tbt_s_p99", runs[(both or between)[0]].summary["tbt_s_p99"])
    if len(both) == len(runs):
        return f"This load does not separate the runs: TTFT P99 {ttft} and TBT P99 {tbt} in all of them."
    if both:
        return f"{_named(both)} {'leads' if len(both) == 1 else 'lead'} in both tails: TTFT P99 {ttft}, TBT P99 {tbt}."
    return (
        f"No run leads in both tails: {_named(first)} {_have(first)} the shortest TTFT P99 ({ttft}), {_named(between)} "
        f"the shortest TBT P99 ({tbt})."
    )


def _not_sound(runs: Mapping[str, RunTables]) -> str:
    over = [label for label, run in runs.items() if run.summary.get("overloaded")]
    if not over:
        return ""
    if len(over) == len(runs):
        return "The load is more than can be served: latencies grow with the length of the run."
    verb = "is" if len(over) == 1 else "are"
    return f"{_named(over)} {verb} overloaded ({_its(over)} latencies grow with the length of the run) and not ranked."


def _leaders(runs: Mapping[str, RunTables], key: str, better: int) -> list[str]:
    """Among runs that are not overloaded: the best one of a statistic, then every run within `ALIKE` of it.

    Empty if fewer than two have it."""
    sound = {label: run for label, run in runs.items() if not run.summary.get("overloaded")}
    known = {
        label: value
        for label, run in (sound if len(sound) > 1 else runs).items()
        if (value := number_of(run.summary.get(key))) is not None
    }
    if len(known) < 2:
        return []
    order = sorted(known, key=lambda label: -better * known[label])
    best = known[order[0]]
    return [label for label in order if abs(known[label] - best) <= ALIKE * abs(best)]


def _named(labels: Sequence[str], most: int = 3) -> str:
    shown, rest = labels[:most], len(labels) - most
    if rest > 0:
        return f"{', '.join(shown)} and {rest} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _its(labels: Sequence[str]) -> str:
    return "its" if len(labels) == 1 else "their"


def _serve(labels: Sequence[str]) -> str:
    return "serves" if len(labels) == 1 else "serve"


def _have(labels: Sequence[str]) -> str:
    return "has" if len(labels) == 1 else "have"
