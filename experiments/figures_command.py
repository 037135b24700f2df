"""`python -m experiments list | run | gallery`: the figures of papers, measured here."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.sweep_command import WorkersOption

if TYPE_CHECKING:
    from collections.abc import Sequence

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]


def register(app: typer.Typer) -> None:
    app.command("list")(list_experiments)
    app.command("run")(run)
    app.command("gallery")(gallery)


def list_experiments(as_json: JsonOption = False) -> None:
    """List every experiment with its question and source."""
    from experiments.experiment import experiment_names, load_experiment

    rows = []
    for name in experiment_names():
        module = load_experiment(name)
        rows.append({"experiment": name, "question": module.QUESTION, "source": module.SOURCE})
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for row in rows:
        print(f"{row['experiment']}\n  {row['question']}\n  {row['source']}")


def run(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Experiments, or all.")],
    out: Annotated[Path, typer.Option(help="Folder for figures, CSV and verdicts.")] = Path("runs/figures"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller runs of the same kind, for a first look and CI.")
    ] = False,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run experiments: measure, draw (PDF, PNG, SVG; both column widths), write the CSV, and judge."""
    from experiments.engines import make_engine
    from experiments.errors import ExperimentError
    from experiments.experiment import experiment_names, load_experiment
    from experiments.progress import Progress

    chosen = experiment_names() if names == ["all"] else list(dict.fromkeys(names))
    # The longest first, so that no core waits for another at the end.
    chosen.sort(key=lambda name: -getattr(load_experiment(name), "MINUTES", 0.0))
    began = time.monotonic()
    engine = make_engine("local", workers=0 if len(chosen) == 1 else workers)
    tasks = {
        number: {"kind": "experiment", "experiment": name, "out": str(out), "quick": quick}
        for number, name in enumerate(chosen)
    }
    results: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    with Progress("experiments", "done", quiet=as_json) as progress:
        progress(0, len(chosen))
        try:
            for number, done in engine.run(tasks):
                if done["status"] == "ok":
                    results[chosen[number]] = done["result"]
                else:
                    failed[chosen[number]] = done["error"]
                progress(len(results) + len(failed), len(chosen), len(failed))
        finally:
            engine.close()
    if as_json:
        print(json.dumps({"results": [results[n] for n in sorted(results)], "failed": failed}, indent=2))
    else:
        for name in sorted(results):
            _print_result(results[name])
        print(f"{len(results)} experiments in {time.monotonic() - began:.0f} s, written to {out}")
    if failed:
        name, error = next(iter(failed.items()))
        raise ExperimentError(f"{len(failed)} of {len(chosen)} experiments failed; {name}: {error}")


def gallery(
    results: Annotated[Path, typer.Option(help="Where `run` wrote its results.")] = Path("runs/figures"),
    out: Annotated[Path, typer.Option(help="Markdown file; PNGs go into a folder of its name.")] = Path(
        "docs/gallery.md"
    ),
) -> None:
    """Write a Markdown page of all figures with their verdicts and the papers' numbers beside ours."""
    from experiments.gallery import write_gallery

    count = write_gallery(results, out)
    print(f"{count} figures in {out}")


def _print_result(result: dict[str, Any]) -> None:
    print(f"\n{result['experiment']}: {result['verdict']}")
    print(f"  {result['question']} ({result['source']})")
    for check in result["checks"]:
        print(f"  [{'yes' if check['holds'] else 'no '}] {check['text']}")
    _print_comparisons(result["comparisons"])
    print(f"  costs: {'; '.join(result['cost_models'])}; {result['wall_s']} s", flush=True)


def _print_comparisons(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        return
    width = max(len(row["what"]) for row in rows)
    for row in rows:
        unit = row["unit"]
        text = f"ours {row['ours']:.4g} {unit}, paper {row['paper']:.4g} {unit} ({row['ratio'] - 1:+.0%})"
        print(f"    {row['what']:<{width}}  {text}", file=sys.stdout)
