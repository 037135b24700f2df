"""Results of load clients: which requests were sent when, and what each of them waited for.

Four tools, told apart by content: `vllm bench serve --save-detailed`, sglang's bench_serving, guidellm, aiperf (one
record a line). Lengths are tokens as the server counted them where the client kept that; seconds throughout. One reader
serves traces (`read_trace`), comparisons (`validate --against`) and calibrations (`calibrate-engine`).
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.edges.errors import InputError
from policies.edges.input_file import LOG_BYTES, checked_file, parse_json
from policies.edges.settings import check_value
from workloads.trace import Trace, TraceError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOOLS = ("vllm_bench", "sglang_bench", "guidellm", "aiperf")
_PROBE = 1 << 16


@dataclass(frozen=True)
class ClientRun:
    """One load of one client, answered requests alone, in the order of sending.

    sent_s: since the first one; None where the client keeps no times of sending (sglang). gaps_s: between chunks as
    they came, empty where a client keeps none. rate: that was asked for, requests/s (None: all at once, or unknown);
    concurrency: most in flight, None for no limit. left_out: requests without an answer.
    """

    tool: str
    name: str
    prompt_tokens: Ints
    output_tokens: Ints
    ttft_s: Floats
    e2e_s: Floats
    sent_s: Floats | None
    gaps_s: tuple[Floats, ...] = field(default=(), repr=False)
    rate: float | None = None
    concurrency: int | None = None
    left_out: int = 0

    @property
    def tpot_s(self) -> Floats:
        """(E2E - TTFT) / (output - 1) of each request; NaN of one token."""
        more = self.output_tokens > 1
        return np.where(more, (self.e2e_s - self.ttft_s) / np.maximum(self.output_tokens - 1, 1), np.nan)

    def trace(self, *, timeless: bool = False) -> Trace:
        """The requests as they were sent; TraceError where the client kept no times, unless timeless (all at 0)."""
        if self.sent_s is None and not timeless:
            raise TraceError(
                f"{self.name}: {self.tool} keeps no times of sending: say how requests arrive, for example with "
                f"arrivals poisson:{self.rate or 4:g}"
            )
        sent = np.zeros(len(self.ttft_s)) if self.sent_s is None else self.sent_s
        notes = (f"{self.left_out:,} requests without an answer are left out",) if self.left_out else ()
        return Trace(
            self.name,
            np.rint(sent * 1e9).astype(np.int64),
            self.prompt_tokens,
            self.output_tokens,
            self.output_tokens,
            source_format=self.tool,
            notes=notes,
        )


def client_tool(path: str | os.PathLike[str]) -> str | None:
    """Which tool wrote this file, by its first bytes; None for anything else."""
    try:
        head = _head(Path(path))
    except (OSError, ValueError, EOFError, zlib.error):
        return None
    if not head.lstrip().startswith("{"):
        return None
    if '"guidellm_version"' in head:
        return "guidellm"
    if '"record_processor_id"' in head or ('"credit_issued_ns"' in head and '"metrics"' in head):
        return "aiperf"
    if '"itls"' in head or '"ttfts"' in head or ('"request_throughput"' in head and '"total_input_tokens"' in head):
        return "sglang_bench" if '"dataset_name"' in head or '"random_range_ratio"' in head else "vllm_bench"
    return None


def read_client_run(path: str | os.PathLike[str], error: type[InputError] = TraceError) -> ClientRun:
    """The requests of a client's result; raises `error` with file, entry, what was found and what was expected."""
    file = Path(path)
    tool = client_tool(file)
    if tool is None:
        raise error(f"{file}: is no result of {', '.join(TOOLS)}")
    text = _text(file, error)
    if tool == "aiperf":
        return _aiperf(file, text, error)
    content = parse_json(text, str(file), error, constants=True)
    if not isinstance(content, dict):
        raise error(f"{file}: found a JSON {type(content).__name__}, expected a benchmark's result")
    return _guidellm(file, content, error) if tool == "guidellm" else bench_run(file, content, error, tool)


