"""A trace in one figure: its rate over time, its gaps, its lengths, and how prompts and answers go together."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from policies.edges.missing_glyphs import drawable
from policies.edges.output_file import whole_file
from policies.work.request import NS_PER_S
from workloads.description import describe
from workloads.trace import Trace, TraceError

_BLUE, _ORANGE, _GREY = "#0072b2", "#d55e00", "#999999"
_MOST_POINTS = 20_000


def draw(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Writes the figure (its ending says the format: .png, .pdf, .svg). Raises TraceError where that is impossible."""
    from matplotlib import font_manager, rcParams
    from matplotlib.figure import Figure

    path = Path(path)
    figure = Figure(figsize=(10, 7), layout="constrained")
    rate, gaps, lengths, pairs = figure.subplots(2, 2).flat
    numbers = describe(trace)
    _rate_over_time(rate, trace)
    _distribution(gaps, np.diff(trace.arrival_ns) / NS_PER_S, "gaps", _BLUE)
    if numbers["rate"]:
        times = np.geomspace(1e-3 / numbers["rate"], 20 / numbers["rate"], 200)
        gaps.plot(times, 1 - np.exp(-numbers["rate"] * times), color=_GREY, ls="--", lw=1, label="Poisson")
    gaps.set(xlabel="gap between arrivals (s)", ylabel="share of gaps", xscale="log")
    _distribution(lengths, trace.prompt_tokens, "prompt", _BLUE)
    _distribution(lengths, trace.output_tokens, "output", _ORANGE, "--")
    lengths.set(xlabel="tokens", ylabel="share of requests", xscale="log")
    for axes in (gaps, lengths):
        axes.set_ylim(0, 1)
        if axes.lines:
            axes.legend(frameon=False)
        else:
            axes.text(0.5, 0.5, "no gaps: all requests arrive at once", transform=axes.transAxes, ha="center")
    rows = np.linspace(0, len(trace) - 1, min(len(trace), _MOST_POINTS)).astype(np.int64)
    pairs.scatter(trace.prompt_tokens[rows], trace.output_tokens[rows], s=3, alpha=0.3, color=_BLUE, rasterized=True)
    pairs.set(xlabel="prompt tokens", ylabel="output tokens", xscale="log", yscale="log")
    for axis in (gaps.xaxis, lengths.xaxis, pairs.xaxis, pairs.yaxis):
        _whole_decades(axis)
    for axes in (rate, gaps, lengths, pairs):
        axes.spines[["top", "right"]].set_visible(False)
    ratio = numbers["pd_ratio"]
    count = f"{len(trace):,} request{'' if len(trace) == 1 else 's'}"
    name = drawable(trace.name, font_manager, rcParams["font.family"]).replace("$", r"\$")
    figure.suptitle(f"{name}: {count} in {numbers['span_s']:,.0f} s, P:D {ratio:.1f}")
    with whole_file(path, TraceError) as scratch:
        try:
            figure.savefig(scratch, dpi=150)
        except ValueError as error:
            raise TraceError(f"{path}: the figure cannot be written ({str(error).splitlines()[0]})") from None
    return path


def _rate_over_time(axes, trace: Trace) -> None:  # type: ignore[no-untyped-def]
    arrival_s = trace.arrival_ns / NS_PER_S
    span_s = float(arrival_s[-1])
    axes.set(xlabel="time (s)", ylabel="requests per second")
    if span_s <= 0:
        axes.text(0.5, 0.5, "no rate: all requests arrive at once", transform=axes.transAxes, ha="center")
        return
    counts, edges = np.histogram(arrival_s, bins=min(max(len(trace) // 20, 1), 120), range=(0, span_s))
    axes.stairs(counts / np.diff(edges), edges, color=_BLUE, fill=True, alpha=0.6)
    axes.set(xlim=(0, span_s), ylim=(0, None))


def _whole_decades(axis) -> None:  # type: ignore[no-untyped-def]
    """From one power of ten to another, these alone with labels: between them labels would touch."""
    from matplotlib.ticker import NullFormatter

    low, high = sorted(axis.get_view_interval())
    axis.set_view_interval(10.0 ** np.floor(np.log10(low)), 10.0 ** np.ceil(np.log10(high)), ignore=True)
    axis.set_minor_formatter(NullFormatter())


def _distribution(axes, values, label: str, color: str, dashes: str = "-") -> None:  # type: ignore[no-untyped-def]
    ordered = np.sort(values[values > 0])
    if len(ordered):
        # From below the first value, so that a single one is a line too.
        shares = np.arange(len(ordered) + 1) / len(ordered)
        axes.step(np.concatenate([ordered[:1], ordered]), shares, where="post", color=color, ls=dashes, label=label)
