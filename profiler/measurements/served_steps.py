"""Steps of a running engine as it tells them itself: vLLM's iteration log, and Dynamo's forward-pass traces.

vLLM (`--enable-logging-iteration-details`) prints requests and tokens of context and of generation, and elapsed ms, for
each step; contexts it does not print, so they are followed from step to step, first come, first done. Dynamo
(`dynamo.fpm.trace.v1`, one record a line, plain or .gz) gives tokens and KV of prefills and decodes and the wall time.
Both tell sums, no lengths: the requests of a step are taken as equal.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.edges.input_file import LOG_BYTES, checked_file
from policies.work.batch import BatchShape
from profiler.errors import ProfileError

_LINE = re.compile(
    r"Iteration\((\d{1,12})\): (\d{1,9}) context requests, (\d{1,9}) context tokens, (\d{1,9}) generation requests, "
    r"(\d{1,9}) generation tokens, iteration elapsed time: (\d{1,9}(?:\.\d{1,9})?) ms"
)
_SCHEMA = "dynamo.fpm.trace.v1"
_PROBE = 1 << 16
_MOST = 10**9


@dataclass(frozen=True)
class ServedSteps:
    """Steps of one log in their order. kind: vllm_iterations or dynamo_fpm; left_out: lines without work."""

    source: str
    kind: str
    shapes: tuple[BatchShape, ...]
    elapsed_s: NDArray[np.float64]
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.shapes)


def step_log_kind(path: str | Path) -> str | None:
    """Which log this is, by its first bytes; None for anything else."""
    file = Path(path)
    try:
        if not file.is_file():
            return None
        with _opened(file) as lines:
            head = lines.read(_PROBE).decode("utf-8", "replace")
    except (OSError, EOFError, ValueError):
        return None
    if _SCHEMA in head:
        return "dynamo_fpm"
    return "vllm_iterations" if _LINE.search(head) else None


def read_served_steps(path: str | Path) -> ServedSteps:
    """The steps of a log; raises ProfileError with file, line, what was found and what was expected."""
    file = checked_file(path, ProfileError)
    kind = step_log_kind(file)
    if kind is None:
        raise ProfileError(
            f"{file}: found neither vLLM's iteration log (--enable-logging-iteration-details) nor {_SCHEMA} records"
        )
    with _opened(file) as raw:
        content = raw.read(LOG_BYTES + 1)
    if len(content) > LOG_BYTES:
        raise ProfileError(f"{file}: found more than {LOG_BYTES >> 20} MiB, expected a part of the log")
    lines = content.decode("utf-8", "replace").splitlines()
    steps = _of_vllm(lines) if kind == "vllm_iterations" else _of_dynamo(file, lines)
    shapes, elapsed, left_out = steps
    if not shapes:
        raise ProfileError(f"{file}: found no step with work in it")
    return ServedSteps(file.name, kind, tuple(shapes), np.array(elapsed, float), left_out)


def _of_vllm(lines: Iterable[str]) -> tuple[list[BatchShape], list[float], int]:
    """Contexts by following: whoever came first ends first, since the log does not say who does."""
    shapes: list[BatchShape] = []
    elapsed: list[float] = []
    contexts: list[int] = []
    left_out = 0
    for line in lines:
        found = _LINE.search(line)
        if not found:
            continue
        _, prompts, prompt_tokens, decodes, _, ms = (float(part) for part in found.groups())
        prompts, prompt_tokens, decodes = int(prompts), int(prompt_tokens), int(decodes)
        if not prompts and not decodes:
            left_out += 1
            continue
        while len(contexts) > decodes:
            contexts.pop(0)
        contexts += [int(np.mean(contexts)) if contexts else 1] * (decodes - len(contexts))
        chunks = _shares(prompts, prompt_tokens, 0)
        shapes.append(_shape(chunks, contexts))
        elapsed.append(ms / 1e3)
        contexts = [context + 1 for context in contexts]
        contexts += [tokens + prefix for tokens, prefix in chunks]
    return shapes, elapsed, left_out


def _of_dynamo(file: Path, lines: Iterable[str]) -> tuple[list[BatchShape], list[float], int]:
    shapes: list[BatchShape] = []
    elapsed: list[float] = []
    left_out = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise ProfileError(f"{where}: found no JSON, expected a {_SCHEMA} record") from None
        event = record.get("event", record) if isinstance(record, dict) else None
        if not isinstance(event, dict) or event.get("schema") != _SCHEMA or not isinstance(event.get("fpm"), dict):
            raise ProfileError(f"{where}: found no {_SCHEMA} record")
        wall = _number(where, event["fpm"], "wall_time")
        work = event["fpm"].get("scheduled_requests")
        if not isinstance(work, dict):
            raise ProfileError(f"{where}: found no table scheduled_requests")
        prompts, tokens = _count(where, work, "num_prefill_requests"), _count(where, work, "sum_prefill_tokens")
        decodes, held = _count(where, work, "num_decode_requests"), _count(where, work, "sum_decode_kv_tokens")
        # Heartbeats of an idle engine took no time.
        if wall <= 0 or (not tokens and not decodes):
            left_out += 1
            continue
        chunks = _shares(max(prompts, 1 if tokens else 0), tokens, _count(where, work, "sum_prefill_kv_tokens"))
        mean = held // decodes if decodes else 0
        spread = _number(where, work, "var_decode_kv_tokens") ** 0.5 if decodes else 0.0
        shape = _shape(chunks, [mean] * decodes)
        longest = int(mean + 2 * spread) if decodes else 0
        shapes.append(shape._replace(decode_context_total=held, decode_context_max=max(longest, mean)))
        elapsed.append(wall)
    return shapes, elapsed, left_out


def _shares(requests: int, tokens: int, prefix: int) -> tuple[tuple[int, int], ...]:
    """Equal chunks of a step's context requests; the first ones take what is left over."""
    if not requests or not tokens:
        return ()
    requests = min(requests, tokens)
    each, more = divmod(tokens, requests)
    return tuple((each + (row < more), prefix // requests) for row in range(requests))


def _shape(chunks: tuple[tuple[int, int], ...], contexts: list[int]) -> BatchShape:
    return BatchShape(chunks, len(contexts), sum(contexts), max(contexts, default=0), 0, len(contexts) + len(chunks))


def _number(where: str, table: dict[str, Any], key: str) -> float:
    value = table.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise ProfileError(f"{where}: {key}: found {str(value)[:40]!r}, expected a number, 0 or more")
    return float(value)


def _count(where: str, table: dict[str, Any], key: str) -> int:
    value = _number(where, table, key)
    if value != int(value) or value > _MOST:
        raise ProfileError(f"{where}: {key}: found {value:g}, expected a count")
    return int(value)


def _opened(file: Path) -> Any:
    with file.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    return gzip.open(file, "rb") if packed else file.open("rb")
