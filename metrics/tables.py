"""The tables of one run, in memory or on disk: what every summary and every figure reads.

A table that lies on disk is read column by column when it is asked for, so the statistics of a run with ten million
iterations need the few columns that they use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metrics.columns import TABLES, MetricsError, schema, to_ns

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Ints = NDArray[np.int64]


class RunTables:
    """One run: five tables (`metrics.columns.TABLES`), its configuration and, once written, its summary.

    Each of requests, iterations, tokens, segments and stages is a pyarrow Table; `column` gives one column as a numpy
    array and `frame` a pandas DataFrame.
    """

    def __init__(
        self,
        tables: Mapping[str, pa.Table | Path],
        config: Mapping[str, Any] | None = None,
        summary: Mapping[str, Any] | None = None,
    ) -> None:
        missing = [name for name in TABLES if name not in tables]
        if missing:
            raise MetricsError(f"run: found no table {missing[0]}, expected {', '.join(TABLES)}")
        self._tables = dict(tables)
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
            import pyarrow.parquet as pq

            return pq.read_table(held, columns=list(columns) if columns is not None else None, memory_map=True)
        return held if columns is None else held.select(list(columns))

    def rows(self, name: str) -> int:
        held = self._tables[name]
        if isinstance(held, Path):
            import pyarrow.parquet as pq

            return int(pq.read_metadata(held).num_rows)
        return int(held.num_rows)

    def column(self, table: str, name: str) -> NDArray[Any]:
        """One column as a numpy array (strings as objects); not for the nested columns."""
        values: NDArray[Any] = self.table(table, [name]).column(name).to_numpy()
        return values

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

    def path(self, name: str) -> Path | None:
        """Where a table lies on disk, if it does."""
        held = self._tables[name]
        return held if isinstance(held, Path) else None

    def _flattened(self, name: str) -> dict[str, NDArray[Any]]:
        import pyarrow.compute as pc

        nested = self.table("iterations", [name]).column(name)
        flat = pc.list_flatten(nested)
        rows = np.repeat(np.arange(len(nested)), pc.list_value_length(nested).to_numpy())
        fields = {field.name: pc.struct_field(flat, field.name).to_numpy() for field in flat.type}
        return {"row": rows, **fields}
