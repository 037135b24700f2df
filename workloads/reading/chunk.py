"""Some rows of a request file before their cells are understood, whatever container they come from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class BadRow(NamedTuple):
    """A row that could not be taken apart. at: before which of its chunk's good rows it stands."""

    at: int
    row: int
    line: int
    problem: str


class Chunk(NamedTuple):
    """rows: number of each row in the file, 1 for the first request. lines: of the file, from 1; 0 where it has none.

    cells: column name -> as many cells: a pyarrow array, or a list of Python values.
    """

    rows: NDArray[np.int64]
    lines: NDArray[np.int64]
    cells: Mapping[str, Any]
    bad: Sequence[BadRow] = ()

    def cut(self, count: int) -> tuple[Chunk, Chunk]:
        """The first `count` good rows with the bad ones before them, and the rest."""
        first, rest = slice(0, count), slice(count, None)
        one, other = ({name: cells[part] for name, cells in self.cells.items()} for part in (first, rest))
        early = [bad for bad in self.bad if bad.at < count]
        late = [bad._replace(at=bad.at - count) for bad in self.bad if bad.at >= count]
        return Chunk(self.rows[first], self.lines[first], one, early), Chunk(
            self.rows[rest], self.lines[rest], other, late
        )


class Table(Protocol):
    """A file of rows. kind: csv, jsonl or parquet. names: of its columns. late_names: of further ones that came up too
    late to be read."""

    kind: str
    path: str
    names: list[str]

    @property
    def late_names(self) -> Collection[str]: ...

    def chunks(self, wanted: Sequence[str]) -> Iterator[Chunk]:
        """All rows, in order, with the wanted columns."""
        ...


def place(row: int, line: int) -> str:
    """How an error message says where a row is."""
    return f"row {row} (line {line})" if line else f"row {row}"


def as_numpy(array: Any) -> NDArray[Any]:
    """A pyarrow array of numbers or truths without nulls, straight from memory: its own `to_numpy` loads pandas first,
    which takes longer than reading many a trace."""
    import pyarrow as pa

    if pa.types.is_boolean(array.type):
        return as_numpy(array.cast(pa.uint8())).astype(bool)
    if not len(array):
        return np.empty(0, array.type.to_pandas_dtype())
    dtype = array.type.to_pandas_dtype()
    return np.frombuffer(array.buffers()[1], dtype, count=array.offset + len(array))[array.offset :]


def taken(array: Any, which: NDArray[Any]) -> Any:
    """The elements of a pyarrow array at some positions, given to it as memory for the same reason."""
    import pyarrow as pa

    positions = np.ascontiguousarray(which, np.int64)
    return array.take(pa.Array.from_buffers(pa.int64(), len(positions), [None, pa.py_buffer(positions)]))
