"""Many batch shapes as columns: what vectorised predictions, FLOP counts and byte counts work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.work.batch import BatchShape
from profiler.errors import ProfileError

Column = NDArray[np.int64]

NUMBERS = len(BatchShape._fields) - 1
"""Of a shape, beside its chunks."""

SINCE_SPECULATION = ("draft_tokens", "draft_context_total", "drafting")
"""Columns that runs of earlier versions lack: nobody speculated in them."""

_RANGE = 1 << 63
_BEYOND = "has no place in 64 bits; no batch is that large"


@dataclass(frozen=True)
class ShapeColumns:
    """One entry per batch in every column of length n; chunks of all batches lie one after another.

    chunk_tokens, chunk_prefix: all chunks in batch order. chunk_offsets: n + 1 positions; batch i owns the chunks
    `chunk_offsets[i]:chunk_offsets[i + 1]`.
    """

    chunk_tokens: Column
    chunk_prefix: Column
    chunk_offsets: Column
    decodes: Column
    decode_context_total: Column
    decode_context_max: Column
    dummy_tokens: Column
    sampled: Column
    executed_rows: Column
    draft_tokens: Column
    draft_context_total: Column
    drafting: Column

    def __len__(self) -> int:
        return len(self.decodes)

    @classmethod
    def of(cls, shapes: object) -> ShapeColumns:
        """Columns of a sequence of BatchShape; columns pass through."""
        if isinstance(shapes, cls):
            return shapes
        if isinstance(shapes, BatchShape) or not isinstance(shapes, Sequence):
            raise ProfileError(
                f"shapes: found {type(shapes).__name__}, expected a sequence of BatchShape or ShapeColumns"
            )
        n = len(shapes)
        offsets = np.zeros(n + 1, np.int64)
        np.cumsum(np.fromiter((len(shape[0]) for shape in shapes), np.int64, n), out=offsets[1:])
        numbers = chain.from_iterable(shape[1:] for shape in shapes)
        pairs = chain.from_iterable(chain.from_iterable(shape[0] for shape in shapes))
        try:
            flat = np.fromiter(numbers, np.int64, NUMBERS * n).reshape(n, NUMBERS).T.copy()
            chunks = np.fromiter(pairs, np.int64, 2 * int(offsets[-1])).reshape(-1, 2).T.copy()
        except OverflowError:
            raise ProfileError(f"shapes: found a number that {_BEYOND}") from None
        for column in (flat, chunks):
            # Columns are summed over all batches.
            if column.size and (most := int(column.max())) * column.size >= _RANGE:
                raise ProfileError(f"shapes: found {most:,}; the sum over so many batches {_BEYOND}")
        return cls(chunks[0], chunks[1], offsets, *flat)

    @classmethod
    def of_iterations(cls, table: Any) -> ShapeColumns:
        """Columns of a run's iterations table (pyarrow), whose `chunks` are lists of {request, tokens, prefix, ...}."""
        chunks = table.column("chunks").combine_chunks()
        flat = chunks.flatten()
        offsets = np.zeros(len(chunks) + 1, np.int64)
        np.cumsum(chunks.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), out=offsets[1:])

        def column(values: Any) -> Column:
            return np.asarray(values.to_numpy(zero_copy_only=False), np.int64)

        def table_column(name: str) -> Column:
            if name in SINCE_SPECULATION and name not in table.column_names:
                return np.zeros(len(chunks), np.int64)
            return column(table.column(name).combine_chunks())

        return cls(
            column(flat.field("tokens")),
            column(flat.field("prefix")),
            offsets,
            *(table_column(name) for name in BatchShape._fields[1:]),
        )

    def shapes(self) -> list[BatchShape]:
        """The batches one by one."""
        pairs = list(zip(self.chunk_tokens.tolist(), self.chunk_prefix.tolist(), strict=True))
        ends = self.chunk_offsets.tolist()
        numbers = zip(
            self.decodes.tolist(),
            self.decode_context_total.tolist(),
            self.decode_context_max.tolist(),
            self.dummy_tokens.tolist(),
            self.sampled.tolist(),
            self.executed_rows.tolist(),
            self.draft_tokens.tolist(),
            self.draft_context_total.tolist(),
            self.drafting.tolist(),
            strict=True,
        )
        return [BatchShape(tuple(pairs[ends[at] : ends[at + 1]]), *rest) for at, rest in enumerate(numbers)]

    def part(self, start: int, stop: int) -> ShapeColumns:
        """Batches `start` to `stop` as views."""
        offsets = self.chunk_offsets[start : stop + 1]
        chunks = slice(int(offsets[0]), int(offsets[-1]))
        batches = slice(start, stop)
        return ShapeColumns(
            self.chunk_tokens[chunks],
            self.chunk_prefix[chunks],
            offsets - offsets[0],
            self.decodes[batches],
            self.decode_context_total[batches],
            self.decode_context_max[batches],
            self.dummy_tokens[batches],
            self.sampled[batches],
            self.executed_rows[batches],
            self.draft_tokens[batches],
            self.draft_context_total[batches],
            self.drafting[batches],
        )

    def per_batch(self, chunk_values: Column) -> Column:
        """Sums of a per-chunk integer column over each batch's chunks."""
        sums = np.zeros(len(chunk_values) + 1, np.int64)
        np.cumsum(chunk_values, out=sums[1:])
        at = sums.take(self.chunk_offsets)
        return at[1:] - at[:-1]

    @cached_property
    def has_chunks(self) -> NDArray[np.bool_]:
        return self.chunk_offsets[1:] > self.chunk_offsets[:-1]

    @cached_property
    def tokens(self) -> Column:
        """Useful tokens: prefill and decode together, without dummies."""
        return self.per_batch(self.chunk_tokens) + self.decodes + self.draft_tokens

    @cached_property
    def rows(self) -> Column:
        """Rows that every linear layer pays for, as BatchShape.rows."""
        rows: Column = np.maximum(self.tokens + self.dummy_tokens, self.executed_rows)
        return rows


def attended_pairs(tokens: Column, prefix: Column, window: int | None) -> Column:
    """Query-key pairs of many chunks; ModelSpec.attended in columns."""
    if len(tokens):
        most, longest = int(tokens.max()), int(prefix.max())
        # Twice, as costs count a pair for keys and one for values; and summed over all chunks.
        if 2 * most * (longest + most + 1) * len(tokens) >= _RANGE:
            seen = prefix.astype(float) + tokens + 1
            within_range(2 * float(np.dot(tokens.astype(float), seen)), "query-key pairs")
    if window is None:
        return tokens * prefix + tokens * (tokens + 1) // 2
    growing: Column = np.clip(window - prefix, 0, tokens)
    pairs: Column = growing * prefix + growing * (growing + 1) // 2 + (tokens - growing) * window
    return pairs


def within_range(largest: float, what: str) -> None:
    """Raises ProfileError where whole numbers of this size would wrap around."""
    if not -_RANGE < largest < _RANGE:
        raise ProfileError(f"shapes: found {largest:.1e} {what}, which {_BEYOND}")
