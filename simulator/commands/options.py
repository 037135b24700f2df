"""The flags that replay, compare and their relatives share, and how flags, config file and defaults become one config.

Precedence: a flag that was given, then the config file, then the default. Flags that no command knows are taken as
knobs of the policy; one that the policy does not have is an error that names those it has.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from policies.edges.command_line import knob_flags, refuse_flags
from policies.edges.declared_settings import Flags, flags_of, settings_of, values_of_flags, with_flags
from policies.edges.input_file import read_json, read_toml
from policies.edges.settings_file import files_beside, knobs_of_file, one_spelling
from policies.registry import BUILT_IN, knobs_of, policy_class
from profiler.operators.named_engines import load_engine
from simulator.config import OUTPUT, POLICY, TRACE, ReplayConfig
from simulator.errors import SimulationError
from workloads.door.options import DoorOptions
from workloads.reading_options import ReadingOptions


def _option(flag: str, text: str, panel: str, **more: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=panel, **more)


Policies = Annotated[
    str | None, _option("--policies", "Policies to compare, separated by commas; all built-in ones by default.", POLICY)
]
ChunkSize = Annotated[
    int | None, _option("--chunk-size", "Most tokens of a batch, its decodes counted (the policy's knob).", POLICY)
]
Async = Annotated[
    bool | None, _option("--async/--sync", "Plan one step ahead of the running one (where the policy can).", POLICY)
]
Out = Annotated[Path | None, _option("--out", "Folder for the run (or runs, one folder each).", OUTPUT)]
Figures = Annotated[bool, _option("--figures", "Draw the figures into OUT/figures.", OUTPUT)]
Report = Annotated[
    Path | None, _option("--report", "Write one HTML file with tables, plots, timeline and requests.", OUTPUT)
]
Runs = Annotated[
    int,
    _option(
        "--runs",
        "Draws from the cost model's own error: prints an interval of every statistic, 90 % from 19 draws on.",
        OUTPUT,
    ),
]
Timeline = Annotated[
    str | None,
    _option("--timeline", "Write timeline.json (for Perfetto) of FROM:TO seconds; `:` is the whole run.", OUTPUT),
]
Follow = Annotated[int | None, _option("--follow", "A request to follow through the timeline with arrows.", OUTPUT)]
ConfigFile = Annotated[
    Path | None, _option("--config", "TOML with any of these flags, or the config.json of a run.", OUTPUT)
]
Anyway = Annotated[bool, _option("--anyway", "Run a --config again although its inputs have changed.", OUTPUT)]
Json = Annotated[bool, _option("--json", "Print JSON only.", OUTPUT)]
Seeds = Annotated[
    int,
    _option("--seeds", "Draws of the workload: of --arrivals if given, else of blocks of the trace.", POLICY),
]
AnswerLengths = Annotated[
    str | None,
    _option(
        "--answer-lengths",
        "How long answers are where a request does not ignore_eos, as lognormal:200,0.8; as allowed by default.",
        TRACE,
    ),
]
Preset = Annotated[
    str | None, _option("--preset", "A typical workload with its objective, in place of a trace.", TRACE)
]
CheckedName = Annotated[
    str, typer.Argument(help="path/to/file.py:ClassName of a policy or router, or a registered name; knobs are flags.")
]
CheckedTrace = Annotated[Path | None, typer.Argument(help="A trace of yours, checked in addition to generated ones.")]
CheckSeconds = Annotated[float, typer.Option("--seconds", help="How long at most.", min=1.0, max=3600.0)]
CheckSeed = Annotated[int, typer.Option("--seed", help="Of the first generated trace.", min=0, max=2**62)]
CheckModel = Annotated[str, typer.Option("--model", help="Model whose costs the checked runs have.")]
CheckGpu = Annotated[str, typer.Option("--gpu", help="GPU whose costs the checked runs have.")]
TraceFile = Annotated[Path | None, typer.Argument(help="Trace file; may come from --config instead.")]

CHOICES: Flags = {"chunk_size": (ChunkSize, None), "asynchronous": (Async, None)}
"""Flags for knobs that so many policies have that every command shows them."""

_POLICY = flags_of(ReplayConfig, typer.Option, only=("policy",))
_REST = {**flags_of(ReplayConfig, typer.Option), **flags_of(ReadingOptions, typer.Option)}

replay_flags = with_flags({**CHOICES, **{name: flag for name, flag in _REST.items() if name not in _POLICY}})
"""Gives a command, written as f(ctx, its own flags, **shared), the flags of a replay in its signature, --policy apart.

They are the declared settings of `ReplayConfig` and `ReadingOptions`: a new one is declared there alone.
"""
one_policy_flags = with_flags({**_POLICY, **CHOICES, **_REST})
"""The same with --policy, for a command that replays under one policy."""

NOT_SERVED = ("rate_scale", "limit", "leaps", "reference")
"""Settings of a trace's replay that mean nothing where clients send the requests."""
serve_flags = with_flags(
    {
        **_POLICY,
        **CHOICES,
        **{name: flag for name, flag in flags_of(ReplayConfig, typer.Option).items() if name not in NOT_SERVED},
        **flags_of(DoorOptions, typer.Option),
    }
)
"""Flags of the command that serves clients."""


def door_options(ctx: typer.Context) -> DoorOptions:
    """The door's settings among the flags that were given."""
    return DoorOptions(**{name: ctx.params[name] for name in settings_of(DoorOptions) if _given(ctx, name)})


