"""The tables of one run, in memory or on disk: what every summary and every figure reads.

A table that lies on disk is read column by column when it is asked for, so the statistics of a run with ten million
iterations need the few columns that they use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metrics.run_folder.columns import LATER, RANK, TABLES, MetricsError, schema, to_ns

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Ints = NDArray[np.int64]


def identity(path: Path) -> tuple[int, ...] | None:
    """Which file or folder lies at a path, None if none: another one there has another identity."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


class RunTables:
    """One run: five tables (`metrics.run_folder.columns.TABLES`), its configuration and, once written, its summary.

    Each of requests, iterations, tokens, segments and stages is a pyarrow Table; `column` gives one column as a numpy
    array and `frame` a pandas DataFrame. opened: `identity` of each table on disk when the run was opened.
    """

    def __init__(
        self,
        tables: Mapping[str, pa.Table | Path],
        config: Mapping[str, Any] | None = None,
        summary: Mapping[str, Any] | None = None,
        opened: Mapping[str, object] | None = None,
    ) -> None:
        missing = [name for name in TABLES if name not in tables]
        if missing:
            raise MetricsError(f"run: found no table {missing[0]}, expected {', '.join(TABLES)}")
        self._tables = dict(tables)
        self._opened = dict(opened or {})
        self._ranks: int | None = None
        self.config: dict[str, Any] = dict(config or {})
        self.summary: dict[str, Any] = dict(summary or {})

    @property
    def requests(self) -> pa.Table:
        return self.table("requests")

    @property
    def iterations(self) -> pa.Table:
        return self.table("iterations")

    @property
    def tokens(self) -> pa.Table:
        return self.table("tokens")

    @property
    def segments(self) -> pa.Table:
        return self.table("segments")

    @property
    def stages(self) -> pa.Table:
        return self.table("stages")

    def table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """One table, or some of its columns."""
        held = self._tables[name]
        if isinstance(held, Path):
            with self._the_one_that_was_opened(name, held):
                return _read(held, name, schema(name).names if columns is None else list(columns))
        return held if columns is None else held.select(list(columns))

    def has_all_columns(self, name: str) -> bool:
        """Whether a table has every column of today, as all do but those of earlier versions on disk."""
        held = self._tables[name]
        if isinstance(held, Path):
            import pyarrow.parquet as pq

            return set(schema(name).names) <= set(pq.read_schema(held).names)
        return True

    def put_column(self, table: str, name: str, values: NDArray[Any]) -> None:
        """Replace a column of a table in memory; for tables on disk nothing is done."""
        import pyarrow as pa

        held = self._tables[table]
        if isinstance(held, Path):
            return
        place = held.schema.get_field_index(name)
        field = held.schema.field(place)
        self._tables[table] = held.set_column(place, field, pa.array(values, field.type))

    def rows(self, name: str) -> int:
        held = self._tables[name]
        if isinstance(held, Path):
            import pyarrow.parquet as pq

            with self._the_one_that_was_opened(name, held):
                return int(pq.read_metadata(held).num_rows)
        return int(held.num_rows)

    @contextmanager
    def _the_one_that_was_opened(self, name: str, file: Path) -> Iterator[None]:
        """Columns of one run beside config and summary of another would be wrong without a word.

        Looked at afterwards: what has been read or mapped by then stays what it was, whatever is put at its place.
        """
        try:
            yield
        except OSError:
            self._refuse_another(name, file)
            raise
        self._refuse_another(name, file)

    def _refuse_another(self, name: str, file: Path) -> None:
        if name in self._opened and identity(file) != self._opened[name]:
            raise MetricsError(
                f"{file.parent}: found another run there than the one that was opened: it was replaced meanwhile; "
                "read it again"
            )

    def column(self, table: str, name: str) -> NDArray[Any]:
        """One column as a numpy array (strings as objects); not for the nested columns."""
        return as_numpy(self.table(table, [name]).column(name))

    def engines(self, table: str) -> Ints:
        """Per row, a number of the engine (one rank of one replica) it is of: replica * ranks + rank."""
        rank = self.column(table, RANK).astype(np.int64)
        return self.column(table, "replica").astype(np.int64) * self.ranks + rank

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of a replica, of those that ran or rejected anything; 1 without."""
        if self._ranks is None:
            highest = [self.column(table, RANK).max(initial=0) for table in ("iterations", "requests")]
            self._ranks = int(max(highest)) + 1
        return self._ranks

    def column_ns(self, table: str, name: str) -> Ints:
        """One column of times as integer nanoseconds."""
        return to_ns(self.column(table, name))

    def frame(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One table as a pandas DataFrame, without its nested columns unless they are named."""
        if columns is None:
            columns = [field.name for field in schema(name) if not str(field.type).startswith("list")]
        frame: pd.DataFrame = self.table(name, columns).to_pandas()
        return frame

    def chunks(self) -> dict[str, NDArray[Any]]:
        """All prefill chunks of the run as flat columns; `row` is the row of the iteration in its table."""
        return self._flattened("chunks")

    def cohorts(self) -> dict[str, NDArray[Any]]:
        """All cohorts of all batches as flat columns; `row` is the row of the iteration in its table."""
        return self._flattened("cohorts")

    def drafts(self) -> dict[str, NDArray[Any]]:
        """All speculating decodes of all batches as flat columns; `row` is the row of the iteration in its table."""
        return self._flattened("drafts")

    def path(self, name: str) -> Path | None:
        """Where a table lies on disk, if it does."""
        held = self._tables[name]
        return held if isinstance(held, Path) else None

    def _flattened(self, name: str) -> dict[str, NDArray[Any]]:
        import pyarrow.compute as pc

        nested = self.table("iterations", [name]).column(name)
        flat = pc.list_flatten(nested)
        rows = np.repeat(np.arange(len(nested)), as_numpy(pc.list_value_length(nested)))
        fields = {field.name: as_numpy(pc.struct_field(flat, field.name)) for field in flat.type}
        return {"row": rows, **fields}


