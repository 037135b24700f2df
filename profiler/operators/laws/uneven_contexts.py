"""What contexts of unequal lengths add to attention: a price for each token by which the longest one beats the others.

It is told from pairs, each uneven batch beside an even twin of as many tokens: measured in the same session where the
profile has one, and otherwise predicted by the fit of even batches.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from profiler.operators.laws.decode_law import SPLIT_BELOW

if TYPE_CHECKING:
    import pandas as pd

    from profiler.operators.fitting.attention_fit import AttentionFit

Array = NDArray[np.float64]

_TWINS_BY = ["tokens", "prefix", "decodes", "context"]


def fit_uneven(fit: AttentionFit, rows: pd.DataFrame, twins: pd.DataFrame) -> AttentionFit:
    """How much longer than their even twins uneven batches take; a twin that was not measured is the fit's own
    prediction of it."""
    measured = twins.groupby(_TWINS_BY)["us"].median().rename("even")
    rows = rows.join(measured, on=_TWINS_BY)
    alone = rows[rows["tokens"] == 0]
    slopes: list[tuple[float, float]] = []
    for decodes, group in alone.groupby("decodes"):
        predicted = fit.decode_us(group["decodes"], group["context"])
        even = np.where(group["even"].isna(), predicted, group["even"])
        excess = group["us"].to_numpy(float) - even
        beyond = (group["longest"] - group["context"]).to_numpy(float)
        weight = 1.0 / group["us"].to_numpy(float)
        slopes.append((float(decodes), max(0.0, _slope(beyond * weight, excess * weight))))
    mixed = rows[rows["tokens"] > 0]
    slope = 0.0
    if len(mixed):
        us = mixed["us"].to_numpy(float)
        predicted = fit.batch_us(mixed["tokens"], mixed["prefix"], mixed["decodes"], mixed["context"])
        even = np.where(mixed["even"].isna(), predicted, mixed["even"])
        end = mixed["tokens"] + mixed["prefix"]
        beyond = (np.maximum(mixed["longest"], end) - np.maximum(mixed["context"], end)).to_numpy(float)
        use = (beyond > 0) & (np.abs(us - even) < 0.7 * us)
        slope = max(0.0, _slope((beyond / us)[use], ((us - even) / us)[use]))
    return replace(fit, uneven_decode=_with_split(slopes, fit), uneven_token_us=slope)


def _slope(x: Array, y: Array) -> float:
    """Least squares through the origin."""
    return float((x * y).sum() / max(float((x * x).sum()), 1e-30))


def _with_split(slopes: list[tuple[float, float]], fit: AttentionFit) -> tuple[tuple[float, float], ...]:
    """Two more knots where the kernel stops splitting, if that lies between a small and a large measured slope."""
    last_split = np.ceil(SPLIT_BELOW * 2 * fit.sms / fit.kv_heads) - 1
    for (below, low), (above, high) in pairwise(slopes):
        if below < last_split < above - 1 and high > 2 * low:
            slopes = sorted([*slopes, (last_split, low), (last_split + 1, high)])
            break
    return tuple((n, round(us, 9)) for n, us in slopes)
