"""`python -m experiments calibrate-engine`: an engine file from logs and clients' results of a running server."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from experiments.calibration.from_outside import Found


def register(app: typer.Typer) -> None:
    app.command("calibrate-engine")(calibrate_engine_command)


def calibrate_engine_command(
    logs: Annotated[list[Path], typer.Argument(help="Step logs, and results of load clients, one load a file.")],
    model: Annotated[str, typer.Option(help="Model, as a replay takes it.")],
    gpu: Annotated[str, typer.Option(help="GPU, as a replay takes it.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel devices.")] = 1,
    out: Annotated[Path, typer.Option(help="The engine file.")] = Path("engine.toml"),
    base: Annotated[str, typer.Option(help="Engine whose other terms and defaults are kept.")] = "vllm",
    cost_model: Annotated[str, typer.Option(help="auto, roofline, or a model file.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Weights and activations.")] = "auto",
    max_num_seqs: Annotated[int | None, typer.Option(help="The server's own; the base engine's by default.")] = None,
    token_budget: Annotated[int | None, typer.Option(help="The server's own; the base engine's by default.")] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="The server's KV blocks; what the GPU holds by default.")
    ] = None,
    asynchronous: Annotated[
        bool | None, typer.Option("--async/--sync", help="The server plans ahead; as the base engine by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Fit what a running server's logs and clients tell: scales a phase, host time, front end; with held-out errors."""
    from experiments.calibration.from_outside import calibrate_engine, engine_file
    from experiments.errors import ExperimentError
    from policies.edges.output_file import check_place, write_text
    from profiler.operators.named_engines import load_engine
    from simulator import ReplayConfig

    check_place(out, ExperimentError)
    if out.suffix != ".toml":
        raise ExperimentError(f"--out: found {out.name!r}, expected a name that ends in .toml")
    named = load_engine(base)
    config = ReplayConfig(
        policy=named.policy or "vllm_v1", model=model, gpu=gpu, tp=tp, engine=base, cost_model=cost_model, dtype=dtype,
        max_num_seqs=max_num_seqs, token_budget=token_budget, num_blocks=num_blocks,
        knobs={} if asynchronous is None else {"async_scheduling": asynchronous},
    )  # fmt: skip
    found = calibrate_engine(logs, config, (lambda _: None) if as_json else lambda text: print(text, file=sys.stderr))
    write_text(out, engine_file(found, base, out.stem), ExperimentError)
    if as_json:
        print(json.dumps({**asdict(found), "file": str(out)}, indent=2))
        return
    _print(found)
    print(f"wrote {out}: --engine {out}")


def _print(found: Found) -> None:
    print(f"CALIBRATED on {', '.join(found.sources)}")
    for name, term in found.terms.items():
        print(f"  {name:26} {term.value:10.4g}   90 % interval {term.low:.4g} to {term.high:.4g}")
    for title, errors in (("in the fit", found.errors), ("held out, every second", found.held_out)):
        if errors:
            cells = ", ".join(f"{name.upper()} {value:.1%}" for name, value in errors.items())
            print(f"  median error {title}: {cells}")
    for warning in found.warnings:
        print(f"  warning: {warning}")