def _read(file: Path, name: str, wanted: list[str]) -> pa.Table:
    """Columns of a table on disk; those that the version which wrote it did not know have what stands for them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    asked = [column for column in wanted if column in LATER]
    there = pq.read_schema(file).names if asked else []
    lacking = [column for column in asked if column not in there]
    read = [column for column in wanted if column not in lacking]
    table = pq.read_table(file, columns=read, memory_map=True)
    if not lacking:
        return table
    fields, rows = schema(name), pq.read_metadata(file).num_rows
    columns = [
        pa.repeat(pa.scalar(LATER[column], fields.field(column).type), rows)
        if column in lacking
        else table.column(column)
        for column in wanted
    ]
    return pa.table(columns, schema=pa.schema([fields.field(column) for column in wanted]))


def as_numpy(column: pa.ChunkedArray) -> NDArray[Any]:
    """A column as a numpy array of its own, strings as objects, null as None.

    Straight from memory where it can be: pyarrow's `to_numpy` loads pandas first, longer than many a replay takes.
    """
    import pyarrow as pa

    types, kind = pa.types, column.type
    parts: list[NDArray[Any]] = []
    for chunk in column.chunks:
        start, end = chunk.offset, chunk.offset + len(chunk)
        if types.is_string(kind):
            coded = chunk.dictionary_encode()
            texts = np.array([*coded.dictionary.to_pylist(), None], dtype=object)
            valid, codes = coded.indices.buffers()
            start, end = coded.indices.offset, coded.indices.offset + len(chunk)
            places = np.frombuffer(codes, np.int32, count=end)[start:]
            if coded.indices.null_count:
                places = np.where(_bits(valid, start, end), places, len(texts) - 1)
            parts.append(texts[places])
        elif column.null_count or not (types.is_primitive(kind) and not types.is_temporal(kind)):
            values: NDArray[Any] = column.to_numpy()
            return values
        elif types.is_boolean(kind):
            parts.append(_bits(chunk.buffers()[1], start, end))
        else:
            parts.append(np.frombuffer(chunk.buffers()[1], kind.to_pandas_dtype(), count=end)[start:])
    if not parts:
        empty: NDArray[Any] = np.empty(0, object if types.is_string(kind) else kind.to_pandas_dtype())
        return empty
    return np.concatenate(parts)


def _bits(buffer: Any, start: int, end: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(buffer, np.uint8), count=end, bitorder="little")[start:].view(np.bool_)
