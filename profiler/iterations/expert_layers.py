"""What whole iterations of a model with experts are charged for beside their rows: the experts that they touch.

An expert's weights are read once by an iteration, however many of its rows go there. How many experts a batch touches
was counted while it was measured; of a batch to come it is expected, from how rows spread over experts meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.errors import ProfileError
from profiler.experts.chances import ExpertChances

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ExpertLayers:
    """price_ns: of one touched expert of one layer. chances: of all layers with experts, in order. trimmed: only
    sampled rows go through the last of them."""

    price_ns: float
    chances: ExpertChances
    trimmed: bool

    @classmethod
    def of_provenance(cls, said: Mapping[str, Any] | None) -> ExpertLayers | None:
        """From what a profile says of its engine's routing (`counts`, `rows`, `trimmed`); None where it has none."""
        if not said:
            return None
        try:
            counts, rows = np.array(said["counts"], float), np.array(said["rows"], float)
            if counts.ndim != 2 or rows.shape != counts.shape[:1] or not (rows > 0).all():
                raise ValueError
            return cls(0.0, ExpertChances.measured(counts, rows), bool(said["trimmed"]))
        except (KeyError, TypeError, ValueError):
            raise ProfileError("profile: routing: found no counts [layers, experts] with rows of each layer") from None

    @cached_property
    def _parts(self) -> tuple[ExpertChances | None, ExpertChances | None]:
        """Layers that all rows go through, and the one of sampled rows."""
        if not self.trimmed:
            return self.chances, None
        *whole, last = self.chances.layers
        return ExpertChances(tuple(whole)) if whole else None, ExpertChances((last,))

    def by_rows(self, rows: Any) -> Array:
        """Experts touched by so many rows, all layers together that all rows go through."""
        whole = self._parts[0]
        return np.zeros(len(rows)) if whole is None else whole.touched(rows) * len(whole.layers)

    def by_sampled(self, sampled: Any) -> Array:
        """Experts of the trimmed layer that so many sampled rows touch."""
        last = self._parts[1]
        return np.zeros(len(sampled)) if last is None else last.touched(sampled)

    def touched(self, rows: Any, sampled: Any) -> Array:
        """Touched experts of all layers together."""
        return self.by_rows(rows) + self.by_sampled(sampled)

    def mean(self, rows: Any, sampled: Any) -> Array:
        """Touched experts, the mean over the layers that a batch runs through."""
        layers = len(self.chances.layers) - (int(self.trimmed) * (np.asarray(sampled) == 0))
        return self.touched(rows, sampled) / np.maximum(layers, 1)
