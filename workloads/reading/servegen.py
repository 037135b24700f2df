"""ServeGen's clients as requests: a folder of chunk-N-trace.csv and chunk-N-dataset.json becomes a trace.

The files hold no requests. Per client and ten-minute window they give a rate, the shape of the gaps (Gamma or
Weibull) and, per longer window, histograms of prompt and answer lengths. Requests are drawn from them, seeded.

The fitted scale does not always agree with the measured rate of its window (bursts and silences in one fit), so the
rate is kept and the scale is not: gaps have the fitted shape and a mean of 1/rate. Time is stretched from a clock that
ticks once per expected request, so that a gap may reach over the edge of a window.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.work.request import NS_PER_S
from workloads.cells import MAX_TOKENS
from workloads.generating.random_streams import random_stream
from workloads.source import MAX_WHOLE, open_source
from workloads.trace import Trace, TraceError

Coupling = Literal["shared", "independent"]
"""How prompt and answer of one request go together, of which the files say nothing.

shared: one random number for both, so that the longest prompts get the longest answers (what ServeGen's own generator
does). independent: two.
"""

_TRACE_NAME, _DATASET_NAME = "-trace.csv", "-dataset.json"
_MAX_CLIENTS = 20_000
_MAX_REQUESTS = 50_000_000
_MAX_RATE = 1e6
_AT_ONCE = 1 << 20
_MOST_PASSED = 2_000_000_000
_MOST_TICKS_BEFORE = 1e5
_CLIENT_STREAM, _LENGTHS_STREAM = 5, 6


class LengthWindow(NamedTuple):
    """From start_s on: lengths, ascending, and their cumulative probabilities, of prompts and of answers."""

    start_s: float
    prompt: NDArray[np.float64]
    prompt_levels: NDArray[np.float64]
    output: NDArray[np.float64]
    output_levels: NDArray[np.float64]


@dataclass(frozen=True)
class Client:
    """One client's files.

    starts_s: window starts, ascending (shape (w,)), the last window as long as the one before. rates: requests per
    second; kinds: "Gamma", "Weibull" or ""; shapes: of the gap distribution. lengths: ascending, windows
    without any left out.
    """

    name: str
    starts_s: NDArray[np.float64]
    rates: NDArray[np.float64]
    kinds: tuple[str, ...]
    shapes: NDArray[np.float64]
    lengths: tuple[LengthWindow, ...]


def is_servegen(path: str | os.PathLike[str]) -> bool:
    """Whether this is a folder with at least one client."""
    folder = Path(path)
    try:
        return folder.is_dir() and any(folder.glob(f"chunk-*{_TRACE_NAME}"))
    except (OSError, ValueError):
        return False


def read_servegen(
    path: str | os.PathLike[str],
    *,
    seed: int = 0,
    coupling: Coupling = "shared",
    window_s: tuple[float, float] | None = None,
    limit: int | None = None,
) -> Trace:
    """Draws the requests of all clients in a folder; session-free, one stream per client, seeded by client name.

    window_s: only this part of the clients' day, counted from its start; the trace then starts at 0. limit: only the
    first so many of it. Neither changes what is drawn, and what they leave out takes no memory.
    Raises TraceError naming file, row and column of what cannot be read, or when no request falls into the window.
    """
    if coupling not in ("shared", "independent"):
        raise TraceError(f"coupling: found {coupling!r}, expected shared or independent")
    folder = Path(path)
    traces = sorted(folder.glob(f"chunk-*{_TRACE_NAME}"))
    if not traces:
        raise TraceError(f"{folder}: found no chunk-N{_TRACE_NAME}, expected a folder of ServeGen clients")
    if len(traces) > _MAX_CLIENTS:
        raise TraceError(f"{folder}: found {len(traces):,} clients, expected at most {_MAX_CLIENTS:,}")
    drawn = []
    count = 0
    for trace_path in traces:
        client = read_client(trace_path)
        number = int.from_bytes(client.name.encode()[-6:], "big")
        times, lengths = (random_stream(seed, stream, number) for stream in (_CLIENT_STREAM, _LENGTHS_STREAM))
        drawn.append((client.name, *_requests(client, times, lengths, coupling, window_s, limit)))
        count += len(drawn[-1][1])
        if count > _MAX_REQUESTS:
            what = f"found more than {_MAX_REQUESTS:,} requests, expected fewer"
            raise TraceError(f"{folder}: {what}; pass a narrower --window, or --limit")
    times_s, prompts, outputs = (np.concatenate(columns) for columns in list(zip(*drawn))[1:])
    if not len(times_s):
        raise TraceError(f"{folder}: found no request in this window, expected some; widen the window")
    owners = np.repeat(np.arange(len(drawn)), [len(times) for _, times, _, _ in drawn])
    order = np.argsort(times_s, kind="stable")[:limit]
    names = [name for name, *_ in drawn]
    start_s = window_s[0] if window_s is not None else 0.0
    return Trace(
        folder.name or str(folder),
        np.rint(times_s[order] * NS_PER_S).astype(np.int64) - round(start_s * NS_PER_S),
        prompts[order],
        outputs[order],
        outputs[order],
        tenant=[names[owner] for owner in owners[order].tolist()],
        source_format="servegen",
        notes=(
            f"Drawn from {len(names)} ServeGen clients with seed {seed}; prompt and answer lengths {coupling}.",
            "Gaps have the fitted shapes, scaled to each window's measured rate.",
        ),
        provenance={
            "path": os.fspath(path),
            "format": "servegen",
            "seed": seed,
            "coupling": coupling,
            "window_s": window_s,
            "clients": names,
            "requests_per_client": np.bincount(owners[order], minlength=len(names)).tolist(),
        },
    )


def read_client(trace_path: Path) -> Client:
    """One client from its chunk-N-trace.csv and the chunk-N-dataset.json beside it."""
    windows = _windows(trace_path)
    starts_s = np.array([window[0] for window in windows])
    if (np.diff(starts_s) <= 0).any():
        row = int(np.argmax(np.diff(starts_s) <= 0)) + 2
        raise TraceError(f"{trace_path}, row {row}, column 1: found {starts_s[row - 1]:g}, expected a later start")
    dataset_path = trace_path.with_name(trace_path.name.removesuffix(_TRACE_NAME) + _DATASET_NAME)
    return Client(
        trace_path.name.removesuffix(_TRACE_NAME),
        starts_s,
        np.array([window[1] for window in windows]),
        tuple(window[2] for window in windows),
        np.array([window[3] for window in windows]),
        _length_windows(dataset_path),
    )


def _rows(text: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of each line; TraceError for a cell that no reader takes."""
    try:
        yield from enumerate(csv.reader(text.splitlines()), 1)
    except csv.Error as error:
        raise TraceError(f"{path}: cannot be read as CSV: {error}") from None


