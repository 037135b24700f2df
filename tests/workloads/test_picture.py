"""The picture of a trace: its logarithmic axes can be read whatever the trace holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest

from workloads import generate
from workloads.picture import draw


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("requests", "prompt", "output"),
    [(30, "fixed:512", "fixed:64"), (1, "fixed:100", "fixed:1"), (60, "uniform:90,400", "fixed:2")],
)
def test_labels_stand_at_whole_powers_of_ten_and_at_two_of_them_at_least(
    requests: int, prompt: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    original = matplotlib.figure.Figure

    def kept(*args: Any, **options: Any) -> Any:
        made.append(original(*args, **options))
        return made[-1]

    monkeypatch.setattr(matplotlib.figure, "Figure", kept)
    draw(generate(requests=requests, arrivals="uniform:4", prompt=prompt, output=output, seed=1), tmp_path / "p.png")
    monkeypatch.undo()
    rate, gaps, lengths, pairs = made[0].axes
    assert bool(rate.texts) == (requests == 1)  # one moment has no rate
    assert all(line.get_ydata()[0] == 0 and line.get_ydata()[-1] == 1 for line in lengths.lines)
    for axis in (gaps.xaxis, lengths.xaxis, pairs.xaxis, pairs.yaxis):
        low, high = axis.get_view_interval()
        inside = [at for at in axis.get_majorticklocs() if 0.999 * low <= at <= 1.001 * high]
        assert len(inside) >= 2
        assert not any(label.get_text() for label in axis.get_minorticklabels())


@pytest.mark.filterwarnings("error")
def test_a_name_that_the_font_cannot_show_or_that_looks_like_a_formula_is_drawn_all_the_same(tmp_path: Path) -> None:
    trace = replace(generate(requests=20, arrivals="poisson:2", prompt="fixed:8", output="fixed:2"), name="政策 🚀 $x_")
    assert draw(trace, tmp_path / "picture.png").stat().st_size > 1000
