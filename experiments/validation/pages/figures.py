"""The figures of a validation report: errors by statistic, distributions of both worlds, iterations, drift."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.validation.comparing.settings import load_name
from experiments.validation.comparing.statistics import Iterations, aim_of
from metrics.drawing.figure_style import DOUBLE_COLUMN_IN, house_style, legend_above, new_figure, shown_name, styles_for
from metrics.measures.latencies import finished_latencies

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from experiments.validation.comparing.machine_drift import Probe
    from experiments.validation.comparing.result import Result
    from metrics import RunTables

_SHOWN = ("ttft_s_mean", "ttft_s_p90", "tpot_s_mean", "tpot_s_p90", "tbt_s_p99", "e2e_s_mean", "e2e_s_p90")
_RATIOS = (0.4, 1.6)
"""Predicted over measured: what the panel of iterations shows to scale."""
_PREDICTED = (0, (3, 1.2))


def errors_figure(result: Result) -> Figure:
    """Predicted over live, statistic by statistic: the point, the prediction's interval, the live repeats' range."""
    loads = result.settings.loads
    labels = list(result.settings.policies)
    styles = styles_for({label: label.split(":")[0] for label in labels})
    with house_style():
        figure, axes = new_figure(DOUBLE_COLUMN_IN, 0.6 + 1.9 * len(loads), len(loads), 1, sharex=True)
        for panel, load in zip(axes[:, 0], loads):
            width = 0.8 / max(1, len(labels))
            for number, label in enumerate(labels):
                rows = {row.statistic: row for row in result.comparisons if row.policy == label and row.load == load}
                for place, statistic in enumerate(_SHOWN):
                    row = rows.get(statistic)
                    if row is None or not row.live:
                        continue
                    at = place + (number - (len(labels) - 1) / 2) * width
                    ratios = [row.live_low / row.live, row.live_high / row.live]
                    panel.plot([at, at], ratios, color="#999999", linewidth=6, alpha=0.45, solid_capstyle="butt")
                    low, high = row.low / row.live, row.high / row.live
                    middle = row.simulated / row.live
                    style = styles[label]
                    panel.plot([at, at], [low, high], color=style.colour, linewidth=1)
                    panel.plot(
                        [at],
                        [middle],
                        marker=style.marker,
                        color=style.colour,
                        markersize=4,
                        linestyle="none",
                        label=shown_name(label) if place == 0 else None,
                    )
            for place, statistic in enumerate(_SHOWN):
                aim = aim_of(statistic, load)
                if aim is not None:
                    panel.fill_between(
                        [place - 0.45, place + 0.45], 1 - aim, 1 + aim, color="#009E73", alpha=0.12, lw=0
                    )
            panel.axhline(1.0, color="#333333", linewidth=0.6)
            panel.set_ylabel(f"predicted / live\n({load_name(load)} load)")
        axes[-1, 0].set_xticks(range(len(_SHOWN)), [_name(statistic) for statistic in _SHOWN])
        first = axes[0, 0]
        first.plot([], [], color="#333333", linewidth=1, label="its interval (5 to 95 %)")
        first.plot([], [], color="#999999", linewidth=6, alpha=0.45, label="range of live repeats")
        first.fill_between([], [], [], color="#009E73", alpha=0.12, lw=0, label="aim")
        legend_above(figure, first, len(labels) + 3)
    return figure


def iterations_figure(iterations: Iterations) -> Figure:
    """Left: predicted against measured time of every live iteration. Right: their ratio by what the batch holds."""
    from metrics.drawing.log_axis import log_scale

    with house_style():
        figure, axes = new_figure(DOUBLE_COLUMN_IN, 2.7, 1, 2)
        left, right = axes[0]
        mixed = iterations.prefill_tokens > 0
        step = max(1, len(mixed) // 6000)  # more dots than this are only ink
        outside = shown = 0
        for rows, colour, marker, label in (
            (~mixed, "#E69F00", "o", "decode only"),
            (mixed, "#0072B2", "s", "with prefill"),
        ):
            measured, predicted = iterations.measured_s[rows][::step] * 1e3, iterations.predicted_s[rows][::step] * 1e3
            dots: dict[str, Any] = {"s": 4, "color": colour, "marker": marker, "alpha": 0.35, "linewidths": 0}
            shown += len(measured)
            left.scatter(measured, predicted, label=label, rasterized=True, **dots)
            tokens = (iterations.prefill_tokens + iterations.decodes)[rows][::step]
            ratio = predicted / measured
            right.scatter(tokens, np.clip(ratio, *_RATIOS), rasterized=True, **dots)
            outside += _mark_outside(right, tokens, ratio, colour)
        if len(iterations.measured_s):
            low = float(min(iterations.measured_s.min(), iterations.predicted_s.min())) * 1e3
            high = float(max(iterations.measured_s.max(), iterations.predicted_s.max())) * 1e3
            left.plot([low, high], [low, high], color="#333333", linewidth=0.6)
        log_scale(left, "x", "y")
        left.set(xlabel="measured (ms)", ylabel="predicted (ms)")
        left.legend(loc="upper left", markerscale=2)
        right.axhline(1.0, color="#333333", linewidth=0.6)
        log_scale(right, "x")
        low, high = _RATIOS
        right.set(xlabel="tokens in the batch", ylabel="predicted / measured", ylim=(low - 0.03, high + 0.03))
        if outside:
            right.set_title(f"triangles: {outside:,} of {shown:,} lie beyond {low} and {high}", loc="right")
    return figure


def _mark_outside(ax: Axes, tokens: Any, ratio: Any, colour: str) -> int:
    """Ratios beyond the panel stand at its edge as triangles that point out of it; returns how many."""
    beyond = 0
    for rows, marker, edge in ((ratio < _RATIOS[0], "v", _RATIOS[0]), (ratio > _RATIOS[1], "^", _RATIOS[1])):
        if rows.any():
            ax.scatter(
                tokens[rows],
                np.full(int(rows.sum()), edge),
                s=16,
                color=colour,
                marker=marker,
                edgecolors="#333333",
                linewidths=0.4,
                clip_on=False,
                zorder=4,
            )
            beyond += int(rows.sum())
    return beyond


def distributions_figure(result: Result) -> Figure:
    """CDFs of TTFT, TPOT and E2E, simulated (dashed) beside every live repeat, one row a load."""
    loads, labels = result.settings.loads, list(result.settings.policies)
    styles = styles_for({label: label.split(":")[0] for label in labels})
    with house_style():
        figure, axes = new_figure(DOUBLE_COLUMN_IN, 0.6 + 1.9 * len(loads), len(loads), 3, sharey=True)
        for line, load in zip(axes, loads):
            for label in labels:
                style = styles[label]
                for run in result.live[load, label]:
                    for panel, values in zip(line, _latencies(run)):
                        panel.plot(*_cdf(values), color=style.colour, linewidth=0.8, alpha=0.6)
                for panel, values in zip(line, _latencies(result.simulated[load, label])):
                    # Dashes say which world it is; in grey, markers say which policy.
                    panel.plot(
                        *_cdf(values),
                        color=style.colour,
                        linewidth=1.4,
                        linestyle=_PREDICTED,
                        label=shown_name(label),
                        marker=style.marker,
                        markersize=3,
                        markevery=max(1, len(values) // 6),
                    )
            line[0].set_ylabel(f"fraction of requests\n({load_name(load)} load)")
        for panel, name in zip(axes[-1], ("TTFT (s)", "TPOT (s)", "E2E (s)")):
            panel.set_xlabel(name)
        axes[0, 0].plot([], [], color="#333333", linewidth=1.4, linestyle=_PREDICTED, label="dashed: predicted")
        axes[0, 0].plot([], [], color="#333333", linewidth=0.8, alpha=0.6, label="solid: live repeats")
        legend_above(figure, axes[0, 0], len(labels) + 2)
    return figure


def drift_figure(probes: list[Probe]) -> Figure:
    """Speed of the machine over the experiment, as the probes saw it."""
    with house_style():
        figure, axes = new_figure(DOUBLE_COLUMN_IN, 1.7)
        panel = axes[0, 0]
        at = [probe.at_s / 60 for probe in probes]
        panel.plot(at, [probe.speed for probe in probes], marker="o", color="#0072B2", label="left alone (medians)")
        panel.plot(
            at,
            [probe.mean_speed for probe in probes],
            marker="s",
            color="#D55E00",
            linestyle=(0, (3, 1.2)),
            label="with disturbances (means)",
        )
        panel.axhline(1.0, color="#333333", linewidth=0.6)
        panel.set(xlabel="minutes", ylabel="time / profile's")
        panel.legend()
    return figure


def _latencies(run: RunTables) -> list[Any]:
    """TTFT, TPOT and E2E of finished requests, seconds."""
    own = finished_latencies(run)
    return [own[name] for name in ("ttft", "tpot", "e2e")]


def _cdf(values: Any) -> tuple[Any, Any]:
    ordered = np.sort(values)
    return ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered))


def _name(statistic: str) -> str:
    family, _, rest = statistic.partition("_s_")
    return f"{family.upper()}\n{rest}"
