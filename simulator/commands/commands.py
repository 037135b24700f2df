"""Commands of the simulator: thin. They parse, call `simulator.replay`, and print."""

from __future__ import annotations

import contextlib
import json
import sys
from contextlib import contextmanager
from dataclasses import replace as with_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from policies.edges.command_line import failure_line, knob_flags, one_line, tell_notes
from policies.edges.distinct_names import distinct_names, folder_names
from policies.edges.errors import PolicyError
from policies.edges.input_digests import changed_inputs, digests_of
from policies.registry import BUILT_IN, knobs_of, policy_class, policy_names
from simulator.commands import options as o
from simulator.commands.printing import (
    Progress,
    can_report,
    list_pages,
    print_advice,
    print_checks,
    print_intervals,
    print_runs,
    say_costs,
    say_draw,
    say_trying,
    wide_console,
    write_html,
)
from simulator.config import ReplayConfig
from simulator.errors import SimulationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from simulator.simulation import Run
    from workloads import Trace
    from workloads.reading_options import ReadingOptions

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
@o.one_policy_flags
def replay_command(
    ctx: typer.Context,
    trace: o.TraceFile = None,
    runs: o.Runs = 0,
    out: o.Out = None,
    figures: o.Figures = False,
    report: o.Report = None,
    timeline: o.Timeline = None,
    follow: o.Follow = None,
    config: o.ConfigFile = None,
    anyway: o.Anyway = False,
    as_json: o.Json = False,
    **shared: Any,
) -> None:
    """Replay a trace under one policy."""
    settings, reading = o.collect(ctx, config, anyway)
    if (timeline or figures) and out is None:
        raise SimulationError("--timeline and --figures: say where with --out")
    can_report(report)
    if not 0 <= runs <= MOST_RUNS:
        raise SimulationError(f"--runs: found {runs}, expected 0 to {MOST_RUNS:,}")
    if runs:
        if out is not None or report is not None:
            raise SimulationError("--runs prints intervals and keeps no run: it does not go with --out or --report")
        workload = reading.read(trace, settings.seed, limit=settings.limit)
        print_intervals(workload, settings, runs, as_json, _tell_notes(workload, [settings]))
        return
    window = _timeline_window(timeline, follow)
    done, _ = _replay_all(trace, [settings], reading, out, quiet=as_json, one_folder=True)
    if window is not None and out is not None:
        from metrics.drawing.perfetto import empty_window, write_timeline

        run = next(iter(done.values()))
        if not as_json and (note := empty_window(window, run.summary)):
            print(f"note: {note}", file=sys.stderr)
        write_timeline(out / "timeline.json", run.tables, window=window, request=follow)
    write_html(report, done)
    print_runs(done, out, figures, as_json)


@app.command("serve", context_settings=_KNOBS)
@o.serve_flags
def serve_command(
    ctx: typer.Context,
    answer_lengths: o.AnswerLengths = None,
    out: o.Out = None,
    config: o.ConfigFile = None,
    anyway: o.Anyway = False,
    as_json: o.Json = False,
    **shared: Any,
) -> None:
    """Serve predicted costs to real clients over HTTP (OpenAI's protocol, vLLM's metrics), until Ctrl-C or SIGTERM."""
    from simulator.commands.serve import serve

    settings, _ = o.collect(ctx, config, anyway)
    serve(settings, o.door_options(ctx), answer_lengths, out, as_json)


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
    anyway: o.Anyway = False,
    as_json: o.Json = False,
    **shared: Any,
) -> None:
    """Replay a trace under several policies and compare them in one table."""
    settings, reading = o.collect(ctx, config, anyway)
    names = [name.strip() for name in policies.split(",")] if policies else list(BUILT_IN)
    if len(set(names)) != len(names) or not all(names):
        raise SimulationError(f"--policies: found {policies!r}, expected different names separated by commas")
    if not 1 <= seeds <= MOST_RUNS:
        raise SimulationError(f"--seeds: found {seeds}, expected 1 to {MOST_RUNS:,}")
    if seeds > 1:
        if out is not None or figures or report is not None:
            raise SimulationError("--seeds compares draws and keeps no run: no --out, --figures or --report beside it")
        by_label = dict(zip(distinct_names(names), _one_each(settings, names)))
        _compare_draws(trace, by_label, reading, seeds, as_json)
        return
    can_report(report)
    each = list(_one_each(settings, names))
    runs, failures = _replay_all(trace, each, reading, out, quiet=as_json, one_folder=False)
    write_html(report, runs)
    print_runs(runs, out, figures, as_json, failures)
    if failures:
        raise typer.Exit(1)


