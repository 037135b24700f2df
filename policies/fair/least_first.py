"""Names by what they have had so far: the least of those that wait is found without a look at all of them.

Counts only grow, so that an entry of a heap may be too low but never too high: the top is corrected until it is right.
Counts are whole numbers, as sums of floats would depend on how many plans a promise has spared.
"""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache
from heapq import heappop, heappush, heapreplace

from policies.edges.errors import PolicyError
from policies.edges.settings import shown

PER_TOKEN = 1_000_000
"""Counted for one token of weight 1."""


class LeastFirst:
    """count: what each name has had; a name without an entry has had nothing."""

    __slots__ = ("_heap", "_number_of", "_numbers", "count")

    def __init__(self) -> None:
        self.count: dict[str | None, int] = {}
        self._heap: list[tuple[int, int, str | None]] = []
        self._number_of: dict[str | None, int] = {}
        self._numbers = 0

    def add(self, name: str | None, amount: int) -> None:
        self.count[name] = self.count.get(name, 0) + amount

    def raise_to(self, name: str | None, count: int) -> None:
        self.count[name] = max(self.count.get(name, 0), count)

    def line_up(self, name: str | None) -> None:
        """A name that did not wait does so from now on."""
        self._numbers += 1
        self._number_of[name] = self._numbers
        heappush(self._heap, (self.count.get(name, 0), self._numbers, name))

    def least(self, waiting: Container[str | None]) -> str | None:
        """Of the names that are `waiting` (at least one, all lined up) the one that has had least; of equals the one
        that began to wait first."""
        heap = self._heap
        while True:
            counted, number, name = heap[0]
            if name not in waiting or self._number_of[name] != number:
                heappop(heap)
            elif (count := self.count.get(name, 0)) > counted:
                heapreplace(heap, (count, number, name))
            else:
                return name


@lru_cache(maxsize=64)
def parse_weights(text: str) -> dict[str | None, float]:
    """`gold=2,free=0.5` as weights by name; PolicyError says which part is wrong."""
    weights: dict[str | None, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.rpartition("=")
        name = name.strip()
        try:
            weight = float(value)
        except ValueError:
            weight = 0.0
        if not (equals and name and 1e-3 <= weight <= 1e3):
            raise PolicyError(f"weights: found {shown(part)}, expected NAME=WEIGHT with a weight from 0.001 to 1000")
        if name in weights:
            raise PolicyError(f"weights: {shown(name)} is given twice")
        weights[name] = weight
    return weights


def prices(text: str, name: str | None, input_weight: float, output_weight: float) -> tuple[int, int]:
    """What a prompt token and an output token of a name count, by the weights of tokens and of names."""
    weight = parse_weights(text).get(name, 1.0)
    return round(PER_TOKEN * input_weight / weight), round(PER_TOKEN * output_weight / weight)
