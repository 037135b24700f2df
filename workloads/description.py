"""What a trace looks like, in numbers: how many, how fast, how bursty, how long, how much is shared.

`describe` returns one flat dictionary; its keys are listed in docs/concepts/workloads.md and do not change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.work.request import NS_PER_S
from workloads.ragged import RaggedColumn
from workloads.trace import Trace

PERCENTILES = (50, 90, 95, 99)


def describe(trace: Trace) -> dict[str, Any]:
    """Counts, span, rate, CV of gaps, length quantiles, P:D and what else the trace has; None for what it has not."""
    span_s = float(trace.arrival_ns[-1] - trace.arrival_ns[0]) / NS_PER_S if len(trace) else 0.0
    gaps_s = np.diff(trace.arrival_ns) / NS_PER_S
    numbers: dict[str, Any] = {
        "name": trace.name,
        "format": trace.source_format,
        "requests": len(trace),
        "first_arrival_s": float(trace.arrival_ns[0]) / NS_PER_S if len(trace) else None,
        "span_s": span_s,
        "rate": (len(trace) - 1) / span_s if span_s > 0 else None,
        "peak_rate_10s": _peak_rate(trace.arrival_ns, 10.0) if len(trace) else None,
        "gap_cv": float(gaps_s.std() / gaps_s.mean()) if len(gaps_s) and gaps_s.mean() > 0 else None,
        "longest_gap_s": float(gaps_s.max()) if len(gaps_s) else None,
        "tied_arrivals": int((gaps_s == 0).sum()),
    }
    ratios = trace.prompt_tokens / trace.output_tokens
    numbers |= _quantiles("prompt_tokens", trace.prompt_tokens) | _quantiles("output_tokens", trace.output_tokens)
    numbers |= _quantiles("total_tokens", trace.prompt_tokens + trace.output_tokens)
    numbers |= {
        "pd_ratio": _ratio(trace.prompt_tokens.sum(), trace.output_tokens.sum()),
        "pd_ratio_p50": float(np.median(ratios)) if len(trace) else None,
        "length_correlation": _correlation(trace.prompt_tokens, trace.output_tokens),
        "declared_limits": bool((trace.max_output_tokens != trace.output_tokens).any()),
        "sessions": None if trace.session is None else len({name for name in trace.session if name is not None}),
        "closed_loop_requests": 0 if trace.after_row is None else int((trace.after_row >= 0).sum()),
        "clients_giving_up": 0 if trace.abort_ns is None else int((trace.abort_ns >= 0).sum()),
        "slo_classes": None if trace.slo is None else sorted({name for name in trace.slo if name is not None}),
        "tenants": None if trace.tenant is None else len({name for name in trace.tenant if name is not None}),
        "programs": None if trace.program is None else len({name for name in trace.program if name is not None}),
        "shared_prompt_share": _shared(trace),
        "notes": list(trace.notes),
    }
    return numbers


def _quantiles(name: str, values: NDArray[np.int64]) -> dict[str, float | None]:
    if not len(values):
        return {f"{name}_{key}": None for key in ("mean", "min", "max", *(f"p{level}" for level in PERCENTILES))}
    levels = np.percentile(values, PERCENTILES).tolist()
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_min": int(values.min()),
        **{f"{name}_p{level}": value for level, value in zip(PERCENTILES, levels)},
        f"{name}_max": int(values.max()),
    }


def _ratio(one: float, other: float) -> float | None:
    return float(one / other) if other else None


def _correlation(one: NDArray[np.int64], other: NDArray[np.int64]) -> float | None:
    if len(one) < 2 or one.std() == 0 or other.std() == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _peak_rate(arrival_ns: NDArray[np.int64], window_s: float) -> float:
    """Most requests in any window that starts with one, per second."""
    ends = np.searchsorted(arrival_ns, arrival_ns + round(window_s * NS_PER_S))
    return float((ends - np.arange(len(arrival_ns))).max() / window_s)


def _shared(trace: Trace) -> float | None:
    """Share of prompt tokens under a prefix hash that came before: the most that an endless prefix cache could hit."""
    if trace.prefix_hashes is None or not len(trace):
        return None
    hashes = RaggedColumn.of(trace.prefix_hashes)
    values = hashes.values[hashes.offsets[0] : hashes.offsets[-1]]
    first = np.zeros(len(values), bool)
    first[np.unique(values, return_index=True)[1]] = True
    row = np.repeat(np.arange(len(trace)), hashes.lengths)
    position = np.arange(len(values)) - np.repeat(hashes.offsets[:-1] - hashes.offsets[0], hashes.lengths)
    tokens = np.minimum(trace.prompt_tokens[row] - position * trace.hash_tokens, trace.hash_tokens)
    return float(tokens[~first].sum() / trace.prompt_tokens.sum())
