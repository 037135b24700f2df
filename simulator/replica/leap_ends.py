"""When equal iterations end: the durations of a leap, summed up to the moment that matters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from policies import Batch, BatchShape, Ns
from simulator.replica.fast_costs import refuse

if TYPE_CHECKING:
    from profiler.cost_model import CostModel

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


Terms = Callable[[BatchShape], "tuple[int, int, float, float, Ns] | None"]


def ends_until(
    cost: CostModel,
    terms: Terms | None,
    shape: BatchShape,
    steps: int,
    now_ns: Ns,
    host_ns: Ns,
    device_ns: Ns,
    horizon_ns: Ns,
) -> list[Ns]:
    """Ends of at most `steps` iterations, back to back from now on, in each of which every decode is one longer.

    The last of them is the first that does not end before `horizon_ns`, where there is one and it is not too far to
    be sure of (durations hardly ever shrink while contexts grow: then there are fewer, never wrong ones).
    terms: the cost model's `repeat_terms`, if it has them. device_ns: of the first iteration.
    """
    first = device_ns + host_ns
    room = horizon_ns - now_ns
    if room < first * steps:
        if room <= first:
            return [now_ns + first]
        steps = min(steps, room // first + 1)
    line = terms(shape) if terms is not None else None
    if line is None:
        device = cost.repeat_ns(shape, steps)
    else:
        start, step, slope, offset, rest = line
        if steps < WORTH_AN_ARRAY:
            rest += host_ns
            end, kv = now_ns, start
            ends: list[Ns] = []
            while steps:
                device_ns = int(kv * slope + offset) + rest
                if device_ns <= host_ns:
                    refuse(cost, later(shape, len(ends)), device_ns - host_ns)
                end += device_ns
                ends.append(end)
                if end >= horizon_ns:
                    break
                kv += step
                steps -= 1
            return ends
        device = (np.arange(start, start + steps * step, step) * slope + offset).astype(np.int64) + rest
    if device.min() <= 0:
        first_at = int((device <= 0).argmax())
        refuse(cost, later(shape, first_at), int(device[first_at]))
    ends = (np.cumsum(device + host_ns) + now_ns).tolist()
    if ends[-1] > horizon_ns:
        del ends[bisect_left(ends, horizon_ns) + 1 :]
    return ends


def later(shape: BatchShape, steps: int) -> BatchShape:
    """The shape of a batch of decodes so many steps later."""
    return shape._replace(
        decode_context_total=shape.decode_context_total + steps * shape.decodes,
        decode_context_max=shape.decode_context_max + steps,
    )
