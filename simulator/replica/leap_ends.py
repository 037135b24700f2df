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

# The same for plans made one batch ahead; two batches are in flight, so it is at least 2.
LEAST_AHEAD: Final = 3


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


def ends_ahead(
    costs: FastCosts,
    shape: BatchShape,
    steps: int,
    first_end_ns: Ns,
    second_end_ns: Ns,
    before_ns: Ns,
    after_ns: Ns,
    device_ns: Ns,
    host_free_ns: Ns,
    device_free_ns: Ns,
    horizon_ns: Ns,
) -> tuple[list[Ns], list[Ns], list[Ns], Ns] | None:
    """Iterations that are planned when the one before the last ends, in each of which every decode is one longer.

    shape: of the first that is not in flight yet; first_end_ns, second_end_ns: of the two that are, the second of which
    keeps the device busy for device_ns, until device_free_ns; host_free_ns: when its inputs were ready. Returns starts,
    device times and ends of at most `steps` iterations, and when the last one's inputs were ready; of so many that the
    iteration two before the last ends before `horizon_ns` (or fewer). None for less than two.
    """
    room = horizon_ns - first_end_ns
    if room < device_ns * steps:
        steps = min(steps, room // device_ns + 2)
    terms = costs.repeat_terms
    line = terms(shape) if terms is not None else None
    kv = step = rest = 0
    slope = offset = 0.0
    given: list[Ns] = []
    if line is None or steps >= WORTH_AN_ARRAY:
        if line is None:
            device = costs.repeat_ns(shape, steps)
        else:
            first, step, slope, offset, rest = line
            device = (np.arange(first, first + steps * step, step) * slope + offset).astype(np.int64) + rest
            all_above_nothing(costs.cost, shape, device)
        busy = before_ns + after_ns
        hidden = host_free_ns <= first_end_ns and first_end_ns + before_ns <= device_free_ns
        if hidden and second_end_ns == device_free_ns + after_ns and int(device.min()) >= busy:
            # The host keeps ahead of the device, which never waits.
            free = np.cumsum(device) + device_free_ns
            ends = (free + after_ns).tolist()
            # Each is planned when the one two before it ends.
            planned = [first_end_ns, second_end_ns, *ends[:-2]]
            done = bisect_left(planned, horizon_ns)
            if done < 2:
                return None
            starts = (free - device).tolist()
            return starts[:done], device[:done].tolist(), ends[:done], planned[done - 1] + before_ns
        given = device.tolist()
    else:
        kv, step, slope, offset, rest = line
    starts, devices, ends = [], [], []
    while len(ends) < steps and first_end_ns < horizon_ns:
        if given:
            device_ns = given[len(ends)]
        else:
            device_ns = int(kv * slope + offset) + rest
            if device_ns <= 0:
                refuse(costs.cost, later(shape, len(ends)), device_ns)
            kv += step
        host_free_ns = (host_free_ns if host_free_ns > first_end_ns else first_end_ns) + before_ns
        start = host_free_ns if host_free_ns > device_free_ns else device_free_ns
        device_free_ns = start + device_ns
        end = device_free_ns + after_ns
        if end < second_end_ns:
            end = second_end_ns
        starts.append(start)
        devices.append(device_ns)
        ends.append(end)
        first_end_ns, second_end_ns = second_end_ns, end
    return (starts, devices, ends, host_free_ns) if len(ends) > 1 else None