def bench_run(file: Path, content: Mapping[str, Any], error: type[InputError], tool: str = "vllm_bench") -> ClientRun:
    """vLLM's and sglang's form: a list of each quantity, one entry a request."""
    needed = ("input_lens", "output_lens", "ttfts", "itls")
    for key in needed:
        if not isinstance(content.get(key), list):
            flag = "--save-detailed" if tool == "vllm_bench" else "--output-details"
            raise error(f"{file}: found no list {key!r}; run the benchmark with {flag}")
    count = len(content["input_lens"])
    if not count or any(len(content[key]) != count for key in needed):
        raise error(f"{file}: found lists of unequal length, expected one entry a request in each")
    errors, began = content.get("errors") or [""] * count, content.get("start_times")
    if not isinstance(errors, list) or len(errors) != count:
        raise error(f"{file}: errors: expected a list of {count} texts")
    for key in ("input_lens", "output_lens"):
        for value in content[key]:
            check_value(f"{file}: {key}", value, (int,), error)
    spans = [("ttfts", content["ttfts"]), ("start_times", began or []), *(("itls", row) for row in content["itls"])]
    for key, values in spans:
        if not isinstance(values, list):
            raise error(f"{file}: {key}: found {str(values)[:40]!r}, expected a list of seconds")
        for value in values:
            check_value(f"{file}: {key}", value, (float,), error)
    rate, limit = content.get("request_rate"), content.get("max_concurrency")
    asked = None if rate in ("inf", float("inf"), None) else float(rate)
    if began and len(began) != count:
        raise error(f"{file}: start_times: found {len(began)}, expected {count}")
    if not began and asked is not None and tool == "vllm_bench":
        raise error(f"{file}: found no start_times, expected them (a newer vLLM writes them)")
    rows = []
    for row in range(count):
        if errors[row] or content["output_lens"][row] < 1:
            continue
        ttft, gaps = float(content["ttfts"][row]), np.array(content["itls"][row], float)
        e2e = ttft + float(gaps.sum())
        sent = float(began[row]) if began else 0.0
        rows.append((sent, content["input_lens"][row], content["output_lens"][row], ttft, e2e, gaps))
    timeless = not began and not (tool == "vllm_bench" and asked is None)
    return _run(file, tool, rows, error, count - len(rows), timeless=timeless, rate=asked, limit=limit)


def _guidellm(file: Path, content: Mapping[str, Any], error: type[InputError]) -> ClientRun:
    benchmarks = content.get("benchmarks")
    if not isinstance(benchmarks, list) or len(benchmarks) != 1:
        found = len(benchmarks) if isinstance(benchmarks, list) else 0
        raise error(f"{file}: found {found} benchmarks, expected one load a file")
    requests = _within(file, benchmarks[0], "requests", error)
    answered, rows = requests.get("successful"), []
    if not isinstance(answered, list):
        raise error(f"{file}: found no list of successful requests; keep them in the output")
    for number, entry in enumerate(answered):
        where = f"{file}, request {number + 1}"
        timings = _within(where, _within(where, entry, "info", error), "timings", error)
        keys = ("request_start", "first_token_iteration", "last_token_iteration", "request_end")
        times: dict[str, Any] = {key: timings.get(key) for key in keys}
        for key, value in times.items():
            check_value(f"{where}: {key}", value, (float,), error)
        prompt, output = entry.get("prompt_tokens"), entry.get("output_tokens")
        for key, value in (("prompt_tokens", prompt), ("output_tokens", output)):
            check_value(f"{where}: {key}", value, (int,), error)
        if output < 1:
            continue
        sent = float(times["request_start"])
        ttft, e2e = float(times["first_token_iteration"]) - sent, float(times["last_token_iteration"]) - sent
        rows.append((sent, int(prompt), int(output), ttft, e2e, np.zeros(0)))
    others = sum(len(requests.get(key) or ()) for key in ("errored", "incomplete")) + len(answered) - len(rows)
    return _run(file, "guidellm", rows, error, others)


