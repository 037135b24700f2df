"""Parquet from outside, with a bound on what it becomes in memory: a small file may stand for terabytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from policies.edges.input_file import checked_file
from profiler.errors import ProfileError

if TYPE_CHECKING:
    import pyarrow as pa

MAX_BYTES = 1 << 30


def read_parquet(path: Path) -> pa.Table:
    """A whole Parquet table, unpacked piece by piece up to MAX_BYTES; raises ProfileError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    checked_file(path, ProfileError)
    batches: list[pa.RecordBatch] = []
    size = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1 << 10, use_threads=False):
                size += batch.nbytes
                if size > MAX_BYTES:
                    raise ProfileError(f"{path}: found more than {MAX_BYTES:,} bytes when unpacked")
                batches.append(batch)
            return pa.Table.from_batches(batches, file.schema_arrow).combine_chunks()
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{path}: cannot be read as parquet: {str(error).splitlines()[0]}") from None
