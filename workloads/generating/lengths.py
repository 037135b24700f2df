"""How long prompts and answers are: distributions of token counts, written as short texts such as `zipf:0.4,1024,4096`.

    fixed:N                        always N tokens
    uniform:LOW,HIGH               any whole number between, both included
    zipf:THETA,LOW,HIGH            P(LOW + k) proportional to 1 / (k + 1)^THETA (SARATHI, section 5: 0.4, 1K to 4K)
    geometric:MEAN                 1, 2, 3, ... with that mean (turns of a conversation)
    lognormal:MEDIAN,SIGMA         optionally ,LOW,HIGH: values outside are moved to the bound
    quantiles:50=1020,90=2734,...  percentage=tokens; straight lines in log tokens between them
    empirical:FILE                 the prompt (or output) lengths of another trace

Every one is an inverse distribution function, applied to uniform draws: the same draws can be stratified (so that a
short trace shows its quantiles) or shared between prompt and output (so that long prompts get long answers).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from workloads.cells import MAX_TOKENS
from workloads.trace import TraceError

FORMS = (
    "fixed:N, uniform:LOW,HIGH, zipf:THETA,LOW,HIGH, geometric:MEAN, lognormal:MEDIAN,SIGMA[,LOW,HIGH], "
    "quantiles:50=N,90=N,... or empirical:FILE"
)
_MAX_ZIPF_RANGE = 10_000_000


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts. text: its short form; inverse: uniform draws in [0, 1) -> tokens (float64)."""

    text: str
    inverse: Callable[[NDArray[np.float64]], NDArray[np.float64]]

    def of(self, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """Token counts (at least 1) at these points of the distribution, shape as given."""
        return np.clip(np.floor(self.inverse(draws)), 1, MAX_TOKENS).astype(np.int64)


def parse(text: str, column: str = "prompt_tokens") -> Lengths:
    """A length distribution from its text form. column: which lengths of an empirical file. Raises TraceError."""
    kind, _, rest = text.strip().partition(":")
    if kind == "empirical" and rest:
        return Lengths(text, _empirical(rest, column))
    try:
        if kind == "quantiles":
            return Lengths(text, _quantiles(rest))
        numbers = [float(part) for part in rest.split(",")]
        if all(map(math.isfinite, numbers)):
            return Lengths(text, _inverse(kind, numbers))
    except (ValueError, KeyError) as error:
        if isinstance(error, TraceError):
            raise
    raise TraceError(f"lengths: found {text[:80]!r}, expected {FORMS}, in whole tokens from 1, LOW not above HIGH")


def uniform_draws(count: int, rng: np.random.Generator, stratified: bool = False) -> NDArray[np.float64]:
    """Uniform draws in [0, 1); stratified: one in each of `count` equal slices, in random order."""
    draws = rng.random(count)
    if not stratified:
        return draws
    order = np.argsort(rng.random(count), kind="stable")
    return (order + draws) / max(count, 1)


def _inverse(kind: str, numbers: list[float]) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    match kind, numbers:
        case "fixed", [length] if 1 <= length <= MAX_TOKENS:
            return lambda draws: np.full(draws.shape, length)
        case "uniform", [low, high] if 1 <= low <= high <= MAX_TOKENS:
            return lambda draws: low + np.floor(draws * (high - low + 1))
        case "zipf", [theta, low, high] if 0 <= theta <= 20 and 1 <= low <= high <= low + _MAX_ZIPF_RANGE:
            weights = np.arange(1, int(high - low) + 2, dtype=np.float64) ** -theta
            cumulative = np.cumsum(weights)
            return lambda draws: low + np.searchsorted(cumulative, draws * cumulative[-1], side="right")
        case "geometric", [mean] if 1 <= mean <= MAX_TOKENS:
            fail = 1 - 1 / mean
            return lambda draws: 1 + np.floor(np.log1p(-draws) / math.log(fail)) if fail else np.ones(draws.shape)
        case "lognormal", [median, sigma, *bounds] if median >= 1 and 0 <= sigma <= 10 and len(bounds) in (0, 2):
            low, high = bounds or (1, MAX_TOKENS)
            if not 1 <= low <= high:
                raise ValueError
            return lambda draws: np.clip(np.rint(median * np.exp(sigma * _normal(draws))), low, high)
    raise ValueError


def _normal(draws: NDArray[np.float64]) -> NDArray[np.float64]:
    inverse = NormalDist().inv_cdf
    return np.array([inverse(max(draw, 1e-300)) for draw in draws.ravel().tolist()]).reshape(draws.shape)


def _quantiles(rest: str) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    pairs = sorted((float(percent), float(length)) for percent, length in (part.split("=") for part in rest.split(",")))
    levels, values = np.array(pairs).T
    increasing = bool((np.diff(levels) > 0).all() and (np.diff(values) >= 0).all())
    if not (increasing and levels[0] >= 0 and levels[-1] <= 100 and values[0] >= 1 and values[-1] <= MAX_TOKENS):
        raise ValueError
    return lambda draws: np.rint(np.exp(np.interp(draws * 100, levels, np.log(values))))


def _empirical(file: str, column: str) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    from workloads.reading.reader import read_trace

    ordered = np.sort(getattr(read_trace(file, arrivals="burst"), column)).astype(np.float64)
    return lambda draws: ordered[(draws * len(ordered)).astype(np.int64)]


def pairs(file: str, draws: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(prompt, output) token counts of whole requests of another trace, so that what belongs together stays so."""
    from workloads.reading.reader import read_trace

    trace = read_trace(file, arrivals="burst")
    rows = (draws * len(trace)).astype(np.int64)
    return trace.prompt_tokens[rows], trace.output_tokens[rows]
