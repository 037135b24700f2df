"""Commands of the executor: thin. They parse, call `executor.serving.replay` and its neighbours, and print."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from executor.commands import options as o
from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.machine.threads import set_threads
from executor.serving.journal import Journal
from executor.serving.notes import notes_of_live_run
from policies.edges.command_line import knob_flags, refuse_flags, tell_notes
from policies.edges.declared_settings import settings_of, values_of_flags, with_flags
from policies.edges.input_digests import changed_inputs, digests_of
from policies.edges.input_file import read_json, read_toml
from policies.edges.settings_file import files_beside, knobs_of_file, one_spelling
from policies.registry import knobs_of, policy_class
from workloads.door.options import DoorOptions, check_installed
from workloads.reading_options import ReadingOptions

app = typer.Typer(
    name="executor",
    help="Run LLM-inference traces on a real model, in real time, under the simulator's own policies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_ANSWERS = ("temperature", "top_k", "top_p", "seed")
_KNOBS = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command("replay", context_settings=_KNOBS)
@with_flags(o.replay_flags())
def replay_command(
    ctx: typer.Context,
    trace: o.TraceFile = None,
    out: o.Out = None,
    config: o.ConfigFile = None,
    anyway: o.Anyway = False,
    as_json: o.Json = False,
    **shared: Any,
) -> None:
    """Serve a trace in real time. Exit code 130 or 143 after Ctrl-C or SIGTERM; the run so far is written then."""
    from_file = _config_file(config) if config is not None else {}
    settings, reading = _live_config(ctx, from_file)
    if settings.tp * settings.pp > 1:
        from executor.distributed.worker import serve_if_not_rank_0

        serve_if_not_rank_0()
    _refuse_early(settings, out)
    # By names that mean the same from everywhere.
    named = {**settings.as_dict(), "trace": reading.recorded(trace)["trace"], "model": _full_name(settings.model)}
    if config is not None and not anyway:
        _refuse_other_inputs(config, named)
    inputs = digests_of(named)
    requests = reading.read(trace, settings.seed, limit=settings.limit)
    notes = tell_notes(notes_of_live_run(settings, requests))
    from executor.serving.replay import load_for, replay_live

    head = requests if settings.limit is None else requests.head(settings.limit)
    longest = settings.max_model_len or head.longest
    set_threads(settings.threads)
    with load_for(settings, longest) as loaded:
        stop_ids = () if settings.ignore_eos else _stop_ids(loaded)
        journal = None
        if out is not None:
            journal = Journal(out, {"trace": requests.name, "requests": len(head), **settings.as_dict()})
            if journal.kept is not None:
                print(f"note: an earlier run was cut off; what it had finished is in {journal.kept}", file=sys.stderr)
        with _Progress(as_json) as bar, _tells_of(journal):
            run = replay_live(
                requests,
                settings,
                loaded=loaded,
                progress=bar.update,
                stop_ids=stop_ids,
                on_ended=journal.ended if journal is not None else None,
            )
    run.config["live"] = {**run.config["live"], **reading.recorded(trace)}
    if changed := changed_inputs(inputs, digests_of(named)):
        notes += tell_notes([f"inputs changed while the run went on: {', '.join(changed)}"])
    run.config["inputs"] = inputs
    run.config["live"]["model"] = named["model"]
    if out is not None:
        from metrics.run_folder.folder import replaced

        if not as_json and (note := replaced(out, run.config)):
            print(f"note: {note}", file=sys.stderr)
        run.write(out)
        assert journal is not None
        journal.remove()
    _print_run(run, out, as_json, notes)
    if run.outcome.stopped_by:
        raise typer.Exit({"SIGINT": 130, "SIGTERM": 143}[run.outcome.stopped_by])


@app.command("serve", context_settings=_KNOBS)
@with_flags(o.serve_flags())
def serve_command(
    ctx: typer.Context, out: o.Out = None, config: o.ConfigFile = None, as_json: o.Json = False, **shared: Any
) -> None:
    """Serve a model to real clients over HTTP (OpenAI's protocol, vLLM's metrics), until Ctrl-C or SIGTERM."""
    check_installed()
    settings = _live_config(ctx, _config_file(config) if config is not None else {})[0]
    door = {name: value for name, value in _given(ctx).items() if name in settings_of(DoorOptions)}
    from executor.door.served import ServedModel

    session = ServedModel(settings, DoorOptions(**door), out=out, ready=_say_where)
    run = session.run()
    if run is None:
        print("no request has come: nothing is written", file=sys.stderr)
        return
    _print_run(run, out, as_json, tell_notes(run.config["served"]["notes"]))


def _say_where(url: str) -> None:
    print(f"serving at {url} (POST {url}/v1/completions; Ctrl-C ends the session)", file=sys.stderr, flush=True)


def _live_config(ctx: typer.Context, from_file: Mapping[str, Any]) -> tuple[LiveConfig, ReadingOptions]:
    """What flags and a config file say of a live run, and of how its trace is read."""
    given = _given(ctx)
    values = {**from_file, **given, **values_of_flags(LiveConfig, given)}
    unknown = knob_flags(ctx.args)
    if unknown:
        refuse_flags(ctx, unknown, knobs_of(policy_class(str(values.get("policy", LiveConfig.policy)))), ExecutorError)
    knobs = {**knobs_of_file(from_file, ExecutorError), **unknown}
    reading = ReadingOptions(
        **{name: values.pop(name) for name in settings_of(ReadingOptions) if values.get(name) is not None}
    )
    for name in settings_of(DoorOptions):
        values.pop(name, None)
    if values.get("chunk_size") is not None:
        knobs["chunk_size"] = values["chunk_size"]
    values.pop("chunk_size", None)
    return LiveConfig.from_dict({**values, "knobs": knobs}), reading


@app.command("generate")
@with_flags(o.live_flags((*_ANSWERS, *o.ENGINE_FLAGS)), model="smollm2")
def generate_command(
    prompt: Annotated[str | None, typer.Option("--prompt", help="The text to answer.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of the answer.")] = 128,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text instead of answering as a chat.")] = False,
    as_json: o.Json = False,
    **settings: Any,
) -> None:
    """Answer one prompt with a model that has a tokenizer (a folder, a .gguf file, or smollm2)."""
    if prompt is None:
        raise ExecutorError("found no prompt: give the text with --prompt")
    from executor.serving.generate import generate

    set_threads(settings["threads"])
    config = LiveConfig(**settings, ignore_eos=False, policy="vllm_v1")
    show = None if as_json else lambda piece: print(piece, end="", flush=True)
    answer = generate(prompt, config, max_tokens=max_tokens, chat=not raw, on_text=show)
    if as_json:
        print(json.dumps(answer.as_dict(), indent=2))
        return
    print()
    print(
        f"{answer.prompt_tokens} prompt tokens, first token after {answer.first_token_s:.2f} s, "
        f"{answer.output_tokens} tokens at {answer.tokens_per_s:.1f} tokens/s, ended by {answer.ended_by}",
        file=sys.stderr,
    )


@app.command("bench")
@with_flags(o.live_flags(o.ENGINE_FLAGS))
def bench_command(
    chunk: Annotated[int, typer.Option("--chunk", help="Prefill tokens of the batch.")] = 448,
    prefix: Annotated[int, typer.Option("--prefix", help="Context already cached before the chunk.")] = 0,
    decodes: Annotated[int, typer.Option("--decodes", help="Requests that decode in the batch.")] = 64,
    context: Annotated[int, typer.Option("--context", help="Context of every decode.")] = 512,
    repeats: Annotated[int, typer.Option("--repeats", help="Measured runs of the batch.", min=1, max=1_000_000)] = 10,
    as_json: o.Json = False,
    **settings: Any,
) -> None:
    """Time one batch shape, part by part, beside the machine's own matrix rate."""
    from executor.measuring.bench import bench_batch

    set_threads(settings["threads"])
    config = LiveConfig(**settings)
    result = bench_batch(config, chunk=chunk, prefix=prefix, decodes=decodes, context=context, repeats=repeats)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    width = max(len(key) for key in result)
    for key, value in result.items():
        print(f"{key:<{width}}  {value:.4g}" if isinstance(value, float) else f"{key:<{width}}  {value}")


