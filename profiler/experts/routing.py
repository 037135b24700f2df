"""How the tokens of a batch spread over experts: what decides the time of an expert layer beside its sizes.

A spread draws how many tokens every expert gets. Of devices with whole experts (expert parallel) the fullest counts,
since all others wait for it. What the law of an expert layer sees is the mean over draws: experts that got any token,
tokens in all, and tokens rounded up to whole tiles of each expert.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from profiler.errors import ProfileError

Array = NDArray[np.float64]

TILES = (16, 32, 64, 128)
"""Rows that kernels of experts deal out at a time."""
DRAWS = 12
MORE_DRAWS = 96
"""Of spreads whose counts are drawn one by one: few tokens scatter most, and drawing is quick."""
MOST_DRAWN = 65536
"""Tokens of a batch beyond which loads are those of so many in proportion."""

_POWER = re.compile(r"power_law_(\d+(?:\.\d+)?)\Z")
KINDS = "uniform, balanced, power_law_1.01 (any exponent), or a file of counts"


@dataclass(frozen=True)
class Spread:
    """One of: "uniform" (each token's experts drawn evenly), "balanced" (as evenly as can be), "power_law" with the
    exponent `alpha` (as NVIDIA aiconfigurator's collector draws them: few experts get most), or "counts" (measured
    `shares` of the experts).
    """

    kind: str
    alpha: float = 0.0
    shares: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Spread:
        """A name, or a CSV file with a column `count`, one row an expert. Raises ProfileError."""
        if text in ("uniform", "balanced"):
            return cls(text)
        found = _POWER.match(text)
        if found and 0.0 < float(found[1]) <= 4.0:
            return cls("power_law", float(found[1]))
        if Path(text).suffix == ".csv":
            return cls("counts", shares=_read_counts(Path(text)))
        raise ProfileError(f"routing: found {text!r}, expected one of {KINDS} (.csv with a column count)")

    @property
    def name(self) -> str:
        return f"power_law_{self.alpha:g}" if self.kind == "power_law" else self.kind

    def counts(self, tokens: int, experts: int, top_k: int, draws: int = DRAWS) -> Array:
        """[draws, experts]: tokens that each expert gets, whole numbers. Rows sum to tokens * top_k; where experts are
        drawn one by one, in the mean."""
        total = tokens * top_k
        if self.kind == "balanced":
            return _balanced(tokens, experts, top_k)[None]
        rng = np.random.default_rng(tokens * 1009 + experts * 31 + top_k)
        if self.kind == "power_law":
            low, high = (1.0, tokens * 0.8) if total > experts else (0.01, 2.0)
            weights = _power_law(rng.random((draws, experts)), self.alpha, low, max(high, low * 1.01))
            return _whole(weights, total, tokens)
        shares = np.full(experts, 1.0 / experts)
        if self.kind == "counts":
            if len(self.shares) != experts:
                raise ProfileError(f"routing: found counts of {len(self.shares)} experts, expected {experts}")
            shares = np.array(self.shares)
        # No token goes to one expert twice: each count is binomial, with at most `tokens`.
        likely = np.minimum(shares * top_k, 1.0)
        return rng.binomial(tokens, likely, (max(draws, MORE_DRAWS), experts)).astype(float)


@dataclass(frozen=True)
class Loads:
    """Of the fullest device, in the mean over draws. touched: experts with at least one token. tokens: rows that its
    experts work on. padded: these rounded up to whole tiles of each expert, by TILES."""

    touched: float
    tokens: float
    padded: tuple[float, ...]


@lru_cache(maxsize=1 << 16)
def loads(spread: Spread, tokens: int, experts: int, top_k: int, ways: int = 1) -> Loads:
    """Of a batch of `tokens` whose experts are dealt to `ways` devices, whole experts each."""
    drawn = min(tokens, MOST_DRAWN)
    counts = spread.counts(drawn, experts, top_k)
    if ways > 1:
        grouped = counts.reshape(len(counts), ways, experts // ways)
        fullest = grouped.sum(axis=2).argmax(axis=1)
        counts = grouped[np.arange(len(counts)), fullest]
    more = tokens / drawn
    padded = [float((np.ceil(counts / tile) * tile).sum(axis=1).mean()) * more for tile in TILES]
    return Loads(float((counts > 0).sum(axis=1).mean()), float(counts.sum(axis=1).mean()) * more, tuple(padded))


def columns(spread: Spread, tokens: Sequence[int], experts: int, top_k: int, ways: int = 1) -> Array:
    """[len(tokens), 2 + len(TILES)]: touched, tokens, padded of each batch."""
    rows = [loads(spread, int(count), experts, top_k, ways) for count in tokens]
    return np.array([(one.touched, one.tokens, *one.padded) for one in rows], float).reshape(len(rows), 2 + len(TILES))


def _power_law(uniform: Array, alpha: float, low: float, high: float) -> Array:
    power = 1.0 - alpha
    if abs(power) < 1e-9:
        return np.asarray(low * (high / low) ** uniform)
    return np.asarray(((high**power - low**power) * uniform + low**power) ** (1.0 / power))


def _whole(weights: Array, total: int, most: int) -> Array:
    """Counts in proportion to weights that sum to `total`, none above `most`."""
    found = np.minimum(np.rint(weights / weights.sum(axis=1, keepdims=True) * total), most)
    for row in found:
        while (missing := int(total - row.sum())) != 0:
            order = np.argsort(-row, kind="stable")
            if missing > 0:
                order = order[row[order] < most][:missing]
                row[order] += 1
            else:
                order = order[row[order] > 0][:-missing]
                row[order] -= 1
    return np.asarray(found)


def _balanced(tokens: int, experts: int, top_k: int) -> Array:
    """Token t's i-th expert lies i strides further; below a stride of tokens the first ones are spread evenly too."""
    stride = -(-experts // top_k)
    index = np.arange(tokens)[:, None]
    first = index if tokens >= stride else index * stride / tokens
    chosen = (first + np.arange(top_k)[None] * stride) % experts
    return np.bincount(chosen.astype(np.int64).ravel(), minlength=experts).astype(float)


def _read_counts(path: Path) -> tuple[float, ...]:
    import csv

    from policies.edges.input_file import checked_file

    with checked_file(path, ProfileError).open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        if "count" not in (reader.fieldnames or ()):
            raise ProfileError(f"{path}: found columns {reader.fieldnames}, expected a column count, one row an expert")
        counts = []
        for number, row in enumerate(reader, 2):
            try:
                counts.append(float(row["count"]))
            except (TypeError, ValueError):
                raise ProfileError(f"{path}: line {number}, count: found {row['count']!r}, expected a number") from None
            if not 0 <= counts[-1] < 1e18:
                raise ProfileError(f"{path}: line {number}, count: found {counts[-1]:g}, expected 0 or more")
    if not sum(counts):
        raise ProfileError(f"{path}: count: found no token, expected counts of experts above 0")
    return tuple(count / sum(counts) for count in counts)
