"""What a contest says, and what it may not say: differences pair by pair, with chance and many comparisons counted.

A block is one slice of one workload; its value is the mean over what else was played there (loads, draws). Two policies
are compared by the differences of their blocks, with Student's t and Bonferroni's correction for all rivals of the
leader: without it, of twenty equal policies one would "win" nearly every time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from experiments.arena.contest import Contest

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Rival:
    """How far the leader is ahead of one policy: mean difference of scores, and its corrected interval."""

    name: str
    ahead: float
    low: float
    high: float

    @property
    def beaten(self) -> bool:
        return self.low > 0


@dataclass(frozen=True)
class Ranking:
    """scores: mean by policy, best first. rivals: of the leader, nearest first. blocks: pairs behind each interval."""

    scores: Mapping[str, float]
    rivals: tuple[Rival, ...]
    blocks: int

    @property
    def leader(self) -> str:
        return next(iter(self.scores))

    @property
    def wins(self) -> bool:
        """Whether every rival is beaten beyond chance."""
        return bool(self.rivals) and all(rival.beaten for rival in self.rivals)

    @property
    def tied(self) -> tuple[str, ...]:
        """The leader, and those that cannot be told from it."""
        return (self.leader, *(rival.name for rival in self.rivals if not rival.beaten))


def ranking(blocks: Mapping[str, Sequence[float]]) -> Ranking:
    """blocks: the values of each policy, in the same order for all."""
    scores = dict(sorted(((name, fmean(values)) for name, values in blocks.items()), key=lambda item: -item[1]))
    leader, *others = scores
    rivals = []
    for name in others:
        differences = [one - other for one, other in zip(blocks[leader], blocks[name], strict=True)]
        ahead, half = fmean(differences), _half_width(differences, len(others))
        rivals.append(Rival(name, ahead, ahead - half, ahead + half))
    return Ranking(scores, tuple(sorted(rivals, key=lambda rival: rival.ahead)), len(blocks[leader]))


def _half_width(values: Sequence[float], comparisons: int) -> float:
    if len(values) < 2:
        return math.inf
    spread = stdev(values)
    if spread == 0.0:
        return 0.0
    from scipy.stats import t

    quantile = float(t.ppf(1 - (1 - CONFIDENCE) / (2 * max(1, comparisons)), len(values) - 1))
    return quantile * spread / math.sqrt(len(values))


def blocks_of(
    contest: Contest, workloads: Sequence[str] | None = None, loads: Sequence[float] | None = None
) -> dict[str, list[float]]:
    """Block values by policy over some workloads and loads, all by default."""
    names = [workload.name for workload in contest.workloads] if workloads is None else list(workloads)
    chosen = contest.rules.loads if loads is None else loads
    draws = contest.rules.draws
    found: dict[str, list[float]] = {}
    for label in contest.tuned:
        values = []
        for name in names:
            for at in range(contest.rules.slices):
                rows = [
                    row["score"]
                    for load in chosen
                    for row in contest.results[label, name, load][at * draws : (at + 1) * draws]
                ]
                values.append(fmean(rows))
        found[label] = values
    return found


def verdict(contest: Contest) -> dict[str, Any]:
    """Everything the page says, as plain data."""
    overall = ranking(blocks_of(contest))
    by_load = {load: ranking(blocks_of(contest, loads=[load])) for load in contest.rules.loads}
    by_workload = {each.name: ranking(blocks_of(contest, [each.name])) for each in contest.workloads}
    flips = [
        {"load": load, "leader": found.leader, "tied": list(found.tied)}
        for load, found in by_load.items()
        if overall.leader not in found.tied
    ]
    return {
        "sentence": _sentence(contest, overall),
        "leader": overall.leader,
        "wins": overall.wins,
        "tied": list(overall.tied),
        "overall": _plain(overall),
        "by_load": {f"{load:g}": _plain(found) for load, found in by_load.items()},
        "by_workload": {name: _plain(found) for name, found in by_workload.items()},
        "flips": flips,
        "settings": {
            label: {
                "policy": tuned.entrant.policy,
                "knobs": tuned.knobs,
                "tried": tuned.tried,
                "score_tuned": tuned.score,
                "score_default": tuned.default_score,
            }
            for label, tuned in contest.tuned.items()
        },
        "statistics": {
            name: {
                f"{load:g}": {label: _statistics(contest.results[label, name, load]) for label in contest.tuned}
                for load in contest.rules.loads
            }
            for name in by_workload
        },
        "knee_requests_per_s": contest.knee,
        "slo": {workload.name: workload.slo for workload in contest.workloads},
        "draws_differ": any(row["drawn"] for rows in contest.results.values() for row in rows),
        "tuning_cut_short": contest.cut,
    }


def _statistics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over slices and draws; medians of the latencies, since one slice may hold a pile-up."""
    values: dict[str, Any] = {"score": fmean(row["score"] for row in rows)}
    values["goodput_requests_per_s"] = fmean(row["score"] * row["rate"] for row in rows)
    for key in ("ttft_s_p99", "tbt_s_p99", "e2e_s_p50", "output_tokens_per_s"):
        known = [row[key] for row in rows if row[key] is not None and not math.isnan(row[key])]
        values[key] = median(known) if known else None
    return values


def pareto(statistics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Policies whom no other beats in both P99s, of the first token and of the gaps, by the first."""
    known = [
        (row["ttft_s_p99"], row["tbt_s_p99"], name)
        for name, row in statistics.items()
        if row["ttft_s_p99"] is not None and row["tbt_s_p99"] is not None
    ]
    front, least = [], math.inf
    for _, gap, name in sorted(known):
        if gap < least:
            front.append(name)
            least = gap
    return front


def _plain(found: Ranking) -> dict[str, Any]:
    return {
        "scores": dict(found.scores),
        "wins": found.wins,
        "tied": list(found.tied),
        "blocks": found.blocks,
        "rivals": [
            {"name": rival.name, "ahead": rival.ahead, "low": rival.low, "high": rival.high} for rival in found.rivals
        ],
    }


def _sentence(contest: Contest, found: Ranking) -> str:
    """The verdict in one sentence."""
    where = (
        contest.workloads[0].name if len(contest.workloads) == 1 else f"{len(contest.workloads)} workloads"
    ) + f" at loads {', '.join(f'{load:g}' for load in contest.rules.loads)}"
    leader = f"{found.leader} serves {found.scores[found.leader]:.1%} of all requests within the objective"
    if not found.rivals:
        return f"{leader} on {where}; nobody else took part."
    nearest = found.rivals[0]
    if found.wins:
        return (
            f"{leader} on {where} and wins: {100 * nearest.ahead:.2f} points ahead of {nearest.name} "
            f"(95 % interval {100 * nearest.low:.2f} to {100 * nearest.high:.2f}, {len(found.rivals)} comparisons)."
        )
    others = [name for name in found.tied if name != found.leader]
    return f"No winner on {where}: {leader}, but {_listed(others)} cannot be told from it."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
