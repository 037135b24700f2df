"""Pipeline figures: they show what the bubbles say."""

from __future__ import annotations

import pytest

from metrics import MetricsError, Recorder
from metrics.drawing.figure_style import save
from metrics.drawing.perfetto import Window
from metrics.drawing.pipeline_figures import bubble_shares, draw_pipeline, gantt
from metrics.pipelines.bubbles import find_bubbles
from tests.metrics.pipelines import MicroBatch, run_pipeline


def alternating():
    pair = [MicroBatch([5_000_000] * 2, prefill=512, decodes=3), MicroBatch([3_000_000] * 2, decodes=4)]
    return run_pipeline(pair * 10)


def test_the_gantt_chart_holds_every_slice_of_its_window() -> None:
    run = alternating()
    window = Window(
        20_000_000, 40_000_000
    )  # ms; stage 0: A 20-25 B 25-28 idle 28-30, stage 1: B 20-23 idle 23-25 A 25-30
    ax = gantt({"run": run}, {"run": find_bubbles(run)}, window=window).axes[0]
    bars = [path.get_extents() for bars in ax.collections for path in bars.get_paths()]
    assert len(bars) == 12
    busy = sum(box.width for box in bars)
    assert busy == pytest.approx(2 * 20)
    assert ax.get_xlabel() == "ms after 0.020 s"


def test_the_bars_add_up_to_the_bubble_share() -> None:
    run = alternating()
    found = find_bubbles(run)
    ax = bubble_shares({"run": found}).axes[0]
    assert sum(bar.get_width() for bar in ax.patches) == pytest.approx(100 * found.share)


@pytest.mark.filterwarnings("error")
def test_one_bar_has_room_below_a_legend_of_every_cause(tmp_path) -> None:
    found = find_bubbles(alternating())
    for cause in range(found.idle_ns.shape[1]):
        found.idle_ns[:, cause] += 1_000_000
    figure = bubble_shares({"run": found})
    save(figure, tmp_path, "shares")
    assert figure.axes[0].get_position().height * figure.get_figheight() > 0.25  # inches


def test_all_pipeline_figures_are_written(tmp_path) -> None:
    paths = draw_pipeline({"one": alternating(), "two": alternating()}, tmp_path)
    assert sorted(path.name for path in paths) == sorted(path.name for path in tmp_path.iterdir())
    assert len(paths) == 6
    with pytest.raises(MetricsError, match="found no replica that ran anything"):
        draw_pipeline({"empty": Recorder().tables()}, tmp_path)
