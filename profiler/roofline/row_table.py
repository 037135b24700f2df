"""Times by a number of rows: a table that grows up to a size, and larger numbers one by one as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from profiler.errors import ProfileError

Column = NDArray[np.int64]

TABLED_ROWS = 1 << 16
"""The largest number of rows in a table. A prompt of a million tokens needs one entry, not a million."""


class RowTable:
    """ns: the table, a list that grows in place, so that a hot path may hold it and look up what it has.

    terms: named columns of ns for a column of row counts; their sum is what a table holds.
    """

    def __init__(self, terms: Callable[[Column], Mapping[str, Column]], rows: int) -> None:
        self._terms = terms
        self.ns: list[int] = []
        self._column: Column = np.zeros(0, np.int64)
        self._large: dict[int, int] = {}
        self._grow(rows)

    def at(self, rows: int) -> int:
        """Of any number of rows."""
        if 0 <= rows < len(self.ns):
            return self.ns[rows]
        if rows < 0:
            raise ProfileError(f"batch of {rows} rows: expected 0 or more")
        if rows <= TABLED_ROWS:
            self._grow(rows)
            return self.ns[rows]
        if rows not in self._large:
            self._large[rows] = int(self._sum(np.array([rows], np.int64))[0])
        return self._large[rows]

    def each(self, rows: Column) -> Column:
        """Of many numbers of rows."""
        most = int(rows.max(initial=0))
        if most >= len(self.ns):
            self.at(most)
            if most > TABLED_ROWS:
                self._grow(TABLED_ROWS)
                found = self._column.take(rows, mode="clip")
                for place in np.flatnonzero(rows > TABLED_ROWS).tolist():
                    found[place] = self.at(int(rows[place]))
                return found
        return self._column.take(rows)

    def _grow(self, rows: int) -> None:
        """Reach so many rows, and at least twice as many as before."""
        size = min(max(rows + 1, 2 * len(self.ns)), TABLED_ROWS + 1)
        if size > len(self.ns):
            self._column = self._sum(np.arange(size, dtype=np.int64))
            self.ns.extend(self._column[len(self.ns) :].tolist())

    def _sum(self, rows: Column) -> Column:
        total: Column = np.add.reduce(list(self._terms(rows).values()), axis=0, dtype=np.int64)
        return total
