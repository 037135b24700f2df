"""Logarithmic axes that can be read: plain numbers, as many as have room, never one over another.

Matplotlib labels an axis of less than a decade with every `6 x 10^-3` that falls on it, and one of less than an octave
with hardly anything. Here the ticks with labels come from the densest of a few familiar series (1 to 9, 1 2 4 6 8,
1 2 5, 1 3, every decade, every second one, ...) whose labels fit beside each other at the axis' own length, asked anew
at each drawing, since a layout settles late; where no series has two of them inside, from evenly spaced round numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from matplotlib import rcParams
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import (
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    SymmetricalLogLocator,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SERIES: tuple[tuple[int, ...], ...] = ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 4, 6, 8), (1, 2, 5), (1, 3), (1,))
_WIDTH_OF_A_LETTER = 0.64
"""Of the font size: a digit of our font."""
_ROOM_BETWEEN = 0.8
"""Of the font size, between two labels in a row."""
_HEIGHT_OF_A_LINE = 1.3


def log_scale(ax: Axes, *names: Literal["x", "y"]) -> None:
    """Make these axes of a panel logarithmic, with ticks as described above. Call inside `house_style()`."""
    sizes = {"x": rcParams["xtick.labelsize"], "y": rcParams["ytick.labelsize"]}
    for name in names:
        axis = ax.xaxis if name == "x" else ax.yaxis
        (ax.set_xscale if name == "x" else ax.set_yscale)("log")
        points = FontProperties(size=sizes[name]).get_size_in_points()
        axis.set_major_locator(ReadableLogLocator(points, along=name == "x"))
        axis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
        axis.set_minor_locator(LogLocator(subs=range(2, 10), numticks=60))
        axis.set_minor_formatter(NullFormatter())


def log_above_one(ax: Axes) -> None:
    """Make the y axis of a panel logarithmic above 1 and linear from 0 to 1, for counts that may be 0."""
    ax.set_yscale("symlog", linthresh=1, linscale=0.4)
    ax.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=1, subs=(1,)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
    ax.yaxis.set_minor_locator(NullLocator())


def plain_number(value: float) -> str:
    """0.02, 5, 2,000: a number as a reader writes it; powers of ten only far from 1."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    if 1e-4 <= abs(value) < 1e6:
        digits = max(0, 3 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    factor = value / 10**exponent
    power = f"10^{{{exponent}}}"
    return f"${power}$" if abs(factor - 1) < 1e-6 else rf"${factor:.3g}{{\times}}{power}$"


class ReadableLogLocator(Locator):
    """Places of labelled ticks; see the module's text.

    font_points: size of the labels. along: whether they stand beside each other (x) or above each other (y).
    """

    def __init__(self, font_points: float, *, along: bool) -> None:
        self.font_points, self.along = font_points, along

    def __call__(self) -> Sequence[float]:
        axis: Any = self.axis
        low, high = axis.get_view_interval()
        return self.tick_values(low, high)

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        low, high = sorted((vmin, vmax))
        if not (math.isfinite(low) and math.isfinite(high) and 0 < low < high):
            return []
        for ticks in _candidates(low, high):
            if self._fit(ticks, low, high):
                return ticks
        return []

    def _fit(self, ticks: Sequence[float], low: float, high: float) -> bool:
        per_log = self._length_points() / math.log(high / low)
        middles = [math.log(tick / low) * per_log for tick in ticks]
        sizes = [
            self.font_points
            * (_WIDTH_OF_A_LETTER * _letters(plain_number(tick)) + _ROOM_BETWEEN if self.along else _HEIGHT_OF_A_LINE)
            for tick in ticks
        ]
        return all(
            right - left >= (size + next_size) / 2
            for left, right, size, next_size in zip(middles, middles[1:], sizes, sizes[1:])
        )

    def _length_points(self) -> float:
        axis: Any = self.axis
        box = axis.axes.bbox
        return float(box.width if self.along else box.height) * 72 / float(axis.axes.get_figure().dpi)

    def view_limits(self, dmin: float, dmax: float) -> tuple[float, float]:
        """Limits for data between these: their own, or a factor of 1.25 to either side of a single value."""
        low, high = sorted((dmin, dmax))
        if not (math.isfinite(low) and math.isfinite(high)) or high <= 0:
            return 1.0, 10.0
        low = low if low > 0 else high / 10
        return (low, high) if high > low * 1.001 else (low / 1.25, high * 1.25)


def _candidates(low: float, high: float) -> Iterable[list[float]]:
    """Series of ticks within the limits, densest first."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in _SERIES:
        ticks = [float(f"{factor}e{power}") for power in range(first, last + 1) for factor in factors]
        inside = _within(ticks, low, high)
        # More numbers are wanted only where the axis is too short for 1 2 5 to say much.
        if len(inside) >= 2 and (len(factors) <= 3 or high < 12 * low):
            yield inside
    for step in range(2, last - first + 1):
        inside = _within([float(f"1e{power}") for power in range(first, last + 1) if power % step == 0], low, high)
        if len(inside) >= 2:
            yield inside
    ends: list[float] = []
    for most in (5, 4, 3, 2):
        even = MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        inside = _within([float(tick) for tick in even], low, high)
        ends = ends or inside[:: max(1, len(inside) - 1)]
        if len(inside) >= 2:
            yield inside
    yield ends
    yield ends[:1]


def _within(ticks: Iterable[float], low: float, high: float) -> list[float]:
    slack = 1 + 1e-9
    return [tick for tick in ticks if low / slack <= tick <= high * slack]


def _letters(label: str) -> int:
    """About how many letters wide a label is; a power stands smaller."""
    return len(label.replace("$", "").replace("{", "").replace("}", "").replace("^", "").replace(r"\times", "x"))
