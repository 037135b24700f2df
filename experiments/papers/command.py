"""`python -m experiments list | run | gallery`: the figures of papers, measured here."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.errors import ExperimentError
from experiments.sweeps.command import WorkersOption
from policies.edges.output_file import check_place, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

CostsOption = Annotated[
    str, typer.Option("--cost-model", help="auto, roofline or a file, where an experiment leaves the choice.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]


def register(app: typer.Typer) -> None:
    app.command("list")(list_experiments)
    app.command("run")(run)
    app.command("claims")(claims)
    app.command("gallery")(gallery)


def list_experiments(as_json: JsonOption = False) -> None:
    """List every experiment with its question and source."""
    from experiments.papers.experiment import experiment_names, load_experiment

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
    cost_model: CostsOption = "auto",
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run experiments: measure, draw (PDF, PNG, SVG; both column widths), write the CSV, and judge."""
    from experiments.papers.experiment import experiment_names, load_experiment

    chosen = experiment_names() if names == ["all"] else list(dict.fromkeys(names))
    # The longest first, so that no core waits for another at the end.
    chosen.sort(key=lambda name: -getattr(load_experiment(name), "MINUTES", 0.0))
    check_place(out, ExperimentError)
    more = {"out": str(out), "quick": quick, "cost_model": cost_model}
    results, failed, seconds = _run_all("experiment", chosen, more, "experiments", workers, as_json)
    if as_json:
        print(json.dumps({"results": results, "failed": failed}, indent=2, ensure_ascii=False))
    else:
        for result in results:
            _print_result(result)
        print(f"{len(results)} experiments in {seconds:.0f} s, written to {out}")
    _raise_first(failed, len(chosen), "experiments")


def claims(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="Claims; all by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the findings.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller runs of the same kind.")] = False,
    cost_model: CostsOption = "auto",
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold claims about scheduling against our own runs: each with its configuration, our numbers and a verdict."""
    from experiments.errors import ExperimentError
    from experiments.papers.claim import claim_names

    if out is not None:
        check_place(out, ExperimentError)
    known = claim_names()
    for name in names or ():
        if name not in known:
            raise ExperimentError(f"claim {name!r}: no such claim, expected some of {', '.join(known)}")
    chosen = names or known
    results, failed, seconds = _run_all(
        "claim", chosen, {"quick": quick, "cost_model": cost_model}, "claims", workers, as_json
    )
    if out is not None:
        write_text(out, json.dumps(results, indent=2, ensure_ascii=False) + "\n", ExperimentError)
    if as_json:
        print(json.dumps(results, indent=2, ensure_ascii=False))
    else:
        for row in results:
            print(f"\n{row['claim']}: {row['says']}")
            print(f"  setting: {row['setting']}\n  ours:    {row['ours']}\n  verdict: {row['verdict']}")
            print(f"  costs:   {'; '.join(dict.fromkeys(row['cost_models']))}")
        print(f"\n{len(results)} claims in {seconds:.0f} s")
    _raise_first(failed, len(chosen), "claims")


def gallery(
    results: Annotated[Path, typer.Option(help="Where `run` wrote its results.")] = Path("runs/figures"),
    out: Annotated[Path, typer.Option(help="Markdown; PNGs go into a folder of its name.")] = Path(
        "docs/evidence/gallery.md"
    ),
    claims: Annotated[Path | None, typer.Option("--claims", help="What `claims --out` wrote, for a table.")] = None,
    beside: Annotated[
        Path | None, typer.Option(help="Results under another cost model, to be shown beside the first.")
    ] = None,
) -> None:
    """Write a Markdown page of all figures with their verdicts and the papers' numbers beside ours."""
    from experiments.papers.gallery import write_gallery

    count = write_gallery(results, out, claims, beside)
    print(f"{count} figures in {out}")


def _run_all(
    kind: str, names: Sequence[str], more: dict[str, Any], what: str, workers: int | None, quiet: bool
) -> tuple[list[dict[str, Any]], dict[str, str], float]:
    """Do tasks of one kind side by side: results by name in order, errors by name, seconds."""
    from experiments.running.progress import Progress
    from experiments.running.task_runners import make_engine

    began = time.monotonic()
    engine = make_engine("local", workers=0 if len(names) == 1 else workers)
    tasks = {number: {"kind": kind, kind: name, **more} for number, name in enumerate(names)}
    results: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    with Progress(what, "done", quiet=quiet) as progress:
        progress(0, len(names))
        try:
            for number, done in engine.run(tasks):
                if done["status"] == "ok":
                    results[names[number]] = done["result"]
                else:
                    failed[names[number]] = done["error"]
                progress(len(results) + len(failed), len(names), len(failed))
        finally:
            engine.close()
    return [results[name] for name in sorted(results)], failed, time.monotonic() - began


def _raise_first(failed: dict[str, str], total: int, what: str) -> None:
    from experiments.errors import ExperimentError

    if failed:
        name, error = next(iter(failed.items()))
        raise ExperimentError(f"{len(failed)} of {total} {what} failed; {name}: {error}")


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
