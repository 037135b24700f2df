"""Figures of pipelines: who computes what when, what share of the time is lost to which cause, and to whom.

Micro-batches are filled, bubbles are hatched by cause; the hatches alone tell the causes apart in grey.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metrics.drawing.figure_style import (
    DOUBLE_COLUMN_IN,
    LEGEND_POINTS,
    SINGLE_COLUMN_IN,
    costs_said,
    footnote,
    house_style,
    letters_in,
    new_figure,
    save,
    shown_name,
    styles_for,
)
from metrics.drawing.figures import cdf_figure
from metrics.drawing.perfetto import Window
from metrics.measures.bubble_causes import CAUSE_NAMES, CAUSES
from metrics.pipelines.bubbles import Bubbles, Gaps, find_bubbles
from metrics.pipelines.request_bubbles import request_bubble_ns
from metrics.pipelines.stage_schedule import Schedule, schedules
from metrics.run_folder.columns import MetricsError
from metrics.run_folder.tables import RunTables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ints = NDArray[np.int64]
Runs = Mapping[str, RunTables]

_KINDS = {
    "prefill": {"facecolor": "#3B5B92", "edgecolor": "#22365A"},
    "mixed": {"facecolor": "#8FB0D9", "edgecolor": "#22365A"},
    "decode": {"facecolor": "#F2B84B", "edgecolor": "#8A6414"},
}
_LOOKS: dict[str, dict[str, Any]] = {
    "pb1": {"facecolor": "#F6D5C5", "hatch": "/////"},
    "pb2": {"facecolor": "#F2B8B5", "hatch": "xxxxx"},
    "pb3": {"facecolor": "#E4D3EE", "hatch": "....."},
    "stage_split": {"facecolor": "#D9E8D2", "hatch": "\\\\\\\\\\"},
    "fill_drain": {"facecolor": "#FFFFFF", "hatch": "--"},
    "transfer": {"facecolor": "#CFE8EF", "hatch": "+++++"},
    "host": {"facecolor": "#E3E3E3", "hatch": "|||||"},
    "starvation": {"facecolor": "#FFFFFF", "hatch": ""},
    "rank": {"facecolor": "#FBE9C6", "hatch": "ooo"},
}
_PASSES_SHOWN = 5


def draw_pipeline(
    runs: Runs,
    folder: str | Path,
    *,
    window: Window | None = None,
    bubbles: Mapping[str, Bubbles] | None = None,
) -> list[Path]:
    """Write the three pipeline figures into a folder (made if it is not there); returns the files, PDF and PNG.

    window: what the Gantt chart shows; of each run, a few passes with the bubble share of the whole unless given.
    bubbles: per label, as found by `find_bubbles`, if they are at hand.
    """
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MetricsError(f"{target}: cannot make the folder for figures: {error.strerror}") from error
    found = bubbles or {label: find_bubbles(run) for label, run in runs.items()}
    said = costs_said(run.config for run in runs.values())
    with house_style():
        return [
            *save(footnote(gantt(runs, found, window=window), said), target, "pipeline_gantt"),
            *save(footnote(bubble_shares(found), said), target, "bubble_shares"),
            *save(footnote(request_bubble_cdf(runs, found), said), target, "request_bubble_cdf"),
        ]


def gantt(
    runs: Runs,
    bubbles: Mapping[str, Bubbles],
    *,
    window: Window | None = None,
    replica: int | None = None,
    width_in: float = DOUBLE_COLUMN_IN,
) -> Figure:
    """Stages over time in a window, runs side by side (two in a row), bubbles hatched by cause; the stages of
    every data-parallel rank.

    replica: whose stages; of each run, the first that ran anything unless given.
    """
    with house_style():
        columns = min(len(runs), 2) or 1
        rows = -(-len(runs) // columns) or 1
        schedules_of = {label: _replica(label, run, replica) for label, run in runs.items()}
        depth = max((sum(s.num_stages for s in ranks) for ranks in schedules_of.values()), default=1)
        figure, axes = new_figure(width_in, 0.75 + rows * (0.35 + 0.24 * depth), rows, columns)
        panels = list(axes.flat)
        seen: set[str] = set()
        for ax, (label, ranks) in zip(panels, schedules_of.items()):
            gaps = [_of_rank(bubbles[label], schedule) for schedule in ranks]
            shown = window or _typical(ranks[0], gaps[0])
            seen |= _draw_ranks(ax, ranks, gaps, shown)
            ax.set_title(shown_name(label, letters_in(0.72 * width_in / columns, 8)), loc="left", pad=2)
            ax.set_xlabel(f"{'ms' if _in_ms(shown) else 's'} after {shown.start / 1e9:.3f} s")
        for ax in panels[len(runs) :]:
            ax.set_visible(False)
        _legend_of_looks(figure, [name for name in (*_KINDS, *CAUSES) if name in seen])
        return figure


def bubble_shares(bubbles: Mapping[str, Bubbles], *, width_in: float = SINGLE_COLUMN_IN) -> Figure:
    """Share of the in-flight time of all stages that is lost, stacked by cause, one bar per run."""
    with house_style():
        figure, axes = new_figure(width_in, 0.85 + 0.26 * max(len(bubbles), 1))
        ax = axes[0, 0]
        position = np.arange(len(bubbles))
        left = np.zeros(len(bubbles))
        used = []
        for cause in CAUSES:
            share = np.array([100 * found.cause_shares[cause] for found in bubbles.values()])
            share = np.nan_to_num(share)
            if share.any():
                ax.barh(position, share, left=left, height=0.72, edgecolor="#333333", linewidth=0.4, **_LOOKS[cause])
                if share.max() >= 0.1:
                    used.append(cause)
            left += share
        for y, total in zip(position, left):
            ax.text(total, y, f" {total:.1f} %", va="center", fontsize=7)
        ax.set_yticks(position, [shown_name(label, letters_in(0.4 * width_in)) for label in bubbles])
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_xlim(0, max(left.max(initial=0) * 1.16, 1))
        ax.set_xlabel("bubbles, % of stage time in flight")
        _legend_of_looks(figure, used, per_row=2)
        return figure


def request_bubble_cdf(runs: Runs, bubbles: Mapping[str, Bubbles], *, width_in: float = SINGLE_COLUMN_IN) -> Figure:
    """CDF of the bubble time of finished requests, summed over their micro-batches and all stages."""
    samples = {}
    for label, run in runs.items():
        finished = run.column("requests", "status") == "finished"
        values = request_bubble_ns(run, bubbles[label])[finished] / 1e9
        samples[label] = (values, np.ones(len(values), dtype=np.int64))
    styles = styles_for({label: run.config.get("policy") for label, run in runs.items()})
    return cdf_figure(samples, styles, "bubble time per request, all stages (s)", "fraction of requests", width_in)


def _replica(label: str, run: RunTables, replica: int | None) -> list[Schedule]:
    """The ranks of a replica (one without), of the first that ran anything unless it is named."""
    found = list(schedules(run))
    chosen = replica if replica is not None or not found else found[0].replica
    ranks = [schedule for schedule in found if schedule.replica == chosen]
    if ranks:
        return ranks
    which = "replica" if replica is None else f"replica {replica}"
    raise MetricsError(f"Gantt chart: run {label!r}: found no {which} that ran anything")


def _of_rank(bubbles: Bubbles, schedule: Schedule) -> Gaps:
    mine = (schedule.replica, schedule.rank)
    return next(gaps for gaps in bubbles.gaps if (gaps.replica, gaps.rank) == mine)


def _typical(s: Schedule, gaps: Gaps) -> Window:
    """A few pipeline passes whose bubble share is that of the whole run, as nearly as it gets."""
    length = max(int(_PASSES_SHOWN * np.median(s.done - s.planned)), 1)
    starts = s.start[np.unique(np.linspace(0, s.num_batches - 1, 400).astype(np.int64)), 0]
    starts = starts[starts + length <= max(s.done[-1], starts[0] + length)]

    def idle_until(moments: Ints) -> Ints:
        idle = np.zeros(len(moments), dtype=np.int64)
        for edges, sign in ((np.sort(gaps.start), 1), (np.sort(gaps.end), -1)):
            upto = np.concatenate([[0], np.cumsum(edges)])
            passed = np.searchsorted(edges, moments)
            idle += sign * (passed * moments - upto[passed])
        return idle

    share = (idle_until(starts + length) - idle_until(starts)) / (length * s.num_stages)
    whole = int((gaps.end - gaps.start).sum()) / max(int((s.end - s.start).sum() + (gaps.end - gaps.start).sum()), 1)
    start = int(starts[np.argmin(np.abs(share - whole))])
    return Window(start, start + length)


def _in_ms(shown: Window) -> bool:
    return shown.end - shown.start < 2e9


def _draw_ranks(ax: Axes, ranks: list[Schedule], gaps: list[Gaps], shown: Window) -> set[str]:
    """Draw one replica, rank by rank; returns which kinds and causes occur."""
    seen: set[str] = set()
    names: list[str] = []
    for schedule, own in zip(ranks, gaps):
        seen |= _draw_stages(ax, schedule, own, shown, len(names))
        prefix = f"rank {schedule.rank}" if len(ranks) > 1 else ""
        stages = [f"stage {stage}" for stage in range(schedule.num_stages)]
        names += [prefix] if prefix and len(stages) == 1 else [f"{prefix} {stage}".strip() for stage in stages]
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(0, (shown.end - shown.start) / (1e6 if _in_ms(shown) else 1e9))
    ax.grid(visible=False)
    return seen


def _draw_stages(ax: Axes, s: Schedule, gaps: Gaps, shown: Window, first: int) -> set[str]:
    """Draw the stages of one rank from row `first` on."""
    unit = 1e6 if _in_ms(shown) else 1e9
    least = (shown.end - shown.start) / 500  # what is thinner than its own outline is left out
    seen = set()
    kind = np.where(s.chunk_tokens == 0, "decode", np.where(s.decodes > 0, "mixed", "prefill"))

    def bars(start: Ints, end: Ints, stage: int, look: Mapping[str, Any], name: str) -> None:
        visible = (end > shown.start) & (start < shown.end) & (end > start)
        if not visible.any():
            return
        begin = np.maximum(start[visible], shown.start)
        length = np.minimum(end[visible], shown.end) - begin
        begin, length = begin[length >= least] - shown.start, length[length >= least]
        if not len(begin):
            return
        seen.add(name)
        ax.broken_barh(
            np.stack([begin / unit, length / unit], axis=1).tolist(),
            (first + stage - 0.42, 0.84),
            linewidth=0.35,
            **look,
        )

    for stage in range(s.num_stages):
        for name, look in _KINDS.items():
            bars(s.start[kind == name, stage], s.end[kind == name, stage], stage, look, name)
        own = gaps.stage == stage
        # A bubble of several causes is drawn as one piece per cause, in the order of CAUSES.
        upto = gaps.start[own][:, None] + np.cumsum(gaps.cause_ns[own], axis=1)
        for c, cause in enumerate(CAUSES):
            bars(
                upto[:, c] - gaps.cause_ns[own, c], upto[:, c], stage, {"edgecolor": "#555555", **_LOOKS[cause]}, cause
            )
    return seen


def _legend_of_looks(figure: Figure, names: list[str], per_row: int = 5) -> None:
    from matplotlib.patches import Patch

    looks = {**_KINDS, **{cause: {"edgecolor": "#555555", **look} for cause, look in _LOOKS.items()}}
    handles = [Patch(linewidth=0.4, label=CAUSE_NAMES.get(name, name), **looks[name]) for name in names]
    if handles:
        rows = -(-len(handles) // per_row)
        # Panels keep their height, however many causes there are.
        figure.set_figheight(figure.get_figheight() + (rows - 1) * 1.5 * LEGEND_POINTS / 72)
        figure.legend(handles=handles, loc="outside upper center", ncols=-(-len(handles) // rows), columnspacing=1.2)
