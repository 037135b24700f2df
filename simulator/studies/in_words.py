"""One sentence of advice below a comparison: who keeps up with the load, and who of these keeps an objective best.

It judges as `advise` does, by the objective met, then goodput, then the room below the tightest bound; it tries nothing
that was not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simulator.studies.advise import DEFAULT_SLO, bounds_of, in_milliseconds, room_below

SummaryOf = Mapping[str, Any]


def advice_in_words(summaries: Mapping[str, SummaryOf], slo: str = DEFAULT_SLO) -> str:
    """summaries: of runs of one trace, by name. Empty for fewer than two, or where nothing was measured."""
    measured = {name: summary for name, summary in summaries.items() if summary["requests"] and summary["measured"]}
    if len(summaries) < 2 or len(measured) < len(summaries):
        return ""
    behind = [name for name, summary in summaries.items() if summary["overloaded"]]
    steady = [name for name in summaries if name not in behind]
    if not steady:
        least = min(behind, key=lambda name: float(summaries[name]["load"] or 0.0))
        return (
            "Under this load no policy keeps up: the queue grows under all of them, least under "
            f"{least} ({summaries[least]['load']:.2f} times what it serves); a longer run would only wait longer."
        )
    first = f"Under this load {_who_keeps_up(steady, behind)}"
    best = max(steady, key=lambda name: (_served(summaries[name]), room_below(summaries[name], slo)))
    room = room_below(summaries[best], slo)
    bounds = bounds_of(slo)
    limits = " and ".join(f"{_spelt(key)} {in_milliseconds(bound)}" for key, bound in bounds)
    values = ", ".join(in_milliseconds(summaries[best][key]) for key, _ in bounds)
    if room < 0:
        return f"{first}; none meets {limits}, {best} misses by the least ({values})."
    others = " of these" if behind else ""
    return f"{first}; {best} stays furthest below {limits}{others} ({values})."


def _who_keeps_up(steady: Sequence[str], behind: Sequence[str]) -> str:
    if not behind:
        return "every policy keeps up"
    if len(behind) <= len(steady):
        return f"every policy but {_listed(behind)} keeps up"
    return f"{_listed(steady)} alone {'keeps' if len(steady) == 1 else 'keep'} up"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _served(summary: SummaryOf) -> float:
    """Share of the requests that finished, to three digits: who refuses requests is no advice."""
    return round(float(summary["finished"]) / float(summary["requests"]), 3)


def _spelt(key: str) -> str:
    latency, _, statistic = key.replace("_s_", "_").partition("_")
    return f"{latency.upper()} {statistic.upper() if statistic.startswith('p') else statistic}"
