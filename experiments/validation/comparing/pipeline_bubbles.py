"""Bubbles of a live pipeline beside those of its prediction: share of stage time by cause, policy by policy.

Both are found by the same code (`metrics.pipelines.bubbles`) from the same columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.running.report_document import Block, Heading, Table, Text
from experiments.validation.comparing.settings import load_name
from experiments.validation.comparing.statistics import OUTSIDE, WITHIN_AIM, WITHIN_SPREAD

if TYPE_CHECKING:
    from metrics import RunTables

AIM = 0.03
"""Largest difference of shares that is aimed at."""
ALL = "all"


@dataclass(frozen=True)
class BubbleComparison:
    """Share of the stages' time in flight that they idle for one cause, or for all of them. live: mean of the repeats;
    live_low, live_high: their range."""

    policy: str
    load: float
    cause: str
    simulated: float
    live: float
    live_low: float
    live_high: float
    repeats: int

    @property
    def difference(self) -> float:
        """Of shares; above 0 where the prediction has more."""
        return self.simulated - self.live

    @property
    def spread(self) -> float:
        return self.live_high - self.live_low

    @property
    def verdict(self) -> str:
        if abs(self.difference) <= AIM:
            return WITHIN_AIM
        return WITHIN_SPREAD if abs(self.difference) <= self.spread else OUTSIDE

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference, "spread": self.spread, "verdict": self.verdict}


def compare_bubbles(
    policy: str, load: float, simulated: RunTables, live: Sequence[RunTables]
) -> list[BubbleComparison]:
    """Every cause, then all of them together."""
    from metrics.pipelines.bubbles import find_bubbles

    def shares(run: RunTables) -> dict[str, float]:
        found = find_bubbles(run)
        return {**found.cause_shares, ALL: found.share}

    predicted, measured = shares(simulated), [shares(run) for run in live]
    return [
        BubbleComparison(
            policy,
            load,
            cause,
            predicted[cause],
            float(np.mean([one[cause] for one in measured])),
            min(one[cause] for one in measured),
            max(one[cause] for one in measured),
            len(live),
        )
        for cause in predicted
    ]


def ranked(rows: Sequence[BubbleComparison]) -> tuple[int, int]:
    """(pairs of policies that the live runs tell apart by their bubbles, pairs of these that are predicted alike)."""
    decided = agreed = 0
    for one, other in combinations([row for row in rows if row.cause == ALL], 2):
        apart = one.live_low > other.live_high or other.live_low > one.live_high
        if one.load != other.load or not apart or one.repeats < 2:
            continue
        decided += 1
        agreed += (one.live < other.live) == (one.simulated < other.simulated)
    return decided, agreed


def bubbles_in_short(rows: Sequence[BubbleComparison]) -> list[str]:
    """One sentence; none for a run without a pipeline."""
    totals = [row for row in rows if row.cause == ALL]
    if not totals:
        return []
    causes = [row for row in rows if row.cause != ALL]
    good = sum(row.verdict != OUTSIDE for row in causes)
    decided, agreed = ranked(rows)
    loads = len({row.load for row in totals}) > 1
    text = ", ".join(
        f"`{row.policy}`{f' at {load_name(row.load)}' if loads else ''} {row.simulated:.1%} for {row.live:.1%}"
        for row in totals
    )
    return [
        f"Bubbles, predicted for live: {text}; {good} of {len(causes)} shares by cause within {AIM * 100:.0f} points "
        f"or the repeats' spread; {agreed} of {decided} decided pairs of policies in the live order."
    ]


def bubble_blocks(rows: Sequence[BubbleComparison]) -> list[Block]:
    """The report's section."""
    marks = {WITHIN_AIM: "good", OUTSIDE: "bad"}
    lines = [
        (
            row.policy,
            load_name(row.load),
            row.cause,
            f"{row.simulated:.1%}",
            f"{row.live:.1%}",
            f"{row.live_low:.1%} to {row.live_high:.1%}",
            f"{100 * row.difference:+.1f}",
            row.verdict,
        )
        for row in rows
        if row.cause == ALL or max(row.simulated, row.live_high) >= 0.0005
    ]
    decided, agreed = ranked(rows)
    return [
        Heading("Bubbles"),
        Text(
            "Share of the stages' time in flight that they idle, by cause (docs/reference/metrics.md). Differences are "
            f"in percentage points; aim: {AIM * 100:.0f} of them or the repeats' own spread. Ranked by all bubbles, "
            f"{agreed} of {decided} decided pairs of policies stand in the live order."
        ),
        Table(("policy", "load", "cause", "predicted", "live", "live range", "difference", "verdict"), lines, marks),
    ]
