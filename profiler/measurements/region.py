"""Where a run goes: the batch shapes it visits, as plain data that a dry simulated run (or any run folder) yields.

A profile has to be dense where batches will be and need not exist where none will: this is what tells it so. Shapes are
compared in doublings: 512 and 1,024 prefill tokens lie as far apart as 8 and 16 decodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.work.batch import BatchShape
from profiler.errors import ProfileError

Array = NDArray[np.float64]

AXES = ("prefill_tokens", "prefix", "chunks", "decodes", "context", "skew", "dummies")
"""Coordinates of a shape: tokens of all chunks, their mean prefix (weighted by tokens), number of chunks, decodes,
mean context of a decode, largest context over the mean, dummy rows. Each as log2(1 + x), skew as log2."""

_WEIGHT = np.array([1.0, 0.5, 0.7, 1.0, 1.0, 0.5, 0.7])
_KEPT = 4000


@dataclass(frozen=True)
class Region:
    """Distinct shapes (executed rows left out: an engine's graphs decide them) and how often each was visited."""

    shapes: tuple[BatchShape, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shapes or len(self.shapes) != len(self.counts):
            raise ProfileError(
                f"region: found {len(self.shapes)} shapes, {len(self.counts)} counts; expected equal, >0"
            )

    @classmethod
    def of(cls, shapes: Iterable[BatchShape], *, kept: int = _KEPT) -> Region:
        """The region of many shapes, alike ones (a quarter of a doubling on every axis) taken as one.

        kept: most distinct shapes; if there are more, cells get coarser until they fit.
        """
        plain = [shape._replace(executed_rows=0) for shape in shapes if shape.tokens]
        if not plain:
            raise ProfileError("region: found no batch with tokens in it, expected at least one")
        points = coordinates(plain)
        step = 0.25
        while True:
            cells = np.floor(points / step).astype(np.int64)
            _, first, counts = np.unique(cells, axis=0, return_index=True, return_counts=True)
            if len(first) <= kept:
                break
            step *= 1.5
        return cls(tuple(plain[row] for row in first.tolist()), tuple(counts.tolist()))

    @classmethod
    def of_bounds(cls, *, chunk: int, decodes: int, context: int) -> Region:
        """Every combination of a few sizes up to the bounds, for a profile without a trace in mind."""
        if min(chunk, decodes, context) < 1:
            raise ProfileError(f"region: found bounds {chunk}, {decodes}, {context}, expected at least 1 each")
        shapes = []
        for tokens in (0, *_sizes(chunk)):
            for batch in (0, *_sizes(decodes)):
                for length in _sizes(context, least=16):
                    prefix = 0 if length <= tokens else length - tokens
                    chunks = ((tokens, prefix),) if tokens else ()
                    if tokens and prefix and batch == 0:
                        shapes.append(BatchShape(((tokens, 0),), 0, 0, 0, 0, 1))
                    if tokens or batch:
                        held = length if batch else 0
                        sampled = batch + (1 if tokens else 0)
                        shapes.append(BatchShape(chunks, batch, batch * held, held, 0, sampled))
        return cls.of(shapes)

    def as_dict(self) -> dict[str, Any]:
        """{"shapes": [[[[tokens, prefix], ...], decodes, total, largest, dummies, sampled, count], ...]}."""
        return {
            "shapes": [
                [
                    [list(chunk) for chunk in s.chunks],
                    s.decodes,
                    s.decode_context_total,
                    s.decode_context_max,
                    s.dummy_tokens,
                    s.sampled,
                    n,
                ]
                for s, n in zip(self.shapes, self.counts)
            ]
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "region") -> Region:
        """The inverse of `as_dict`; ProfileError names the entry at fault."""
        rows = values.get("shapes")
        if not isinstance(rows, list):
            raise ProfileError(f"{where}: shapes: found {type(rows).__name__}, expected a list")
        shapes, counts = [], []
        for number, row in enumerate(rows):
            try:
                chunks, decodes, total, largest, dummies, sampled, count = row
                pairs = tuple((int(tokens), int(prefix)) for tokens, prefix in chunks)
                shape = BatchShape(pairs, int(decodes), int(total), int(largest), int(dummies), int(sampled))
                check_shape(shape)
            except (TypeError, ValueError) as error:
                raise ProfileError(f"{where}: shapes[{number}]: {error}") from None
            shapes.append(shape)
            counts.append(int(count))
        return cls(tuple(shapes), tuple(counts))

    @property
    def weights(self) -> Array:
        """Share of the visits that each shape had."""
        counts = np.array(self.counts, float)
        return np.asarray(counts / counts.sum())


def check_shape(shape: BatchShape) -> None:
    """Raise ProfileError for a shape that no engine can run."""
    if any(tokens < 1 or prefix < 0 for tokens, prefix in shape.chunks):
        raise ProfileError(f"found chunks {shape.chunks}, expected at least 1 token each on a prefix of 0 or more")
    decodes, total, largest = shape.decodes, shape.decode_context_total, shape.decode_context_max
    fits = total == largest == 0 if not decodes else decodes - 1 <= total - largest <= (decodes - 1) * largest
    if decodes < 0 or not fits or (decodes and largest < 1):
        raise ProfileError(
            f"found {decodes} decodes, contexts {total} in all, {largest} at most: expected a context of 1 or more each"
        )
    if shape.dummy_tokens < 0:
        raise ProfileError(f"found {shape.dummy_tokens} dummy tokens, expected 0 or more")
    if not shape.chunks and not decodes:
        raise ProfileError("found an empty batch, expected a chunk or a decode")


def coordinates(shapes: Sequence[BatchShape]) -> Array:
    """[shapes, AXES] in doublings."""
    rows = np.zeros((len(shapes), len(AXES)))
    for row, (chunks, decodes, total, largest, dummies, *_) in zip(rows, shapes):
        tokens = sum([t for t, _ in chunks])
        mean = total / decodes if decodes else 0.0
        row[0], row[2], row[3] = tokens, len(chunks), decodes
        row[1] = sum([t * p for t, p in chunks]) / tokens if tokens else 0.0
        row[4], row[5], row[6] = mean, largest / mean - 1.0 if mean else 0.0, dummies
    return np.log2(1.0 + rows)


def distance(points: Array, to: Array) -> Array:
    """Distance of many points to one, in doublings: what weighs more in an iteration's time weighs more here."""
    return np.asarray(np.sqrt(np.square((points - to) * _WEIGHT).sum(axis=1)))


def _sizes(most: int, least: int = 1) -> list[int]:
    """least, 4 least, ... and `most` itself."""
    sizes = []
    size = min(least, most)
    while size < most:
        sizes.append(size)
        size *= 4
    return [*sizes, most]
