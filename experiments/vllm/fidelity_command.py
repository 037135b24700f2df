"""`python -m experiments fidelity`: replay real vLLM runs and print what they experienced beside what was predicted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from experiments.vllm.fidelity import Bench, Fidelity


def register(app: typer.Typer) -> None:
    app.command("fidelity")(fidelity)


def fidelity(
    run: Annotated[
        list[Path] | None, typer.Option(help="Folder of a run (repeatable); default: all that the project carries.")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="LLMServingSim profile folder, profile or model file.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name or config; the run's own by default.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU name; the run's own by default.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree; the run's own by default.")] = None,
    term: Annotated[list[str] | None, typer.Option(help="Change a term of the costs, e.g. kernel_gap_us=1.")] = None,
    engine: Annotated[str, typer.Option(help="Engine whose terms are added: vllm:0.19, ..., or a TOML file.")] = "none",
    p2p: Annotated[
        bool | None, typer.Option("--p2p/--no-p2p", help="GPUs of the node reach each other directly.")
    ] = None,
    ablation: Annotated[bool, typer.Option(help="One line for each effect switched off or on.")] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for over-time tables and figures.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Mean and percentiles of TTFT, TPOT and E2E: simulated, measured, error. Nothing is fitted on the runs."""
    from experiments.errors import ExperimentError
    from experiments.vllm.fidelity import make_bench
    from profiler.measurements.facts import VLLM_RUNS
    from profiler.operators.engine_terms import parse_terms

    folders = run or sorted(path.parent for path in VLLM_RUNS.glob("*/*/requests.parquet"))
    reports = []
    terms = parse_terms(term or [], ExperimentError)
    for folder in folders:
        bench = make_bench(folder, profile=profile, model=model, gpu=gpu, tp=tp, terms=terms, engine=engine, p2p=p2p)
        result = bench.replay()
        rows = _ablation(bench, result) if ablation else []
        reports.append(_report(bench, result, rows))
        if not as_json:
            _print(bench, result, rows)
        if out is not None:
            written = _write(out, result)
            if not as_json:
                print(f"  wrote {written}\n")
    if as_json:
        from metrics.run_folder.folder import json_ready

        print(json.dumps(json_ready(reports if len(reports) > 1 else reports[0]), indent=2))


def _ablation(bench: Bench, base: Fidelity) -> list[dict[str, Any]]:
    rows = [{"variant": "as it is", "errors": base.errors}]
    for variant in bench.variants():
        rows.append({"variant": variant.name, "errors": bench.replay(variant).errors})
    return rows


def _report(bench: Bench, result: Fidelity, rows: list[dict[str, Any]]) -> dict[str, Any]:
    second, blocks = result.run.overcommitted()
    inside = result.replayed.tables.iterations.to_pandas()["inside"]
    return {
        "run": result.run.name,
        "costs": bench.source,
        "calibrated_on": bench.fit.provenance.get("calibrated_on"),
        "settings": result.run.settings(),
        "measured": result.measured,
        "simulated": result.simulated,
        "errors": result.errors,
        "missed": result.missed,
        "iterations": len(inside),
        "iterations_outside_measured_region": int((~inside).sum()),
        "shared_blocks_shown_by_log": {"second": second, "blocks": blocks},
        "known_decode_steps": [asdict(one) | {"error": one.error} for one in bench.known_stretches()],
        "decode_seconds_of_the_log": [asdict(one) | {"error": one.error} for one in bench.decode_seconds()],
        "ablation": rows,
    }


def _print(bench: Bench, result: Fidelity, rows: list[dict[str, Any]]) -> None:
    from experiments.vllm.fidelity import STATISTICS
    from experiments.vllm.steps_from_request_times import by_size

    calibrated = bench.fit.provenance.get("calibrated_on")
    print(f"{result.run.name}: {len(result.run.requests)} requests; costs from {bench.source}", end="")
    if calibrated:
        print(f", CALIBRATED on {calibrated}")
    else:
        print("" if "CALIBRATED" in bench.source else ", nothing fitted on the run")
    for line in _not_its_own(result.costs):
        print(f"  {line}")
    print(f"  {'':10}" + "".join(f"{name:>26}" for name in STATISTICS))
    for key, measured in result.measured.items():
        unit, scale = ("ms", 1e3) if key == "tpot" else ("s", 1.0)
        cells = [
            f"{result.simulated[key][name] * scale:.2f} {measured[name] * scale:7.2f} {result.errors[key][name]:+6.1%}"
            for name in STATISTICS
        ]
        print(f"  {key.upper() + ' ' + unit:10}" + "".join(f"{cell:>26}" for cell in cells))
    print("  (simulated, measured, error)" + (f"; beyond its aim: {', '.join(result.missed)}" if result.missed else ""))
    second, blocks = result.run.overcommitted()
    if blocks:
        print(
            f"  the log at {second:.0f} s holds {blocks} blocks more than fit unless prompts share prefixes;"
            " the run does not say which"
        )
    for one in bench.known_stretches():
        size = f"{one.decodes[0]} to {one.decodes[1]} requests"
        times = f"{one.predicted_s * 1e3:.2f} ms predicted, {one.measured_s * 1e3:.2f} measured, {one.error:+.1%}"
        print(f"  {one.steps} decode steps of {size} (their number is certain): {times}")
    for least, most, seconds, ms, error in by_size(bench.decode_seconds()):
        unit = "second" if seconds == 1 else "seconds"
        print(f"  {seconds} {unit} of decodes alone, {least} to {most}: {ms:.1f} ms a step measured, {error:+.1%}")
    if rows:
        print(f"  {'error at mean / P50':50}{'TTFT':>20}{'TPOT':>20}{'E2E':>20}")
    for row in rows:
        errors = row["errors"]
        cells = [f"{errors[key]['mean']:+5.1%} / {errors[key]['p50']:+5.1%}" for key in ("ttft", "tpot", "e2e")]
        print(f"  {row['variant']:50}" + "".join(f"{cell:>20}" for cell in cells))
    print()


def _not_its_own(costs: Mapping[str, Any]) -> list[str]:
    """What the costs say of a model that was not profiled itself."""
    region = costs.get("region", {})
    lines = [
        f"{word}: {', '.join(dict.fromkeys(region[key]))}"
        for key, word in (("composed", "composed of other shapes"), ("unmeasured", "never measured near"))
        if region.get(key)
    ]
    return [] if costs.get("profiled") else ["the profile holds another model or degree of tensor parallelism", *lines]


def _write(out: Path, result: Fidelity) -> Path:
    """over_time.csv and figures/over_time.{pdf,png} below OUT/GPU/MODEL."""
    import pandas as pd

    from experiments.vllm.fidelity import over_time
    from experiments.vllm.fidelity_figures import over_time_figure
    from metrics.drawing.figure_style import save

    folder = out / result.run.folder.parent.name / result.run.folder.name
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    columns = over_time(result)
    pd.DataFrame(columns).to_csv(folder / "over_time.csv", index=False)
    save(over_time_figure(columns, result.run.name), folder / "figures", "over_time")
    return folder
