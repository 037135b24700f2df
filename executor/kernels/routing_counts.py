"""Which experts a pass has touched: how many of its rows went to each expert of each layer.

The counts stay where the model runs, one row of memory a layer, so that a captured pass writes them as any other.
"""

from __future__ import annotations

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

    def read(self) -> NDArray[np.int32]:
        """[layers with experts, experts], a copy. Waits for the device."""
        counts: NDArray[np.int32] = self._counts.cpu().numpy().copy()
        return counts