def collect(ctx: typer.Context, config_file: Path | None, anyway: bool) -> tuple[ReplayConfig, ReadingOptions]:
    """One config from flags, config file and defaults.

    anyway: take a run's config although it was made from files of other content, or by another version.
    """
    from_file = read_config_file(config_file) if config_file is not None else {}
    flags = _given_flags(ctx)
    knobs = {**knobs_of_file(from_file, SimulationError), **_knobs_given(ctx, from_file)}
    if flags.pop("asynchronous", None) is not None:
        knobs["async_scheduling"] = ctx.params["asynchronous"]
    if (chunk_size := flags.pop("chunk_size", None)) is not None:
        knobs["chunk_size"] = chunk_size
    given = values_of_flags(ReplayConfig, flags)
    if "terms" in given:
        given["terms"] = {**from_file.get("terms", {}), **given["terms"]}
    values = {**from_file, **flags, **given}
    reading = settings_of(ReadingOptions)
    trace_options = ReadingOptions(**{name: value for name, value in values.items() if name in reading})
    rest = {name: value for name, value in values.items() if name not in reading}
    engine = load_engine(rest.get("engine", "none"))
    for name, value in (("policy", engine.policy), ("block_size", engine.block_size)):
        if value is not None and name not in rest and "policies" not in ctx.params:
            rest[name] = value
    config = ReplayConfig.from_dict({**rest, "knobs": knobs})
    if config_file is not None and not anyway:
        _refuse_other_inputs(ctx, config_file, config, trace_options)
    return config, trace_options


def _refuse_other_inputs(ctx: typer.Context, path: Path, config: ReplayConfig, options: ReadingOptions) -> None:
    from metrics.run_folder.config_check import refuse_changed_inputs
    from metrics.run_folder.folder import versions_of

    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json":
        trace = ctx.params.get("trace") or options.trace
        settings = {**config.as_dict(), "trace": None if trace is None else str(Path(trace).resolve())}
        refuse_changed_inputs(file, settings, versions_of(("charioteer",))["charioteer"], SimulationError)


def _knobs_given(ctx: typer.Context, from_file: Mapping[str, Any]) -> dict[str, str]:
    """The flags that are none of the command's own; SimulationError for one that is no knob, but near a flag."""
    knobs = knob_flags(ctx.args)
    if not knobs:
        return knobs
    has: set[str] = set()
    if "policies" in ctx.params:
        names = ctx.params["policies"].split(",") if ctx.params["policies"] else BUILT_IN
        has = {knob for name in names for knob in knobs_of(policy_class(name.strip()))}
    elif "policy" in ctx.params:
        default = load_engine(ctx.params.get("engine", "none")).policy or ctx.params["policy"]
        name = ctx.params["policy"] if _given(ctx, "policy") else from_file.get("policy", default)
        has = set(knobs_of(policy_class(str(name))))
    chooses = "policies" in ctx.params or "policy" in ctx.params
    refuse_flags(ctx, knobs, has, SimulationError, beside=chooses)
    return knobs


def refuse_choices(ctx: typer.Context) -> None:
    """SimulationError where a command that finds policy and chunk size itself is given them, or any other knob."""
    chosen = [name for name in ("policy", "chunk_size", "asynchronous") if name in ctx.params and _given(ctx, name)]
    for name in [*chosen, *knob_flags(ctx.args)]:
        flag = "async" if name == "asynchronous" else name.replace("_", "-")
        raise SimulationError(f"--{flag}: advise finds the policy and its knobs itself; replay and compare take it")


def _given_flags(ctx: typer.Context) -> dict[str, Any]:
    known = {*settings_of(ReplayConfig), *settings_of(ReadingOptions), *CHOICES}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in ctx.params.items()
        if name in known and _given(ctx, name)
    }


def read_config_file(path: Path) -> dict[str, Any]:
    """The values of a TOML config, or of the `replay` part of a run's config.json.

    File names of a TOML are relative to it; a run's config names its files as the command that made the run did.
    """
    from metrics.run_folder.config_check import settings_of_run

    if not path.exists() and path.name == str(path) and path.suffix not in (".toml", ".json"):
        return dict(_preset(str(path)))
    if path.is_dir():
        path = path / "config.json"
    values = (read_json if path.suffix == ".json" else read_toml)(path, SimulationError)
    if not isinstance(values, Mapping):
        raise SimulationError(f"{path}: found no table of settings")
    if "replay" in values:
        return one_spelling(settings_of_run(values, "replay", path, SimulationError), str(path), SimulationError)
    if values.get("world") == "live":
        raise SimulationError(f"{path}: is the config of a live run; python -m executor replay --config takes it")
    return files_beside(one_spelling(values, str(path), SimulationError), path.parent, told=_note)


def _preset(name: str) -> Mapping[str, Any]:
    """The deployment that comes with the package under this name."""
    known = tomllib.loads(resources.files("simulator").joinpath("presets.toml").read_text(encoding="utf-8"))
    if name not in known:
        raise SimulationError(f"--config: found {name!r}, expected a file, a run folder, or one of {', '.join(known)}")
    found: Mapping[str, Any] = known[name]
    return found


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _given(ctx: typer.Context, name: str) -> bool:
    # By name: typer may carry its own copy of click, whose enumeration is another object.
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
