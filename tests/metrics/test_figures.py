"""Figures: the curves hold the numbers they should, each policy keeps its look, files are fit for print."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib import rc_context

from metrics import Recorder, RunTables
from metrics.drawing.figure_style import POLICY_STYLES, shown_name, styles_for
from metrics.drawing.figures import batch_composition, draw_all, load_over_time, tbt_cdf, ttft_cdf
from policies.work.batch import BatchShape
from tests.metrics.sample_runs import three_requests
from tests.metrics.test_pipeline_figures import alternating


def test_a_policy_looks_the_same_in_every_figure_and_no_two_look_alike() -> None:
    assert styles_for({"a": "vllm_v1", "chunked": None})["a"] == POLICY_STYLES["vllm_v1"]
    assert styles_for({"chunked": None, "mine.py:Mine": None})["chunked"] == POLICY_STYLES["chunked"]
    crowd = styles_for({f"chunk {size}": "chunked" for size in range(12)})
    assert len(set(crowd.values())) == 12
    assert len({style.colour for style in POLICY_STYLES.values()}) == len(POLICY_STYLES)
    assert len({style.marker for style in POLICY_STYLES.values()}) == len(POLICY_STYLES)


def test_the_ttft_curve_rises_at_each_request() -> None:
    line = ttft_cdf({"run": three_requests()}).axes[0].lines[0]
    assert line.get_xdata().tolist() == [1, 1, 2, 5]
    assert line.get_ydata() == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_the_tbt_curve_gives_the_tail_its_room() -> None:
    line = tbt_cdf({"run": three_requests()}).axes[0].lines[0]
    assert line.get_xdata().tolist() == [1, 1, 2, 4]  # gaps 1, 1, 2, 4
    assert line.get_ydata() == pytest.approx(-np.log10([1, 1 / 2, 1 / 4, 0.5 / 4]))


def test_load_over_time_adds_up_to_what_was_delivered() -> None:
    queued, running, throughput = load_over_time({"run": three_requests()}).axes
    width_s = 8 / 100
    assert queued.lines[0].get_ydata().sum() * width_s == pytest.approx(5)  # one waits from 1 to 3, 3 to 4, 4 to 6
    assert running.lines[0].get_ydata().sum() * width_s == pytest.approx(11)
    # Few iterations are drawn in few slices: a slice without the end of one would look like a pause.
    assert throughput.lines[0].get_ydata().sum() * 8 / 10 == pytest.approx(7)


def a_long_queue(seconds: int, waiting: int) -> RunTables:
    recorder = Recorder()
    end = seconds * 1_000_000_000
    shape = BatchShape(((8, 0),), sampled=1)
    recorder.iteration(0, 0, 0, 0, end, shape, ((0, 8, 0, True),), (), 0, 1, waiting, 8, 0, 0, 0, end, True)
    return recorder.tables()


def test_one_run_with_a_long_queue_or_a_long_end_does_not_flatten_the_others() -> None:
    """Queues of 1 and 500 differ by more than a decade; 100 s is more than half as long again as the median of 8 s."""
    runs = {"a": three_requests(), "b": three_requests(), "slow": a_long_queue(100, 500)}
    queued, running, _ = load_over_time(runs).axes
    assert queued.get_xlim() == pytest.approx((0, 8.8))
    assert queued.get_title(loc="right") == "goes on beyond this axis: slow until 100 s"
    assert (queued.get_yscale(), running.get_yscale()) == ("symlog", "linear")
    assert queued.get_ylim()[0] == 0 < 500 < queued.get_ylim()[1]
    slow = queued.lines[2]
    assert len(slow.get_xdata()) == 9  # slices of a second
    assert slow.get_xdata().max() < 8.8


def test_runs_alike_keep_plain_axes_and_their_whole_length() -> None:
    runs = {"a": three_requests(), "b": a_long_queue(12, 9)}
    queued = load_over_time(runs).axes[0]
    assert (queued.get_yscale(), queued.get_title(loc="right"), queued.get_xlim()) == ("linear", "", (0, 12))


def test_batch_composition_groups_runs_that_coincide_and_names_the_largest_batch() -> None:
    run = three_requests()
    figure = batch_composition({"one": run, "two": run})
    tokens = sum(run.column("iterations", name) for name in ("chunk_tokens", "decodes", "dummy_tokens"))
    names = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert "one = two" in names
    assert {text.get_text().strip() for text in figure.axes[1].texts} == {f"largest {tokens.max():,}"}
    assert len(figure.axes[1].patches) == 2 * 3
    widths = sum(patch.get_width() for patch in figure.axes[1].patches)
    assert widths == pytest.approx(2 * tokens.mean())


def test_all_figures_are_written_for_print_and_screen(tmp_path) -> None:
    paths = draw_all({"chunked": three_requests(), "empty": Recorder().tables()}, tmp_path / "figures")
    assert sorted(path.name for path in paths) == sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert len(paths) == 8
    for path in paths:
        if path.suffix == ".pdf":
            assert b"/Type3" not in path.read_bytes()
            assert b"/FontFile2" in path.read_bytes()


def test_the_longest_gap_of_all_is_inside_the_tbt_figure() -> None:
    axes = tbt_cdf({"run": three_requests()}).axes[0]
    line = axes.lines[0]
    assert axes.get_xlim()[1] > line.get_xdata()[-1]
    assert axes.get_ylim()[1] >= line.get_ydata()[-1]


def test_runs_without_a_finished_request_or_a_batch_say_so() -> None:
    empty = {"empty": Recorder().tables()}
    for figure in (ttft_cdf(empty), tbt_cdf(empty), batch_composition(empty)):
        (text,) = figure.axes[0].texts
        assert "no " in text.get_text()
    assert load_over_time(empty).axes[0].get_ylim() == (0, 1)


@pytest.mark.parametrize("name", ["a" * 200, "_hidden", "cost $x_", r"\frac{", "<b>", "two words"])
def test_any_name_of_a_run_stands_in_the_legend_and_inside_the_figure(name) -> None:
    for draw in (ttft_cdf, load_over_time, batch_composition):
        figure = draw({name: three_requests(), "other": three_requests()})
        figure.canvas.draw()
        width = figure.bbox.width
        texts = [text for legend in figure.legends for text in legend.get_texts()]
        texts += [axes.title for axes in figure.axes] + [axes._left_title for axes in figure.axes]
        texts += [label for axes in figure.axes for label in axes.get_yticklabels()]
        assert any("".join(name.split()) == "".join(text.get_text().replace("\\$", "$").split()) for text in texts)
        for text in texts:
            box = text.get_window_extent()
            assert not text.get_text() or (box.x0 >= 0 and box.x1 <= width)


@pytest.mark.filterwarnings("error")
def test_letters_that_no_font_has_stand_there_as_escapes_and_names_stay_apart(tmp_path) -> None:
    """DejaVu Sans, which matplotlib brings, has Turkish and Greek and no Chinese."""
    names = {"政策": r"\u653f\u7b56", "🚀 a": r"\U0001f680 a", "ürün µ": "ürün µ", "a$b$": r"a\$b\$"}
    runs = {name: three_requests() for name in names}
    with rc_context({"font.family": ["DejaVu Sans", "No Such Font"]}):
        assert [shown_name(name) for name in runs] == list(names.values())
    draw_all(runs, tmp_path)
    assert len({shown_name(name) for name in runs}) == len(runs)


def test_a_pipeline_gets_its_bubbles_among_the_figures_of_a_run(tmp_path) -> None:
    names = {path.stem for path in draw_all({"deep": alternating(), "flat": three_requests()}, tmp_path)}
    assert {"pipeline_gantt", "bubble_shares", "request_bubble_cdf", "ttft_cdf"} <= names
    assert len({path.stem for path in draw_all({"flat": three_requests()}, tmp_path / "flat")}) == 4
