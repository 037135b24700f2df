"""Commands of the simulator: thin. They parse, call `simulator.replay`, and print."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from dataclasses import replace as with_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from policies.registry import BUILT_IN, knobs_of, policy_class, policy_names
from simulator import options as o
from simulator.config import ReplayConfig
from simulator.errors import SimulationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simulator.simulation import Run

app = typer.Typer(
    name="simulator",
    help="Replay LLM-inference traces in virtual time under pluggable scheduling policies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_KNOBS = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command("replay", context_settings=_KNOBS)
@o.replay_flags
def replay_command(
    ctx: typer.Context,
    trace: o.TraceFile = None,
    policy: o.Policy = "chunked",
    out: o.Out = None,
    figures: o.Figures = False,
    config: o.ConfigFile = None,
    as_json: o.Json = False,
    **shared: Any,
) -> None:
    """Replay a trace under one policy."""
    settings, reading = o.collect(ctx, config)
    runs = _replay_all(trace, [settings], reading, out, quiet=as_json, one_folder=True)
    _report(runs, out, figures, as_json)


@app.command("compare", context_settings=_KNOBS)
@o.replay_flags
def compare_command(
    ctx: typer.Context,
    trace: o.TraceFile = None,
    policies: o.Policies = None,
    out: o.Out = None,
    figures: o.Figures = False,
    config: o.ConfigFile = None,
    as_json: o.Json = False,
    **shared: Any,
) -> None:
    """Replay a trace under several policies and compare them in one table."""
    settings, reading = o.collect(ctx, config)
    names = [name.strip() for name in policies.split(",")] if policies else list(BUILT_IN)
    if len(set(names)) != len(names) or not all(names):
        raise SimulationError(f"--policies: found {policies!r}, expected different names separated by commas")
    runs = _replay_all(trace, list(_one_each(settings, names)), reading, out, quiet=as_json, one_folder=False)
    _report(runs, out, figures, as_json)


@app.command("policies")
def policies_command(as_json: o.Json = False) -> None:
    """List every policy with its knobs, defaults, paper and rule."""
    rows = []
    for name in policy_names():
        cls = policy_class(name)
        knobs = {knob.name: {"default": knob.default, "help": knob.help} for knob in knobs_of(cls).values()}
        rule = " ".join((cls.__doc__ or "").split())
        rows.append({"policy": name, "rule": rule, "paper": cls.paper, "knobs": knobs})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console

    console = Console()
    for row in rows:
        console.print(f"[bold]{row['policy']}[/bold]  [dim]{row['paper']}[/dim]", highlight=False)
        console.print(f"  {row['rule']}", highlight=False)
        for knob, facts in row["knobs"].items():
            flag = knob.replace("_", "-")
            console.print(f"    --{flag} [cyan]{facts['default']}[/cyan]  {facts['help']}", highlight=False)


def _one_each(settings: ReplayConfig, names: list[str]) -> Iterator[ReplayConfig]:
    """The same settings under each policy; a knob goes to those policies that have it, and must fit at least one."""
    has = {name: knobs_of(policy_class(name)) for name in names}
    for knob in settings.knobs:
        if not any(knob in knobs for knobs in has.values()):
            raise SimulationError(f"none of {', '.join(names)} has a knob {knob!r}")
    for name in names:
        knobs = {knob: value for knob, value in settings.knobs.items() if knob in has[name]}
        yield with_fields(settings, policy=name, knobs=knobs)


def _replay_all(
    path: Path | None,
    settings: list[ReplayConfig],
    reading: o.TraceOptions,
    out: Path | None,
    *,
    quiet: bool,
    one_folder: bool,
) -> dict[str, Run]:
    from simulator.simulation import make_engine, replay

    trace = o.read_options_trace(path, reading, settings[0].seed)
    for config in settings:
        # Every mistake in any of the configs shows before the first run has cost time.
        make_engine(config, trace)
    for note in [] if quiet else trace.notes:
        print(f"note: {note}", file=sys.stderr)
    runs: dict[str, Run] = {}
    with _progress(quiet) as start:
        for config in settings:
            run = replay(trace, config, progress=start(config.policy, len(trace)))
            run.config["replay"] = {**run.config["replay"], **_reading_fields(path, reading)}
            if out is not None:
                run.write(out if one_folder else out / _folder_name(config.policy))
            runs[config.policy] = run
    return runs


def _reading_fields(path: Path | None, reading: o.TraceOptions) -> dict[str, Any]:
    return {**asdict(reading), "trace": str(path.resolve()) if path is not None else reading.trace}


def _folder_name(policy: str) -> str:
    return policy.rpartition(":")[2] if ":" in policy else policy


def _report(runs: dict[str, Run], out: Path | None, figures: bool, as_json: bool) -> None:
    drawn: list[Path] = []
    if figures:
        if out is None:
            raise SimulationError("--figures: say where with --out")
        from metrics.figures import draw_all

        drawn = draw_all({_folder_name(name): run.tables for name, run in runs.items()}, out / "figures")
    summaries = {_folder_name(name): run.summary for name, run in runs.items()}
    if as_json:
        from metrics.run_folder import json_ready

        only = next(iter(summaries.values())) if len(summaries) == 1 else summaries
        print(json.dumps(json_ready(only), indent=2))
        return
    from rich.console import Console

    from metrics.report import comparison_table

    console = Console()
    console.print(comparison_table(summaries))
    first = next(iter(runs.values()))
    trust = "calibrated" if first.config["calibrated"] else "uncalibrated"
    console.print(f"costs: {first.config['cost_model']} ({trust})", highlight=False, soft_wrap=True)
    for run in runs.values():
        reasons = _reasons(run)
        if reasons:
            console.print(f"{run.config['policy']}: {reasons}", highlight=False, soft_wrap=True)
    if out is not None:
        console.print(f"written to {out}", highlight=False, soft_wrap=True)
    if drawn:
        console.print(f"figures in {out}/figures: {', '.join(sorted({p.stem for p in drawn}))}", highlight=False)


def _reasons(run: Run) -> str:
    """Requests that did not finish, by reason, most frequent first."""
    from collections import Counter

    status, reason = run.tables.column("requests", "status"), run.tables.column("requests", "reason")
    counts = Counter((str(s), str(r)) for s, r in zip(status, reason) if s != "finished")
    return "; ".join(f"{count} {status} ({reason})" for (status, reason), count in counts.most_common(3))


class _progress:  # noqa: N801
    """A progress bar on a terminal's stderr, nothing elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet or not sys.stderr.isatty()
        self.bar: Any = None

    def __enter__(self) -> Any:
        if self.quiet:
            return lambda name, total: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=Console(stderr=True),
        )  # fmt: skip
        self.bar.start()
        return self._start

    def _start(self, name: str, total: int) -> Any:
        task = self.bar.add_task(name, total=total)
        return lambda ended, total: self.bar.update(task, completed=ended)

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            for task in self.bar.tasks:
                self.bar.update(task.id, completed=task.total)
            self.bar.stop()
