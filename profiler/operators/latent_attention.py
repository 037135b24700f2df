"""Latent attention (MLA) of one card: whole modules as they were measured, compressions and projections included.

Decodes attend to the compressed vectors, absorbed into queries and outputs; prompts unfold keys and values first. Both
were measured by the heads of one device. Prompts were measured without a prefix: what one adds is its pairs, at the
rate of the longest prompts, and its own unfolding. Chunks beside decodes share the projections' weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.errors import ProfileError
from profiler.operators.laws.lattice import Lattice
from profiler.operators.laws.measured_grid import MeasuredGrid
from profiler.operators.laws.smooth_batch_law import CONTEXT_STEP, BatchLaw

Array = NDArray[np.float64]
PROMPTS = 4096.0
"""Tokens from which a prompt's time is told by its pairs and tokens alone."""


@dataclass(frozen=True)
class LatentFit:
    """weights, kv_dtype: of the projections, of the compressed vectors. decode: by heads of a device, log microseconds
    over (decodes, context); prefill: over tokens of one prompt. head_dim, value_dim, latent, q_latent, hidden: of the
    model that was measured (DeepSeek-V3), since what differs is refused."""

    weights: str
    kv_dtype: str
    decode: Mapping[int, Lattice]
    prefill: Mapping[int, Lattice]

    def of(self, heads: int, sms: int) -> LatentAttention:
        """Of a device with so many heads."""
        for known in (self.decode, self.prefill):
            if heads not in known:
                have = ", ".join(map(str, sorted(known)))
                raise ProfileError(
                    f"latent attention: {heads} heads a device were not measured, expected one of {have}"
                )
        return LatentAttention(heads, sms, self.decode[heads], self.prefill[heads])


@dataclass(frozen=True)
class LatentAttention:
    """`profiler.operators.attention_tables.AttentionSource` of one device. Microseconds of one layer."""

    heads: int
    sms: int
    decodes: Lattice
    prompts: Lattice
    uneven_token_us: float = 0.0
    prefill_law: Any = None
    grids: Mapping[str, MeasuredGrid] = field(default_factory=dict)

    @property
    def batch_law(self) -> BatchLaw:
        """What a further chunk takes: its tokens through the projections, its pairs at the rate of long prompts."""
        token, pair = self._rates
        step = pair * 128 * CONTEXT_STEP * self.sms / self.heads
        return BatchLaw(launch=0.0, block=0.0, step=step, decode_step=0.0, empty=0.0, write=token * 1e3, query_rows=128)

    @property
    def _rates(self) -> tuple[float, float]:
        """Microseconds a token and a pair (query and key, all heads), from the two longest prompts measured."""
        knots = self.prompts.axes[0]
        long = knots[knots >= PROMPTS]
        first, last = float(long[0]), float(long[-1])
        us = np.exp(self.prompts(np.array([first, last])))
        # us = token * n + pair * n (n + 1) / 2
        system = np.array([[first, first * (first + 1) / 2], [last, last * (last + 1) / 2]])
        token, pair = np.linalg.solve(system, us)
        if token <= 0:
            return 0.0, float(us[1] / system[1, 1])
        return float(token), float(max(pair, 0.0))

    def decode_us(self, decodes: ArrayLike, context: ArrayLike, typical: bool = False) -> Array:
        count = np.maximum(np.asarray(decodes, float), 1.0)
        most = self.decodes.axes[0][-1]
        return np.asarray(np.exp(self.decodes(count, np.asarray(context, float))) * np.maximum(count / most, 1.0))

    def prefill_us(self, tokens: ArrayLike, prefix: ArrayLike) -> Array:
        tokens, prefix = np.asarray(tokens, float), np.asarray(prefix, float)
        token, pair = self._rates
        # Half of what a token takes in the projections is unfolding, at most: a prefix pays that once more.
        return np.asarray(np.exp(self.prompts(tokens)) + pair * tokens * prefix + 0.25 * token * prefix)

    def batch_us(
        self, tokens: ArrayLike, prefix: ArrayLike, decodes: ArrayLike, context: ArrayLike, typical: bool = False
    ) -> Array:
        alone = self.prefill_us(tokens, prefix)
        beside = self.decode_us(decodes, context) - self.decode_us(1.0, 0.0)
        return np.asarray(alone + np.maximum(beside, 0.0))

    def uneven_decode_us(self, decodes: ArrayLike) -> Array:
        return np.zeros(np.shape(decodes))

    def knots(self, axis: str, most: int = 32) -> Array:
        """Measured coordinates, of which tables take some."""
        known = {"tokens": self.prompts.axes[0], "decodes": self.decodes.axes[0], "context": self.decodes.axes[1]}[axis]
        return np.asarray(known[:: max(1, len(known) // most)])
