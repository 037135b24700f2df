"""Parquet from outside, with a bound on what it becomes in memory: a small file may stand for terabytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.edges.input_file import LOG_BYTES, checked_file, parse_json, read_text
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


def log_rows(path: Path, error: type[Exception] = ProfileError) -> Iterator[tuple[str, Any]]:
    """Where each row of a log stands, and the row: JSON lines (blank ones are skipped), or a Parquet table of the same
    columns (.parquet). Raises `error`."""
    if path.suffix == ".parquet":
        try:
            rows = read_parquet(path).to_pylist()
        except ProfileError as wrong:
            raise error(str(wrong)) from None
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
        return
    for number, line in enumerate(read_text(path, error, LOG_BYTES).splitlines(), 1):
        if line.strip():
            yield f"{path}, line {number}", parse_json(line, f"{path}, line {number}", error)
