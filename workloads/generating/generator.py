"""Synthetic workloads: an arrival process, a distribution of prompt lengths and one of answers, and a seed.

Each purpose draws from its own seeded stream, so that changing the rate leaves the lengths as they were.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from policies.work.request import NS_PER_S
from workloads.generating import arrival_processes, sessions
from workloads.generating import lengths as length_distributions
from workloads.generating import rate_profiles as rates
from workloads.generating.arrival_processes import ArrivalProcess
from workloads.generating.random_streams import random_stream
from workloads.generating.rate_profiles import RateProfile
from workloads.trace import Trace, TraceError

MAX_REQUESTS = 50_000_000

_TIME, _PROMPT, _OUTPUT, _TURNS, _THINK, _PATIENCE, _CLASS, _TENANT = (
    1,
    3,
    4,
    6,
    7,
    8,
    9,
    11,
)  # one stream of draws a purpose
_MICROSECOND_NS = 1000


def generate(
    *,
    requests: int | None = None,
    duration_s: float | None = None,
    arrivals: str = "poisson:1",
    profile: str = "constant",
    prompt: str = "fixed:1024",
    output: str = "fixed:128",
    total: str | None = None,
    pd_ratio: float | None = None,
    lengths: str | None = None,
    turns: str | None = None,
    think: str = "exponential:10",
    hash_tokens: int = 16,
    context_limit: int | None = None,
    timeout: str | None = None,
    slo: str | None = None,
    tenants: str | None = None,
    stratified: bool = False,
    seed: int = 0,
    name: str = "generated",
) -> Trace:
    """A trace of `requests` requests (or sessions), or of as many as arrive within `duration_s` (one of the two).

    arrivals: see workloads.generating.arrival_processes. profile: how the rate changes, see
    workloads.generating.rate_profiles. prompt, output: token counts, see workloads.generating.lengths; or
        pd_ratio: prompt tokens per output token. The output is prompt / pd_ratio; with `total` (a distribution of
            prompt + output, as in SARATHI) the total is split: output = total / (pd_ratio + 1), rounded up.
        lengths: a trace whose (prompt, output) pairs are drawn, kept together.
    turns: turns per session (a distribution of counts); then requests and arrivals count sessions, `prompt` is what a
        turn adds to the history, `think` (see workloads.generating.sessions) lies between an answer and the next
        turn, shared
        beginnings get one prefix hash per hash_tokens (0: none), and sessions end within context_limit tokens.
    timeout: how long clients wait (a distribution as for think). slo: shares of classes, `interactive=0.7,batch=0.3`;
        tenants: of tenants, likewise (a session has one).
    stratified: lengths are spread evenly over their distributions, so that even a short trace shows their quantiles.
    Times are whole microseconds. Raises TraceError for what makes no sense.
    """
    given = {key: value for key, value in locals().items() if key != "name"}
    process = arrival_processes.parse(arrivals)
    shape = rates.parse(profile)
    starts_ns = _arrival_times_ns(process, shape, requests, duration_s, random_stream(seed, _TIME))
    per_session = None
    if turns is not None:
        per_session = length_distributions.parse(turns).of(random_stream(seed, _TURNS).random(len(starts_ns)))
        if per_session.sum() > MAX_REQUESTS:
            raise TraceError(f"generate: found {per_session.sum():,} turns, expected at most {MAX_REQUESTS:,}")
    count = len(starts_ns) if per_session is None else int(per_session.sum())
    prompt_tokens, output_tokens = _token_counts(count, seed, stratified, prompt, output, total, pd_ratio, lengths)
    trace = Trace(
        name,
        np.zeros(count, np.int64) if per_session is not None else starts_ns,
        prompt_tokens,
        output_tokens,
        output_tokens,
        source_format="generated",
        provenance={"generator": given},
    )
    if per_session is not None:
        if process.kind in ("closed", "trace"):
            raise TraceError(
                f"generate: found turns with {process.kind} arrivals, expected poisson, gamma, uniform or burst"
            )
        trace = _with_sessions(trace, per_session, starts_ns, think, seed, hash_tokens, context_limit)
    elif process.kind in ("closed", "trace"):
        trace = replace(arrival_processes.retimed(trace, process, seed), provenance=trace.provenance)
    if slo is not None:
        trace = replace(
            trace, slo=_drawn(slo, len(trace), random_stream(seed, _CLASS), "slo", "interactive=0.7,batch=0.3")
        )
    if tenants is not None:
        trace = replace(trace, tenant=_tenants(tenants, trace, random_stream(seed, _TENANT)))
    if timeout is not None:
        patience_ns = sessions.durations_ns(timeout, len(trace), random_stream(seed, _PATIENCE))
        trace = replace(trace, abort_ns=trace.arrival_ns + np.maximum(patience_ns, 1))
    return trace


def _token_counts(
    count: int,
    seed: int,
    stratified: bool,
    prompt: str,
    output: str,
    total: str | None,
    pd_ratio: float | None,
    lengths: str | None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    draws = length_distributions.uniform_draws(count, random_stream(seed, _PROMPT), stratified)
    if lengths is not None:
        return length_distributions.pairs(lengths, draws)
    if pd_ratio is None:
        if total is not None:
            raise TraceError(
                "generate: found a total length without pd_ratio, expected how to split it into prompt and output"
            )
        output_draws = length_distributions.uniform_draws(count, random_stream(seed, _OUTPUT), stratified)
        output_tokens = length_distributions.parse(output, "output_tokens").of(output_draws)
        return length_distributions.parse(prompt).of(draws), output_tokens
    if not 1e-6 <= pd_ratio <= 1e6:
        raise TraceError(f"generate: found pd_ratio {pd_ratio}, expected prompt tokens per output token, above 0")
    if total is None:
        prompt_tokens = length_distributions.parse(prompt).of(draws)
        return prompt_tokens, np.maximum(np.rint(prompt_tokens / pd_ratio), 1).astype(np.int64)
    totals = length_distributions.parse(total).of(draws)
    if (totals < 2).any():
        raise TraceError(f"generate: found totals of 1 token in {total!r}, expected 2 or more (prompt and output)")
    output_tokens = np.ceil(totals / (pd_ratio + 1)).astype(np.int64)
    output_tokens = np.minimum(output_tokens, totals - 1)
    return totals - output_tokens, output_tokens


def _with_sessions(
    trace: Trace,
    turns: NDArray[np.int64],
    starts_ns: NDArray[np.int64],
    think: str,
    seed: int,
    hash_tokens: int,
    context_limit: int | None,
) -> Trace:
    if not 0 <= hash_tokens <= 1_000_000:
        raise TraceError(f"generate: found hash_tokens {hash_tokens}, expected tokens per prefix hash, or 0 for none")
    think_ns = sessions.durations_ns(think, len(trace), random_stream(seed, _THINK))
    one_a_turn = replace(trace, arrival_ns=np.repeat(starts_ns, turns))
    return sessions.conversations(one_a_turn, turns, think_ns, hash_tokens=hash_tokens, context_limit=context_limit)


def _tenants(text: str, trace: Trace, rng: np.random.Generator) -> list[str]:
    """A tenant for every request, one for all turns of a session."""
    drawn = _drawn(text, len(trace), rng, "tenants", "heavy=8,light=1,other=1")
    if trace.session is None:
        return drawn
    of_session: dict[str | None, str] = {}
    return [of_session.setdefault(name, tenant) for name, tenant in zip(trace.session, drawn)]


def _drawn(text: str, count: int, rng: np.random.Generator, what: str, such: str) -> list[str]:
    """A name for each of `count`, by shares such as `such`."""
    try:
        shares = {name.strip(): float(share) for name, share in (part.split("=") for part in text.split(","))}
    except ValueError:
        shares = {}
    total = sum(shares.values())
    if not shares or not all(0 <= share < 1e9 for share in shares.values()) or total <= 0 or "" in shares:
        raise TraceError(f"{what}: found {text[:80]!r}, expected shares such as {such}")
    names = list(shares)
    drawn = np.searchsorted(np.cumsum(list(shares.values())) / total, rng.random(count), side="right")
    return [names[index] for index in np.minimum(drawn, len(names) - 1).tolist()]


def _arrival_times_ns(
    process: ArrivalProcess,
    profile: RateProfile,
    requests: int | None,
    duration_s: float | None,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Arrival times of the given number of requests, or of all within the duration; whole microseconds, ascending."""
    if (requests is None) == (duration_s is None):
        raise TraceError("generate: expected either a number of requests or a duration, and not both")
    if requests is not None:
        if not 1 <= requests <= MAX_REQUESTS:
            raise TraceError(f"generate: found {requests} requests, expected 1 to {MAX_REQUESTS:,}")
        if process.rate == 0:
            return np.zeros(requests, np.int64)
        return _rounded(profile.times_at(process.unit_times(requests, rng) / process.rate))
    assert duration_s is not None
    if process.rate == 0:
        raise TraceError(f"generate: found a duration for {process.kind!r} arrivals, expected a number of requests")
    if not (0 < duration_s <= 1e9 and process.rate * profile.ticks_at(duration_s) <= MAX_REQUESTS):
        raise TraceError(f"generate: found a duration of {duration_s} s, expected 1 to {MAX_REQUESTS:,} requests in it")
    end = profile.ticks_at(duration_s)
    mean = process.rate * end
    enough = int(mean + 10 * max(process.cv, 1) * np.sqrt(mean) + 100)
    ticks = process.unit_times(enough, rng) / process.rate
    while ticks[-1] < end:  # a run of luck with very uneven gaps
        ticks = np.concatenate([ticks, ticks[-1] + process.unit_times(enough, rng) / process.rate])
    within = ticks[ticks < end]
    if not len(within):
        raise TraceError(
            f"generate: found a duration of {duration_s} s in which no request arrives at {process.rate:g} per second, "
            "expected a longer one"
        )
    return _rounded(profile.times_at(within))


def _rounded(times_s: NDArray[np.float64]) -> NDArray[np.int64]:
    if times_s[-1] > 1e9:
        raise TraceError(
            f"generate: found a last arrival after {times_s[-1]:.3g} s, expected less than 1e9 s; raise the rate"
        )
    return np.rint(times_s * (NS_PER_S / _MICROSECOND_NS)).astype(np.int64) * _MICROSECOND_NS
