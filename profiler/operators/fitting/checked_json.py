"""One JSON object of a model file, with its place in the file, so that every complaint names both."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.errors import ProfileError

Array = NDArray[np.float64]
MAX_ENTRIES = 20_000


class Entry:
    """Its values, each checked as it is asked for; `fail` raises ProfileError."""

    def __init__(self, path: Path, where: str, values: Any) -> None:
        self.path, self.where = path, where
        if not isinstance(values, dict):
            self.fail("", values, "a JSON object")
        self.values: dict[str, Any] = values

    def fail(self, key: str, found: Any, expected: str) -> None:
        place = ".".join(part for part in (self.where, key) if part)
        raise ProfileError(f"{self.path}: {place}: found {str(found)[:60]!r}, expected {expected}")

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or len(value) > 200:
            self.fail(key, value, "a short text")
        return str(value)

    def number(self, key: str, low: float, high: float) -> float:
        value = self.values.get(key)
        good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not good:
            self.fail(key, value, f"a number from {low:g} to {high:g}")
        return float(value)  # type: ignore[arg-type]

    def count(self, key: str, least: int = 0, most: int = 1 << 40) -> int:
        value = self.number(key, least, most)
        if value != int(value):
            self.fail(key, value, "a whole number")
        return int(value)

    def numbers(self, *wanted: str) -> dict[str, float]:
        found = {key: self.number(key, -1e15, 1e15) for key in self.values}
        return found | {key: self.number(key, 0.0, 1e6) for key in wanted}

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self.fail(key, value, "a JSON object")
        return dict(value)

    def items(self, key: str) -> list[Entry]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or len(value) > MAX_ENTRIES:
            self.fail(key, value, "a list")
        return [Entry(self.path, f"{key}[{index}]", item) for index, item in enumerate(value)]

    def pairs(self, key: str, convert: Callable[[Any], Any]) -> tuple[Any, ...]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, list) and len(item) == 2 for item in value):
            self.fail(key, value, "a list of pairs")
        try:
            return tuple(convert(item) for item in value)
        except (TypeError, ValueError):
            self.fail(key, value, "pairs of the right kind")
            raise AssertionError from None

    def array(self, key: str, values: Array) -> Array:
        return self.cut(key, self.values.get(key), values)

    def cut(self, key: str, place: Any, values: Array) -> Array:
        """The piece of the long row that starts at place[0] and has the shape place[1:]."""
        whole = isinstance(place, list) and 2 <= len(place) <= 5 and all(type(one) is int for one in place)
        if not whole or min(place) < 0 or min(place[1:]) < 1 or place[0] + math.prod(place[1:]) > values.size:
            self.fail(key, place, f"[start, shape ...] within the {values.size} values of the .npz")
        return values[place[0] : place[0] + math.prod(place[1:])].reshape(place[1:])
