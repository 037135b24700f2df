"""How fast the processor is right now, told by a fixed bit of work between the steps of a run or a measurement.

On a machine shared with others the same step takes half as long again from one second to the next, and a profile made
in a fast minute is wrong for a run in a slow one. The gauge does what a step on a CPU does, in small: calls from
Python, a product of small matrices, a read of memory that no cache near the core holds. What it took in a run, over
what it took while the profile was measured, is the machine's speed during the run, without a look at the run's own
steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

EVERY_S = 0.02
"""Least time between two samples of a run: at 0.1 ms each, half a per cent of it."""
_CALLS, _PRODUCTS = 400, 3
_WINDOW, _MEMORY = 1 << 16, 1 << 24  # float32: 256 KiB of 64 MiB at a time


class SpeedGauge:
    """Times a fixed bit of work; `samples` are nanoseconds, in order, `moments_ns` when they were taken (of
    `time.perf_counter_ns`)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randn(16, 256, generator=generator)
        self._weights = torch.randn(256, 256, generator=generator)
        self._memory = torch.ones(_MEMORY)
        self._at = 0
        self._next_s = 0.0
        self.samples: list[int] = []
        self.moments_ns: list[int] = []
        for _ in range(3):
            self.sample()
        self.samples.clear()
        self.moments_ns.clear()

    def sample(self) -> int:
        """Do the work once; returns the geometric mean of its three parts in ns, so that none outweighs the others."""
        clock = time.perf_counter_ns
        start = clock()
        count = 0
        for number in range(_CALLS):
            count += number
        called = clock()
        for _ in range(_PRODUCTS):
            torch.mm(self._rows, self._weights)
        multiplied = clock()
        self._memory[self._at : self._at + _WINDOW].sum()
        end = clock()
        self._at = (self._at + _WINDOW) % _MEMORY
        parts = (called - start, multiplied - called, end - multiplied)
        found = round(math.prod(max(part, 1) for part in parts) ** (1 / 3))
        self.samples.append(found)
        self.moments_ns.append(end)
        return found

    def __call__(self) -> None:
        """Between two steps: a sample, unless the last one is less than EVERY_S ago."""
        if time.monotonic() >= self._next_s:
            self.sample()
            self._next_s = time.monotonic() + EVERY_S


def typical_ns(samples: Sequence[int]) -> float | None:
    """Geometric mean; None below ten samples, which say too little."""
    if len(samples) < 10:
        return None
    return math.exp(sum(math.log(sample) for sample in samples) / len(samples))