@app.command("advise", context_settings=_KNOBS)
@o.replay_flags
def advise_command(
    ctx: typer.Context,
    trace: o.TraceFile = None,
    preset: o.Preset = None,
    out: o.Out = None,
    config: o.ConfigFile = None,
    anyway: o.Anyway = False,
    as_json: o.Json = False,
    **shared: Any,
) -> None:
    """Which policy and chunk size for this trace on this GPU, and why; with the matching vLLM flags."""
    from simulator.studies.advise import advise, draw_frontier, run_chosen

    settings, reading = o.collect(ctx, config, anyway)
    o.refuse_choices(ctx)
    if out is not None:
        from metrics.run_folder.folder import check_run_place

        check_run_place(out)
    slo = settings.slo
    if preset is not None:
        from workloads.generating.presets import preset as named

        chosen = named(preset)
        workload = chosen.trace(seed=settings.seed)
        slo = slo or ",".join(f"{key}={bound:g}" for key, bound in chosen.slo.items())
    else:
        workload = reading.read(trace, settings.seed, limit=settings.limit)
    notes = _tell_notes(workload, [settings])
    advice = advise(workload, settings, slo=slo, progress=None if as_json else say_trying)
    if out is not None:
        run_chosen(workload, advice).write(out)
        draw_frontier(advice, out / "figures")
    if as_json:
        from metrics.run_folder.folder import json_ready

        print(json.dumps(json_ready({**advice.as_dict(), "notes": notes}), indent=2))
        return
    print_advice(advice, out)


@app.command("check", context_settings=_KNOBS)
def check_command(
    ctx: typer.Context,
    name: o.CheckedName,
    trace: o.CheckedTrace = None,
    seconds: o.CheckSeconds = 40.0,
    seed: o.CheckSeed = 0,
    model: o.CheckModel = "llama-3.1-8b",
    gpu: o.CheckGpu = "h100",
    as_json: o.Json = False,
) -> None:
    """Check a policy or router of your own: its contract in both worlds, its promises, and a verdict."""
    from simulator.studies.check_user_code import check_user_code, is_router
    from workloads import read_trace

    known = ReplayConfig(model=model, gpu=gpu)
    if trace is not None and str(trace).startswith("--"):
        # An unknown flag, a knob, stands where the trace may stand.
        ctx.args.insert(0, str(trace))
        trace = None
    knobs = knob_flags(ctx.args)
    config = with_fields(known, router_knobs=knobs) if is_router(name) else with_fields(known, knobs=knobs)
    checks = check_user_code(
        name, config, read_trace(trace) if trace is not None else None, seconds=seconds, first_seed=seed
    )
    print_checks(name, checks, as_json)
    if any(check.failure for check in checks):
        raise typer.Exit(1)


@app.command("policies")
def policies_command(as_json: o.Json = False) -> None:
    """List every policy with its knobs, defaults, paper and rule."""
    rows = []
    for name in policy_names():
        with _others_may_be_broken():
            cls = policy_class(name)
            knobs = {knob.name: {"default": knob.default, "help": knob.help} for knob in knobs_of(cls).values()}
            rule = " ".join((cls.__doc__ or "").split())
            rows.append({"policy": name, "rule": rule, "paper": cls.paper, "knobs": knobs})
    list_pages("policy", "--", rows, as_json)


@app.command("routers")
def routers_command(as_json: o.Json = False) -> None:
    """List every router with its knobs, defaults, paper and rule."""
    from simulator.routers import router_class, router_knobs, router_names

    rows = []
    for name in router_names():
        with _others_may_be_broken():
            cls = router_class(name)
            knobs = {knob.name: {"default": knob.default, "help": knob.help} for knob in router_knobs(name).values()}
            rule = " ".join((cls.__doc__ or "").split())
            rows.append({"router": name, "rule": rule, "paper": cls.paper, "knobs": knobs})
    list_pages("router", "--router-knob ", rows, as_json)


