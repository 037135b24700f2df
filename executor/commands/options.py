"""The executor's flags: those of a live run are declared in `executor.config`, the commands' own ones here."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from executor.config import OUTPUT, POLICY, LiveConfig
from policies.edges.declared_settings import Flags, flags_of
from workloads.door.options import DoorOptions
from workloads.reading_options import ReadingOptions

ENGINE_FLAGS = (
    "model",
    "device",
    "dtype",
    "kv_dtype",
    "kernels",
    "attention",
    "graphs",
    "streams",
    "nvtx",
    "allocator",
    "threads",
    "block_size",
)
"""Settings of an engine that runs batches without a trace."""

Out = Annotated[Path | None, typer.Option("--out", help="Folder for the run.", rich_help_panel=OUTPUT)]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML with these flags, or a live run's config.json.", rich_help_panel=OUTPUT),
]
Anyway = Annotated[
    bool,
    typer.Option("--anyway", help="Run a --config again although its inputs have changed.", rich_help_panel=OUTPUT),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.", rich_help_panel=OUTPUT)]
TraceFile = Annotated[Path | None, typer.Argument(help="Trace file; may come from --config instead.")]
ChunkSize = Annotated[
    int | None,
    typer.Option(
        "--chunk-size",
        help="Most tokens of a batch, its decodes counted (the policy's knob).",
        rich_help_panel=POLICY,
    ),
]


def live_flags(only: Collection[str] | None = None) -> Flags:
    """Flags of a live run's settings: all of them, or those named."""
    return flags_of(LiveConfig, typer.Option, only=only)


def replay_flags() -> Flags:
    """Flags of a command that serves a trace."""
    return {"chunk_size": (ChunkSize, None), **live_flags(), **flags_of(ReadingOptions, typer.Option)}


NOT_SERVED = (
    *("time_scale", "as_fast_as_possible", "limit", "prompts"),
    *("temperature", "top_k", "top_p", "ignore_eos", "tp", "pp", "layer_split", "chase_chunks"),
)
"""Settings of a trace's replay that each request brings itself where clients send them, and those of several ranks."""


def serve_flags() -> Flags:
    """Flags of the command that serves clients."""
    flags = {name: flag for name, flag in live_flags().items() if name not in NOT_SERVED}
    return {"chunk_size": (ChunkSize, None), **flags, **flags_of(DoorOptions, typer.Option)}
