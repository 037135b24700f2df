"""How a trace file is read, as plain data and as flags: declared once for every command that reads one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from policies.edges.settings import check_settings
from workloads.trace import Trace, TraceError


@dataclass(frozen=True)
class ReadingOptions:
    """What `read_trace` takes, as a command line and a config file spell it; kept in config.json.

    trace: the file, where no argument names one. window: START:END in seconds. timeout: a client's patience in seconds.
    """

    trace: str | None = None
    trace_format: str = "auto"
    arrivals: str | None = None
    on_bad_row: str = "fail"
    on_unsorted: str = "fail"
    sessions: str = "open"
    history: str = "in_prompt"
    coupling: str = "shared"
    spread_ties: bool = False
    hash_tokens: int | None = None
    time_unit: str | None = None
    timeout: float | None = None
    window: str | None = None

    def __post_init__(self) -> None:
        check_settings(self, TraceError)

    def read(self, path: str | os.PathLike[str] | None, seed: int, *, limit: int | None = None) -> Trace:
        """The trace at `path`, or the one that the options name. Raises TraceError."""
        from workloads.reading.reader import read_trace

        chosen = path or self.trace
        if not chosen:
            raise TraceError("found no trace: name a trace file, or a config that names one")
        options: dict[str, Any] = asdict(self)
        del options["trace"]
        return read_trace(
            Path(chosen),
            seed=seed,
            limit=limit,
            timeout_s=options.pop("timeout"),
            window_s=parse_window(options.pop("window")),
            **options,
        )

    def recorded(self, path: Path | None) -> dict[str, Any]:
        """The options as config.json keeps them, with the file's whole path."""
        return {**asdict(self), "trace": str(path.resolve()) if path is not None else self.trace}


def parse_window(text: str | None) -> tuple[float, float] | None:
    """`START:END` in seconds as two numbers; None for none."""
    if text is None:
        return None
    try:
        start, end = (float(part) for part in text.split(":"))
    except ValueError:
        raise TraceError(f"--window: found {text[:40]!r}, expected START:END in seconds") from None
    return start, end


def _option(flag: str, text: str) -> Any:
    return typer.Option(flag, help=text, rich_help_panel="Trace")


TraceFormat = Annotated[
    str,
    _option(
        "--trace-format",
        "auto (by content), csv, jsonl, parquet, azure, vidur, mooncake, burstgpt, vllm, vllm_steps, servegen or "
        "lengths.",
    ),
]
Arrivals = Annotated[
    str | None,
    _option(
        "--arrivals",
        "Not the file's times: poisson:RATE, gamma:RATE,CV, uniform:RATE, burst, closed:USERS,THINK_S, trace:FILE.",
    ),
]
OnBadRow = Annotated[str, _option("--on-bad-row", "fail at a bad row, or skip it and say so.")]
OnUnsorted = Annotated[str, _option("--on-unsorted", "fail where arrivals go back in time, or sort them.")]
SpreadTies = Annotated[bool, _option("--spread-ties", "Spread requests with equal times (seeded).")]
Sessions = Annotated[str, _option("--sessions", "open: turns arrive as logged; closed: after the last answer.")]
History = Annotated[
    str, _option("--history", "Later turns' prompts hold their session (in_prompt), lack it (add) or never do (none).")
]
Coupling = Annotated[str, _option("--coupling", "ServeGen's prompt and answer lengths: shared or independent draws.")]
HashTokens = Annotated[int | None, _option("--hash-tokens", "Prompt tokens per prefix hash, if the file is unclear.")]
TimeUnit = Annotated[str | None, _option("--time-unit", "Unit of the file's times: s, ms, us or ns.")]
Window = Annotated[str | None, _option("--window", "Only arrivals from START:END seconds.")]
Timeout = Annotated[float | None, _option("--timeout", "Seconds after which a client gives up.")]

FLAGS: Mapping[str, tuple[Any, Any]] = {
    "trace_format": (TraceFormat, "auto"),
    "arrivals": (Arrivals, None),
    "on_bad_row": (OnBadRow, "fail"),
    "on_unsorted": (OnUnsorted, "fail"),
    "spread_ties": (SpreadTies, False),
    "sessions": (Sessions, "open"),
    "history": (History, "in_prompt"),
    "coupling": (Coupling, "shared"),
    "hash_tokens": (HashTokens, None),
    "time_unit": (TimeUnit, None),
    "window": (Window, None),
    "timeout": (Timeout, None),
}
"""name -> (annotation, default)"""
