"""Two boards: which figures differ by more than rounding, and whether predictions came nearer to what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

ROUNDING = 2e-3
"""Relative difference that four digits, and another machine's arithmetic, may make."""


class Change(NamedTuple):
    """One figure in both boards. error: relative to what was measured, where something was."""

    where: str
    before: float
    after: float
    error_before: float | None
    error_after: float | None

    @property
    def better(self) -> bool | None:
        """None where there is nothing to be near to."""
        if self.error_before is None or self.error_after is None:
            return None
        return abs(self.error_after) < abs(self.error_before)


def figures(board: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Where a figure stands -> its value, and its relative error."""
    found: dict[str, tuple[float, float | None]] = {}
    for entry in (*board["runs"], *board["engines"]):
        for name, value in entry["predicted"].items():
            found[f"{entry['run']}: {name}"] = (value, value / entry["measured"][name] - 1)
    for row in board["ranking"]:
        where = f"ranking {row['study']}, load {row['load']:g}, {row['statistic']}"
        found[where] = (float(row["agreed"]), row["agreed"] / row["decided"] - 1 if row["decided"] else None)
    for row in board["parity"]:
        found[f"parity {row['log']}"] = (float(row["matched"]), row["matched"] / row["steps"] - 1)
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Figures of both boards that differ by more than rounding, in the order of the second."""
    old, new = figures(before), figures(after)
    return [
        Change(where, old[where][0], value, old[where][1], error)
        for where, (value, error) in new.items()
        if where in old and abs(value - old[where][0]) > ROUNDING * max(abs(value), abs(old[where][0]))
    ]


def only_in_one(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Figures that were left out, and figures that are new."""
    old, new = figures(before), figures(after)
    return [where for where in old if where not in new], [where for where in new if where not in old]
