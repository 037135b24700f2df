"""The commands of `python -m workloads`: describe, convert and generate traces; each a thin layer over Python calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from policies.edges.declared_settings import with_flags
from policies.edges.settings import whole_number
from workloads.reading_options import FLAGS, ReadingOptions

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="What arrives: request traces."
)

_LENGTHS = (
    "fixed:N, uniform:LOW,HIGH, zipf:THETA,LOW,HIGH, geometric:MEAN, lognormal:MEDIAN,SIGMA (and ,LOW,HIGH), "
    "quantiles:50=N,90=N,... or empirical:FILE."
)
_SPANS = "fixed:S, uniform:LOW,HIGH, exponential:MEAN or lognormal:MEDIAN,SIGMA."

Seed = Annotated[int, typer.Option(help="Seed of everything random.", min=0)]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
RateScale = Annotated[float, typer.Option(help="Arrive so many times as fast.")]
Limit = Annotated[int | None, typer.Option(help="Only the first so many requests.", min=1)]
TracePath = Annotated[Path, typer.Argument(help="A request file, or a folder of ServeGen clients.", show_default=False)]


@app.command()
@with_flags(FLAGS)
def describe(
    trace: TracePath,
    rate_scale: RateScale = 1.0,
    limit: Limit = None,
    seed: Seed = 0,
    figure: Annotated[Path | None, typer.Option(help="Write a figure here (.png, .pdf, .svg).")] = None,
    as_json: AsJson = False,
    **shared: Any,
) -> None:
    """Counts, rate, burstiness, lengths and P:D of a trace, as a table or as JSON, and as a picture."""
    from workloads.description import describe as described

    requests = _read(trace, ReadingOptions(**shared), seed, rate_scale, limit)
    numbers = described(requests)
    if figure is not None:
        from workloads.picture import draw

        draw(requests, figure)
    if as_json:
        print(json.dumps(numbers, indent=2))
    else:
        _print_table(numbers)


@app.command()
@with_flags(FLAGS)
def convert(
    trace: TracePath,
    out: Annotated[Path, typer.Argument(help="Where to: .csv, .jsonl or .parquet (.csv.gz and .jsonl.gz too).")],
    rate_scale: RateScale = 1.0,
    limit: Limit = None,
    seed: Seed = 0,
    **shared: Any,
) -> None:
    """Reads a trace of any known format and writes it in the project's own columns."""
    _write(_read(trace, ReadingOptions(**shared), seed, rate_scale, limit), out)


