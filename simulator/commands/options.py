"""The flags that replay, compare and their relatives share, and how flags, config file and defaults become one config.

Precedence: a flag that was given, then the config file, then the default. Flags that no command knows are taken as
knobs of the policy; one that the policy does not have is an error that names those it has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from policies.edges.command_line import knob_flags, refuse_flags, with_flags
from policies.edges.input_file import read_json, read_toml
from policies.edges.settings_file import files_beside, knobs_of_file, one_spelling
from policies.registry import BUILT_IN, knobs_of, policy_class
from simulator.commands import cluster_options, memory_options
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from workloads import reading_options
from workloads.reading_options import ReadingOptions

POLICY, ENGINE, MEMORY, PIPELINE, TRACE, OUTPUT = "Policy", "Engine", "KV memory", "Pipeline", "Trace", "Output"


def _option(flag: str, text: str, panel: str, **more: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=panel, **more)


Policy = Annotated[
    str, _option("--policy", "Name of a policy, or path/to/file.py:ClassName; its knobs are flags too.", POLICY)
]
Policies = Annotated[
    str | None, _option("--policies", "Policies to compare, separated by commas; all built-in ones by default.", POLICY)
]
ChunkSize = Annotated[
    int | None, _option("--chunk-size", "Most tokens of a batch, its decodes counted (the policy's knob).", POLICY)
]
TokenBudget = Annotated[
    int | None, _option("--token-budget", "Most tokens of a batch, prefill and decode together.", POLICY)
]
MaxNumSeqs = Annotated[int | None, _option("--max-num-seqs", "Most requests admitted at once.", POLICY)]
Async = Annotated[
    bool | None, _option("--async/--sync", "Plan one step ahead of the running one (where the policy can).", POLICY)
]
Model = Annotated[str, _option("--model", "Model name, Hugging Face folder, config.json or TOML file.", ENGINE)]
Gpu = Annotated[str, _option("--gpu", "GPU name, or a TOML file that describes one.", ENGINE)]
CostModel = Annotated[
    str,
    _option(
        "--cost-model",
        "auto (a fitted one if it ships for this GPU), roofline, a model file, or FILE.py:Class.",
        ENGINE,
    ),
]
DType = Annotated[str, _option("--dtype", "Weights and activations; auto is the model's own.", ENGINE)]
KVDType = Annotated[str, _option("--kv-dtype", "Keys and values; auto is that of the weights.", ENGINE)]
TP = Annotated[int, _option("--tp", "Tensor-parallel devices per stage.", ENGINE)]
MaxModelLen = Annotated[
    int | None,
    _option("--max-model-len", "Longest prompt + output; by default the trace's, if the model allows.", ENGINE),
]
BlockSize = Annotated[int, _option("--block-size", "Tokens per KV block.", MEMORY)]
NumBlocks = Annotated[int | None, _option("--num-blocks", "Usable KV blocks; by default what the GPU holds.", MEMORY)]
Utilization = Annotated[
    float | None,
    _option("--gpu-memory-utilization", "Share of the GPU's memory used; the policy's own rule by default.", MEMORY),
]
Watermark = Annotated[
    float | None, _option("--watermark", "Share of the KV blocks that admission leaves free.", MEMORY)
]
PP = Annotated[int, _option("--pp", "Pipeline stages.", PIPELINE)]
LayerSplit = Annotated[str | None, _option("--layer-split", "Layers of each stage, as 16,16.", PIPELINE)]
PPOverlap = Annotated[
    bool, _option("--pp-overlap/--no-pp-overlap", "A stage computes while its last output is being sent.", PIPELINE)
]
ChaseChunks = Annotated[
    bool, _option("--chase-chunks", "A prompt's next chunk may follow its last one through the stages.", PIPELINE)
]
RateScale = Annotated[float, _option("--rate-scale", "Arrivals this many times as fast.", TRACE)]
Limit = Annotated[int | None, _option("--limit", "Only the first so many requests.", TRACE)]
Seed = Annotated[int, _option("--seed", "Seed of everything random.", TRACE, min=0)]
Warmup = Annotated[
    str | None, _option("--warmup", "Requests (100), seconds (30s) or auto: left out of the statistics.", OUTPUT)
]
Slo = Annotated[
    str | None,
    _option("--slo", "Objective, as ttft_p99=2,tbt_p99=0.2 (seconds); by SLO class: chat:ttft_p99=1;...", OUTPUT),
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
Json = Annotated[bool, _option("--json", "Print JSON only.", OUTPUT)]
Seeds = Annotated[
    int,
    _option("--seeds", "Draws of the workload: of --arrivals if given, else of blocks of the trace.", POLICY),
]
Preset = Annotated[
    str | None, _option("--preset", "A typical workload with its objective, in place of a trace.", TRACE)
]
NoLeaps = Annotated[bool, _option("--plain", "Step through equal iterations one by one.", ENGINE)]
Reference = Annotated[
    bool,
    _option("--reference", "Run the readable reference simulator: slow, and the same in every nanosecond.", ENGINE),
]


TraceFile = Annotated[Path | None, typer.Argument(help="Trace file; may come from --config instead.")]

SHARED: dict[str, tuple[Any, Any]] = {
    "chunk_size": (ChunkSize, None),
    "token_budget": (TokenBudget, None),
    "max_num_seqs": (MaxNumSeqs, None),
    "asynchronous": (Async, None),
    "model": (Model, "llama-3.1-8b"),
    "gpu": (Gpu, "h100"),
    "cost_model": (CostModel, "auto"),
    "dtype": (DType, "auto"),
    "kv_dtype": (KVDType, "auto"),
    "tp": (TP, 1),
    "max_model_len": (MaxModelLen, None),
    "plain": (NoLeaps, False),
    "reference": (Reference, False),
    "block_size": (BlockSize, 16),
    "num_blocks": (NumBlocks, None),
    "gpu_memory_utilization": (Utilization, None),
    "watermark": (Watermark, None),
    **memory_options.FLAGS,
    "pp": (PP, 1),
    "layer_split": (LayerSplit, None),
    "pp_overlap": (PPOverlap, True),
    "chase_chunks": (ChaseChunks, False),
    **cluster_options.FLAGS,
    "rate_scale": (RateScale, 1.0),
    "limit": (Limit, None),
    **reading_options.FLAGS,
    "seed": (Seed, 0),
    "warmup": (Warmup, None),
    "slo": (Slo, None),
}
"""Flags of every command that replays a trace: name -> (annotation, default). A new one is added here alone."""


replay_flags = with_flags(SHARED)
"""Gives a command, written as f(ctx, its own flags, **shared), the flags of SHARED."""


def collect(ctx: typer.Context, config_file: Path | None) -> tuple[ReplayConfig, ReadingOptions]:
    """One config from flags, config file and defaults."""
    from_file = read_config_file(config_file) if config_file is not None else {}
    flags = _given_flags(ctx)
    knobs = {**knobs_of_file(from_file, SimulationError), **_knobs_given(ctx, from_file)}
    if flags.pop("asynchronous", None) is not None:
        knobs["async_scheduling"] = ctx.params["asynchronous"]
    if (chunk_size := flags.pop("chunk_size", None)) is not None:
        knobs["chunk_size"] = chunk_size
    if flags.pop("plain", False):
        flags["leaps"] = False
    if isinstance(split := flags.get("layer_split"), str):
        flags["layer_split"] = _split(split)
    values = {**from_file, **cluster_options.as_config(flags)}
    reading = {entry.name for entry in fields(ReadingOptions)}
    trace_options = ReadingOptions(**{name: value for name, value in values.items() if name in reading})
    rest = {name: value for name, value in values.items() if name not in reading}
    return ReplayConfig.from_dict({**rest, "knobs": knobs}), trace_options


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
        name = ctx.params["policy"] if _given(ctx, "policy") else from_file.get("policy", ctx.params["policy"])
        has = set(knobs_of(policy_class(str(name))))
    refuse_flags(knobs, has, (option for each in ctx.command.params for option in each.opts), SimulationError)
    return knobs


def refuse_choices(ctx: typer.Context) -> None:
    """SimulationError where a command that finds policy and chunk size itself is given them, or any other knob."""
    chosen = [name for name in ("policy", "chunk_size", "asynchronous") if name in ctx.params and _given(ctx, name)]
    for name in [*chosen, *knob_flags(ctx.args)]:
        flag = "async" if name == "asynchronous" else name.replace("_", "-")
        raise SimulationError(f"--{flag}: advise finds the policy and its knobs itself; replay and compare take it")


def _given_flags(ctx: typer.Context) -> dict[str, Any]:
    known = {entry.name for entry in fields(ReplayConfig)} | {entry.name for entry in fields(ReadingOptions)}
    known |= {"chunk_size", "asynchronous", "plain", *cluster_options.FLAGS}
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


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _split(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SimulationError(f"--layer-split: found {text!r}, expected whole numbers as 16,16") from None


def _given(ctx: typer.Context, name: str) -> bool:
    # By name: typer may carry its own copy of click, whose enumeration is another object.
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