def _windows(path: Path) -> list[tuple[float, float, str, float]]:
    """(start, rate, kind, shape) per line; a line is: window start, rate, CV, distribution or empty, shape, scale."""
    text = open_source(path).whole(MAX_WHOLE).decode("utf-8", "replace")
    windows = []
    for row, cells in _rows(text, path):
        if not cells:
            continue
        where = f"{path}, row {row}"
        if len(cells) != 6:
            raise TraceError(f"{where}: found {len(cells)} cells, expected start, rate, CV, distribution, shape, scale")
        kind = cells[3].strip()
        if kind not in ("", "Gamma", "Weibull"):
            raise TraceError(f"{where}, column 4: found {kind[:40]!r}, expected Gamma, Weibull or nothing")
        start_s = _number(cells[0], f"{where}, column 1", 0, 1e8)
        rate = _number(cells[1], f"{where}, column 2", 0, _MAX_RATE)
        least = 0.1 if kind == "Weibull" else 1e-4  # CVs of 430 and 100: far beyond what was ever measured
        shape = _number(cells[4], f"{where}, column 5", least, 1e4) if kind else 1.0
        windows.append((start_s, rate, kind, shape))
    if not windows:
        raise TraceError(f"{path}: found no windows, expected one per line")
    return windows


def _number(text: str, where: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise TraceError(f"{where}: found {text[:40]!r}, expected a number from {low:g} to {high:g}")
    return value


def _length_windows(path: Path) -> tuple[LengthWindow, ...]:
    try:
        parsed = json.loads(open_source(path).whole(MAX_WHOLE))
    except (ValueError, RecursionError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: found JSON that is broken or cut off, expected window start -> histograms") from None
    if not isinstance(parsed, dict):
        raise TraceError(
            f"{path}: found a JSON {type(parsed).__name__}, expected an object of window start -> histograms"
        )
    windows = []
    for start, histograms in parsed.items():
        where = f"{path}, window {str(start)[:40]!r}"
        start_s = _number(start, where, 0, 1e8)
        if not isinstance(histograms, dict):
            raise TraceError(f"{where}: found {type(histograms).__name__}, expected histograms by name")
        prompt = _histogram(histograms.get("input_tokens", "{}"), f"{where}, input_tokens")
        output = _histogram(histograms.get("output_tokens", "{}"), f"{where}, output_tokens")
        if prompt is not None and output is not None:
            windows.append(LengthWindow(start_s, *prompt, *output))
    return tuple(sorted(windows, key=lambda window: window.start_s))


def _histogram(text: object, where: str) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Lengths and cumulative probabilities from a text such as `{45: 0.25, 46: 0.75}`; None when it is empty."""
    expected = "expected a text such as {45: 0.25, 46: 0.75}"
    if not isinstance(text, str) or not (text.startswith("{") and text.rstrip().endswith("}")):
        raise TraceError(f"{where}: found {repr(text)[:40]}, {expected}")
    body = text.strip()[1:-1].strip().rstrip(",")
    if not body:
        return None
    try:
        pairs = np.array([[float(part) for part in pair.split(":")] for pair in body.split(",")])
    except ValueError:
        pairs = np.empty((0, 0))
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not np.isfinite(pairs).all():
        raise TraceError(f"{where}: found {body[:40]!r}, {expected}")
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    lengths, weights = pairs.T
    if (weights < 0).any() or not weights.sum() > 0 or lengths[0] < 0 or lengths[-1] > MAX_TOKENS:
        raise TraceError(f"{where}: found {body[:40]!r}, expected lengths of 0 or more and probabilities above 0")
    return np.maximum(lengths, 1), np.cumsum(weights) / weights.sum()


def _requests(
    client: Client,
    rng: np.random.Generator,
    length_rng: np.random.Generator,
    coupling: Coupling,
    window_s: tuple[float, float] | None,
    limit: int | None,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Times in s, prompt and answer lengths of one client's requests."""
    start_s, end_s = window_s if window_s is not None else (-math.inf, math.inf)
    times: list[NDArray[np.float64]] = []
    before = count = 0
    for part in arrival_times_s(client, rng, end_s):
        first, last = np.searchsorted(part, (start_s, end_s)).tolist()
        before += first if not times else 0
        if last > first:
            times.append(part[first:last])
            count += last - first
        if last < len(part) or (limit is not None and count >= limit):
            break
        if count > _MAX_REQUESTS:
            what = f"found more than {_MAX_REQUESTS:,} requests, expected fewer"
            raise TraceError(f"{client.name}: {what}; pass a narrower --window, or --limit")
    times_s = np.concatenate(times)[:limit] if times else np.empty(0)
    # Two numbers a request, in order: those of the requests before are passed over, so that a window is a part of it.
    length_rng.bit_generator.advance(2 * before)  # type: ignore[attr-defined]
    draws = length_rng.random((len(times_s), 2)).T
    if coupling == "shared":
        draws[1] = draws[0]
    if len(times_s) and not client.lengths:
        raise TraceError(
            f"{client.name}: found rates but no lengths, expected histograms for the windows with requests"
        )
    prompts, outputs = np.zeros((2, len(times_s)), np.int64)
    starts = np.array([window.start_s for window in client.lengths])
    windows = np.maximum(np.searchsorted(starts, times_s, side="right") - 1, 0)
    for index, window in enumerate(client.lengths):
        mine = windows == index
        prompts[mine] = window.prompt[np.searchsorted(window.prompt_levels[:-1], draws[0, mine], side="right")]
        outputs[mine] = window.output[np.searchsorted(window.output_levels[:-1], draws[1, mine], side="right")]
    return times_s, prompts, outputs


def arrival_times_s(
    client: Client, rng: np.random.Generator, until_s: float = math.inf
) -> Iterator[NDArray[np.float64]]:
    """Arrival times of one client over its day (seconds, ascending), in parts of at most a million. until_s: how far
    they will be asked for."""
    lengths_s = np.diff(client.starts_s)
    lengths_s = np.append(lengths_s, lengths_s[-1] if len(lengths_s) else 600.0)
    ticks = np.concatenate([[0.0], np.cumsum(client.rates * lengths_s)])  # expected requests up to each edge
    busy = np.flatnonzero(client.rates > 0)
    if not len(busy):
        return
    edges_s = np.append(client.starts_s, client.starts_s[-1] + lengths_s[-1])
    if (expected := float(np.interp(min(until_s, edges_s[-1]), edges_s, ticks))) > _MOST_PASSED:
        raise TraceError(
            f"{client.name}: found {expected:,.0f} expected requests up to the window's end, expected at most "
            f"{_MOST_PASSED:,}"
        )
    # Start well before the first window, so that its first request is not taken for the end of a gap.
    now = -min(10 * (1 + _variance(client.kinds[busy[0]], client.shapes[busy[0]])), _MOST_TICKS_BEFORE)
    last = -1.0
    for window in busy.tolist():
        while now < ticks[window + 1]:
            count = min(int(ticks[window + 1] - now) + 16, _AT_ONCE)
            marks = now + np.cumsum(_unit_gaps(client.kinds[window], client.shapes[window], count, rng))
            inside = int(np.searchsorted(marks, ticks[window + 1]))
            # The first mark past the window's end belongs to a later window, or past the end of all.
            some = np.unique(marks[: inside + 1])
            some = some[(some >= 0) & (some < ticks[-1]) & (some > last)]
            now = float(marks[min(inside, count - 1)])
            if len(some):
                last = float(some[-1])
                windows = np.searchsorted(ticks, some, side="right") - 1
                yield edges_s[windows] + (some - ticks[windows]) / client.rates[windows]
            if inside < count:
                break


def _unit_gaps(kind: str, shape: float, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    if kind == "Gamma":
        return rng.gamma(shape, 1 / shape, count)
    if kind == "Weibull":
        return rng.weibull(shape, count) / math.gamma(1 + 1 / shape)
    return rng.exponential(1.0, count)


def _variance(kind: str, shape: float) -> float:
    if kind == "Gamma":
        return 1 / shape
    if kind == "Weibull":
        return math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1
    return 1.0
