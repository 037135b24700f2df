"""`python -m executor profile`: measure whole iterations of this machine, for a plan or for bounds."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from executor.commands import options as o
from executor.errors import ExecutorError
from policies.edges.declared_settings import with_flags
from policies.edges.output_file import check_place

_PANEL = "What to measure"


def register(app: typer.Typer) -> None:
    app.command("profile")(profile_command)


@with_flags(o.live_flags((*o.ENGINE_FLAGS, "seed")))
def profile_command(
    out: Annotated[Path, typer.Option("--out", help="Profile to write, .parquet or .csv; started again, it goes on.")],
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="plan.json; without one the bounds below say what.", rich_help_panel=_PANEL),
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="Time for measuring, as 120s or 5m.", rich_help_panel=_PANEL)
    ] = None,
    max_chunk: Annotated[int, typer.Option(help="Largest chunk.", rich_help_panel=_PANEL)] = 512,
    max_decodes: Annotated[int, typer.Option(help="Most decodes of a batch.", rich_help_panel=_PANEL)] = 32,
    max_context: Annotated[int, typer.Option(help="Longest context.", rich_help_panel=_PANEL)] = 2048,
    adapt: Annotated[
        bool, typer.Option("--adapt/--no-adapt", help="Spend the last third where the fit is least sure.")
    ] = True,
    operators: Annotated[
        bool, typer.Option("--operators/--no-operators", help="Also time a few batches operator by operator.")
    ] = True,
    as_json: o.Json = False,
    **settings: Any,
) -> None:
    """Measure whole iterations as a live run executes them; `python -m profiler fit` turns the profile into costs."""
    if out.suffix not in (".parquet", ".csv"):
        raise ExecutorError(f"--out: found suffix {out.suffix!r}, expected .parquet or .csv")
    check_place(out, ExecutorError)
    from dataclasses import replace

    from profiler.measurements.plan import make_plan, read_plan
    from profiler.measurements.region import Region

    planned = (
        read_plan(plan)
        if plan is not None
        else make_plan(
            Region.of_bounds(chunk=max_chunk, decodes=max_decodes, context=max_context), seed=settings["seed"]
        )
    )
    if budget is not None:
        planned = replace(planned, budget_s=seconds_of(budget, "--budget"))

    from executor.config import LiveConfig
    from executor.machine.threads import set_threads
    from executor.measuring.measure_plan import measure_plan, unsure_by_fit
    from executor.serving.replay import load_for

    set_threads(settings["threads"])
    loaded = load_for(
        LiveConfig(**settings),
        planned.longest + 8,
    )
    profile = measure_plan(
        loaded,
        planned,
        out,
        block_size=settings["block_size"],
        operators=operators,
        adapt=unsure_by_fit if adapt else None,
        progress=None if as_json else Spoken(),
        note=lambda text: print(text, file=sys.stderr, flush=True),
    )
    table = profile.table
    iterations = table[table["operator"] == "iteration"]
    facts: dict[str, Any] = {
        "out": str(out),
        "device": str(table["device"].iloc[0]),
        "iterations": len(iterations),
        "outliers": int(iterations["outlier"].sum()),
        "operators": len(table) - len(iterations),
        "measuring_s": profile.provenance["measuring_s"],
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    print(
        f"{out}: {facts['iterations']} iterations in {facts['measuring_s']} s on {facts['device']}, "
        f"{facts['outliers']} of them outliers (kept, flagged), {facts['operators']} rows of single operators"
    )


class Spoken:
    """Progress on stderr: a line every few seconds, what is left of the budget in it."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._said = time.monotonic()

    def __call__(self, spent_s: float, budget_s: float, doing: str) -> None:
        now = time.monotonic()
        if now - self._said >= self._every_s:
            self._said = now
            left = max(0.0, budget_s - spent_s)
            print(f"profile: {doing}, {left:.0f} s left", file=sys.stderr, flush=True)


def seconds_of(text: str, flag: str) -> float:
    """ "120s", "5m" or "120" as seconds."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m", "h") else (text, "s")
    try:
        seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ExecutorError(f"{flag}: found {text!r}, expected a time such as 120s or 5m")
    return seconds
