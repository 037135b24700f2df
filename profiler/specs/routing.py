"""How tokens spread over the experts of a layer, and how many experts a batch therefore touches.

A routing is a probability for each expert that a token goes to it; a token goes to top_k different ones. Tokens of a
batch are taken to choose independently of each other: n tokens leave an expert untouched with probability (1 - p)^n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.edges.settings import shown
from profiler.errors import ProfileError

Array = NDArray[np.float64]

MOST_EXPERTS = 1 << 16


@dataclass(frozen=True)
class Routing:
    """chances: [layers, experts], the probability that a token goes to each expert; every row's sum is top_k.

    name: "balanced", "power:ALPHA" or "measured".
    """

    name: str
    chances: tuple[tuple[float, ...], ...]

    @classmethod
    def balanced(cls, experts: int, top_k: int) -> Routing:
        """Every expert is as likely as any other."""
        return cls("balanced", ((top_k / experts,) * experts,))

    @classmethod
    def power_law(cls, experts: int, top_k: int, alpha: float) -> Routing:
        """Expert number i (from 1) has a popularity of i^-alpha, and a token draws top_k of them without putting any
        back. Larger alpha: a few experts get most tokens."""
        if not 0 <= alpha <= 100:
            raise ProfileError(f"routing: found an exponent of {alpha:g}, expected 0 to 100")
        popularity = np.arange(1, experts + 1, dtype=float) ** -alpha
        return cls(f"power:{alpha:g}", (tuple(chances_of(popularity, top_k).tolist()),))

    @classmethod
    def measured(cls, counts: Any, rows: Any) -> Routing:
        """From how many rows went to each expert: counts [layers, experts], rows of each layer [layers]. A layer
        without rows says nothing and is left out."""
        counts, rows = np.asarray(counts, float), np.asarray(rows, float)
        seen = rows > 0
        if not seen.any():
            raise ProfileError("routing: found no rows in any layer, expected counts of a run")
        chances = np.clip(counts[seen] / rows[seen, None], 0.0, 1.0)
        return cls("measured", tuple(tuple(row) for row in np.round(chances, 9).tolist()))

    @classmethod
    def named(cls, text: str, experts: int, top_k: int) -> Routing:
        """What "balanced" or "power:1.2" stands for."""
        kind, colon, number = text.partition(":")
        if text == "balanced":
            return cls.balanced(experts, top_k)
        if kind == "power" and colon:
            try:
                return cls.power_law(experts, top_k, float(number))
            except ValueError:
                pass
        raise ProfileError(f"routing: found {shown(text)}, expected balanced or power:ALPHA, such as power:1.2")

    def activated(self, rows: Any) -> Array:
        """Experts that batches of so many tokens touch in the mean, [len(rows)]: expected, and the mean over layers."""
        rows, places = np.unique(np.atleast_1d(np.asarray(rows, np.int64)), return_inverse=True)
        chances = np.array(self.chances)
        # Few distinct chances (all layers of a balanced routing have one) are worked out once.
        distinct, times = np.unique(chances, return_counts=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            untouched = np.exp(np.log1p(-distinct)[None, :] * np.maximum(rows, 0)[:, None].astype(float))
        untouched = np.where(rows[:, None] == 0, 1.0, untouched)  # 0 * -inf: an expert that everybody goes to
        found: Array = ((1.0 - untouched) @ times) / len(chances)
        return found[places]


def chances_of(popularity: Array, top_k: int) -> Array:
    """The chance of each expert to be among top_k that are drawn one after the other in proportion to popularity.

    The chances are 1 - exp(-popularity * t) with the t at which they sum to top_k (Rosen, "Asymptotic theory for
    successive sampling", 1972): exact where all are equally popular, within 3 % of the truth for tens of
    experts (1 % in how many are touched).
    """
    experts = len(popularity)
    if not 1 <= top_k <= experts <= MOST_EXPERTS:
        raise ProfileError(f"routing: found top {top_k} of {experts} experts, expected 1 to as many as there are")
    if top_k == experts:
        return np.ones(experts)
    share = popularity / popularity.sum()
    if not (share > 0).all():
        share = np.maximum(share, 1e-300)
    low, high = -40.0, 600.0  # of log t
    for _ in range(200):
        middle = (low + high) / 2
        if -np.expm1(-share * np.exp(middle)).sum() < top_k:
            low = middle
        else:
            high = middle
    chances: Array = -np.expm1(-share * np.exp(high))
    return chances
