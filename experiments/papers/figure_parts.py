"""Pieces that several figures share: how operators look, stacked bars, the paper's own points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.papers.step_costs import ATTENTION, FFN, OTHERS, POSTPROJ, PREPROJ

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GROUP_LOOKS: dict[str, dict[str, Any]] = {
    PREPROJ: {"facecolor": "#56B4E9", "hatch": ""},
    ATTENTION: {"facecolor": "#E69F00", "hatch": "////"},
    POSTPROJ: {"facecolor": "#0072B2", "hatch": ""},
    FFN: {"facecolor": "#BBBBBB", "hatch": "...."},
    OTHERS: {"facecolor": "#FFFFFF", "hatch": "\\\\\\\\"},
}
"""Colours of the Okabe-Ito palette; hatches and order tell the operators apart in grey."""

PAPER_POINT: dict[str, Any] = {
    "color": "#000000",
    "marker": "x",
    "linestyle": "none",
    "markersize": 5,
    "markeredgewidth": 1.2,
    "zorder": 5,
}
"""A number read from the paper: always a black cross."""


def stacked_bars(
    ax: Axes, rows: Sequence[Mapping[str, Any]], x: str, parts: Sequence[str], looks: Mapping[str, Mapping[str, Any]]
) -> None:
    """One bar a row, its parts on top of each other; x: the key that names a bar."""
    below = [0.0] * len(rows)
    for part in parts:
        values = [float(row[part]) for row in rows]
        ax.bar(
            range(len(rows)),
            values,
            bottom=below,
            width=0.72,
            label=part,
            edgecolor="#333333",
            linewidth=0.4,
            **looks[part],
        )
        below = [a + b for a, b in zip(below, values)]
    ax.set_xticks(range(len(rows)), [str(row[x]) for row in rows])
    ax.grid(axis="x", visible=False)
