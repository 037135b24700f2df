"""Synthetic workloads: an arrival process, a distribution of prompt lengths and one of answers, and a seed.

Each purpose draws from its own seeded stream, so that changing the rate leaves the lengths as they were.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.request import NS_PER_S
from workloads import arrivals as arrival_processes
from workloads import lengths as length_distributions
from workloads.arrivals import ArrivalProcess
from workloads.trace import Trace, TraceError

MAX_REQUESTS = 50_000_000

_TIME_STREAM, _PROMPT_STREAM, _OUTPUT_STREAM = 1, 3, 4
_MICROSECOND_NS = 1000


def generate(
    *,
    requests: int | None = None,
    duration_s: float | None = None,
    arrivals: str = "poisson:1",
    prompt: str = "fixed:1024",
    output: str = "fixed:128",
    stratified: bool = False,
    seed: int = 0,
    name: str = "generated",
) -> Trace:
    """A trace of `requests` requests, or of as many as arrive within `duration_s` (one of the two).

    arrivals: see workloads.arrivals. prompt, output: see workloads.lengths. stratified: lengths are spread evenly over
    their distributions, so that even a short trace shows their quantiles. Times are whole microseconds.
    Raises TraceError for what makes no sense.
    """
    process = arrival_processes.parse(arrivals)
    arrival_ns = arrival_times_ns(process, requests, duration_s, np.random.default_rng([seed, _TIME_STREAM]))
    count = len(arrival_ns)
    prompt_draws, output_draws = (
        length_distributions.uniform_draws(count, np.random.default_rng([seed, stream]), stratified)
        for stream in (_PROMPT_STREAM, _OUTPUT_STREAM)
    )
    prompt_tokens = length_distributions.parse(prompt, "prompt_tokens").of(prompt_draws)
    output_tokens = length_distributions.parse(output, "output_tokens").of(output_draws)
    settings = {"arrivals": arrivals, "prompt": prompt, "output": output, "stratified": stratified, "seed": seed}
    trace = Trace(
        name,
        arrival_ns,
        prompt_tokens,
        output_tokens,
        output_tokens,
        source_format="generated",
        provenance={"generator": settings | {"requests": requests, "duration_s": duration_s}},
    )
    return arrival_processes.retimed(trace, process, seed) if process.kind in ("closed", "trace") else trace


def arrival_times_ns(
    process: ArrivalProcess, requests: int | None, duration_s: float | None, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Arrival times of the given number of requests, or of all within the duration; whole microseconds, ascending."""
    if (requests is None) == (duration_s is None):
        raise TraceError("generate: expected either a number of requests or a duration, and not both")
    if requests is not None:
        if not 1 <= requests <= MAX_REQUESTS:
            raise TraceError(f"generate: found {requests} requests, expected 1 to {MAX_REQUESTS:,}")
        if process.rate == 0:
            return np.zeros(requests, np.int64)
        return _rounded(process.unit_times(requests, rng) / process.rate)
    assert duration_s is not None
    if process.rate == 0:
        raise TraceError(f"generate: found a duration for {process.kind!r} arrivals, expected a number of requests")
    if not (0 < duration_s < float("inf") and process.rate * duration_s <= MAX_REQUESTS):
        raise TraceError(f"generate: found a duration of {duration_s} s, expected 1 to {MAX_REQUESTS:,} requests in it")
    mean = process.rate * duration_s
    enough = int(mean + 10 * max(process.cv, 1) * np.sqrt(mean) + 100)
    times_s = process.unit_times(enough, rng) / process.rate
    while times_s[-1] < duration_s:  # a run of luck with very uneven gaps
        times_s = np.concatenate([times_s, times_s[-1] + process.unit_times(enough, rng) / process.rate])
    within = times_s[times_s < duration_s]
    if not len(within):
        raise TraceError(
            f"generate: found a duration of {duration_s} s in which no request arrives at {process.rate:g} per second, "
            "expected a longer one"
        )
    return _rounded(within)


def _rounded(times_s: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(times_s * (NS_PER_S / _MICROSECOND_NS)).astype(np.int64) * _MICROSECOND_NS
