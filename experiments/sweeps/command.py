"""`python -m experiments sweep`: many replays from one file of axes, resumable."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.errors import ExperimentError
from policies.edges.command_line import tell_notes
from policies.edges.output_file import check_place

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.sweeps.folder import SweepFolder

EngineOption = Annotated[str, typer.Option("--engine", help="local (worker processes of this machine) or ray.")]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", help="Worker processes; as many as cores by default, 0 for none.")
]
RayAddressOption = Annotated[
    str | None, typer.Option("--ray-address", help="Ray cluster, host:port; local starts one here.")
]

TermOption = Annotated[
    list[str] | None, typer.Option("--term", help="Change a term of the engine, as host_tp_step_us=0; repeatable.")
]

SHOWN = ("ttft_s_p99", "tbt_s_p99", "e2e_s_p50", "requests_per_s", "output_tokens_per_s", "slo_attainment")


def register(app: typer.Typer) -> None:
    app.command("sweep")(sweep)


def sweep(
    file: Annotated[
        Path, typer.Argument(help="TOML with tables trace, base and space; see docs/how-to/experiments.md.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the results; runs/FILE by default.")] = None,
    engine: EngineOption = "local",
    workers: WorkersOption = None,
    ray_address: RayAddressOption = None,
    report: Annotated[Path | None, typer.Option(help="Write one HTML file to explore the points in.")] = None,
    term: TermOption = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed points again.")] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Keep finished points although their inputs have changed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Run every point of a sweep, on this machine or on Ray; started again, it goes on where it was."""
    from experiments.running.early_notes import notes_of_sweep
    from experiments.running.progress import Progress
    from experiments.running.task_runners import make_engine
    from experiments.sweeps.axes import read_sweep
    from experiments.sweeps.run import run_sweep

    if report is not None:
        from metrics.html_report import require_plotly

        check_place(report, ExperimentError)
        require_plotly()
    spec = read_sweep(file)
    if term:
        spec = replace(spec, base={**spec.base, "terms": {**spec.base.get("terms", {}), **terms_of(term)}})
    target = out or Path("runs") / file.stem
    chosen = make_engine(engine, workers=workers, ray_address=ray_address)
    notes = tell_notes(notes_of_sweep(spec))
    with Progress("sweep", "points", quiet=as_json) as progress:
        try:
            folder = run_sweep(spec, target, engine=chosen, retry_failed=retry_failed, anyway=anyway, report=progress)
        except KeyboardInterrupt:
            print(f"interrupted; finished points are kept in {target}, the same command goes on", file=sys.stderr)
            raise typer.Exit(130) from None
    rows = folder.rows()
    if report is not None:
        _write_report(report, folder, file, notes)
    failed = [row for row in rows if row["status"] == "failed"]
    table = target / "sweep.parquet"
    if as_json:
        counts = {"table": str(table), "points": len(rows), "failed": len(failed)}
        print(json.dumps({**counts, "notes": notes, "rows": rows}, indent=2))
        _refuse_success(rows, failed)
        return
    from metrics.drawing.text_tables import terminal

    console = terminal()
    console.print(_table(folder))
    tell = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    for costs, count in _costs(rows).most_common(5):
        tell(f"costs: {costs}" + (f", {count} of {len(rows)} points" if count < len(rows) else ""))
    for error, count in Counter(row["error"] for row in failed).most_common(5):
        tell(f"{count} failed: {error}")
    tell(f"{len(rows)} points in {table}")
    _refuse_success(rows, failed)


def terms_of(texts: Sequence[str]) -> dict[str, Any]:
    """Terms of a command line, checked by name and value."""
    from profiler.operators.engine_terms import EngineTerms, parse_terms

    terms = parse_terms(texts, ExperimentError)
    EngineTerms.from_mapping(terms, "--term")
    return terms


def _refuse_success(rows: Sequence[object], failed: Sequence[Mapping[str, Any]]) -> None:
    """A sweep whose points all failed found nothing."""
    if failed and len(failed) == len(rows):
        raise ExperimentError(f"all {len(rows)} points failed, the first with: {failed[0]['error']}")


def _costs(rows: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Where the costs of points come from, and how many of them each."""
    return Counter(f"{row['cost_model']} ({row.get('cost_basis')})" for row in rows if row.get("cost_model"))


def _write_report(path: Path, folder: SweepFolder, file: Path, said: Sequence[str]) -> None:
    from metrics.html_report import RowTable, write_report

    spec, rows = folder.spec, folder.rows()
    failed = sum(row["status"] == "failed" for row in rows)
    notes = [f"Sweep {file.name}: {len(rows)} points, {failed} failed; method {spec.method}, seed {spec.seed}."]
    notes += [f"Costs: {costs}." for costs in _costs(rows)]
    notes.append(f"Trace: {json.dumps(spec.trace)}. Settings that stay: {json.dumps(spec.base)}.")
    notes += [f"Note: {note}" for note in said]
    axes = [axis.name for axis in spec.axes]
    table = RowTable(f"{len(rows)} points", rows, axes, "One row a point; every key of the summary is a column.")
    question = f"What do the points of {file.stem} come to?"
    write_report(path, question=question, verdict=_range(rows, axes), tables=[table], notes=notes)


def _range(rows: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> str:
    """Between which points the tail of the gaps lies, in one sentence."""
    for key, title in (("tbt_s_p99", "TBT P99"), ("ttft_s_p99", "TTFT P99")):
        known = sorted(
            (row for row in rows if isinstance(row.get(key), float) and row[key] == row[key]), key=itemgetter(key)
        )
        if len(known) > 1:
            least, most = (
                (", ".join(f"{axis} {row.get(axis)}" for axis in axes), 1e3 * row[key]) for row in (known[0], known[-1])
            )
            return f"{title} goes from {least[1]:.3g} ms ({least[0]}) to {most[1]:.3g} ms ({most[0]})."
    return "Fewer than two points have finished requests."


def _table(folder: SweepFolder, most: int = 40) -> Table:
    """The points as people read them: best first where there is an objective, in order otherwise."""
    from rich import box
    from rich.table import Table

    from metrics.drawing.text_tables import format_value

    spec, rows = folder.spec, folder.rows()
    shown = [key for key in SHOWN if any(row.get(key) is not None for row in rows)]
    if spec.objective:
        best = 1 if spec.direction == "minimize" else -1
        rows.sort(key=lambda row: (row.get(spec.objective) is None, best * (row.get(spec.objective) or 0.0)))
        shown = [spec.objective, *(key for key in shown if key != spec.objective)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    if len(rows) > most:
        table.caption, table.caption_justify = f"{most} of {len(rows)} points", "left"
    axes: list[Any] = [axis.name for axis in spec.axes]
    for name in ("point", *axes, *shown):
        table.add_column(name.replace("_s_", " ").replace("_", " "), justify="right", no_wrap=True)
    for row in rows[:most]:
        cells = [str(row["point"]), *(_setting(row[name]) for name in axes)]
        table.add_row(*cells, *(format_value(key, row.get(key)) for key in shown))
    return table


def _setting(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
