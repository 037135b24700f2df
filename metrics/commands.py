"""The commands of `python -m metrics`: look into run folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metrics.run_folder.columns import MetricsError

if TYPE_CHECKING:
    from metrics.run_folder.tables import RunTables

app = typer.Typer(
    help="Look into run folders: summaries, differences, token times, bubbles, timelines and figures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

BY = ("slo", "priority", "session", "tenant", "program")
"""Columns of the requests by whose values a summary may be split."""

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
WarmupOption = Annotated[str, typer.Option(help="Left out of the statistics: a number of requests, or seconds as 30s.")]
SloOption = Annotated[str, typer.Option(help="Objective, such as ttft_p99=2,tbt_p99=0.2.")]


@app.command()
def show(
    run: RunArgument,
    warmup: WarmupOption = "",
    slo: SloOption = "",
    by: Annotated[str, typer.Option(help=f"One summary per value of a column: {', '.join(BY)}.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Print the summary of a run: its summary.json, or computed anew from its tables if an option asks for that."""
    if by:
        _show_by(run, by, warmup, slo, as_json)
        return
    summary = _summary(run, warmup, slo)
    if as_json:
        _print_json(summary)
        return
    from metrics.drawing.text_tables import summary_tables

    for table in summary_tables(summary):
        _print(table)


@app.command()
def diff(
    first: RunArgument, second: RunArgument, warmup: WarmupOption = "", slo: SloOption = "", as_json: JsonOption = False
) -> None:
    """Print two runs side by side with the difference of the second relative to the first."""
    from metrics.drawing.text_tables import differences, differences_table

    found = differences(_summary(first, warmup, slo), _summary(second, warmup, slo))
    if as_json:
        _print_json(found)
    else:
        one, other = _labelled([first, second])
        _print(differences_table((one, other), found))


@app.command("token-times")
def token_times(
    run: RunArgument,
    request: Annotated[int, typer.Option(help="Request, as numbered in requests.parquet.")],
    as_json: JsonOption = False,
) -> None:
    """Print when each token of one request was delivered, and the gap before it."""
    from metrics.measures.token_times import TokenTimes
    from metrics.run_folder.folder import read_run

    tables = read_run(run)
    rows = (tables.column("requests", "request") == request).nonzero()[0]
    if not len(rows):
        numbers = tables.column("requests", "request")
        span = f"{numbers.min()} to {numbers.max()}" if len(numbers) else "none"
        raise MetricsError(f"{run}: found no request {request}, expected one of its {len(numbers)} ({span})")
    arrival_s = float(tables.column("requests", "arrival_s")[rows[0]])
    times = TokenTimes(tables).of_request(int(rows[0])) / 1e9
    gaps = [float(b - a) for a, b in zip([arrival_s, *times.tolist()], times.tolist())]
    if as_json:
        _print_json({"request": request, "arrival_s": arrival_s, "time_s": times.tolist(), "gap_s": gaps})
        return
    from rich.table import Table

    from metrics.drawing.text_tables import format_value

    table = Table(box=None, pad_edge=False)
    for heading in ("token", "time (s)", "since the one before"):
        table.add_column(heading, justify="right")
    for number, (time_s, gap_s) in enumerate(zip(times.tolist(), gaps), 1):
        table.add_row(str(number), f"{time_s:.6f}", format_value("gap_s", gap_s) + (" (TTFT)" if number == 1 else ""))
    _print(table)


@app.command()
def figures(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders to draw together.")],
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("figures"),
) -> None:
    """Draw latency CDFs, load over time, batch composition and the bubbles of pipelines (PDF and PNG)."""
    from metrics.drawing.figures import draw_all
    from metrics.run_folder.folder import read_run

    for path in draw_all({label: read_run(run) for label, run in _labelled(runs).items()}, out):
        print(path)


