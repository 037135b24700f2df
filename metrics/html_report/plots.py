"""The plots of a report as plain Plotly data: latency tails, load over time, and what batches are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrics.drawing.figure_style import LineStyle, styles_for
from metrics.measures.latencies import finished_latencies
from metrics.measures.statistics import percentiles
from metrics.measures.token_times import TokenTimes
from metrics.measures.windows import held_ns
from metrics.run_folder.tables import RunTables

Floats = NDArray[np.float64]
Plot = dict[str, Any]

BINS = 120
TAIL = (
    0,
    1,
    5,
    10,
    20,
    30,
    40,
    50,
    60,
    70,
    75,
    80,
    85,
    90,
    92,
    94,
    95,
    96,
    97,
    98,
    98.5,
    99,
    99.3,
    99.5,
    99.7,
    99.8,
    99.9,
    99.95,
    99.99,
    100,
)
"""Percentiles that a tail is drawn through."""

_SYMBOLS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "D": "diamond",
    "v": "triangle-down",
    "x": "x",
    "P": "cross",
    "<": "triangle-left",
    ">": "triangle-right",
    "h": "hexagon",
    "*": "star",
    "p": "pentagon",
    "d": "diamond-tall",
    "8": "octagon",
    "X": "x-thin",
    "H": "hexagon2",
    "1": "y-down-open",
    "2": "y-up-open",
}


def run_plots(runs: Mapping[str, RunTables]) -> list[Plot]:
    """Every plot of these runs: an id, a title, what it says in one sentence, traces and layout."""
    styles = styles_for({label: run.config.get("policy") for label, run in runs.items()})
    latencies = {label: _latencies(run) for label, run in runs.items()}
    return [
        _tail("ttft", "Time to first token", "share of requests that waited longer", latencies, styles),
        _tail("tbt", "Time between tokens", "share of gaps that were longer", latencies, styles),
        _tail("e2e", "End to end", "share of requests that took longer", latencies, styles),
        *_load(runs, styles),
        *(_composition(label, run) for label, run in runs.items()),
    ]


def _latencies(run: RunTables) -> dict[str, tuple[Floats, NDArray[np.int64] | None]]:
    finished = run.column("requests", "status") == "finished"
    own = finished_latencies(run)
    gaps = TokenTimes(run).gaps(finished)
    return {"ttft": (own["ttft"], None), "tbt": (gaps.ns / 1e9, gaps.count), "e2e": (own["e2e"], None)}


def _tail(
    key: str,
    title: str,
    share: str,
    latencies: Mapping[str, Mapping[str, tuple[Floats, NDArray[np.int64] | None]]],
    styles: Mapping[str, LineStyle],
) -> Plot:
    traces = []
    for label, found in latencies.items():
        values, counts = found[key]
        if len(values):
            x = [1e3 * value for value in percentiles(values, TAIL, counts)]
            y = [100 - percent for percent in TAIL]
            traces.append({"name": label, "x": x, "y": y, "mode": "lines+markers", **_look(styles[label])})
    traces = _coinciding(traces)
    # The last percentile, 100, would lie at 0, which a logarithmic axis does not have.
    for trace in traces:
        trace["y"] = [max(value, 0.005) for value in trace["y"]]
    percent = f"% that {share.partition(' that ')[2]}"
    layout = {
        "xaxis": {"type": "log", "title": {"text": "ms"}},
        "yaxis": {"type": "log", "title": {"text": percent}, "range": [-2.4, 2.05]},
    }
    return {
        "id": key,
        "title": title,
        "says": f"Each point: {share} than the time below it.",
        "traces": traces,
        "layout": layout,
    }


def _coinciding(traces: list[Plot]) -> list[Plot]:
    """Curves that agree in every point become one, named after all of them: the others would be hidden behind it."""
    kept: list[Plot] = []
    for trace in traces:
        twin = next((one for one in kept if one["x"] == trace["x"] and one["y"] == trace["y"]), None)
        if twin is None:
            kept.append(dict(trace))
        else:
            twin["name"] = f"{twin['name']} = {trace['name']}"
    return kept


def picture_of(runs: Mapping[str, RunTables]) -> Plot:
    """The picture at the top. Several runs: the two tails that a policy trades against each other, a point a run. One
    run: every request's wait for its first token, by its arrival."""
    if len(runs) == 1:
        ((label, run),) = runs.items()
        style = styles_for({label: run.config.get("policy")})[label]
        rows = np.flatnonzero(~np.isnan(run.column("requests", "first_token_s").astype(np.float64)))
        arrival = run.column("requests", "arrival_s")[rows]
        waits = (run.column("requests", "first_token_s")[rows] - arrival) * 1e3
        trace = {
            "name": label,
            "x": _short(arrival),
            "y": _short(waits),
            "mode": "markers",
            "marker": {"color": style.colour, "size": 6, "opacity": 0.7},
        }
        layout = {
            "xaxis": {"title": {"text": "arrival (s)"}},
            "yaxis": {"title": {"text": "time to first token (ms)"}, "rangemode": "tozero"},
            "showlegend": False,
        }
        return {"id": "picture", "title": "Wait for the first token", "says": "", "traces": [trace], "layout": layout}
    styles = styles_for({label: run.config.get("policy") for label, run in runs.items()})
    points: dict[tuple[float, float], list[str]] = {}
    for label, run in runs.items():
        tails = [run.summary.get(key) for key in ("ttft_s_p99", "tbt_s_p99")]
        known = [float(value) for value in tails if isinstance(value, int | float) and value == value and value > 0]
        if len(known) == 2:
            points.setdefault((float(f"{known[0]:.4g}"), float(f"{known[1]:.4g}")), []).append(label)
    traces = [
        {
            "name": " = ".join(labels),
            "x": [1e3 * ttft],
            "y": [1e3 * tbt],
            "mode": "markers",
            "marker": {**_look(styles[labels[0]])["marker"], "size": 12},
        }
        for (ttft, tbt), labels in points.items()
    ]
    layout = {
        "xaxis": {"type": "log", "title": {"text": "TTFT P99 (ms)"}, **_ticks(traces, "x")},
        "yaxis": {"type": "log", "title": {"text": "TBT P99 (ms)"}, **_ticks(traces, "y")},
    }
    return {
        "id": "picture",
        "title": "Both tails at once",
        "says": "A point a run; lower left is better. Runs at the same point share it.",
        "traces": traces,
        "layout": layout,
    }


