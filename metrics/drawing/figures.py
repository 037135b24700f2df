"""The figures of a replay, from tables alone: latency CDFs, load over time, what batches are made of.

Each takes several runs at once (label -> run), draws them with the style of their policy, and returns a matplotlib
Figure; `draw_all` writes all of them into a folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrics.drawing.figure_style import (
    DOUBLE_COLUMN_IN,
    LEGEND_POINTS,
    SINGLE_COLUMN_IN,
    SOFT_INK,
    LineStyle,
    costs_said,
    footnote,
    house_style,
    legend_above,
    letters_in,
    new_figure,
    save,
    say_empty,
    shown_name,
    styles_for,
)
from metrics.measures.latencies import finished_latencies
from metrics.measures.statistics import percentiles
from metrics.measures.token_times import TokenTimes
from metrics.measures.windows import held_ns
from metrics.run_folder.columns import MetricsError
from metrics.run_folder.tables import RunTables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Runs = Mapping[str, RunTables]

_CDF_POINTS = 1_000
_BINS = 100
_TAIL_TICKS = (0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
_PARTS: dict[str, dict[str, Any]] = {
    "prefill": {"facecolor": "#3B5B92", "edgecolor": "#3B5B92", "linewidth": 0.3},
    "decode": {"facecolor": "#F2B84B", "edgecolor": "#F2B84B", "linewidth": 0.3},
    "dummy": {"facecolor": "#FFFFFF", "edgecolor": "#555555", "linewidth": 0.3, "hatch": "//////"},
}


def draw_all(runs: Runs, folder: str | Path) -> list[Path]:
    """Write the figures of a replay into a folder (made if it is not there); returns the files, PDF and PNG.

    Four of every run; of runs that are pipelines or have ranks, three more about their bubbles (`draw_pipeline`).
    """
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MetricsError(f"{target}: cannot make the folder for figures: {error.strerror}") from error
    figures = {
        "ttft_cdf": ttft_cdf,
        "tbt_cdf": tbt_cdf,
        "load_over_time": load_over_time,
        "batch_composition": batch_composition,
    }
    written: list[Path] = []
    said = costs_said(run.config for run in runs.values())
    with house_style():
        for name, draw in figures.items():
            written += save(footnote(draw(runs), said), target, name)
    pipelines = {label: run for label, run in runs.items() if run.ranks > 1 or run.column("stages", "stage").any()}
    if pipelines:
        from metrics.drawing.pipeline_figures import draw_pipeline

        written += draw_pipeline(pipelines, target)
    return written


def ttft_cdf(runs: Runs, *, width_in: float = SINGLE_COLUMN_IN) -> Figure:
    """CDF of the time to first token of finished requests."""

    def ttft(run: RunTables) -> tuple[Floats, NDArray[np.int64]]:
        values = finished_latencies(run)["ttft"]
        return values, np.ones(len(values), dtype=np.int64)

    samples = {label: ttft(run) for label, run in runs.items()}
    return cdf_figure(samples, _styles(runs), "time to first token (s)", "fraction of requests", width_in)


def tbt_cdf(runs: Runs, *, width_in: float = SINGLE_COLUMN_IN) -> Figure:
    """CDF of the time between tokens of finished requests, stalls included."""

    def tbt(run: RunTables) -> tuple[Floats, NDArray[np.int64]]:
        gaps = TokenTimes(run).gaps(run.column("requests", "status") == "finished")
        return gaps.ns / 1e9, gaps.count

    samples = {label: tbt(run) for label, run in runs.items()}
    return cdf_figure(samples, _styles(runs), "time between tokens (s)", "fraction of gaps", width_in, True)


def load_over_time(runs: Runs, *, width_in: float = DOUBLE_COLUMN_IN) -> Figure:
    """Requests queued and running, and output tokens per second, over time; means over equal slices of the run.

    One run whose queue or duration dwarfs those of the others does not flatten these: queues that differ by more than
    a decade stand on an axis that is logarithmic above 1, and a run far longer than most is cut, with a word of when it
    ends.
    """
    with house_style():
        figure, axes = new_figure(width_in, 0.55 * width_in, rows=3, sharex=True)
        queued, running, throughput = axes[:, 0]
        until, cut = _shown_until({label: _end_s(run) for label, run in runs.items()})
        for position, (label, style) in enumerate(_styles(runs).items()):
            run, look = runs[label], _Look(label, style, position / max(1, len(runs)), until)
            edges = np.linspace(0, _end_s(run), _BINS + 1)
            for ax, column in ((queued, "waiting"), (running, "running")):
                _over_time(ax, edges, _mean_over_bins(run, column, edges), look)
            edges = _edges(run)
            tokens = TokenTimes(run)
            delivered, _ = np.histogram(tokens.times_ns / 1e9, edges, weights=tokens.cover())
            _over_time(throughput, edges, delivered / np.diff(edges), look)
        for ax, name in (
            (queued, "requests\nqueued"),
            (running, "requests\nrunning"),
            (throughput, "output\ntokens/s"),
        ):
            ax.set_ylabel(name)
            peaks = [float(np.max(drawn.get_ydata(), initial=0)) for drawn in ax.lines] or [0.0]
            top = max(peaks)
            ax.set_ylim(0, 1.08 * top or 1)
            if ax is queued and top > 10 * max(1.0, min(peaks)):
                from metrics.drawing.log_axis import log_above_one

                log_above_one(ax)
                ax.set_ylim(0, 1.5 * top)
            ax.set_xlim(0, until)
        figure.align_ylabels()
        throughput.set_xlabel("time (s)")
        if cut:
            queued.set_title(_goes_on(cut, letters_in(0.8 * width_in)), loc="right", fontsize=LEGEND_POINTS, pad=2)
        legend_above(figure, queued, len(runs), per_row=5)
        return figure


def _shown_until(ends_s: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Where an axis of time ends, and the runs that go on beyond it: half as long again as most runs."""
    if not ends_s:
        return 1.0, {}
    ends = sorted(ends_s.values())
    usual = 1.5 * ends[len(ends) // 2]
    cut = {label: end for label, end in ends_s.items() if end > usual}
    return max(end for end in ends if end <= usual) * (1.1 if cut else 1), cut


def _goes_on(cut: Mapping[str, float], letters: int) -> str:
    """Until when the runs go on that an axis of time does not show to their end."""
    told = ", ".join(f"{label} until {end:,.3g} s" for label, end in cut.items())
    return shown_name(f"goes on beyond this axis: {told}", letters)


def batch_composition(runs: Runs, *, width_in: float = DOUBLE_COLUMN_IN) -> Figure:
    """How large batches are, and what they hold. Left: share of batches by their tokens, the largest marked, runs with
    equal curves as one line. Right: the mean batch, divided into prefill, decode and dummy tokens."""
    from metrics.drawing.log_axis import log_scale

    with house_style():
        figure, axes = new_figure(width_in, 1.3 + max(1.0, 0.2 * len(runs)), 1, 2)
        sizes_axes, parts_axes = axes[0]
        styles, parts = _styles(runs), {label: _parts(run) for label, run in runs.items()}
        found = {label: np.sort(sum(each.values())) for label, each in parts.items()}
        drawn = {label: sizes[sizes > 0] for label, sizes in found.items() if len(sizes[sizes > 0])}
        for labels in _coinciding(drawn):
            sizes = drawn[labels[0]]
            values, counts = np.unique(sizes, return_counts=True)
            share = 100 * np.cumsum(counts) / len(sizes)
            name = shown_name(" = ".join(labels), letters_in(0.2 * width_in, 7))
            style = styles[labels[0]]
            sizes_axes.plot(values, share, label=name, drawstyle="steps-post", **style.line())
            sizes_axes.plot(values[-1:], share[-1:], style.marker, color=style.colour, markersize=4, clip_on=False)
        if not drawn:
            say_empty(sizes_axes, "no batch ran")
            say_empty(parts_axes, "no batch ran")
            return figure
        log_scale(sizes_axes, "x")
        sizes_axes.set_ylim(0, 101)
        sizes_axes.set_xlabel("tokens of a batch")
        sizes_axes.set_ylabel("% of batches up to this size")
        figure.legend(*sizes_axes.get_legend_handles_labels(), loc="outside right center", fontsize=7)
        rows = np.arange(len(runs))
        left = np.zeros(len(runs))
        for name, look in _PARTS.items():
            mean = np.array([float(parts[label][name].mean()) if len(parts[label][name]) else 0.0 for label in runs])
            parts_axes.barh(rows, mean, left=left, height=0.7, **look)
            left += mean
        for row, label in enumerate(runs):
            if label in drawn:
                most = f" largest {drawn[label][-1]:,.0f}"
                parts_axes.text(left[row], row, most, va="center", fontsize=6, color=SOFT_INK)
        parts_axes.set_xlim(0, 1.6 * left.max())
        parts_axes.set_yticks(rows, [shown_name(label, letters_in(0.2 * width_in, 7)) for label in runs])
        parts_axes.invert_yaxis()
        parts_axes.set_xlabel("mean tokens of a batch")
        _legend_of_parts(figure)
        return figure


def _parts(run: RunTables) -> dict[str, Floats]:
    """Prefill, decode and dummy tokens of every batch."""
    columns = {"prefill": "chunk_tokens", "decode": "decodes", "dummy": "dummy_tokens"}
    return {name: run.column("iterations", column).astype(np.float64) for name, column in columns.items()}


def _coinciding(samples: Mapping[str, Floats]) -> list[list[str]]:
    """Labels in groups of equal samples."""
    groups: list[list[str]] = []
    for label, values in samples.items():
        twin = next((group for group in groups if np.array_equal(samples[group[0]], values)), None)
        if twin is None:
            groups.append([label])
        else:
            twin.append(label)
    return groups


def _styles(runs: Runs) -> dict[str, LineStyle]:
    return styles_for({label: run.config.get("policy") for label, run in runs.items()})


def cdf_figure(
    samples: Mapping[str, tuple[Floats, NDArray[np.int64]]],
    styles: Mapping[str, LineStyle],
    name: str,
    of_what: str,
    width_in: float = SINGLE_COLUMN_IN,
    stretch_tail: bool = False,
) -> Figure:
    """CDFs of (values, how often each occurs) per label, on a logarithmic axis.

    stretch_tail: the fraction f is drawn at -log10(1 - f), so that P99 and P99.9 have as much room as P90.
    """
    from metrics.drawing.log_axis import log_scale

    with house_style():
        figure, axes = new_figure(width_in, 0.76 * width_in)
        ax = axes[0, 0]
        largest = max((int(counts.sum()) for _, counts in samples.values()), default=0)
        # Up to the largest of all values, which one step of the largest sample tells apart from the rest.
        top = max(2.0, -math.log10(0.5 / max(largest, 1))) if stretch_tail else 1
        for position, (label, (values, counts)) in enumerate(samples.items()):
            x, y = _cdf(values, counts)
            if stretch_tail:
                y = -np.log10(np.maximum(1 - y, 0.5 / max(int(counts.sum()), 1)))
            # Markers sit at other heights in each curve, so that none hides another where curves run together.
            heights = np.arange((0.5 + position) / max(len(samples), 1) * 0.22, 1, 0.22) * top
            marks = np.unique(np.searchsorted(y, heights))
            ax.plot(
                x,
                y,
                label=shown_name(label),
                drawstyle="steps-post",
                marker=styles[label].marker,
                markersize=3,
                markevery=marks[marks < len(x)].tolist(),
                **styles[label].line(),
            )
        drawn = [line.get_xdata() for line in ax.lines if len(line.get_xdata())]
        ax.set_ylim(0, top * 1.01)
        if stretch_tail:
            ticks = [tick for tick in _TAIL_TICKS if -math.log10(1 - tick) <= top]
            ax.set_yticks([-math.log10(1 - tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
        if drawn:
            log_scale(ax, "x")
            above = [(values[values > 0], counts[values > 0]) for values, counts in samples.values()]
            lefts = [percentiles(values, [0.5], counts)[0] for values, counts in above]
            ax.set_xlim(float(np.nanmin(lefts)) / 1.15, max(float(x.max()) for x in drawn) * 1.08)
        else:
            say_empty(ax, "nothing was measured: no request finished")
        ax.set_xlabel(name)
        ax.set_ylabel(of_what)
        legend_above(figure, ax, len(samples), per_row=3 if width_in < 5 else 6)
        return figure


def _cdf(values: Floats, counts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """The points of a CDF, thinned out evenly in probability; first, last and the tail are always kept."""
    positive = values > 0  # a logarithmic axis has no place for 0
    order = np.argsort(values[positive], kind="stable")
    x, weights = values[positive][order], counts[positive][order]
    if not len(x):
        return x, x
    total = counts.sum()
    y = (np.cumsum(weights) + counts[~positive].sum()) / total
    wanted = np.concatenate([np.linspace(0, 1, _CDF_POINTS), 1 - np.geomspace(0.1, 1 / max(total, 10), 200)])
    keep = np.unique(np.concatenate([[0], np.searchsorted(y, np.sort(wanted)), [len(x) - 1]]))
    keep = keep[keep < len(x)]
    # A curve begins below its first value, so that a single value is a line too.
    return np.concatenate([x[:1], x[keep]]), np.concatenate([counts[~positive].sum(keepdims=True) / total, y[keep]])


def _end_s(run: RunTables) -> float:
    ends = [
        np.max(run.column("iterations", "end_s"), initial=0.0),
        np.nanmax(run.column("requests", "finished_s"), initial=0.0),
    ]
    return float(max(*ends, 1e-9))


def _mean_over_bins(run: RunTables, column: str, edges: Floats) -> Floats:
    """Time average of a state column within each bin, summed over replicas; idle replicas hold nobody."""
    engine = run.engines("iterations")
    start = run.column_ns("iterations", "planned_s")
    held = held_ns(run)
    values = run.column("iterations", column).astype(np.float64)
    total = np.zeros(len(edges) - 1)
    for number in np.unique(engine):
        rows = np.flatnonzero(engine == number)
        rows = rows[np.argsort(start[rows], kind="stable")]
        corners = np.stack([start[rows], start[rows] + held[rows]], axis=1).ravel() / 1e9
        area = np.cumsum(np.stack([np.zeros(len(rows)), values[rows] * held[rows] / 1e9], axis=1).ravel())
        total += np.diff(np.interp(edges, corners, area)) / np.diff(edges)
    return total


def _edges(run: RunTables) -> Floats:
    """Slices of a run that hold about ten iterations, so that a slice without an end of one is a pause, not chance."""
    return np.linspace(0, _end_s(run), int(np.clip(run.rows("iterations") // 10, 10, _BINS)) + 1)


class _Look(NamedTuple):
    """A run's look in the panels over time. shift: where its first marker sits, as a share of the way to the next.

    until_s: where the panels end.
    """

    label: str
    style: LineStyle
    shift: float
    until_s: float


def _over_time(ax: Axes, edges: Floats, values: Floats, look: _Look) -> None:
    middles = (edges[1:] + edges[:-1]) / 2
    inside = middles <= look.until_s
    middles, values = middles[inside], values[inside]
    every = max(1, len(values) // 8)  # markers, since dashes alone do not tell nine runs apart in grey
    ax.plot(
        middles,
        values,
        label=shown_name(look.label),
        marker=look.style.marker,
        markersize=3,
        markevery=(int(look.shift * every), every),
        clip_on=False,
        **look.style.line(),
    )


def _legend_of_parts(figure: Figure) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(label=name, **look) for name, look in _PARTS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), columnspacing=1.4)
