"""When requests come: arrival processes, written as short texts such as `poisson:5.5`.

    poisson:RATE              independent users, RATE requests per second
    gamma:RATE,CV             gaps with coefficient of variation CV (above 1: bursty; 1 is Poisson)
    uniform:RATE              one every 1/RATE seconds
    burst                     all at once, at 0
    closed:CLIENTS,THINK_S    so many clients; each sends its next request THINK_S after its last answer ended
    trace:FILE                the arrival times of another trace, row by row

In `closed`, client k takes rows k, k + CLIENTS, k + 2 CLIENTS, ...: which client sends what does not depend on the
policy, so that two policies compared are asked the same questions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from policies.work.request import NS_PER_S
from workloads.generating.random_streams import random_stream
from workloads.trace import Trace, TraceError

FORMS = "poisson:RATE, gamma:RATE,CV, uniform:RATE, burst, closed:CLIENTS,THINK_S or trace:FILE"

_ARRIVAL_STREAM = 1
_TIE_STREAM = 2


@dataclass(frozen=True)
class ArrivalProcess:
    """One parsed process. rate: requests per second; cv: of the gaps; clients, think_s: closed loop; file: a trace."""

    kind: str
    rate: float = 0.0
    cv: float = 1.0
    clients: int = 0
    think_s: float = 0.0
    file: str = ""

    def times_ns(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """The first `count` arrival times of an open-loop process; the first request comes after the first gap."""
        return np.rint(self.unit_times(count, rng) / self.rate * NS_PER_S).astype(np.int64)

    def unit_times(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """The same at one request per second: what a rate profile stretches (shape (count,), seconds)."""
        if self.kind == "poisson":
            gaps = -np.log1p(-rng.random(count))
        elif self.kind == "gamma":
            shape = 1 / self.cv**2
            gaps = rng.gamma(shape, 1 / shape, count)
        else:
            return np.arange(count, dtype=np.float64)
        return np.cumsum(gaps)


def parse(text: str) -> ArrivalProcess:
    """An arrival process from its text form; raises TraceError."""
    kind, _, rest = text.strip().partition(":")
    kind = kind.strip().lower()
    if kind == "trace" and rest:
        return ArrivalProcess(kind, file=rest)
    try:
        numbers = [float(part) for part in rest.split(",")] if rest else []
    except ValueError:
        numbers = [math.nan]
    if not all(0 <= number < 1e9 for number in numbers):
        raise _wrong(text)
    match kind, numbers:
        case "poisson" | "uniform", [rate] if rate > 0:
            return ArrivalProcess(kind, rate)
        case "gamma", [rate, cv] if rate > 0 and 0.01 <= cv <= 100:
            return ArrivalProcess(kind, rate, cv)
        case "burst", []:
            return ArrivalProcess(kind)
        case "closed", [clients, *think] if clients >= 1 and clients == int(clients) and len(think) <= 1:
            return ArrivalProcess(kind, clients=int(clients), think_s=think[0] if think else 0.0)
    raise _wrong(text)


def _wrong(text: str) -> TraceError:
    return TraceError(f"arrivals: found {text[:80]!r}, expected {FORMS} (numbers above 0)")


def retimed(trace: Trace, process: ArrivalProcess | str, seed: int = 0) -> Trace:
    """The same requests in the same order, arriving by this process instead. Client time-outs stay relative."""
    if isinstance(process, str):
        process = parse(process)
    count = len(trace)
    after_row = think_ns = None
    if process.kind == "burst":
        arrival_ns = np.zeros(count, np.int64)
    elif process.kind == "closed":
        rows = np.arange(count)
        after_row = np.maximum(rows - process.clients, -1)
        think_ns = np.where(after_row >= 0, round(process.think_s * NS_PER_S), 0)
        arrival_ns = rows // process.clients * round(process.think_s * NS_PER_S)
    elif process.kind == "trace":
        arrival_ns = _times_of(process.file, count)
    else:
        arrival_ns = process.times_ns(count, random_stream(seed, _ARRIVAL_STREAM))
    abort_ns = trace.abort_ns
    if abort_ns is not None:
        abort_ns = np.where(abort_ns >= 0, arrival_ns + abort_ns - trace.arrival_ns, -1)
    return replace(
        trace,
        arrival_ns=arrival_ns,
        abort_ns=abort_ns,
        after_row=after_row,
        think_ns=think_ns,
        joins=None,
        provenance={**trace.provenance, "arrivals": spelled(process), "arrivals_seed": seed},
    )


def _times_of(file: str, count: int) -> NDArray[np.int64]:
    from workloads.reading.reader import read_trace

    other = read_trace(file)
    if len(other) < count:
        raise TraceError(
            f"arrivals: {file} has {len(other):,} arrival times, expected at least {count:,}, one per request; "
            "take fewer requests"
        )
    return other.arrival_ns[:count]


def spelled(process: ArrivalProcess) -> str:
    """The text form that parses to this process."""
    match process.kind:
        case "poisson" | "uniform":
            return f"{process.kind}:{process.rate:g}"
        case "gamma":
            return f"gamma:{process.rate:g},{process.cv:g}"
        case "closed":
            return f"closed:{process.clients},{process.think_s:g}"
        case "trace":
            return f"trace:{process.file}"
    return process.kind


def spread_ties(trace: Trace, seed: int = 0) -> Trace:
    """Requests with equal arrival times spread at random between that time and the next one, keeping file order.

    Mooncake's times are rounded up to 3 s, so that some ten requests share each of them. The last group is spread
    over the median distance between times. Time-outs stay relative; closed-loop requests are left alone.
    """
    loose = np.ones(len(trace), bool) if trace.after_row is None else trace.after_row < 0
    times, group, sizes = np.unique(trace.arrival_ns[loose], return_inverse=True, return_counts=True)
    if len(times) == int(loose.sum()):
        return trace
    distances = np.diff(times)
    last = int(np.median(distances)) if len(distances) else NS_PER_S
    width = np.append(distances, last)[group]
    draws = random_stream(seed, _TIE_STREAM).random(len(group))
    draws = draws[np.lexsort((draws, group))]  # ascending within each group: file order is kept
    draws[np.flatnonzero(np.diff(group, prepend=-1))] = 0.0  # the first of each group stays where it is
    arrival_ns = trace.arrival_ns.copy()
    arrival_ns[loose] += np.floor(draws * width).astype(np.int64)
    abort_ns = trace.abort_ns
    if abort_ns is not None:
        abort_ns = np.where(abort_ns >= 0, abort_ns + (arrival_ns - trace.arrival_ns), -1)
    tied = int(sizes[sizes > 1].sum())
    order = np.argsort(arrival_ns, kind="stable")
    if (np.diff(order) < 0).any():
        raise TraceError(f"{trace.name}: ties cannot be spread where closed-loop requests lie between them")
    return replace(
        trace,
        arrival_ns=arrival_ns,
        abort_ns=abort_ns,
        notes=(*trace.notes, f"{tied} requests with equal arrival times spread over the time up to the next one."),
        provenance={**trace.provenance, "spread_ties_seed": seed},
    )