def _ticks(traces: list[Plot], side: str) -> dict[str, Any]:
    """1, 2 and 5 of every decade around these points, written out."""
    values = [value for trace in traces for value in trace[side]]
    if not values:
        return {}
    low, high = min(values) / 1.5, max(values) * 1.5
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    at = [step * 10.0**decade for decade in decades for step in (1, 2, 5) if low <= step * 10.0**decade <= high]
    bounds = [float(f"{np.log10(low):.4f}"), float(f"{np.log10(high):.4f}")]
    return {"tickvals": at, "ticktext": [f"{value:,g}" for value in at], "range": bounds}


def _load(runs: Mapping[str, RunTables], styles: Mapping[str, LineStyle]) -> list[Plot]:
    plots = []
    for column, title in (("waiting", "Requests waiting"), ("running", "Requests running"), ("kv", "KV blocks in use")):
        traces = []
        for label, run in runs.items():
            edges = np.linspace(0, _end_s(run), BINS + 1)
            values = _over_time(run, column, edges)
            if values is not None:
                middle = (edges[1:] + edges[:-1]) / 2
                look = _look(styles[label])
                traces.append(
                    {
                        "name": label,
                        "x": _short(middle),
                        "y": _short(values),
                        "mode": "lines+markers",
                        "line": look["line"],
                        "marker": {**look["marker"], "maxdisplayed": 12},
                    }
                )
        unit = "% of blocks" if column == "kv" else "requests"
        layout = {"xaxis": {"title": {"text": "time (s)"}}, "yaxis": {"title": {"text": unit}, "rangemode": "tozero"}}
        if traces:
            plots.append(
                {
                    "id": column,
                    "title": title,
                    "says": "Means over equal slices of the run.",
                    "traces": traces,
                    "layout": layout,
                }
            )
    return plots


