"""Commands of the simulator: thin. They parse, call `simulator.replay`, and print."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from dataclasses import replace as with_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from policies.output_file import check_place
from policies.registry import BUILT_IN, knobs_of, policy_class, policy_names
from simulator import options as o
from simulator.config import ReplayConfig
from simulator.errors import SimulationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simulator.advise import Advice
    from simulator.simulation import Run
    from workloads import Trace

app = typer.Typer(
    name="simulator",
    help="Replay LLM-inference traces in virtual time under pluggable scheduling policies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
MOST_RUNS = 10_000
_KNOBS = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command("replay", context_settings=_KNOBS)
@o.replay_flags
def replay_command(
    ctx: typer.Context,
    trace: o.TraceFile = None,
    policy: o.Policy = "chunked",
    runs: o.Runs = 0,
    out: o.Out = None,
    figures: o.Figures = False,
    report: o.Report = None,
    timeline: o.Timeline = None,
    follow: o.Follow = None,
    config: o.ConfigFile = None,
    as_json: o.Json = False,
    **shared: Any,
) -> None:
    """Replay a trace under one policy."""
    settings, reading = o.collect(ctx, config)
    if (timeline or figures) and out is None:
        raise SimulationError("--timeline and --figures: say where with --out")
    _can_report(report)
    if not 0 <= runs <= MOST_RUNS:
        raise SimulationError(f"--runs: found {runs}, expected 0 to {MOST_RUNS:,}")
    if runs:
        if out is not None or report is not None:
            raise SimulationError("--runs prints intervals and keeps no run: it does not go with --out or --report")
        _print_intervals(o.read_options_trace(trace, reading, settings.seed), settings, runs, as_json)
        return
    window = _timeline_window(timeline, follow)
    done = _replay_all(trace, [settings], reading, out, quiet=as_json, one_folder=True)
    if window is not None and out is not None:
        from metrics.timeline import write_timeline

        write_timeline(out / "timeline.json", next(iter(done.values())).tables, window=window, request=follow)
    _write_report(report, done)
    _report(done, out, figures, as_json)


@app.command("compare", context_settings=_KNOBS)
@o.replay_flags
def compare_command(
    ctx: typer.Context,
    trace: o.TraceFile = None,
    policies: o.Policies = None,
    seeds: o.Seeds = 1,
    out: o.Out = None,
    figures: o.Figures = False,
    report: o.Report = None,
    config: o.ConfigFile = None,
    as_json: o.Json = False,
    **shared: Any,
) -> None:
    """Replay a trace under several policies and compare them in one table."""
    settings, reading = o.collect(ctx, config)
    names = [name.strip() for name in policies.split(",")] if policies else list(BUILT_IN)
    if len(set(names)) != len(names) or not all(names):
        raise SimulationError(f"--policies: found {policies!r}, expected different names separated by commas")
    if not 1 <= seeds <= MOST_RUNS:
        raise SimulationError(f"--seeds: found {seeds}, expected 1 to {MOST_RUNS:,}")
    if seeds > 1:
        if out is not None or figures or report is not None:
            raise SimulationError("--seeds compares draws and keeps no run: no --out, --figures or --report beside it")
        _compare_draws(trace, {c.policy: c for c in _one_each(settings, names)}, reading, seeds, as_json)
        return
    _can_report(report)
    runs = _replay_all(trace, list(_one_each(settings, names)), reading, out, quiet=as_json, one_folder=False)
    _write_report(report, runs)
    _report(runs, out, figures, as_json)


@app.command("advise", context_settings=_KNOBS)
@o.replay_flags
def advise_command(
    ctx: typer.Context,
    trace: o.TraceFile = None,
    preset: o.Preset = None,
    out: o.Out = None,
    config: o.ConfigFile = None,
    as_json: o.Json = False,
    **shared: Any,
) -> None:
    """Which policy and chunk size for this trace on this GPU, and why; with the matching vLLM flags."""
    from simulator.advise import advise, draw_frontier, run_chosen

    settings, reading = o.collect(ctx, config)
    if out is not None:
        from metrics.run_folder import check_run_place

        check_run_place(out)
    slo = settings.slo
    if preset is not None:
        from workloads.presets import preset as named

        chosen = named(preset)
        workload = chosen.trace(seed=settings.seed)
        slo = slo or ",".join(f"{key}={bound:g}" for key, bound in chosen.slo.items())
    else:
        workload = o.read_options_trace(trace, reading, settings.seed)
    advice = advise(workload, settings, slo=slo, progress=None if as_json else _say_trying)
    if out is not None:
        run_chosen(workload, advice).write(out)
        draw_frontier(advice, out / "figures")
    if as_json:
        from metrics.run_folder import json_ready

        print(json.dumps(json_ready(advice.as_dict()), indent=2))
        return
    _print_advice(advice, out)


@app.command("policies")
def policies_command(as_json: o.Json = False) -> None:
    """List every policy with its knobs, defaults, paper and rule."""
    rows = []
    for name in policy_names():
        cls = policy_class(name)
        knobs = {knob.name: {"default": knob.default, "help": knob.help} for knob in knobs_of(cls).values()}
        rule = " ".join((cls.__doc__ or "").split())
        rows.append({"policy": name, "rule": rule, "paper": cls.paper, "knobs": knobs})
    _list_pages("policy", "--", rows, as_json)


@app.command("routers")
def routers_command(as_json: o.Json = False) -> None:
    """List every router with its knobs, defaults, paper and rule."""
    from simulator.routers import router_class, router_knobs, router_names

    rows = []
    for name in router_names():
        cls = router_class(name)
        knobs = {knob.name: {"default": knob.default, "help": knob.help} for knob in router_knobs(name).values()}
        rows.append({"router": name, "rule": " ".join((cls.__doc__ or "").split()), "paper": cls.paper, "knobs": knobs})
    _list_pages("router", "--router-knob ", rows, as_json)


def _list_pages(kind: str, prefix: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    """Policies or routers: name, paper, rule, knobs."""
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = _console()
    for row in rows:
        console.print(f"[bold]{row[kind]}[/bold]  [dim]{row['paper']}[/dim]", highlight=False)
        console.print(f"  {row['rule']}", highlight=False)
        for knob, facts in row["knobs"].items():
            flag = prefix + knob.replace("_", "-")
            console.print(f"    {flag} [cyan]{facts['default']}[/cyan]  {facts['help']}", highlight=False)


def _print_intervals(trace: Trace, settings: ReplayConfig, runs: int, as_json: bool) -> None:
    from simulator.intervals import predict_intervals

    intervals = predict_intervals(trace, settings, runs)
    if as_json:
        from metrics.run_folder import json_ready

        print(json.dumps(json_ready({key: found._asdict() for key, found in intervals.items()}), indent=2))
        return
    from rich.table import Table

    table = Table(title=f"{settings.policy}: prediction and 90 % interval over {runs} draws of the costs")
    for column in ("statistic", "value", "from", "to"):
        table.add_column(column, justify="left" if column == "statistic" else "right")
    for key, found in intervals.items():
        if found.low != found.high:
            table.add_row(key, *(f"{number:,.5g}" for number in found))
    _console().print(table)


def _timeline_window(text: str | None, follow: int | None) -> Any:
    if text is None:
        if follow is not None:
            raise SimulationError("--follow goes with --timeline FROM:TO")
        return None
    from metrics.timeline import parse_window

    return parse_window(text)


def _compare_draws(
    path: Path | None, settings: dict[str, ReplayConfig], reading: o.TraceOptions, seeds: int, as_json: bool
) -> None:
    from simulator.seeds import compare_over_draws, comparison_rows
    from workloads.resample import resample

    first = next(iter(settings.values())).seed
    recorded = None if reading.arrivals else o.read_options_trace(path, reading, first)

    def draw(number: int) -> Trace:
        if recorded is None:
            return o.read_options_trace(path, reading, first + number)
        return resample(recorded, first + number)

    result = compare_over_draws(draw, settings, seeds, progress=None if as_json else _say_draw)
    if as_json:
        from metrics.run_folder import json_ready

        print(json.dumps(json_ready(result.as_dict()), indent=2))
        return
    _console().print(comparison_rows(result))


def _say_draw(number: int, policy: str) -> None:
    if sys.stderr.isatty():
        print(f"draw {number + 1}: {policy}", file=sys.stderr)


def _say_trying(label: str) -> None:
    if sys.stderr.isatty():
        print(f"trying {label}", file=sys.stderr)


def _print_advice(advice: Advice, out: Path | None) -> None:
    from metrics.report import comparison_table

    console = _console()
    tried = {candidate.label: candidate.summary for candidate in advice.tried}
    console.print(comparison_table(tried, max_width=console.width))
    console.print(f"use [bold]{advice.best.label}[/bold] (objective {advice.slo})", highlight=False)
    for reason in advice.reasons:
        console.print(f"- {reason}", highlight=False, soft_wrap=True)
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in advice.vllm_flags.items())
    console.print(f"with vLLM: {flags}", highlight=False, soft_wrap=True)
    if out is not None:
        console.print(f"the run and the frontier are in {out}", highlight=False, soft_wrap=True)


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
    from metrics.run_folder import check_run_place
    from simulator.simulation import make_cluster_plan, replay

    if out is not None:
        for config in settings:
            check_run_place(out if one_folder else out / _folder_name(config.policy))
    trace = o.read_options_trace(path, reading, settings[0].seed)
    for config in settings:
        # Every mistake in any of the configs shows before the first run has cost time.
        make_cluster_plan(config, trace)
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


def _can_report(path: Path | None) -> None:
    if path is not None:
        from metrics.html_report import require_plotly

        check_place(path, SimulationError)
        require_plotly()


def _write_report(path: Path | None, runs: dict[str, Run]) -> None:
    if path is None:
        return
    from metrics.html_report import write_report

    for run in runs.values():
        run.tables.summary = run.summary
    config = next(iter(runs.values())).config
    what = f"{config['model']} on {config['gpu']}, trace {config['trace']['name']}"
    question = f"Which policy serves {what} best?" if len(runs) > 1 else f"How does {config['policy']} serve {what}?"
    write_report(path, {_folder_name(name): run.tables for name, run in runs.items()}, question=question)


def _report(runs: dict[str, Run], out: Path | None, figures: bool, as_json: bool) -> None:
    drawn: list[Path] = []
    if figures:
        if out is None:
            raise SimulationError("--figures: say where with --out")
        from metrics.figures import draw_all

        tables = {_folder_name(name): run.tables for name, run in runs.items()}
        drawn = draw_all(tables, out / "figures")
        if all((run.config.get("pp") or 1) > 1 for run in runs.values()):
            from metrics.pipeline_figures import draw_pipeline

            drawn += draw_pipeline(tables, out / "figures")
    summaries = {_folder_name(name): run.summary for name, run in runs.items()}
    if as_json:
        from metrics.run_folder import json_ready

        only = next(iter(summaries.values())) if len(summaries) == 1 else summaries
        print(json.dumps(json_ready(only), indent=2))
        return
    from metrics.report import comparison_table

    console = _console()
    console.print(comparison_table(summaries, max_width=console.width))
    first = next(iter(runs.values()))
    trust = "calibrated" if first.config["calibrated"] else "uncalibrated"
    console.print(f"costs: {first.config['cost_model']} ({trust})", highlight=False, soft_wrap=True)
    for run in runs.values():
        reasons = _reasons(run)
        if reasons:
            console.print(f"{run.config['policy']}: {reasons}", highlight=False, soft_wrap=True)
        if run.summary["overloaded"]:
            words = f"overloaded: the queue grows without end (load {run.summary['load']:.2f}); latencies grow with it"
            console.print(f"{run.config['policy']}: {words}", highlight=False, soft_wrap=True)
    classes = _class_summaries(runs)
    if classes:
        console.print(comparison_table(classes, title="by SLO class", max_width=console.width))
    if out is not None:
        console.print(f"written to {out}", highlight=False, soft_wrap=True)
    if drawn:
        console.print(f"figures in {out}/figures: {', '.join(sorted({p.stem for p in drawn}))}", highlight=False)


def _class_summaries(runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """policy / class -> summary, where the requests have more than one SLO class."""
    from metrics import summarise_classes
    from metrics.slo import parse_objectives

    found: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        slo = run.config["replay"]["slo"]
        classes = summarise_classes(run.tables, slo=parse_objectives(slo) if slo else None)
        if len(classes) < 2:
            return {}
        found |= {f"{_folder_name(name)} {label}": summary for label, summary in classes.items()}
    return found


def _reasons(run: Run) -> str:
    """Requests that did not finish, by reason, most frequent first."""
    from collections import Counter

    status, reason = run.tables.column("requests", "status"), run.tables.column("requests", "reason")
    counts = Counter((str(s), str(r)) for s, r in zip(status, reason) if s != "finished")
    return "; ".join(f"{count} {status} ({reason})" for (status, reason), count in counts.most_common(3))


def _console() -> Any:
    """As wide as the terminal; 160 characters into a pipe, as the tables assume."""
    import shutil

    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else shutil.get_terminal_size((160, 40)).columns)


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
