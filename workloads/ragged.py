"""Lists of different lengths in two arrays: prefix hashes and prompt ids of a whole trace.

A tuple of Python integers per request costs tens of bytes a hash. Here row i is `values[offsets[i]:offsets[i + 1]]`,
and a tuple is made only when somebody asks for that row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray


class RaggedColumn(Sequence[tuple[int, ...]]):
    """A read-only sequence of integer tuples. Slicing and `take` give another RaggedColumn."""

    __slots__ = ("offsets", "values")

    def __init__(self, values: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        self.values = values
        self.offsets = offsets

    @classmethod
    def of(cls, lists: Iterable[Sequence[int]]) -> RaggedColumn:
        """From any sequence of integer sequences."""
        if isinstance(lists, cls):
            return lists
        rows = list(lists)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        values = np.fromiter((value for row in rows for value in row), np.int64, int(offsets[-1]))
        return cls(values, offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.offsets.nbytes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, row: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, row: slice) -> RaggedColumn: ...
    def __getitem__(self, row: int | slice) -> tuple[int, ...] | RaggedColumn:
        if isinstance(row, slice):
            return self.take(np.arange(len(self))[row])
        index = range(len(self))[row]
        return tuple(self.values[self.offsets[index] : self.offsets[index + 1]].tolist())

    def take(self, rows: NDArray[np.int64]) -> RaggedColumn:
        """The given rows in the given order."""
        lengths = self.lengths[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        starts = np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return RaggedColumn(self.values[starts + np.arange(offsets[-1])], offsets)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaggedColumn):
            return NotImplemented
        return np.array_equal(self.lengths, other.lengths) and np.array_equal(
            self.values[self.offsets[0] : self.offsets[-1]], other.values[other.offsets[0] : other.offsets[-1]]
        )

    __hash__ = None  # type: ignore[assignment]


class RangeColumn(Sequence[tuple[int, ...]]):
    """A read-only sequence of runs of integers: row i is starts[i], starts[i] + 1, ..., counts[i] of them."""

    __slots__ = ("counts", "starts")

    def __init__(self, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        self.starts = starts
        self.counts = counts

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.counts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return self.take(np.arange(len(self))[row])
        start = int(self.starts[row])
        return tuple(range(start, start + int(self.counts[row])))

    def take(self, rows: NDArray[np.int64]) -> RangeColumn:
        """The given rows in the given order."""
        return RangeColumn(self.starts[rows], self.counts[rows])