def _composition(label: str, run: RunTables) -> Plot:
    edges = np.linspace(0, _end_s(run), BINS + 1)
    end = run.column("iterations", "end_s")
    batches = np.maximum(np.histogram(end, edges)[0], 1)
    middle = _short((edges[1:] + edges[:-1]) / 2)
    traces = []
    looks = (
        ("prefill", "chunk_tokens", "#3B5B92", "/"),
        ("decode", "decodes", "#F2B84B", ""),
        ("dummy", "dummy_tokens", "#DDDDDD", "x"),
    )
    for name, column, colour, hatch in looks:
        mean = np.histogram(end, edges, weights=run.column("iterations", column))[0] / batches
        traces.append(
            {
                "name": name,
                "x": middle,
                "y": _short(mean),
                "mode": "lines",
                "stackgroup": "tokens",
                "line": {"width": 0.5, "color": colour},
                "fillcolor": colour,
                "fillpattern": {"shape": hatch, "bgcolor": colour, "fgcolor": "#FFFFFF", "solidity": 0.2},
            }
        )
    layout = {"xaxis": {"title": {"text": "time (s)"}}, "yaxis": {"title": {"text": "tokens per batch"}}}
    return {
        "id": f"batches-{label}",
        "title": f"What batches are made of: {label}",
        "says": "Mean tokens of a batch over equal slices of the run.",
        "traces": traces,
        "layout": layout,
    }


def _over_time(run: RunTables, column: str, edges: Floats) -> Floats | None:
    """Time average of a state within each bin, summed over replicas (KV: share of all blocks, per cent)."""
    blocks = float(run.config.get("num_blocks") or 0)
    if column == "kv" and not blocks:
        return None
    engine = run.engines("iterations")
    start, held = run.column_ns("iterations", "planned_s"), held_ns(run)
    if column == "kv":
        values = 100 * (1 - run.column("iterations", "free_blocks") / blocks)
    else:
        values = run.column("iterations", column).astype(np.float64)
    total = np.zeros(len(edges) - 1)
    numbers = np.unique(engine)
    for number in numbers:
        rows = np.flatnonzero(engine == number)
        rows = rows[np.argsort(start[rows], kind="stable")]
        corners = np.stack([start[rows], start[rows] + held[rows]], axis=1).ravel() / 1e9
        area = np.cumsum(np.stack([np.zeros(len(rows)), values[rows] * held[rows] / 1e9], axis=1).ravel())
        total += np.diff(np.interp(edges, corners, area)) / np.diff(edges)
    return total / max(1, len(numbers)) if column == "kv" else total


def _look(style: LineStyle) -> dict[str, Any]:
    """A style as Plotly spells it: dashes in pixels, marker by name."""
    dash = ",".join(f"{3 * length:g}px" for length in style.dashes) or "solid"
    return {
        "line": {"color": style.colour, "dash": dash, "width": 2},
        "marker": {"symbol": _SYMBOLS.get(style.marker, "circle"), "size": 6, "color": style.colour},
    }


def _end_s(run: RunTables) -> float:
    ends = [
        np.max(run.column("iterations", "end_s"), initial=0.0),
        np.nanmax(run.column("requests", "finished_s"), initial=0.0),
    ]
    return float(max(*ends, 1e-9))


def _short(values: Floats) -> list[float]:
    """Six digits are plenty on a screen, and a third of the bytes."""
    return [float(f"{value:.6g}") for value in values.tolist()]