def _stop_ids(loaded: Any) -> tuple[int, ...]:
    from executor.model.tokenizer import load_tokenizer

    return tuple(load_tokenizer(loaded.source).stop_ids)


def _refuse_early(settings: LiveConfig, out: Path | None) -> None:
    """Mistakes that would otherwise show only after the run."""
    from policies import make_policy

    make_policy(settings.policy, settings.knobs)
    if out is not None:
        from metrics.run_folder.folder import check_run_place

        check_run_place(out)


def _given(ctx: typer.Context) -> dict[str, Any]:
    """Flags that were given on the command line."""
    known = {*settings_of(LiveConfig), *settings_of(ReadingOptions), *settings_of(DoorOptions), "chunk_size"}
    # By name: newer versions of typer carry a click of their own, whose enumeration is not the installed click's.
    sources = {name: getattr(ctx.get_parameter_source(name), "name", "") for name in ctx.params}
    return {k: v for k, v in ctx.params.items() if k in known and sources[k] == "COMMANDLINE"}


def _config_file(path: Path) -> dict[str, Any]:
    """The values of a TOML config (file names relative to it), or of the `live` part of a live run's config.json."""
    from metrics.run_folder.config_check import settings_of_run

    if path.is_dir():
        path = path / "config.json"
    values = (read_json if path.suffix == ".json" else read_toml)(path, ExecutorError)
    if isinstance(values, Mapping):
        if "replay" in values:
            raise ExecutorError(
                f"{path}: is the config of a simulated run; python -m simulator replay --config takes it"
            )
        if "live" in values:
            return one_spelling(settings_of_run(values, "live", path, ExecutorError), str(path), ExecutorError)
    if not isinstance(values, Mapping):
        raise ExecutorError(f"{path}: found no table of settings")
    told = partial(print, "note:", file=sys.stderr)
    return files_beside(one_spelling(values, str(path), ExecutorError), path.parent, told=told)


