"""When equal iterations end: the durations of a leap, summed up to the moment that matters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policies import BatchShape, Ns

if TYPE_CHECKING:
    from profiler.cost_model import CostModel


def ends_until(
    cost: CostModel, shape: BatchShape, steps: int, now_ns: Ns, host_ns: Ns, horizon_ns: float
) -> list[Ns]:
    """Ends of at most `steps` iterations, back to back from now on, in each of which every decode is one longer.

    The last of them is the first that does not end before `horizon_ns`, where there is one and it is not too far to
    be sure of (durations hardly ever shrink while contexts grow: then there are fewer, never wrong ones).
    """
    first = cost.stage_ns(shape) + host_ns
    if horizon_ns - now_ns < first * steps:
        steps = min(steps, int(horizon_ns - now_ns) // first + 1) if first else steps
    device = cost.repeat_ns(shape, steps)
    ends: list[Ns] = (np.cumsum(device + host_ns) + now_ns).tolist()
    at = len(ends) - 1
    while at and ends[at - 1] >= horizon_ns:
        at -= 1
    return ends[: at + 1]