@contextlib.contextmanager
def _others_may_be_broken() -> Iterator[None]:
    """One package whose entry point cannot be loaded does not hide those of all others."""
    try:
        yield
    except (PolicyError, SimulationError) as error:
        tell_notes([one_line(error)])


def _timeline_window(text: str | None, follow: int | None) -> Any:
    if text is None:
        if follow is not None:
            raise SimulationError("--follow goes with --timeline FROM:TO")
        return None
    from metrics.drawing.perfetto import parse_window

    return parse_window(text)


def _compare_draws(
    path: Path | None, settings: dict[str, ReplayConfig], reading: ReadingOptions, seeds: int, as_json: bool
) -> None:
    from simulator.studies.compare_draws import compare_over_draws, comparison_rows
    from workloads.generating.resample import resample

    first = next(iter(settings.values())).seed
    recorded = None if reading.arrivals else reading.read(path, first)

    seen = recorded if recorded is not None else reading.read(path, first)
    notes = _tell_notes(seen, settings.values())

    def draw(number: int) -> Trace:
        if recorded is None:
            return reading.read(path, first + number)
        return resample(recorded, first + number)

    result = compare_over_draws(draw, settings, seeds, progress=None if as_json else say_draw)
    if as_json:
        from metrics.run_folder.folder import json_ready

        print(json.dumps(json_ready({**result.as_dict(), "notes": notes}), indent=2))
        return
    console = wide_console()
    console.print(comparison_rows(result))
    say_costs(console, result.costs)


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
    reading: ReadingOptions,
    out: Path | None,
    *,
    quiet: bool,
    one_folder: bool,
) -> tuple[dict[str, Run], dict[str, str]]:
    """Runs by policy, and a line for each that failed; with nothing but failures, the first of them is raised."""
    from metrics.run_folder.folder import check_run_place, replaced
    from simulator.simulation import make_cluster_plan, replay

    labels = distinct_names([config.policy for config in settings])
    places = [out] if one_folder else [out and out / name for name in folder_names(labels)]
    for place in places:
        if place is not None:
            check_run_place(place)
    inputs = digests_of([{**config.as_dict(), **reading.recorded(path)} for config in settings])
    trace = reading.read(path, settings[0].seed, limit=settings[0].limit)
    errors: dict[str, Exception] = {}
    for config, label in zip(settings, labels, strict=True):
        # A mistake that all configs share shows before the first run has cost time.
        with _failing_alone(errors, label, len(settings)):
            make_cluster_plan(config, trace)
    _tell_notes(trace, [config for config, label in zip(settings, labels, strict=True) if label not in errors])
    runs: dict[str, Run] = {}
    with Progress(quiet) as start:
        for config, label, place in zip(settings, labels, places, strict=True):
            if label in errors:
                continue
            with _failing_alone(errors, label, len(settings)):
                run = replay(trace, config, progress=start(label, len(trace)))
                run.config["replay"] = {**run.config["replay"], **reading.recorded(path)}
                if changed := changed_inputs(inputs, digests_of(run.config["replay"])):
                    raise SimulationError(f"found inputs that changed while the run was made: {', '.join(changed)}")
                run.config["inputs"] = digests_of(run.config["replay"])
                if place is not None:
                    if not quiet and (note := replaced(place, run.config)):
                        print(f"note: {note}", file=sys.stderr)
                    run.write(place)
                runs[label] = run
    return runs, {policy: failure_line(error) for policy, error in errors.items()}


@contextmanager
def _failing_alone(errors: dict[str, Exception], policy: str, policies: int) -> Iterator[None]:
    """Inside: one policy of several, whose failure is kept while others can still go on. A bug of ours ends all."""
    try:
        yield
    except Exception as error:
        failure_line(error)
        if len(errors) + 1 >= policies:
            raise next(iter(errors.values()), error) from None
        errors[policy] = error


def _tell_notes(trace: Trace, settings: Iterable[ReplayConfig]) -> list[str]:
    """What trace and settings have to say before the work; every run keeps its own part of it in its notes."""
    from simulator.settings_without_effect import notes_of_run

    return tell_notes(note for config in settings for note in notes_of_run(config, trace))
