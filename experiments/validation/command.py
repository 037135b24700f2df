"""`python -m experiments validate`: profile, fit, predict, run live, compare; one report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.errors import ExperimentError
from policies.edges.command_line import tell_notes
from policies.edges.distinct_names import folder_name
from policies.edges.output_file import check_place
from policies.edges.settings import whole_number

_ANY_RUN = {"against", "cost_model", "profile", "gpu", "out", "explore", "as_json"}
"""Options that go with --against."""
_LOG = _ANY_RUN | {"model", "policies", "block_size", "num_blocks", "max_num_seqs", "token_budget", "tp", "pp", "dtype"}
"""And those besides that another engine's log does not say itself."""
_LIVE_NOT = {"cost_model", "gpu", "num_blocks"}

_WHAT, _ENGINE, _PROFILE, _AGAINST = "What to compare", "Engine", "Profile", "Against a run that exists"
_SPECULATION = "Speculation"


def register(app: typer.Typer) -> None:
    app.command("validate")(validate)
    app.command("validate-full")(validate_full)


def validate(
    ctx: typer.Context,
    trace: Annotated[Path | None, typer.Argument(help="Trace file; none with --against.")] = None,
    policies: Annotated[
        str, typer.Option(help="Policies, as a,b or chunked:chunk_size=256,vllm_v1.", rich_help_panel=_WHAT)
    ] = "chunked,prefill_priority",
    load: Annotated[
        str, typer.Option(help="Shares of the measured capacity, as 0.6 or 0.6,0.9.", rich_help_panel=_WHAT)
    ] = "0.6",
    repeats: Annotated[
        int, typer.Option(help="Live runs of each policy and load.", rich_help_panel=_WHAT, min=1, max=1_000)
    ] = 3,
    limit: Annotated[int, typer.Option(help="Requests of the trace that are used.", rich_help_panel=_WHAT)] = 40,
    skip: Annotated[int, typer.Option(help="Requests left out at its start.", rich_help_panel=_WHAT)] = 0,
    ensemble: Annotated[
        int, typer.Option(help="Cost models behind an interval; 19 or more reach its 90 %.", rich_help_panel=_WHAT)
    ] = 31,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model, as the executor takes it; nano, but for another engine's log.", rich_help_panel=_ENGINE
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_ENGINE)] = "auto",
    dtype: Annotated[str, typer.Option(help="Weights.", rich_help_panel=_ENGINE)] = "auto",
    kernels: Annotated[str, typer.Option(help="auto, native or torch.", rich_help_panel=_ENGINE)] = "auto",
    attention: Annotated[str, typer.Option(help="Attention backend.", rich_help_panel=_ENGINE)] = "auto",
    graphs: Annotated[str, typer.Option(help="CUDA graphs: auto, on or off.", rich_help_panel=_ENGINE)] = "auto",
    streams: Annotated[
        bool, typer.Option("--streams/--one-stream", help="Two streams (triton on CUDA).", rich_help_panel=_ENGINE)
    ] = False,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Ranges for a profiler.", rich_help_panel=_ENGINE)] = False,
    allocator: Annotated[
        str, typer.Option(help="On CUDA: default, expandable or async.", rich_help_panel=_ENGINE)
    ] = "default",
    threads: Annotated[
        int,
        typer.Option(help="Threads of the model; one is disturbed least. 0: PyTorch's own.", rich_help_panel=_ENGINE),
    ] = 1,
    tp: Annotated[int, typer.Option(help="Ranks over which every layer is split.", rich_help_panel=_ENGINE)] = 1,
    pp: Annotated[
        int, typer.Option(help="Pipeline stages, a process each; compares bubbles too.", rich_help_panel=_ENGINE)
    ] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.", rich_help_panel=_ENGINE)] = 16,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Most requests admitted at once; 32, but for another engine's log.", rich_help_panel=_ENGINE),
    ] = None,
    token_budget: Annotated[int | None, typer.Option(help="Most tokens of a batch.", rich_help_panel=_ENGINE)] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Use this profile instead of measuring one.", rich_help_panel=_PROFILE)
    ] = None,
    budget: Annotated[str, typer.Option(help="Time for measuring, as 120s.", rich_help_panel=_PROFILE)] = "120s",
    speculation: Annotated[
        str | None,
        typer.Option(help="Compare serving with and without drafts instead, as ngram:4.", rich_help_panel=_SPECULATION),
    ] = None,
    batches: Annotated[
        str, typer.Option(help="Loads: requests at once, with --speculation.", rich_help_panel=_SPECULATION)
    ] = "1,4,16",
    prompts: Annotated[
        Path | None, typer.Option(help="Text file, one prompt a line.", rich_help_panel=_SPECULATION)
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            help="Compare with this live run folder (several: repeats), vLLM benchmark JSON or request log (.jsonl); "
            "nothing is run.",
            rich_help_panel=_AGAINST,
        ),
    ] = None,
    cost_model: Annotated[
        str | None, typer.Option(help="model.json of a validation, or as for the simulator.", rich_help_panel=_AGAINST)
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Device of another engine's log.", rich_help_panel=_AGAINST)] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="KV blocks of another engine.", rich_help_panel=_AGAINST)
    ] = None,
    trace_format: Annotated[str, typer.Option(help="Form of the trace file.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of weights, prompts and plan.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder; runs/validate-TRACE by default. The same one goes on.")
    ] = None,
    explore: Annotated[
        Path | None,
        typer.Option("--report", help="Also write one HTML file with timelines and requests to explore."),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Go on in --out although trace, policies or model have changed since.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Hold predictions beside live runs, and say how far they can be trusted."""
    if explore is not None:
        from metrics.html_report import require_plotly

        check_place(explore, ExperimentError)
        require_plotly()
    if against:
        from metrics import is_run_folder

        if all(is_run_folder(path) for path in against):
            _check_given(ctx, _ANY_RUN, "a run folder says itself how it ran")
        else:
            _check_given(ctx, _LOG, "nothing is run with --against")
        _against(
            against,
            cost_model,
            profile,
            gpu,
            model,
            out or Path("runs") / "validate-against",
            explore,
            as_json,
            {
                "policy": policies if "," not in policies else None,
                "block_size": block_size,
                "num_blocks": num_blocks,
                "max_num_seqs": max_num_seqs,
                "token_budget": token_budget,
                "tp": tp,
                "pp": pp,
                "dtype": dtype,
            },
        )
        return
    if trace is None:
        raise ExperimentError("found no trace: name a trace file, or an existing run with --against")
    _check_given(ctx, {str(param.name) for param in ctx.command.params} - _LIVE_NOT, "goes with --against alone")
    from executor.commands.profile import seconds_of
    from experiments.validation.comparing.live_side import EngineChoice
    from experiments.validation.comparing.settings import Settings
    from experiments.validation.pages.report import as_dict, in_short, write_report
    from experiments.validation.stages import Validation
    from metrics.run_folder.folder import json_ready

    settings = Settings(
        trace=str(trace),
        policies=tuple(names_in(policies)),
        engine=EngineChoice(
            model=model or "nano",
            device=device,
            dtype=dtype,
            kernels=kernels,
            attention=attention,
            graphs=graphs,
            streams=streams,
            nvtx=nvtx,
            allocator=allocator,
            threads=threads or None,
            block_size=block_size,
            max_num_seqs=32 if max_num_seqs is None else max_num_seqs,
            token_budget=token_budget,
            seed=seed,
            tp=tp,
            pp=pp,
        ),
        rows=(skip, skip + limit),
        loads=shares_of(load),
        repeats=repeats,
        budget_s=seconds_of(budget, "--budget"),
        ensemble=ensemble,
        trace_format=trace_format,
    )
    day = trace.name.removesuffix(".gz").rpartition(".")[0] or trace.name
    target = out or Path("runs") / f"validate-{folder_name(day)}"
    say = Say(as_json)
    if speculation is not None:
        _speculation(settings, target, speculation, batches, prompts, say, anyway, as_json)
        return
    if prompts is not None:
        raise ExperimentError(f"--prompts without --speculation: found {prompts}, expected --speculation ngram:4")
    validation = Validation(settings, target, profile=profile, anyway=anyway, say=say)
    notes = tell_notes(validation.trace.notes)
    result = validation.run()
    written = write_report(result, target)
    if explore is not None:
        from experiments.validation.pages.interactive_report import write_explorable

        write_explorable(explore, result)
    if as_json:
        print(json.dumps(json_ready({**as_dict(result), "notes": notes}), indent=2))
        return
    for line in in_short(result):
        print(f"- {line}")
    print(f"{result.took_s:.0f} s; report: {written[1]}")


def _speculation(
    settings: Any,
    out: Path,
    text: str,
    batches: str,
    prompts: Path | None,
    say: Say,
    anyway: bool,
    as_json: bool,
) -> None:
    from experiments.validation.speculation import SpeculationStudy, draw, in_short
    from metrics.run_folder.folder import json_ready
    from policies import Speculation

    speculation = Speculation.parse(text)
    study = SpeculationStudy(
        settings,
        out,
        speculation=speculation,
        batches=[_batch(part) for part in batches.split(",")],
        prompts=prompts,
        say=say,
        anyway=anyway,
    )
    rows = study.run()
    drawn = draw(rows, speculation, out / "figures", f"{settings.engine.model} on this machine, {study.policy.label}")
    if as_json:
        print(json.dumps(json_ready(json.loads((out / "speculation.json").read_text(encoding="utf-8"))), indent=2))
        return
    for line in in_short(rows, speculation):
        print(f"- {line}")
    print(f"figure: {drawn[-1]}")


def _batch(text: str) -> int:
    number = whole_number(text.strip())
    if not number:
        raise ExperimentError(f"--batches: found {text.strip()!r}, expected numbers of requests, as 1,4,16")
    return number


def _check_given(ctx: typer.Context, used: set[str], why: str) -> None:
    """Refuse what was given and would be ignored."""
    for param in ctx.command.params:
        source = ctx.get_parameter_source(str(param.name))
        if param.name not in used and source is not None and source.name == "COMMANDLINE":
            given = param.opts[0] if param.param_type_name == "option" else str(param.name)
            raise ExperimentError(f"{given}: {why}; leave it out")


def _against(
    references: list[Path],
    cost_model: str | None,
    profile: Path | None,
    gpu: str | None,
    model: str | None,
    out: Path,
    explore: Path | None,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    from experiments.validation.existing_runs import against_short, validate_against, write_against
    from metrics.run_folder.folder import json_ready

    if profile is not None:
        cost_model = _fitted(profile, out)
    result = validate_against(
        references, cost_model=cost_model or "auto", gpu=gpu, model=model, options=options, say=Say(as_json)
    )
    written = write_against(result, out)
    if explore is not None:
        from experiments.validation.pages.interactive_report import write_explorable_against

        write_explorable_against(explore, result)
    if as_json:
        rows = [row.as_dict() for row in result.comparisons]
        print(json.dumps({"in_short": against_short(result), "comparisons": json_ready(rows)}, indent=2))
        return
    for line in against_short(result):
        print(f"- {line}")
    print(f"report: {written[1]}")


def _fitted(profile: Path, out: Path) -> str:
    """A profile fitted into a model file beside the report."""
    from profiler.iterations.fit_iterations import fit_iterations
    from profiler.iterations.iteration_file import write_fit
    from profiler.measurements.profile import read_profile

    out.mkdir(parents=True, exist_ok=True)
    write_fit(fit_iterations(read_profile(profile)), out / "model.json")
    return str(out / "model.json")


def validate_full(
    traces: Annotated[list[Path], typer.Argument(help="Trace files.")],
    models: Annotated[
        str, typer.Option(help="Models, as nano,tiny; the quick ones first.", rich_help_panel=_WHAT)
    ] = "nano",
    policies: Annotated[str, typer.Option(help="Policies, or all.", rich_help_panel=_WHAT)] = "all",
    load: Annotated[str, typer.Option(help="Shares of the measured capacity.", rich_help_panel=_WHAT)] = "0.6,0.9",
    repeats: Annotated[
        int, typer.Option(help="Live runs of each policy and load.", rich_help_panel=_WHAT, min=1, max=1_000)
    ] = 3,
    limit: Annotated[
        str,
        typer.Option(
            help="Requests of each trace that are used; one for all models or one each.", rich_help_panel=_WHAT
        ),
    ] = "100",
    skip: Annotated[int, typer.Option(help="Requests left out at each start.", rich_help_panel=_WHAT)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_ENGINE)] = "auto",
    threads: Annotated[int, typer.Option(help="Threads of the model; 0: PyTorch's own.", rich_help_panel=_ENGINE)] = 1,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests admitted at once.", rich_help_panel=_ENGINE)] = 32,
    budget: Annotated[
        str,
        typer.Option(help="Time for measuring each profile; one for all models or one each.", rich_help_panel=_PROFILE),
    ] = "300s",
    seed: Annotated[int, typer.Option(help="Of weights, prompts and plan.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder. The same one goes on.")] = Path("runs/validate-full"),
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Go on in --out although trace, policies or model have changed since.")
    ] = False,
) -> None:
    """Validate models x traces x policies x loads: hours, resumable, one report over all."""
    from executor.commands.profile import seconds_of
    from experiments.validation.comparing.live_side import EngineChoice
    from experiments.validation.comparing.settings import Settings
    from experiments.validation.many_models import ModelShare, parts_of, validate_all
    from policies import policy_names

    names = policy_names() if policies == "all" else names_in(policies)
    base = Settings(
        trace="",
        policies=tuple(names),
        loads=shares_of(load),
        repeats=repeats,
        engine=EngineChoice(device=device, threads=threads or None, max_num_seqs=max_num_seqs, seed=seed),
    )
    chosen = names_in(models)
    limits = [requests_of(text) for text in for_each_model(limit, len(chosen), "--limit")]
    budgets = [seconds_of(text, "--budget") for text in for_each_model(budget, len(chosen), "--budget")]
    parts = parts_of(
        base,
        traces,
        [
            ModelShare(name, (skip, skip + requests), budget_s)
            for name, requests, budget_s in zip(chosen, limits, budgets)
        ],
    )
    try:
        validate_all(parts, out, Say(False), anyway=anyway)
    except KeyboardInterrupt:
        print(f"interrupted; what is done is kept in {out}, the same command goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    print(f"report: {out / 'report.html'}")


class Say:
    """One line a stage, on stderr."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def __call__(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)


def shares_of(text: str) -> tuple[float, ...]:
    """ "0.6,0.9" as numbers; ExperimentError for anything else."""
    found: list[Any] = []
    for part in text.split(","):
        try:
            found.append(float(part))
        except ValueError:
            raise ExperimentError(f"--load: found {part!r}, expected shares such as 0.6 or 0.6,0.9") from None
    return tuple(found)


def names_in(text: str) -> list[str]:
    """ "a, b" as names."""
    return [part.strip() for part in text.split(",") if part.strip()]


def for_each_model(text: str, models: int, flag: str) -> list[str]:
    """ "100,30" as one text for each model, "100" for all of them; ExperimentError for another number of parts."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in (1, models):
        raise ExperimentError(f"{flag}: found {len(parts)} values for {models} models, expected one or one each")
    return parts * models if len(parts) == 1 else parts


def requests_of(text: str) -> int:
    """A count of requests; ExperimentError for anything else."""
    found = whole_number(text)
    if not found:
        raise ExperimentError(f"--limit: found {text!r}, expected a number of requests, or one for each model")
    return found
