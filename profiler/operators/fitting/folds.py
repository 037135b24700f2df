"""Which measured values are left out together, so that a fit's error is that of a structure it has not seen."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

RUN = 8
"""Values one apart are left out together, so that none is predicted from a twin: pairs such as 128 and 129, and whole
eighths of a longer run."""


def folds(values: Array, least: float = -np.inf, most: float = np.inf) -> Iterator[Array]:
    """Two sets of every second value (or run of values one apart) between the outermost ones."""
    distinct = np.unique(values)
    if not len(distinct):
        return
    starts = np.concatenate([[True], (np.diff(distinct) > 1) | (distinct[1:] <= 16)])
    within = np.arange(len(distinct)) - np.maximum.accumulate(np.where(starts, np.arange(len(distinct)), 0))
    groups = np.cumsum(starts | (within % RUN == 0)) - 1
    inner = (groups > 0) & (groups < groups[-1]) & (distinct >= least) & (distinct <= most)
    for parity in (0, 1):
        chosen = distinct[inner & (groups % 2 == parity)]
        if len(chosen):
            yield chosen
