"""Service-level objectives such as `ttft_p99=2,tbt_p99=0.2`: read, held against a run, held against one request.

A run meets an objective when its statistic stays within the bound. A request meets it when the same statistic over
that request's own values does: its one TTFT, TPOT or E2E, or the mean, percentile or maximum of its own TBTs. Goodput
counts the requests that meet every bound themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from metrics.measures.statistics import percentiles
from metrics.measures.token_times import TokenTimes
from metrics.run_folder.columns import MetricsError
from policies.edges.settings import shown

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

SLO_METRICS = ("ttft", "tbt", "tpot", "e2e")
_DOUBTFUL_S = {"ttft": 200.0, "tbt": 10.0, "tpot": 10.0, "e2e": 5_000.0}
"""Bounds from which nobody would wait for a token, or an answer, so long: milliseconds, more likely."""
_FORM = (
    "metric_statistic=seconds, such as ttft_p99=2,tbt_p99=0.2 (metrics ttft, tbt, tpot, e2e; statistics mean, max, pNN)"
)


@dataclass(frozen=True)
class Bound:
    """One objective: a metric, a statistic of it and the most seconds it may be.

    percentile: 0 to 100 for a percentile (100 for the maximum), None for the mean.
    """

    metric: str
    statistic: str
    percentile: float | None
    bound_s: float

    @property
    def key(self) -> str:
        """The key of a summary that holds this statistic, where it holds it at all."""
        return f"{self.metric}_s_{self.statistic}"


def parse_slo(text: str) -> tuple[Bound, ...]:
    """Read an SLO string. Raises MetricsError with what was found and the form that was expected."""
    bounds = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+?)_(mean|max|p(\d+(?:\.\d+)?))\s*=\s*(\S+)\s*", part)
        if not match or match[1] not in SLO_METRICS:
            raise MetricsError(f"SLO: found {shown(part.strip())}, expected {_FORM}")
        try:
            bound_s = float(match[4])
        except ValueError:
            bound_s = math.nan
        if not 0 < bound_s < 1e9:
            found = shown(match[4])
            raise MetricsError(f"SLO: {shown(part.strip())}: found bound {found}, expected seconds above 0, below 1e9")
        percentile = float(match[3]) if match[3] else (100.0 if match[2] == "max" else None)
        if percentile is not None and percentile > 100:
            raise MetricsError(f"SLO: {shown(part.strip())}: found percentile {match[3][:20]}, expected at most 100")
        bounds.append(Bound(match[1], match[2], percentile, bound_s))
    return tuple(bounds)


def parse_objectives(text: str) -> str | dict[str, str]:
    """One objective for all, `ttft_p99=2,tbt_p99=0.2`, or one per SLO class, `chat:ttft_p99=1;batch:e2e_p99=60`.

    Returns the text itself, or class -> objective. Raises MetricsError for what neither form reads.
    """
    if ":" not in text:
        parse_slo(text)
        return text
    objectives = {}
    for part in text.split(";"):
        name, colon, objective = (piece.strip() for piece in part.partition(":"))
        if not colon or not name or name in objectives:
            raise MetricsError(f"SLO: found {shown(part.strip())}, expected class:objective, each class once")
        parse_slo(objective)
        objectives[name] = objective
    return objectives


def doubtful_bounds(text: str) -> list[str]:
    """A sentence for each bound that is too long to be meant in seconds, and would hold of any run."""
    objectives = parse_objectives(text)
    each = [objectives] if isinstance(objectives, str) else list(objectives.values())
    return [
        f"SLO: {bound.metric}_{bound.statistic}={bound.bound_s:g} is {bound.bound_s:,g} seconds; "
        f"if milliseconds are meant, write {bound.metric}_{bound.statistic}={bound.bound_s / 1e3:g}"
        for objective in each
        for bound in parse_slo(objective)
        if bound.bound_s >= _DOUBTFUL_S[bound.metric]
    ]


def check_statistics(warmup: str | None, slo: str | None, error: type[ValueError] = MetricsError) -> None:
    """Raises `error` for a warm-up or an objective that no summary could be made with: before the run, not after it."""
    try:
        if slo:
            parse_objectives(slo)
        if warmup not in (None, "auto"):
            parse_warmup(str(warmup))
    except MetricsError as wrong:
        raise error(str(wrong)) from None


def parse_warmup(warmup: int | str) -> tuple[float, bool]:
    """(amount, whether it is seconds) of a number of requests such as 100, or of seconds such as "30s"."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*(s?)\s*", str(warmup), re.ASCII)
    if not match or (not match[2] and "." in match[1]):
        raise MetricsError(f"warm-up: found {str(warmup)[:40]!r}, expected a number of requests (100) or seconds (30s)")
    return float(match[1]), bool(match[2])


def requests_within(bounds: tuple[Bound, ...], own: Mapping[str, Floats], tokens: TokenTimes) -> Bools:
    """Per request, whether it meets every bound by itself.

    own: ttft, tpot and e2e of each request in seconds. NaN (no such value) meets no bound, except TPOT: a request
    with one token has no gap that could be too long.
    """
    met = np.ones(tokens.num_requests, dtype=bool)
    for bound in bounds:
        if bound.metric in ("ttft", "e2e"):
            met &= own[bound.metric] <= bound.bound_s
        elif bound.metric == "tpot" or bound.percentile is None:  # a request's mean TBT is its TPOT
            met &= ~(own["tpot"] > bound.bound_s)
        else:
            met &= _gap_percentile_within(bound, tokens)
    return met


def _gap_percentile_within(bound: Bound, tokens: TokenTimes) -> Bools:
    """Whether the percentile of each request's own gaps is within the bound, without sorting them.

    The percentile lies between two order statistics, so counting the gaps above the bound decides it, except where the
    bound falls between those two: only these requests' gaps are looked at one by one.
    """
    assert bound.percentile is not None
    bound_ns = round(bound.bound_s * 1e9)
    gaps = tokens.gaps_above(0)
    below = gaps - tokens.gaps_above(bound_ns)
    position = bound.percentile / 100 * np.maximum(gaps - 1, 0)
    low = np.floor(position).astype(np.int64)
    high = np.minimum(low + (position > low), np.maximum(gaps - 1, 0))
    within: Bools = (gaps == 0) | (below > high)
    for row in np.flatnonzero(~within & (below > low)):
        own = np.diff(np.unique(tokens.of_request(int(row)))) / 1e9
        within[row] = percentiles(own, [bound.percentile])[0] <= bound.bound_s
    return within