def _aiperf(file: Path, text: str, error: type[InputError]) -> ClientRun:
    rows, left_out = [], 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        entry = parse_json(line, where, error, constants=True)
        metadata, metrics = _within(where, entry, "metadata", error), _within(where, entry, "metrics", error)
        if metadata.get("benchmark_phase", "profiling") != "profiling" or metadata.get("was_cancelled"):
            left_out += 1
            continue
        # The server's own counts: the client's are of its own tokeniser.
        prompt = _metric(where, metrics, ("usage_prompt_tokens", "input_sequence_length"), error)
        output = _metric(where, metrics, ("usage_completion_tokens", "output_sequence_length"), error)
        if output < 1:
            left_out += 1
            continue
        sent = metadata.get("request_start_ns")
        if isinstance(sent, bool) or not isinstance(sent, int) or not 0 <= sent < 1 << 63:
            raise error(f"{where}: request_start_ns: found {str(sent)[:40]}, expected nanoseconds")
        ttft = _metric(where, metrics, ("time_to_first_token",), error) / 1e3
        e2e = _metric(where, metrics, ("request_latency",), error) / 1e3
        gaps = metrics.get("inter_chunk_latency") or {}
        values = gaps.get("value", []) if isinstance(gaps, dict) else []
        rows.append((sent / 1e9, int(prompt), int(output), ttft, e2e, np.array(values, float) / 1e3))
    return _run(file, "aiperf", rows, error, left_out)


def _within(where: object, entry: Any, key: str, error: type[InputError]) -> Mapping[str, Any]:
    found = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(found, dict):
        raise error(f"{where}: found no table {key!r}")
    return found


def _metric(where: str, metrics: Mapping[str, Any], names: tuple[str, ...], error: type[InputError]) -> float:
    """The first of these metrics that the record has: a value with a unit."""
    for name in names:
        if isinstance(metrics.get(name), dict):
            value = metrics[name].get("value")
            check_value(f"{where}: {name}", value, (float,), error)
            return float(value)
    raise error(f"{where}: found no {names[0]}, expected one in each record")


def _run(
    file: Path,
    tool: str,
    rows: list[tuple[float, int, int, float, float, Floats]],
    error: type[InputError],
    left_out: int,
    *,
    timeless: bool = False,
    rate: float | None = None,
    limit: Any = None,
) -> ClientRun:
    if not rows:
        raise error(f"{file}: found no request that got an answer")
    rows = sorted(rows, key=lambda row: row[0])
    sent, prompts, outputs, ttft, e2e = (np.array(column, float) for column in list(zip(*rows, strict=True))[:5])
    wrong = (ttft < 0) | (e2e < ttft)
    if wrong.any():
        row = int(wrong.argmax())
        raise error(f"{file}: found TTFT {ttft[row]:g} s and E2E {e2e[row]:g} s, expected 0 <= TTFT <= E2E")
    return ClientRun(
        tool,
        file.name.removesuffix(".gz").rsplit(".", 1)[0],
        np.maximum(prompts.astype(np.int64), 1),
        outputs.astype(np.int64),
        ttft,
        e2e,
        None if timeless else sent - sent[0],
        tuple(row[5] for row in rows),
        rate,
        int(limit) if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None,
        left_out,
    )


def _opened(file: Path) -> Any:
    with file.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    return gzip.open(file, "rb") if packed else file.open("rb")


def _head(file: Path) -> str:
    if not file.is_file():
        return ""
    with _opened(file) as lines:
        return str(lines.read(_PROBE).decode("utf-8", "replace"))


def _text(file: Path, error: type[InputError]) -> str:
    checked_file(file, error)
    with _opened(file) as lines:
        content = lines.read(LOG_BYTES + 1)
    if len(content) > LOG_BYTES:
        raise error(f"{file}: found more than {LOG_BYTES >> 20} MiB, expected one load of a client")
    try:
        return str(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise error(f"{file}: found bytes that are no UTF-8 text") from None


def lines_of(file: Path, error: type[InputError]) -> Iterator[tuple[int, str]]:
    """(number, line) of a text file, plain or .gz, without empty lines."""
    for number, line in enumerate(_text(file, error).splitlines(), 1):
        if line.strip():
            yield number, line
