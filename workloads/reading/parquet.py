"""Parquet: typed columns, so all that can go wrong is a wrong type, a missing value or a damaged file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from workloads.reading.chunk import Chunk
from workloads.source import MAX_WHOLE, Source
from workloads.trace import TraceError

if TYPE_CHECKING:
    import pyarrow as pa


_FEW_ROWS, _MANY_ROWS = 1 << 10, 1 << 16
"""At once. Of texts of a megabyte each the first take a gigabyte; a kilobyte of dictionary may stand for those."""


class ParquetTable:
    """The cells of one Parquet file."""

    kind = "parquet"
    late_names: tuple[str, ...] = ()

    def __init__(self, source: Source) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self.path = source.path
        try:
            place = io.BytesIO(source.whole(MAX_WHOLE)) if source.packed else source.file
            self._file = parquet.ParquetFile(place, memory_map=False)
            self._schema: pa.Schema = self._file.schema_arrow
        except (pa.ArrowException, OSError) as error:
            raise TraceError(f"{self.path}: found damaged Parquet ({_brief(error)}), expected a whole file") from None
        self.names = list(self._schema.names)
        for position, name in enumerate(self.names):
            if name in self.names[:position]:
                raise TraceError(
                    f"{self.path}, column {position + 1}: found the name {name!r} again, expected every name once"
                )

    def chunks(self, wanted: Sequence[str]) -> Iterator[Chunk]:
        """The wanted columns as the file has them, piece by piece."""
        import pyarrow as pa

        types = [self._schema.field(name).type for name in wanted]
        small = all(pa.types.is_primitive(kind) for kind in types)
        rows = 0
        try:
            for batch in self._file.iter_batches(
                _MANY_ROWS if small else _FEW_ROWS, columns=list(wanted), use_threads=False
            ):
                numbers = rows + 1 + np.arange(batch.num_rows)
                cells = {name: batch.column(batch.schema.get_field_index(name)) for name in wanted}
                yield Chunk(numbers, np.zeros(batch.num_rows, np.int64), cells)
                rows += batch.num_rows
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise TraceError(f"{self.path}: found damaged Parquet ({_brief(error)}), expected a whole file") from None


def _brief(error: BaseException) -> str:
    return str(error).split("\n")[0][:100]
