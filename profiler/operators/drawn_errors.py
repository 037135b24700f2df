"""Random errors of a fitted model as a field over shapes: what `perturbed(seed)` multiplies an operator's times by.

Between two measured values of an axis an error rises from nothing (or from what repeats scatter by) and falls again;
each gap has its own, as held-out structures do. Along the other coordinates it is a lattice of independent normal
values some octaves apart, at a random place, with straight lines between, and a value of the whole gap. A normal value
becomes an error by the quantiles that were measured in its region, so that sizes and tails are those of
`profiler.operators.fitting.error_sizes`. Errors of several axes add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from profiler.operators.fitting.error_sizes import COORDINATES, FARTHEST, Spread, octaves

if TYPE_CHECKING:
    from profiler.operators.attention_tables import AttentionTables

Array = NDArray[np.float64]

_NORMAL = (0.0, 0.3186, 0.6745, 1.1503, 1.6449, 1.9600, 2.3263, 3.0)
"""|z| of a normal value at LEVELS; the largest error seen stands for all beyond three standard deviations."""
AT_KNOTS = ("prefill prefixes", "mixed chunk sizes", "mixed prefixes", "mixed batch sizes", "mixed contexts")
AT_KNOT = 2**-0.5
"""These axes have no room in a table between two measured values: errors are drawn at its knots and straight lines
lie between them, at a size that gives the same mean square as a tent between two knots."""


class ErrorField:
    """One draw of an operator's errors."""

    def __init__(self, spreads: Iterable[Spread], seed: int) -> None:
        self._parts = [_Part(spread, seed) for spread in spreads]

    def factors(self, *coordinates: Any) -> Array:
        """What times are multiplied by on the grid of these coordinates (one row of values each, in the operator's
        order), one dimension each."""
        places = [octaves(np.ravel(values)) for values in coordinates]
        total = np.zeros([len(place) for place in places])
        for part in self._parts:
            total += part.errors(places)
        return np.asarray(np.exp(total))


class _Part:
    """The errors along one axis."""

    def __init__(self, spread: Spread, seed: int) -> None:
        self.spread = spread
        self.knots = octaves(spread.knots)
        random = np.random.default_rng([seed, crc32(spread.name.encode())])
        coordinates = COORDINATES[spread.operator]
        self.own = coordinates.index(spread.axis)
        self.reach = [spread.reach.get(name, 0.0) for name in coordinates]
        self.phase = random.random(len(coordinates))
        self.values = random.standard_normal(spread.nodes)
        self.whole = random.standard_normal(spread.nodes[self.own])

    def errors(self, places: list[Array]) -> Array:
        """log error on a grid of octaves."""
        normal = self.values
        for dimension, place in enumerate(places):
            if dimension == self.own:
                normal = normal.take(np.searchsorted(self.knots, place, side="right"), axis=dimension)
                continue
            at = np.minimum(place, FARTHEST) / self.reach[dimension] + self.phase[dimension]
            cell = at.astype(np.int64)
            share = (at - cell).reshape([-1 if one == dimension else 1 for one in range(len(places))])
            line = normal.take(cell, axis=dimension) * (1.0 - share) + normal.take(cell + 1, axis=dimension) * share
            normal = line / np.sqrt((1.0 - share) ** 2 + share**2)
        # Along its own axis first, so that a region is a run of rows.
        rows = np.moveaxis(normal, self.own, 0)
        gaps = np.searchsorted(self.knots, places[self.own], side="right").reshape([-1] + [1] * (rows.ndim - 1))
        region = np.abs(places[self.own][:, None] - self.spread.centres).argmin(axis=1)
        common = self.spread.common[region].reshape(gaps.shape)
        rows = np.sqrt(1.0 - common) * rows + np.sqrt(common) * self.whole[gaps]
        size = np.empty_like(rows)
        for one in np.unique(region):
            size[region == one] = np.interp(np.abs(rows[region == one]), _NORMAL, self.spread.sizes[one])
        if self.spread.name in AT_KNOTS:
            size *= max(AT_KNOT, self.spread.floor)
        else:
            size *= self._between(places[self.own]).reshape([-1] + [1] * (rows.ndim - 1))
        return np.moveaxis(np.copysign(size, rows), 0, self.own)

    def _between(self, place: Array) -> Array:
        """1 halfway between two measured values and beyond them all, the floor at them."""
        after = np.clip(np.searchsorted(self.knots, place, side="right"), 1, max(len(self.knots) - 1, 1))
        if len(self.knots) < 2:
            return np.ones(len(place))
        low, high = self.knots[after - 1], self.knots[after]
        share = (place - low) / (high - low)
        inside = (share >= 0.0) & (share <= 1.0)
        return np.where(inside, np.maximum(1.0 - np.abs(2.0 * share - 1.0), self.spread.floor), 1.0)


class DrawnAttention:
    """Tables of attention whose times are off by drawn errors, as the source of other tables.

    Without errors those repeat the first ones, knots between theirs included: what differs is drawn.
    """

    def __init__(self, tables: AttentionTables, fields: Mapping[str, ErrorField], more: Mapping[str, float]) -> None:
        """fields: by "decode", "prefill", "mixed". more: one factor for all shapes of a kind."""
        self._tables, self._source, self._fields, self._more = tables, tables.source, fields, more

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    @property
    def differs(self) -> bool:
        """Whether anything is off at all."""
        return any(kind in self._fields or self._more.get(kind, 1.0) != 1.0 for kind in ("decode", "prefill", "mixed"))

    def knots(self, axis: str, most: int | None = None) -> Array:
        """The fit's, and in small tables the middle between two, where errors are largest."""
        if most is None:
            return np.asarray(self._source.knots(axis))
        own = np.asarray(self._source.knots(axis, most), float)
        return np.concatenate([own, np.round(np.sqrt((own[1:] + 1.0) * (own[:-1] + 1.0)) - 1.0)])

    def decode_us(self, decodes: Any, context: Any, typical: bool = False) -> Array:
        count, mean = self._grid(decodes, context)
        ns = self._tables.decode_ns_of(count.ravel(), (count * mean).ravel(), mean.ravel())
        return self._off("decode", ns.reshape(count.shape) * 1e-3, decodes, context)

    def prefill_us(self, tokens: Any, prefix: Any) -> Array:
        rows, before = self._grid(tokens, prefix)
        ns = self._tables.chunk_ns_of(rows.ravel(), before.ravel())
        return self._off("prefill", ns.reshape(rows.shape) * 1e-3, tokens, prefix)

    def batch_us(self, tokens: Any, prefix: Any, decodes: Any, context: Any, typical: bool = False) -> Array:
        us = self._source.batch_us(tokens, prefix, decodes, context, typical)
        return self._off("mixed", us, tokens, prefix, decodes, context)

    @staticmethod
    def _grid(*coordinates: Any) -> list[NDArray[np.int64]]:
        """Every pair; tables have their knots at whole numbers."""
        return [np.array(values) for values in np.broadcast_arrays(*(np.asarray(c, np.int64) for c in coordinates))]

    def _off(self, kind: str, us: Array, *coordinates: Any) -> Array:
        """us: on the grid of the coordinates, each of which varies along a dimension of its own."""
        us = us * self._more.get(kind, 1.0)
        field = self._fields.get(kind)
        return us if field is None else us * field.factors(*coordinates).reshape(np.shape(us))
