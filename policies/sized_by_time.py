"""Batches sized by time instead of tokens: the largest one within a time, and chunks that all take the same time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from policies.contract.host import Host
from policies.work.batch import BatchShape
from policies.work.request import Ns


def rows_within(host: Host, limit_ns: Ns, least: int, most: int, shape_of: Callable[[int], BatchShape]) -> int:
    """The largest whole number of tiles up to `most` rows whose estimate stays within `limit_ns`; at least `least`.

    shape_of: the batch that would be planned with so many rows. O(log tiles) estimates: that a batch of more tiles
    takes no less time is assumed in the search, that the batch returned keeps the limit (if it is more than `least`)
    is not.
    """
    tile = host.tile
    low, high = least // tile, most // tile
    while low < high:
        middle = (low + high + 1) // 2
        if host.estimate_ns(shape_of(middle * tile)) <= limit_ns:
            low = middle
        else:
            high = middle - 1
    return max(least, low * tile)


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """Time of a prefill chunk of x tokens on a prefix of L: t(L, x) = c + g L + b x + a (2 L x + x^2), in ns.

    c is paid by every iteration, g by reading a token of the prefix, b by a token's linear layers, a by a pair of
    tokens in attention (2 L x + x^2 is twice the pairs that a causal chunk attends to).
    """

    c: float
    g: float
    b: float
    a: float

    def ns(self, prefix: int, tokens: float) -> float:
        return self.c + self.g * prefix + self.b * tokens + self.a * (2 * prefix * tokens + tokens * tokens)

    def tokens_within(self, limit_ns: float, prefix: int) -> float:
        """Tokens of the chunk that takes `limit_ns` on this prefix; 0 if the prefix alone takes longer."""
        room = limit_ns - self.c - self.g * prefix
        slope = self.b + 2 * self.a * prefix
        if room <= 0 or slope <= 0:
            return 0.0
        # 2 room / (slope + root) is the positive root of a x^2 + slope x = room, also for a = 0.
        return 2 * room / (slope + sqrt(max(0.0, slope * slope + 4 * self.a * room)))

    @classmethod
    def from_estimates(cls, host: Host, prefix: int, tokens: int) -> ChunkTime:
        """The four coefficients from four estimates: `tokens` and half as many, on no prefix and on `prefix`.

        Exact where the engine's times have that form; elsewhere it agrees at these four points.
        """
        half = max(1, tokens // 2)
        full = max(half + 1, tokens)
        prefix = max(1, prefix)

        def estimate(tokens: int, prefix: int) -> Ns:
            return host.estimate_ns(BatchShape(((tokens, prefix),)))

        t_half, t_full = estimate(half, 0), estimate(full, 0)
        more_half, more_full = estimate(half, prefix) - t_half, estimate(full, prefix) - t_full
        a = max(0.0, (more_full - more_half) / (2 * prefix * (full - half)))
        g = more_half / prefix - 2 * a * half
        b = (t_full - t_half) / (full - half) - a * (full + half)
        return cls(t_half - b * half - a * half * half, g, b, a)
