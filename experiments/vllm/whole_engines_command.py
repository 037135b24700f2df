"""`python -m experiments engines`: whole engines that others measured, predicted, each half of the rows by itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from experiments.vllm.whole_engines import Predicted, Variant


def register(app: typer.Typer) -> None:
    app.command("engines")(engines)


def engines(
    half: Annotated[str, typer.Option(help="a (terms were fitted on it), b (judges), or both.")] = "both",
    engine: Annotated[str | None, typer.Option(help="Engine for all rows; each row's own by default.")] = None,
    term: Annotated[list[str] | None, typer.Option(help="Change a term, as host_tp_step_us=0; repeatable.")] = None,
    only: Annotated[str, typer.Option(help="Rows of models whose name contains this, e.g. qwen3-32b.")] = "",
    every: Annotated[int, typer.Option(help="Every so many-th closed loop.", min=1)] = 1,
    ablation: Annotated[bool, typer.Option(help="One line for each effect switched off.")] = False,
    runs: Annotated[
        int, typer.Option(help="Draws of the costs: how many rows their 90 % intervals hold.", min=0, max=1000)
    ] = 0,
    rows: Annotated[bool, typer.Option(help="One line for each row.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Mean TTFT, TPOT and E2E of measured engines: median errors of each half, TTFT of closed loops as a band."""
    from experiments.errors import ExperimentError
    from experiments.vllm.whole_engines import ABLATION, NO_ENGINE, Variant, known_models
    from profiler.operators.engine_terms import parse_terms

    if half not in ("a", "b", "both"):
        raise ExperimentError(f"--half: found {half!r}, expected a, b or both")
    terms = parse_terms(term or [], ExperimentError)
    variants = [NO_ENGINE, *ABLATION] if ablation else [ABLATION[0]]
    report: dict[str, Any] = {}
    for variant in variants:
        changed = Variant(variant.name, {**terms, **variant.terms}, variant.options)
        found = _predict(half, changed, engine, runs, only, every)
        if not found:
            raise ExperimentError(f"--only: found no row of {only!r}; expected a part of {', '.join(known_models())}")
        report[variant.name] = _facts(found, rows)
        if not as_json:
            _print(variant.name, found, rows)
    if as_json:
        from metrics.run_folder.folder import json_ready

        print(json.dumps(json_ready(report), indent=2))


def _predict(
    half: str, variant: Variant, engine: str | None, draws: int, only: str = "", every: int = 1
) -> list[Predicted]:
    from experiments.vllm.whole_engines import known_loops, known_rates, predict_loop, predict_rate

    loops = [run for run in known_loops(half) if only in run.model][::every]
    rates = [run for run in known_rates(half) if only in run.model]
    found = [predict_loop(run, variant, engine, draws) for run in loops]
    return [*found, *(predict_rate(run, variant, engine, draws) for run in rates)]


def _groups(found: Sequence[Predicted]) -> dict[tuple[str, str], list[Predicted]]:
    """By engine and half; closed loops of several widths together as well."""
    groups: dict[tuple[str, str], list[Predicted]] = {}
    for row in found:
        groups.setdefault((row.group, row.half), []).append(row)
    for row in found:
        if row.ttft_band is not None:
            groups.setdefault(("all closed loops", row.half), []).append(row)
    return dict(sorted(groups.items()))


def _facts(found: Sequence[Predicted], rows: bool) -> list[dict[str, Any]]:
    from experiments.vllm.whole_engines import median_errors

    facts = []
    for (group, half), members in _groups(found).items():
        entry: dict[str, Any] = {"group": group, "half": half, "rows": len(members)}
        entry["median_errors"] = median_errors(members)
        if members[0].ttft_band is not None:
            entry["ttft_in_band"] = sum(row.ttft_in_band for row in members)
        if members[0].intervals:
            entry["held_by_intervals"] = {name: sum(row.inside(name) for row in members) for name in ("tpot", "e2e")}
        if rows or members[0].ttft_band is None:
            entry["each"] = [
                {"id": row.id, "measured": row.measured, "predicted": row.predicted, "ttft_band": row.ttft_band}
                for row in members
            ]
        facts.append(entry)
    return facts


def _print(title: str, found: Sequence[Predicted], rows: bool) -> None:
    from experiments.vllm.whole_engines import median_errors

    print(title)
    print(f"  {'':58}{'half':>5}{'rows':>6}{'TTFT':>8}{'TPOT':>8}{'E2E':>8}   median of absolute errors")
    for (group, half), members in _groups(found).items():
        errors = median_errors(members)
        cells = "".join(f"{100 * errors[name]:7.1f}%" for name in ("ttft", "tpot", "e2e"))
        band = ""
        if members[0].ttft_band is not None:
            band = f"   TTFT within its band: {sum(row.ttft_in_band for row in members)} of {len(members)}"
        print(f"  {group:58}{half:>5}{len(members):6}{cells}{band}")
        if members[0].intervals:
            held = ", ".join(f"{name.upper()} {sum(row.inside(name) for row in members)}" for name in ("tpot", "e2e"))
            print(f"  {'':58}{'':11}held by 90 % intervals of the costs: {held} of {len(members)}")
    for row in found:
        if rows or row.ttft_band is None:
            print(f"    {row.id} ({row.half}): {_line(row)}")


def _line(row: Predicted) -> str:
    parts = []
    for name in row.measured:
        if name == "rate":
            parts.append(f"{row.predicted[name]:.1f} requests/s for {row.measured[name]:.1f} ({row.error(name):+.1%})")
            continue
        ms = f"{row.predicted[name] * 1e3:.5g} ms for {row.measured[name] * 1e3:.5g}"
        parts.append(f"{name.upper()} {ms} ({row.error(name):+.1%})")
    return ", ".join(parts)
