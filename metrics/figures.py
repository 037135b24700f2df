"""The figures of a replay, from tables alone: latency CDFs, load over time, what batches are made of.

Each takes several runs at once (label -> run), draws them with the style of their policy, and returns a matplotlib
Figure; `draw_all` writes all of them into a folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metrics.columns import MetricsError
from metrics.figure_style import (
    DOUBLE_COLUMN_IN,
    SINGLE_COLUMN_IN,
    LineStyle,
    house_style,
    legend_above,
    new_figure,
    save,
    styles_for,
)
from metrics.latencies import finished_latencies
from metrics.statistics import percentiles
from metrics.tables import RunTables
from metrics.token_times import TokenTimes
from metrics.windows import held_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Runs = Mapping[str, RunTables]

_CDF_POINTS = 1_000
_BINS = 100
_TAIL_TICKS = (0, 0.5, 0.9, 0.99, 0.999, 0.9999)
_PARTS = {
    "prefill": {"facecolor": "#3B5B92", "edgecolor": "#3B5B92"},
    "decode": {"facecolor": "#F2B84B", "edgecolor": "#F2B84B"},
    "dummy": {"facecolor": "#FFFFFF", "edgecolor": "#555555", "hatch": "//////"},
}


def draw_all(runs: Runs, folder: str | Path) -> list[Path]:
    """Write the four figures of a replay into a folder (made if it is not there); returns the files, PDF and PNG."""
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
    with house_style():
        for name, draw in figures.items():
            written += save(draw(runs), target, name)
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
    """Requests queued and running, and output tokens per second, over time; means over equal slices of the run."""
    with house_style():
        figure, axes = new_figure(width_in, 0.55 * width_in, rows=3, sharex=True)
        queued, running, throughput = axes[:, 0]
        for label, style in _styles(runs).items():
            run = runs[label]
            edges = np.linspace(0, _end_s(run), _BINS + 1)
            middle = (edges[1:] + edges[:-1]) / 2
            for ax, column in ((queued, "waiting"), (running, "running")):
                ax.plot(middle, _mean_over_bins(run, column, edges), label=label, **style.line())
            tokens = TokenTimes(run)
            delivered, _ = np.histogram(tokens.times_ns / 1e9, edges, weights=tokens.cover())
            throughput.plot(middle, delivered / np.diff(edges), label=label, **style.line())
        for ax, name in (
            (queued, "requests\nqueued"),
            (running, "requests\nrunning"),
            (throughput, "output\ntokens/s"),
        ):
            ax.set_ylabel(name)
            ax.set_ylim(bottom=0)
            ax.set_xlim(0, max(map(_end_s, runs.values()), default=1))
        figure.align_ylabels()
        throughput.set_xlabel("time (s)")
        legend_above(figure, queued, len(runs), per_row=5)
        return figure


def batch_composition(runs: Runs, *, width_in: float = DOUBLE_COLUMN_IN) -> Figure:
    """Prefill, decode and dummy tokens of a batch over time, one panel per run; means over equal slices of the run.

    Every panel has its own vertical scale: batches of 100 and of 2000 tokens both stay readable.
    """
    with house_style():
        columns = 1 if len(runs) <= 2 else 2
        rows = -(-len(runs) // columns)
        figure, axes = new_figure(width_in, 0.45 + 1.05 * rows, rows, columns, sharex=True)
        panels = list(axes.flat)
        for ax, (label, run) in zip(panels, runs.items()):
            _stack_batches(ax, run)
            ax.set_title(label, loc="left", pad=2)
        for ax in panels[len(runs) :]:
            ax.set_visible(False)
        for ax in panels[max(len(runs) - columns, 0) : len(runs)]:
            ax.tick_params(labelbottom=True)
        figure.supxlabel("time (s)", fontsize=8)
        figure.supylabel("tokens per batch", fontsize=8)
        legend_above(figure, panels[0], len(_PARTS))
        return figure


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
    with house_style():
        figure, axes = new_figure(width_in, 0.76 * width_in)
        ax = axes[0, 0]
        top = -math.log10(1 - _TAIL_TICKS[-1]) if stretch_tail else 1
        for position, (label, (values, counts)) in enumerate(samples.items()):
            x, y = _cdf(values, counts)
            if stretch_tail:
                y = -np.log10(np.maximum(1 - y, 0.5 / max(int(counts.sum()), 1)))
            # Markers sit at other heights in each curve, so that none hides another where curves run together.
            heights = np.arange((0.5 + position) / max(len(samples), 1) * 0.22, 1, 0.22) * top
            marks = np.unique(np.searchsorted(y, heights))
            ax.plot(
                x, y, label=label, drawstyle="steps-post", marker=styles[label].marker, markersize=3,
                markevery=marks[marks < len(x)].tolist(), **styles[label].line(),
            )  # fmt: skip
        ax.set_xscale("log")
        lefts = [percentiles(values[values > 0], [0.5], counts[values > 0])[0] for values, counts in samples.values()]
        if np.isfinite(lefts).any():
            ax.set_xlim(left=float(np.nanmin(lefts)) / 1.15)
        ax.set_ylim(0, top * 1.01)
        if stretch_tail:
            ax.set_yticks([-math.log10(1 - tick) for tick in _TAIL_TICKS], [f"{tick:g}" for tick in _TAIL_TICKS])
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
    return x[keep], y[keep]


def _end_s(run: RunTables) -> float:
    ends = [
        np.max(run.column("iterations", "end_s"), initial=0.0),
        np.nanmax(run.column("requests", "finished_s"), initial=0.0),
    ]
    return float(max(*ends, 1e-9))


def _mean_over_bins(run: RunTables, column: str, edges: Floats) -> Floats:
    """Time average of a state column within each bin, summed over replicas; idle replicas hold nobody."""
    replica = run.column("iterations", "replica")
    start = run.column_ns("iterations", "planned_s")
    held = held_ns(run)
    values = run.column("iterations", column).astype(np.float64)
    total = np.zeros(len(edges) - 1)
    for number in np.unique(replica):
        rows = np.flatnonzero(replica == number)
        rows = rows[np.argsort(start[rows], kind="stable")]
        corners = np.stack([start[rows], start[rows] + held[rows]], axis=1).ravel() / 1e9
        area = np.cumsum(np.stack([np.zeros(len(rows)), values[rows] * held[rows] / 1e9], axis=1).ravel())
        total += np.diff(np.interp(edges, corners, area)) / np.diff(edges)
    return total


def _stack_batches(ax: Axes, run: RunTables) -> None:
    end = run.column("iterations", "end_s")
    edges = np.linspace(0, _end_s(run), _BINS + 1)
    batches, _ = np.histogram(end, edges)
    tokens = {
        "prefill": run.column("iterations", "chunk_tokens"),
        "decode": run.column("iterations", "decodes"),
        "dummy": run.column("iterations", "dummy_tokens"),
    }
    below = np.zeros(_BINS)
    for name, values in tokens.items():
        mean = np.histogram(end, edges, weights=values)[0] / np.maximum(batches, 1)
        look: dict[str, Any] = {"linewidth": 0.3, **_PARTS[name]}
        ax.fill_between(
            np.repeat(edges, 2)[1:-1], np.repeat(below, 2), np.repeat(below + mean, 2),
            where=np.repeat(mean > 0, 2), label=name, **look,
        )  # fmt: skip
        below = below + mean
    ax.margins(x=0)
    ax.set_ylim(bottom=0)
