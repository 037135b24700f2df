"""The report: everything that somebody needs who was not there, in one file that opens without a network.

Python puts plain data into the page (JSON in a script element); three small scripts in assets/ draw it with Plotly,
which is inlined. Whatever is shown in colour is also told by words, dashes, markers or hatches, every plot has its
numbers as a table, and everything can be reached with the keyboard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from metrics.html_report.comparison import comparison
from metrics.html_report.plots import picture_of, run_plots
from metrics.html_report.requests import inspected_requests
from metrics.html_report.row_tables import RowTable, tables_section
from metrics.html_report.timeline import Slice, timeline_of
from metrics.html_report.trust import trust_of
from metrics.html_report.verdict import verdict_of
from metrics.run_folder.columns import MetricsError
from metrics.run_folder.folder import json_ready
from metrics.run_folder.tables import RunTables
from policies.edges.output_file import write_text

SCRIPTS = ("plots.js", "timeline.js", "inspector.js")


def write_report(
    path: str | Path,
    runs: Mapping[str, RunTables] | None = None,
    *,
    question: str,
    verdict: str = "",
    tables: Sequence[RowTable] = (),
    notes: Sequence[str] = (),
    window: Slice | None = None,
) -> Path:
    """Write a report, whole or not at all; returns its path.

    runs: label -> run, with its config and summary. question: what the reader wants answered. verdict: the answer
    in one sentence, made from the runs where it is left empty. tables: rows to explore.
    notes: sentences for the trust section. window: seconds (from, to) of the timeline; by default all of a short run,
    and of a long one the part around its longest stall.
    Raises MetricsError if Plotly is not installed, there is nothing to show, or the file cannot be written.
    """
    runs = dict(runs or {})
    if not runs and not tables:
        raise MetricsError("report: found neither runs nor tables, expected at least one of them")
    for label, run in runs.items():
        if not run.summary:
            from metrics.measures.summary import summarise

            run.summary = summarise(run)
        if not run.config:
            raise MetricsError(f"report: run {label!r} has no config, expected one that says what was run")
    page = _page(runs, question, verdict or verdict_of(runs), tables, notes, window)
    return write_text(path, page, MetricsError)


def _page(
    runs: Mapping[str, RunTables],
    question: str,
    verdict: str,
    tables: Sequence[RowTable],
    notes: Sequence[str],
    window: Slice | None,
) -> str:
    data: dict[str, Any] = {"plots": run_plots(runs) if runs else [], "picture": picture_of(runs) if runs else None}
    data["tables"] = [table.for_script() for table in tables]
    data["runs"] = [
        {"label": label, "timeline": timeline_of(run, window), "requests": inspected_requests(run)}
        for label, run in runs.items()
    ]
    sections = []
    if runs:
        sections.append(("result", "Result", '<div id="picture"></div>' + comparison(runs)))
        sections.append(("plots", "Latency and load", '<div id="plot-area"></div>'))
    if tables:
        sections.append(("explore", "Points" if not runs else "Tables", tables_section(tables)))
    if runs:
        sections.append(("timeline", "Timeline", _asset("timeline.html")))
        sections.append(("requests", "Requests", _asset("inspector.html")))
    sections.append(("trust", "Trust", trust_of(runs, notes)))
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in sections)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-heading"><h2 id="{name}-heading">{heading}</h2>'
        f"{content}</section>"
        for name, heading, content in sections
    )
    scripts = "".join(f"<script>{_asset(name)}</script>" for name in SCRIPTS)
    return _asset("page.html").format(
        title=escape(question),
        question=escape(question),
        verdict=f'<p class="verdict">{escape(verdict)}</p>' if verdict else "",
        links=links,
        body=body,
        style=_asset("report.css"),
        data=_embedded(data),
        plotly=_plotly(),
        scripts=scripts,
    )


def _embedded(data: Any) -> str:
    """JSON that cannot end its script element early."""
    return json.dumps(json_ready(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return resources.files("metrics.html_report").joinpath("assets", name).read_text(encoding="utf-8")


def require_plotly() -> None:
    """Raise MetricsError if no report can be written, so that a long run need not end in that."""
    if find_spec("plotly") is None:
        raise MetricsError("--report: Plotly is not installed: pip install plotly")


def _plotly() -> str:
    require_plotly()
    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
