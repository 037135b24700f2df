"""How a trace file is read, as plain data and as flags: declared once for every command that reads one."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from policies.edges.declared_settings import check_declared, flags_of, setting
from workloads.trace import Trace, TraceError

GROUP = "Trace"


@dataclass(frozen=True)
class ReadingOptions:
    """What `read_trace` takes, as a command line and a config file spell it; kept in config.json.

    trace: the file, where no argument names one. window: START:END in seconds. timeout: a client's patience in seconds.
    """

    trace: str | None = setting(None, "Trace file, where no argument names it.", flag="")
    trace_format: str = setting(
        "auto",
        "auto (by content), csv, jsonl, parquet, azure, vidur, mooncake, bailian, agent_sessions, burstgpt, vllm, "
        "vllm_steps, servegen or lengths.",
        group=GROUP,
    )
    arrivals: str | None = setting(
        None,
        "Not the file's times: poisson:RATE, gamma:RATE,CV, uniform:RATE, burst, closed:USERS,THINK_S, trace:FILE.",
        group=GROUP,
    )
    on_bad_row: str = setting("fail", "fail at a bad row, or skip it and say so.", group=GROUP)
    on_unsorted: str = setting("fail", "fail where arrivals go back in time, or sort them.", group=GROUP)
    spread_ties: bool = setting(False, "Spread requests with equal times (seeded).", group=GROUP)
    sessions: str = setting("open", "open: turns arrive as logged; closed: after the last answer.", group=GROUP)
    history: str = setting(
        "in_prompt",
        "Later turns' prompts hold their session (in_prompt), lack it (add) or never do (none).",
        group=GROUP,
    )
    coupling: str = setting("shared", "ServeGen's prompt and answer lengths: shared or independent draws.", group=GROUP)
    hash_tokens: int | None = setting(None, "Prompt tokens per prefix hash, if the file is unclear.", group=GROUP)
    time_unit: str | None = setting(None, "Unit of the file's times: s, ms, us or ns.", group=GROUP)
    window: str | None = setting(None, "Only arrivals from START:END seconds.", group=GROUP)
    predict: str | None = setting(
        None, "Predicted answer lengths: oracle:SIGMA, buckets:N or quantile:Q; else the file's column.", group=GROUP
    )
    timeout: float | None = setting(None, "Seconds after which a client gives up.", group=GROUP)

    def __post_init__(self) -> None:
        check_declared(self, TraceError)

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


FLAGS = flags_of(ReadingOptions, typer.Option)
"""Flags of every command that reads a trace: name -> (annotation, default)."""
