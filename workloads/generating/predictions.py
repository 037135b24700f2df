"""Predicted answer lengths for traces that hold none: what a predictor of a stated error would have said.

    oracle:SIGMA    the true length times a log-normal error of median 1 (SIGMA of its logarithm; 0: the truth)
    buckets:N       the upper edge of the one of N equally full buckets that the true length lies in: what a classifier
                    that is always right says (S3, NeurIPS 2023, has ten)
    quantile:Q      the Q quantile of the last answers that the same tenant (all requests, where none is named) had got
                    by then; the declared limit for its first request

A policy sees predictions (`Request.predicted_tokens`), never true lengths.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from workloads.cells import MAX_TOKENS
from workloads.generating.random_streams import random_stream
from workloads.trace import Trace, TraceError

FORMS = "oracle:SIGMA (0 to 10), buckets:N (1 to 1000) or quantile:Q (0 to 1)"
_STREAM = 10
_REMEMBERED = 100
"""Answers of a tenant that its quantile is taken of."""


def with_predictions(trace: Trace, text: str, seed: int) -> Trace:
    """The trace with a prediction for every answer, whatever its own column says; TraceError for another text."""
    kind, _, rest = text.strip().partition(":")
    try:
        number = float(rest)
    except ValueError:
        number = math.nan
    match kind:
        case "oracle" if 0 <= number <= 10:
            predicted = _with_error(trace.output_tokens, number, seed)
        case "buckets" if 1 <= number <= 1000 and number == int(number):
            predicted = _bucket_edges(trace.output_tokens, int(number))
        case "quantile" if 0 <= number <= 1:
            predicted = _past_quantiles(trace, number)
        case _:
            raise TraceError(f"predict: found {text[:80]!r}, expected {FORMS}")
    note = f"Answer lengths are predicted ({text.strip()}); policies see the predictions alone."
    return replace(trace, predicted_tokens=predicted, notes=(*trace.notes, note))


def _with_error(output_tokens: NDArray[np.int64], sigma: float, seed: int) -> NDArray[np.int64]:
    error = np.exp(sigma * random_stream(seed, _STREAM).standard_normal(len(output_tokens)))
    return np.clip(np.rint(output_tokens * error), 1, MAX_TOKENS).astype(np.int64)


def _bucket_edges(output_tokens: NDArray[np.int64], buckets: int) -> NDArray[np.int64]:
    if not len(output_tokens):
        return output_tokens
    edges = np.quantile(output_tokens, np.arange(1, buckets + 1) / buckets, method="higher")
    found: NDArray[np.int64] = edges[np.searchsorted(edges, output_tokens)].astype(np.int64)
    return found


def _past_quantiles(trace: Trace, level: float) -> NDArray[np.int64]:
    """Answers count in the order in which their requests came: whether one had ended depends on who served it."""
    names = trace.tenant if trace.tenant is not None else [None] * len(trace)
    past: dict[str | None, tuple[deque[int], list[int]]] = {}
    predicted = trace.max_output_tokens.copy()
    for row, (name, output) in enumerate(zip(names, trace.output_tokens.tolist())):
        last, in_order = past.setdefault(name, (deque(), []))
        if last:
            predicted[row] = in_order[min(len(in_order) - 1, int(level * len(in_order)))]
        last.append(output)
        insort(in_order, output)
        if len(last) > _REMEMBERED:
            in_order.remove(last.popleft())
    return predicted