@app.command()
def tenants(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    figures_to: Annotated[Path | None, typer.Option("--figures", help="Folder for service and TTFT over time.")] = None,
    output_weight: Annotated[float, typer.Option(help="What an output token counts, in prompt tokens.", min=0)] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """What every tenant asked for and was given, its TTFT, and how far service came apart while two waited."""
    from metrics.measures.tenants import Tenants, vtc_bound
    from metrics.run_folder.folder import read_run

    tables = {label: read_run(run) for label, run in _labelled(runs).items()}
    found = {label: Tenants(run, output_weight=output_weight) for label, run in tables.items()}
    drawn: list[Path] = []
    if figures_to is not None:
        from metrics.drawing.tenant_figures import draw_tenants

        drawn = draw_tenants(found, figures_to)
    if as_json:
        _print_json(
            {
                label: {
                    "policy": each.run.config.get("policy"),
                    "fairness_jain_tenants": each.jain,
                    "largest_gap_tokens": each.largest_gap(),
                    "vtc_bound_tokens": vtc_bound(each.run),
                    "tenants": each.table(),
                }
                for label, each in found.items()
            }
        )
        return
    from metrics.drawing.text_tables import tenant_table

    for label, each in found.items():
        _print(tenant_table(label, each, vtc_bound(each.run)))
    for path in drawn:
        print(path)


@app.command()
def bubbles(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    figures_to: Annotated[Path | None, typer.Option("--figures", help="Folder for Gantt, shares and CDF.")] = None,
    window: Annotated[str, typer.Option(help="What the Gantt chart shows, as FROM:TO in seconds.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Split the idle time of pipeline stages by cause, per stage and per run."""
    from metrics.drawing.perfetto import parse_window
    from metrics.measures.statistics import statistics
    from metrics.pipelines.bubbles import find_bubbles
    from metrics.pipelines.request_bubbles import request_bubble_ns
    from metrics.run_folder.folder import read_run

    shown = parse_window(window) if window else None
    tables = {label: read_run(run) for label, run in _labelled(runs).items()}
    found = {label: find_bubbles(run) for label, run in tables.items()}
    if figures_to is not None:
        from metrics.drawing.pipeline_figures import draw_pipeline

        drawn = draw_pipeline(tables, figures_to, window=shown, bubbles=found)
    per_request = {
        label: statistics(request_bubble_ns(run, found[label])[run.column("requests", "status") == "finished"] / 1e9)
        for label, run in tables.items()
    }
    if as_json:
        _print_json(
            {
                label: {
                    "policy": tables[label].config.get("policy"),
                    "bubble_share": each.share,
                    "cause_shares": each.cause_shares,
                    "lost_device_s": each.lost_device_s,
                    "request_bubble_s": per_request[label],
                    "stages": each.rows(),
                }
                for label, each in found.items()
            }
        )
        return
    from metrics.drawing.text_tables import bubble_table

    for label, each in found.items():
        _print(bubble_table(label, each, per_request[label]))
    if figures_to is not None:
        for path in drawn:
            print(path)


@app.command()
def timeline(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option(help="Where to write it; RUN/timeline.json unless given.")] = None,
    window: Annotated[
        str,
        typer.Option(
            help="Only what overlaps FROM:TO, in seconds; `:` is the whole run, of which a long one is else cut."
        ),
    ] = "",
    request: Annotated[int | None, typer.Option(help="A request to follow with arrows.")] = None,
) -> None:
    """Write a timeline for Perfetto (ui.perfetto.dev): stages, bubbles by cause, queue and KV blocks."""
    from metrics.drawing.perfetto import bounded_window, empty_window, parse_window, write_timeline
    from metrics.run_folder.folder import read_run

    tables = read_run(run)
    shown, cut = (parse_window(window), None) if window else bounded_window(tables)
    if cut:
        print(f"note: {cut}", file=sys.stderr)
    if note := empty_window(shown, tables.summary):
        print(f"note: {note}", file=sys.stderr)
    print(write_timeline(out or run / "timeline.json", tables, window=shown, request=request))


def _labelled(runs: list[Path]) -> dict[str, Path]:
    """Runs by the names of their folders; by as much of their paths as tells them apart where two have one name."""
    from policies.edges.distinct_names import distinct_names

    return dict(zip(distinct_names([str(run.resolve()) for run in runs]), runs))


def _asked(labels: list[str]) -> str:
    if len(labels) > 3:
        return f"What happened in {len(labels)} runs?"
    return f"What happened in {', '.join(labels)}?"


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders to report on together.")],
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("report.html"),
    question: Annotated[str, typer.Option(help="What the reader wants answered; the page's title.")] = "",
    window: Annotated[str, typer.Option(help="Part of the timeline, as FROM:TO seconds.")] = "",
) -> None:
    """Write one HTML file that opens offline: table, plots, zoomable timeline, request inspector, trust."""
    from metrics.drawing.perfetto import parse_window
    from metrics.html_report import write_report
    from metrics.html_report.timeline import Slice
    from metrics.run_folder.folder import read_run

    part = parse_window(window) if window else None
    shown = Slice(part.start / 1e9, min(part.end, 1 << 62) / 1e9) if part else None
    tables = {label: read_run(run) for label, run in _labelled(runs).items()}
    print(write_report(out, tables, question=question or _asked(list(tables)), window=shown))


def _summary(run: Path, warmup: str, slo: str) -> dict[str, Any]:
    from metrics.measures.slo import doubtful_bounds, parse_objectives
    from metrics.measures.summary import summarise
    from metrics.run_folder.folder import read_run

    tables = read_run(run)
    if tables.summary and not warmup and not slo:
        return tables.summary
    for note in doubtful_bounds(slo) if slo else ():
        print(f"note: {note}", file=sys.stderr)
    slo = slo or _own(tables, "slo")
    return summarise(tables, warmup=warmup or _own(tables, "warmup") or 0, slo=parse_objectives(slo) if slo else None)


def _own(run: RunTables, setting: str) -> str:
    """What the run itself was summarised with, "" for nothing."""
    for world in ("replay", "live"):
        settings = run.config.get(world)
        if isinstance(settings, dict):
            return str(settings.get(setting) or "")
    return ""


def _show_by(run: Path, column: str, warmup: str, slo: str, as_json: bool) -> None:
    from metrics.drawing.text_tables import comparison_table
    from metrics.measures.slo import parse_objectives
    from metrics.measures.summary import summarise_classes
    from metrics.run_folder.folder import read_run

    if column not in BY:
        raise MetricsError(f"--by: found {column!r}, expected one of {', '.join(BY)}")
    tables = read_run(run)
    objective, warmup = slo or _own(tables, "slo"), warmup or _own(tables, "warmup")
    summaries = summarise_classes(
        tables, column, slo=parse_objectives(objective) if objective else None, warmup=warmup or 0
    )
    if as_json:
        _print_json(summaries)
    else:
        _print(comparison_table(summaries, rivals=False))


def _print_json(content: Any) -> None:
    from metrics.run_folder.folder import json_ready

    print(json.dumps(json_ready(content), indent=2, allow_nan=False))


def _print(table: Any) -> None:
    from metrics.drawing.text_tables import terminal

    # Into a pipe or a file rich would assume 80 columns and cut the table.
    terminal().print(table)
