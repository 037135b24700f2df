"""Parquet: typed columns, so all that can go wrong is a wrong type, a missing value or a damaged file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from workloads.column_names import Field
from workloads.reading.raw_row import RawRow
from workloads.source import MAX_BYTES, MAX_ROWS, Source
from workloads.trace import TraceError

if TYPE_CHECKING:
    import pyarrow as pa


_BATCH_ROWS = 1 << 10
"""Of texts of a megabyte each these take a gigabyte."""


class ParquetTable:
    """The cells of one Parquet file."""

    kind = "parquet"

    def __init__(self, source: Source) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self.path = source.path
        try:
            self._file = parquet.ParquetFile(pa.BufferReader(source.content))
            groups = [self._file.metadata.row_group(i) for i in range(self._file.metadata.num_row_groups)]
        except (pa.ArrowException, OSError) as error:
            raise TraceError(f"{self.path}: found damaged Parquet ({_brief(error)}), expected a whole file") from None
        self._refuse_above(MAX_BYTES, sum(group.total_byte_size for group in groups))
        if (rows := self._file.metadata.num_rows) > MAX_ROWS:
            raise TraceError(f"{self.path}: found {rows:,} rows, expected at most {MAX_ROWS:,}; split the file")
        self.names = list(self._file.schema_arrow.names)
        for position, name in enumerate(self.names):
            if name in self.names[:position]:
                raise TraceError(
                    f"{self.path}, column {position + 1}: found the name {name!r} again, expected every name once"
                )

    def _read(self, columns: Sequence[str] | None) -> pa.Table:
        import pyarrow as pa

        batches: list[pa.RecordBatch] = []
        size = 0
        try:
            # Piece by piece: a kilobyte of dictionary and a few runs may stand for terabytes of texts or lists.
            for batch in self._file.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False):
                size += batch.nbytes
                self._refuse_above(2 * MAX_BYTES, size)
                batches.append(batch)
            return pa.Table.from_batches(batches, self._schema(columns)).combine_chunks()
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise TraceError(f"{self.path}: found damaged Parquet ({_brief(error)}), expected a whole file") from None

    def _schema(self, columns: Sequence[str] | None) -> pa.Schema:
        import pyarrow as pa

        whole = self._file.schema_arrow
        return whole if columns is None else pa.schema([whole.field(name) for name in columns])

    def _refuse_above(self, most: int, found: int) -> None:
        if found > most:
            raise TraceError(
                f"{self.path}: found {found:,} bytes or more when unpacked, expected at most {most:,}; split the file"
            )

    def columns(self, wanted: Sequence[Field]) -> dict[str, pa.ChunkedArray] | None:
        """The wanted columns by meaning, as the file has them."""
        table = self._read([field.column for field in wanted])
        return {field.meaning: table.column(field.column) for field in wanted}

    def rows(self) -> Iterator[RawRow]:
        """Every row as Python values."""
        row = 0
        for batch in self._read(None).to_batches(max_chunksize=1 << 14):
            columns = [_values(column) for column in batch.columns]
            for cells in zip(*columns):
                row += 1
                yield RawRow(row, 0, dict(zip(self.names, cells)))


def _values(column: pa.Array) -> list[object]:
    import pyarrow as pa

    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.string())  # keeps all nine digits, which datetime would not
    try:
        return list(column.to_pylist())
    except (ValueError, pa.ArrowException):
        return [None] * len(column)


def _brief(error: BaseException) -> str:
    return str(error).split("\n")[0][:100]
