"""Which experts a pass has touched: how many of its rows went to each expert of each layer.

The counts stay where the model runs, one row of memory a layer, so that a captured pass writes them as any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from profiler.specs.model_spec import ModelSpec


class RoutingCounts:
    """Counts of the pass that ran last. Rows of padding are counted: they are routed as any other."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._layers = [layer for layer in range(spec.layers) if spec.has_experts(layer)]
        self._counts = torch.zeros(len(self._layers), spec.experts, dtype=torch.int32, device=device)

    def __bool__(self) -> bool:
        return bool(self._layers)

    def of_layer(self, layer: int) -> Tensor:
        """int32 [experts], to be written by the layer of this number."""
        return self._counts[self._layers.index(layer)]

    def begin(self) -> None:
        """Before every pass: a layer that is passed over because it has no rows touches no expert."""
        if self._layers:
            self._counts.zero_()

    def touched(self) -> tuple[int, int]:
        """Experts touched, all layers together, and the layers with experts that rows went through."""
        if not self._layers:
            return 0, 0
        by_layer = (self.read() > 0).sum(axis=1)
        return int(by_layer.sum()), int((by_layer > 0).sum())

    def read(self) -> NDArray[np.int32]:
        """[layers with experts, experts], a copy. Waits for the device."""
        counts: NDArray[np.int32] = self._counts.cpu().numpy().copy()
        return counts


class RoutedRows:
    """The counts of a run added up: what its measured routing is made from. counts: int64 [layers, experts]; last: of
    the batch that was added last."""

    def __init__(self, spec: ModelSpec) -> None:
        self.counts = np.zeros((spec.expert_layers, spec.experts), np.int64)
        self.last = np.zeros(self.counts.shape, np.int32)
        self._top_k = spec.top_k

    @property
    def last_touched(self) -> int:
        """Experts that the last batch touched, all layers together."""
        return int((self.last > 0).sum())

    def add(self, counts: NDArray[np.int32]) -> float:
        """Take in one batch; experts that it touched, in the mean over the layers that it ran through."""
        self.counts += counts
        self.last = counts
        touched = (counts > 0).sum(axis=1)
        ran = touched > 0
        return float(touched[ran].mean()) if ran.any() else 0.0

    def facts(self) -> dict[str, Any]:
        """What a run's config says: counts, and the rows that each layer has seen; nothing without experts."""
        if not self.counts.size:
            return {}
        rows = self.counts.sum(axis=1) // self._top_k
        return {"routing": {"counts": self.counts.tolist(), "rows": rows.tolist()}}