@app.command()
def generate(
    out: Annotated[Path, typer.Argument(help="Where to: .csv, .jsonl or .parquet (.csv.gz and .jsonl.gz too).")],
    preset: Annotated[
        str | None,
        typer.Option(rich_help_panel="Ready-made", help="summarization, chat, translation, code or reasoning."),
    ] = None,
    programs: Annotated[
        str | None,
        typer.Option(rich_help_panel="Ready-made", help="agent, research or map_reduce: --requests programs of calls."),
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(rich_help_panel="Ready-made", help="orca_best or orca_worst: SARATHI's extremes, closed loop."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(rich_help_panel="Arrivals", help="How many requests (or sessions).")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(rich_help_panel="Arrivals", help="Or: for how many seconds they arrive.")
    ] = None,
    arrivals: Annotated[
        str | None, typer.Option("--arrivals", rich_help_panel="Arrivals", help="Arrival process, as poisson:RATE.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(rich_help_panel="Ready-made", help="Requests per second, instead of the preset's.")
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            rich_help_panel="Arrivals",
            help="constant, step:AT_S,FACTOR, spike:AT_S,LENGTH_S,FACTOR or diurnal:PERIOD_S,SWING.",
        ),
    ] = "constant",
    prompt: Annotated[
        str,
        typer.Option(rich_help_panel="Lengths", help=f"Prompt tokens: {_LENGTHS}"),
    ] = "fixed:1024",
    output: Annotated[
        str, typer.Option(rich_help_panel="Lengths", help="Output tokens, in the same forms.")
    ] = "fixed:128",
    total: Annotated[
        str | None, typer.Option(rich_help_panel="Lengths", help="Prompt + output tokens, split by --pd-ratio.")
    ] = None,
    pd_ratio: Annotated[
        float | None,
        typer.Option(rich_help_panel="Lengths", help="Prompt tokens per output token, instead of --output."),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(rich_help_panel="Lengths", help="A trace whose (prompt, output) pairs are drawn.")
    ] = None,
    turns: Annotated[
        str | None, typer.Option(rich_help_panel="Sessions", help="Turns per session, for example geometric:3.")
    ] = None,
    think: Annotated[
        str,
        typer.Option(rich_help_panel="Sessions", help=f"Seconds before a next turn: {_SPANS}"),
    ] = "exponential:10",
    hash_tokens: Annotated[
        int, typer.Option(rich_help_panel="Sessions", help="Tokens per prefix hash of sessions; 0 for none.")
    ] = 16,
    context_limit: Annotated[
        int | None, typer.Option(rich_help_panel="Sessions", help="Sessions end within so many tokens.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(rich_help_panel="Clients", help="How long clients wait, in the forms of --think.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(rich_help_panel="Clients", help="Shares of classes: interactive=0.7,batch=0.3.")
    ] = None,
    tenants: Annotated[
        str | None, typer.Option(rich_help_panel="Clients", help="Shares of tenants: heavy=8,light=1,other=1.")
    ] = None,
    stratified: Annotated[
        bool, typer.Option(rich_help_panel="Lengths", help="Spread lengths evenly over their distributions.")
    ] = False,
    clients: Annotated[int, typer.Option(rich_help_panel="Ready-made", help="Of a --case.")] = 8,
    rounds: Annotated[int, typer.Option(rich_help_panel="Ready-made", help="Requests per client of a --case.")] = 10,
    seed: Seed = 0,
) -> None:
    """Makes a trace from distributions, a preset, or one of SARATHI's extreme cases, and writes it."""
    _write(_generated(locals()), out)


_PRESET_TAKES = {"preset", "duration", "rate", "seed", "out"}
_PROGRAMS_TAKE = {"programs", "requests", "arrivals", "rate", "hash_tokens", "context_limit", "seed", "out"}
_CASE_TAKES = {"case", "clients", "rounds", "prompt", "output", "out"}
_NOT_PLAIN = {"out", "preset", "programs", "case", "rate", "clients", "rounds"}
_DEFAULTS: dict[str, Any] = {
    "profile": "constant",
    "prompt": "fixed:1024",
    "output": "fixed:128",
    "think": "exponential:10",
    "hash_tokens": 16,
    "stratified": False,
    "clients": 8,
    "rounds": 10,
    "seed": 0,
}


def _generated(given: dict[str, Any]) -> Any:
    from workloads.generating import sarathi_cases as cases
    from workloads.generating.generator import generate as generated
    from workloads.generating.presets import preset
    from workloads.trace import TraceError

    used = {key for key, value in given.items() if value != _DEFAULTS.get(key)}

    def refuse_others(what: str, takes: set[str]) -> None:
        if others := sorted(used - takes):
            raise TraceError(f"generate: found --{others[0].replace('_', '-')} {what}")

    if given["preset"] is not None:
        refuse_others("with --preset, which does not take it", _PRESET_TAKES)
        duration_s = 300.0 if given["duration"] is None else given["duration"]
        return preset(given["preset"]).trace(duration_s, given["rate"], given["seed"])
    if given["programs"] is not None:
        from workloads.generating.programs import generate_programs

        refuse_others("with --programs, which does not take it", _PROGRAMS_TAKE)
        if given["requests"] is None:
            raise TraceError("generate: found --programs without --requests, expected how many programs")
        if given["rate"] is not None and given["arrivals"] is not None:
            raise TraceError("generate: found --rate beside --arrivals, expected one of the two")
        arrivals = given["arrivals"] or f"poisson:{given['rate'] or 0.1:g}"
        taken = {key: given[key] for key in ("hash_tokens", "context_limit", "seed")}
        return generate_programs(given["programs"], programs=given["requests"], arrivals=arrivals, **taken)
    if given["case"] is not None:
        refuse_others("with --case, which does not take it", _CASE_TAKES)
        if given["case"] not in ("orca_best", "orca_worst"):
            raise TraceError(f"case: found {given['case'][:40]!r}, expected orca_best or orca_worst")
        counts = [_fixed(given[key], key) for key in ("prompt", "output")]
        return getattr(cases, given["case"])(given["clients"], given["rounds"], *counts)
    refuse_others("without the --preset, --programs or --case that takes it", used - _NOT_PLAIN | {"out"})
    options = {key: value for key, value in given.items() if key not in _NOT_PLAIN}
    options["duration_s"] = options.pop("duration")
    options["arrivals"] = options["arrivals"] or "poisson:1"
    return generated(**options)


def _fixed(text: str, what: str) -> int:
    from workloads.trace import TraceError

    number = whole_number(text.removeprefix("fixed:"))
    if number is None:
        raise TraceError(f"--{what}: found {text[:40]!r}, expected fixed:N, since all requests of a case are alike")
    return number


def _read(path: Path, options: ReadingOptions, seed: int, rate_scale: float, limit: int | None) -> Any:
    trace = options.read(path, seed, limit=limit)
    if rate_scale != 1:
        trace = trace.scaled(rate_scale)
    for note in trace.notes:
        print(f"note: {note}", file=sys.stderr)
    return trace


def _write(trace: Any, out: Path) -> None:
    from workloads.write import write_trace

    write_trace(trace, out)
    print(f"{out}: {len(trace):,} requests", file=sys.stderr)


def _print_table(numbers: dict[str, Any]) -> None:
    width = max(map(len, numbers))
    for key, value in numbers.items():
        if value is None or value == []:
            continue
        shown = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
        print(f"{key:<{width}}  {shown}")
