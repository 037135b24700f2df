"""How many experts a batch touches where each token chooses for itself, from how likely each expert is chosen.

This is what whole iterations are charged by: chances are counted in a run, and answer for any number of rows. (A
`Spread` draws whole batches of the uneven loads that kernel tables were measured with.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.errors import ProfileError

Array = NDArray[np.float64]

MOST_EXPERTS = 1 << 16


@dataclass(frozen=True)
class ExpertChances:
    """layers: of each layer and expert the probability that a token goes there; every layer's sum is top_k. A token
    goes to top_k different experts."""

    layers: tuple[tuple[float, ...], ...]

    @classmethod
    def balanced(cls, experts: int, top_k: int) -> ExpertChances:
        """One layer whose experts are all as likely."""
        return cls(((top_k / experts,) * experts,))

    @classmethod
    def power_law(cls, experts: int, top_k: int, alpha: float) -> ExpertChances:
        """One layer in which expert number i (from 1) has a popularity of i^-alpha, and a token draws top_k of them
        without putting any back. Larger alpha: a few experts get most tokens."""
        if not 0 <= alpha <= 100:
            raise ProfileError(f"experts: found an exponent of {alpha:g}, expected 0 to 100")
        popularity = np.arange(1, experts + 1, dtype=float) ** -alpha
        return cls((tuple(drawn_chances(popularity, top_k).tolist()),))

    @classmethod
    def measured(cls, counts: Any, rows: Any) -> ExpertChances:
        """From how many rows went to each expert: counts [layers, experts], rows of each layer [layers], all above
        0."""
        counts, rows = np.asarray(counts, float), np.asarray(rows, float)
        chances = np.clip(counts / rows[:, None], 0.0, 1.0)
        return cls(tuple(tuple(layer) for layer in np.round(chances, 9).tolist()))

    def touched(self, rows: Any) -> Array:
        """Experts that batches of so many tokens touch, [len(rows)]: expected, and the mean over layers.

        n tokens leave an expert untouched with probability (1 - chance)^n.
        """
        rows, places = np.unique(np.atleast_1d(np.asarray(rows, np.int64)), return_inverse=True)
        distinct, times = np.unique(np.array(self.layers), return_counts=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            untouched = np.exp(np.log1p(-distinct)[None, :] * np.maximum(rows, 0)[:, None].astype(float))
        untouched = np.where(rows[:, None] <= 0, 1.0, untouched)  # 0 * -inf: an expert that everybody goes to
        found: Array = ((1.0 - untouched) @ times) / len(self.layers)
        return found[places]


def drawn_chances(popularity: Array, top_k: int) -> Array:
    """The chance of each expert to be among top_k that are drawn one after the other in proportion to popularity.

    The chances are 1 - exp(-popularity * t) with the t at which they sum to top_k (Rosen, "Asymptotic theory for
    successive sampling", 1972): exact where all are equally popular, within 3 % of the truth for tens of experts (1 %
    in how many are touched).
    """
    experts = len(popularity)
    if not 1 <= top_k <= experts <= MOST_EXPERTS:
        raise ProfileError(f"experts: found top {top_k} of {experts}, expected 1 to as many as there are")
    if top_k == experts:
        return np.ones(experts)
    share = np.maximum(popularity / popularity.sum(), 1e-300)
    low, high = -40.0, 600.0  # of log t
    for _ in range(200):
        middle = (low + high) / 2
        if -np.expm1(-share * np.exp(middle)).sum() < top_k:
            low = middle
        else:
            high = middle
    chances: Array = -np.expm1(-share * np.exp(high))
    return chances
