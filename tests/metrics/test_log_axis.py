"""Logarithmic axes: whatever their span and size, labels are plain numbers that never touch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics.drawing.figure_style import house_style, new_figure
from metrics.drawing.log_axis import log_scale, plain_number


def labels(low: float, high: float, width_in: float, side: str = "x"):
    """Boxes and texts of the labels that an axis with these limits shows."""
    with house_style():
        figure, axes = new_figure(width_in, 2.5)
        ax = axes[0, 0]
        log_scale(ax, side)
        (ax.set_xlim if side == "x" else ax.set_ylim)(low, high)
        figure.canvas.draw()
        axis = ax.xaxis if side == "x" else ax.yaxis
        shown = [
            label
            for at, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels())
            if 0.999999 * low <= at <= 1.000001 * high
        ]
        return [label.get_window_extent() for label in shown], [label.get_text() for label in shown]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.floats(-9, 7), st.floats(0.1, 14), st.sampled_from([2.0, 3.35, 7.0]), st.sampled_from(["x", "y"]))
def test_labels_never_touch_and_there_are_always_two(power, decades, width_in, side) -> None:
    boxes, texts = labels(10**power, 10 ** (power + decades), width_in, side)
    assert len(set(texts)) == len(texts) >= 2
    ends = [(box.x0, box.x1) if side == "x" else (box.y0, box.y1) for box in boxes]
    assert all(left[1] < right[0] for left, right in zip(ends, ends[1:]))


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.012, 0.4, ["0.02", "0.05", "0.1", "0.2"]),
        (0.0056, 0.016, ["0.006", "0.008", "0.01"]),
        (0.9, 4500, ["1", "10", "100", "1,000"]),
    ],
)
def test_numbers_are_those_that_a_reader_expects(low, high, wanted) -> None:
    _, texts = labels(low, high, 3.35)
    assert [text for text in texts if text in wanted] == wanted
    assert not any("10^" in text for text in texts)


def test_powers_of_ten_are_kept_for_what_is_far_from_one() -> None:
    assert [plain_number(value) for value in (0.02, 5, 2000, 0.0001, 999_999)] == [
        "0.02",
        "5",
        "2,000",
        "0.0001",
        "999,999",
    ]
    assert plain_number(1e-7) == "$10^{-7}$"
    assert plain_number(3e8) == r"$3{\times}10^{8}$"
