"""When equal iterations end: the durations of a leap, summed up to the moment that matters."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from policies import Batch, BatchShape, Ns
from simulator.replica.fast_costs import all_above_nothing, later, refuse

if TYPE_CHECKING:
    from simulator.replica.fast_costs import FastCosts

# Arrays have a price of their own, which this many steps of a plain loop would pay.
WORTH_AN_ARRAY: Final = 48

# Below this a leap costs more than the plain steps it replaces.
LEAST_LEAP: Final = 2


class Leap(NamedTuple):
    """Equal iterations in flight at once, back to back from planned_ns on: iteration i of them ends at ends_ns[i]."""

    batch: Batch
    planned_ns: Ns
    ends_ns: list[Ns]
    host_before_ns: Ns
    host_after_ns: Ns
    inside: bool


def ends_until(
    costs: FastCosts, shape: BatchShape, steps: int, now_ns: Ns, host_ns: Ns, device_ns: Ns, horizon_ns: Ns
) -> list[Ns]:
    """Ends of at most `steps` iterations, back to back from now on, in each of which every decode is one longer.

    The last of them is the first that does not end before `horizon_ns`, where there is one and it is not too far to
    be sure of (durations hardly ever shrink while contexts grow: then there are fewer, never wrong ones).
    device_ns: of the first iteration.
    """
    first = device_ns + host_ns
    room = horizon_ns - now_ns
    if room < first * steps:
        if room <= first:
            return [now_ns + first]
        steps = min(steps, room // first + 1)
    terms = costs.repeat_terms
    line = terms(shape) if terms is not None else None
    if line is None:
        device = costs.repeat_ns(shape, steps)
    else:
        start, step, slope, offset, rest = line
        if steps < WORTH_AN_ARRAY:
            end, kv = now_ns, start
            ends: list[Ns] = []
            while steps:
                device_ns = int(kv * slope + offset) + rest
                if device_ns <= 0:
                    refuse(costs.cost, later(shape, len(ends)), device_ns)
                end += device_ns + host_ns
                ends.append(end)
                if end >= horizon_ns:
                    break
                kv += step
                steps -= 1
            return ends
        device = (np.arange(start, start + steps * step, step) * slope + offset).astype(np.int64) + rest
        all_above_nothing(costs.cost, shape, device)
    ends = (np.cumsum(device + host_ns) + now_ns).tolist()
    if ends[-1] > horizon_ns:
        del ends[bisect_left(ends, horizon_ns) + 1 :]
    return ends
