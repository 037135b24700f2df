"""Random streams: one generator a seed and purpose, so that draws for one never shift the draws for another.

Whatever of a workload is random draws from here, and a seed that numpy would not take is refused in one place.
"""

from __future__ import annotations

import numpy as np

from policies.edges.settings import shown
from workloads.trace import TraceError


def random_stream(seed: int, *purpose: int) -> np.random.Generator:
    """The generator of a seed for one purpose (numbers of the caller's own); TraceError for a seed below 0."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise TraceError(f"seed: found {shown(seed)}, expected a whole number of 0 or more")
    return np.random.default_rng([seed, *purpose] if purpose else seed)
