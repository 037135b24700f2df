"""What no kernel can beat: its FLOPs at the device's peak, or the bytes it streams at full bandwidth.

Streamed are weights and keys and values, each once; activations may come from a cache. A cost model that was fitted
keeps above this floor where it interpolates, and beyond its tables it goes on in proportion to it: at the efficiency of
the last sizes in the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from profiler.specs.hardware import Hardware
    from profiler.specs.model_spec import AttentionKind

Array = NDArray[np.float64]

ELEMENT_BYTES = 2
"""Of activations, weights and keys and values as they are profiled: 16 bits."""


@dataclass(frozen=True)
class GemmFloor:
    """flops_per_us: peak of the device. bytes_per_us: its full bandwidth. weight_bytes: of one weight."""

    flops_per_us: float
    bytes_per_us: float
    weight_bytes: float = ELEMENT_BYTES

    @classmethod
    def of(cls, hardware: Hardware, dtype: str, weight_bytes: float = ELEMENT_BYTES) -> GemmFloor:
        """dtype: in which products are made."""
        return cls(hardware.peak(dtype) / 1e6, hardware.memory_bandwidth / 1e6, weight_bytes)

    def us(self, rows: ArrayLike, n: ArrayLike, k: ArrayLike) -> Array:
        """Least microseconds of [rows, k] x [k, n] with weights from memory."""
        products = np.multiply(n, np.multiply(k, 1.0))
        flops = 2.0 * np.multiply(rows, products) / self.flops_per_us
        return np.maximum(flops, self.weight_bytes * products / self.bytes_per_us)


@dataclass(frozen=True)
class AttentionFloor:
    """Of one layer on one device, nanoseconds.

    pair: of a query and a key, over all heads, at peak. kv: of a token's keys and values at full bandwidth. window:
    tokens that attention looks back, 0 for all.
    """

    pair: float
    kv: float
    window: int = 0

    @classmethod
    def of(cls, kind: AttentionKind, hardware: Hardware, dtype: str, tp: int, kv_bytes: int = 2) -> AttentionFloor:
        """dtype: in which products are made. kv_bytes: of an element of keys and values."""
        kv = 2 * kv_bytes * kind.kv_heads_per_device(tp) * kind.head_dim
        pair = kind.pair_flops / tp / (hardware.peak(dtype) / 1e9)
        return cls(pair, kv / (hardware.memory_bandwidth / 1e9), kind.window)

    def ns(self, tokens: ArrayLike, prefix: ArrayLike, decodes: ArrayLike, context: ArrayLike) -> Array:
        """Least time of a chunk beside decodes of equal context, of which either may be 0.

        Straight along prefixes, decodes and contexts, and bent upwards along tokens: what interpolates between values
        above this is above it too, if it has a knot at the window.
        """
        tokens, decodes = np.asarray(tokens, float), np.asarray(decodes, float)
        prefix, context = self._seen(prefix), self._seen(context)
        pairs = tokens * prefix + tokens * (tokens + 1) / 2 + decodes * (context + 1)
        return np.maximum(pairs * self.pair, (prefix * (tokens > 0) + decodes * context) * self.kv)

    def _seen(self, context: ArrayLike) -> Any:
        return np.minimum(np.asarray(context, float), self.window) if self.window else np.asarray(context, float)