@contextlib.contextmanager
def _tells_of(journal: Journal | None) -> Iterator[None]:
    """A run that a lost rank ends has no folder: its message says where the requests are that had ended."""
    try:
        yield
    except ExecutorError as error:
        if journal is None or type(error).__name__ != "RankError":  # named, since its module loads PyTorch's own
            raise
        raise ExecutorError(f"{error}; the requests that had ended are in {journal.path}") from error


def _full_name(name: str) -> str:
    """A file or folder by its whole path, any other name as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def _refuse_other_inputs(path: Path, settings: Mapping[str, Any]) -> None:
    from metrics.run_folder.config_check import refuse_changed_inputs
    from metrics.run_folder.folder import versions_of

    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json":
        refuse_changed_inputs(file, settings, versions_of(("charioteer",))["charioteer"], ExecutorError)


def _print_run(run: Any, out: Path | None, as_json: bool, notes: list[str]) -> None:
    if as_json:
        from metrics.run_folder.folder import json_ready

        print(json.dumps(json_ready({**run.summary, "notes": notes}), indent=2))
        return
    from metrics.drawing.text_tables import summary_tables, terminal

    console = terminal(None)
    for table in summary_tables(run.summary):
        console.print(table)
    outcome = run.outcome
    console.print(f"wall {outcome.wall_s:.2f} s, CPU {outcome.cpu_s:.2f} s", highlight=False)
    if outcome.stopped_by:
        console.print(f"stopped by {outcome.stopped_by}: what had not ended is recorded as aborted", highlight=False)
    if out is not None:
        console.print(f"written to {out}", highlight=False, soft_wrap=True)


class _Progress:
    """A progress bar on a terminal's stderr; elsewhere one line there when serving begins."""

    def __init__(self, quiet: bool) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._quiet = quiet
        self._lines = not sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        if not self._quiet and not self._lines:
            from rich.progress import Progress

            from metrics.drawing.text_tables import terminal

            self._bar = Progress(console=terminal(None, stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("serving", total=None)
        return self

    def update(self, ended: int, total: int) -> None:
        if not self._quiet and self._lines and ended == 0:
            print(f"serving {total} requests", file=sys.stderr, flush=True)
        if self._bar is not None:
            self._bar.update(self._task, completed=ended, total=total)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
