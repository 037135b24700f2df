"""Figures: the curves hold the numbers they should, each policy keeps its look, files are fit for print."""

from __future__ import annotations

import numpy as np
import pytest

from metrics import Recorder
from metrics.figure_style import POLICY_STYLES, styles_for
from metrics.figures import batch_composition, draw_all, load_over_time, tbt_cdf, ttft_cdf
from tests.metrics.sample_runs import three_requests


def test_a_policy_looks_the_same_in_every_figure_and_no_two_look_alike() -> None:
    assert styles_for({"a": "vllm_v1", "chunked": None})["a"] == POLICY_STYLES["vllm_v1"]
    assert styles_for({"chunked": None, "mine.py:Mine": None})["chunked"] == POLICY_STYLES["chunked"]
    crowd = styles_for({f"chunk {size}": "chunked" for size in range(12)})
    assert len(set(crowd.values())) == 12
    assert len({style.colour for style in POLICY_STYLES.values()}) == len(POLICY_STYLES)
    assert len({style.marker for style in POLICY_STYLES.values()}) == len(POLICY_STYLES)


def test_the_ttft_curve_rises_at_each_request() -> None:
    line = ttft_cdf({"run": three_requests()}).axes[0].lines[0]
    assert line.get_xdata().tolist() == [1, 2, 5]
    assert line.get_ydata() == pytest.approx([1 / 3, 2 / 3, 1])


def test_the_tbt_curve_gives_the_tail_its_room() -> None:
    line = tbt_cdf({"run": three_requests()}).axes[0].lines[0]
    assert line.get_xdata().tolist() == [1, 2, 4]  # gaps 1, 1, 2, 4
    assert line.get_ydata() == pytest.approx(-np.log10([1 / 2, 1 / 4, 0.5 / 4]))


def test_load_over_time_adds_up_to_what_was_delivered() -> None:
    queued, running, throughput = load_over_time({"run": three_requests()}).axes
    width_s = 8 / 100
    assert queued.lines[0].get_ydata().sum() * width_s == pytest.approx(5)  # one waits from 1 to 3, 3 to 4, 4 to 6
    assert running.lines[0].get_ydata().sum() * width_s == pytest.approx(11)
    assert throughput.lines[0].get_ydata().sum() * width_s == pytest.approx(7)


@pytest.mark.parametrize("count", [1, 3])
def test_batch_composition_has_a_panel_per_run(count) -> None:
    figure = batch_composition({f"run {i}": three_requests() for i in range(count)})
    assert [ax.get_title(loc="left") for ax in figure.axes if ax.get_visible()] == [f"run {i}" for i in range(count)]


def test_all_figures_are_written_for_print_and_screen(tmp_path) -> None:
    paths = draw_all({"chunked": three_requests(), "empty": Recorder().tables()}, tmp_path / "figures")
    assert sorted(path.name for path in paths) == sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert len(paths) == 8
    for path in paths:
        if path.suffix == ".pdf":
            assert b"/Type3" not in path.read_bytes()
            assert b"/FontFile2" in path.read_bytes()
