"""CSV and its kin: any of , ; tab | between the cells, a header line, BOM and CRLF taken as they come.

Two ways to the same cells. `columns` reads whole columns at once and gives up on the first oddity; `rows` walks line
by line, slowly, and knows where everything stands.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from workloads.cells import BadCellError, is_missing, number, shown
from workloads.column_names import Field
from workloads.reading.raw_row import RawRow
from workloads.source import MAX_LINE, Source
from workloads.trace import TraceError

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_COLUMNS = 4096


class DelimitedTable:
    """The cells of one delimited text file."""

    kind = "csv"

    def __init__(self, source: Source) -> None:
        self.path = source.path
        self._content = source.content
        head, self._header_line = self._first_line()
        self.delimiter = max(",;\t|", key=head.count)
        self.names = self._header(head)

    def _first_line(self) -> tuple[str, int]:
        start, line = 0, 1
        while True:
            end = self._content.find(b"\n", start)
            raw = self._content[start:] if end < 0 else self._content[start:end]
            if raw.strip() or end < 0:
                break
            start, line = end + 1, line + 1
        try:
            return raw.decode("utf-8").strip("\r\n"), line
        except UnicodeDecodeError:
            where = f"{self.path}, line {line}"
            raise TraceError(f"{where}: found bytes that are not UTF-8 text, expected a header line") from None

    def _header(self, head: str) -> list[str]:
        where = f"{self.path}, line {self._header_line}"
        try:
            names = [name.strip() for name in next(csv.reader([head], delimiter=self.delimiter, strict=True))]
        except (csv.Error, StopIteration) as error:
            raise TraceError(f"{where}: found {shown(head)} ({error}), expected a header line") from None
        if len(names) > _MAX_COLUMNS:
            raise TraceError(f"{where}: found {len(names):,} columns, expected at most {_MAX_COLUMNS:,}")
        if any(_is_number(name) for name in names):
            raise TraceError(
                f"{where}: found {shown(head)}, expected a header line with column names; "
                "put one first, such as arrival_s,prompt_tokens,output_tokens"
            )
        for position, name in enumerate(names):
            if name and name in names[:position]:
                raise TraceError(
                    f"{where}, column {position + 1}: found the name {name!r} again (column {names.index(name) + 1} "
                    "has it), expected every column name once; rename or remove one of them"
                )
        return names

    def columns(self, wanted: Sequence[Field]) -> dict[str, pa.ChunkedArray] | None:
        """The wanted columns by meaning: numbers (float64), dates (timestamps), text. None: something is odd."""
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        first = next(self.rows(), None)
        if first is None or first.cells is None:
            return None
        types = {field.column: _arrow_type(field, first.cells.get(field.column)) for field in wanted}
        if None in types.values() or len(set(self.names)) < len(self.names):
            return None
        try:
            table = arrow_csv.read_csv(
                pa.BufferReader(self._content),
                read_options=arrow_csv.ReadOptions(use_threads=False, block_size=1 << 23),
                parse_options=arrow_csv.ParseOptions(delimiter=self.delimiter),
                convert_options=arrow_csv.ConvertOptions(
                    column_types=types, include_columns=list(types), strings_can_be_null=True
                ),
            )
        except (pa.ArrowException, KeyError):
            return None
        return {field.meaning: table.column(field.column) for field in wanted}

    def rows(self) -> Iterator[RawRow]:
        """Every row with its line; a row that cannot be split into cells comes with a problem instead."""
        csv.field_size_limit(MAX_LINE)
        lines = io.TextIOWrapper(io.BytesIO(self._content), "utf-8", errors="surrogateescape", newline="")
        reader = csv.reader(lines, delimiter=self.delimiter, strict=True)
        row = -1
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                row += 1
                yield RawRow(row, line, None, f"found a line that cannot be split into cells ({error})", self._shape())
                continue
            if not cells or (len(cells) == 1 and not cells[0].strip()):
                continue
            row += 1
            if row == 0:
                continue
            if len(cells) != len(self.names):
                yield RawRow(row, line, None, f"found {len(cells)} cells", self._shape())
            else:
                yield RawRow(row, line, dict(zip(self.names, cells)))

    def _shape(self) -> str:
        return f"{len(self.names)} cells as in the header"


def _is_number(cell: str) -> bool:
    try:
        number(cell, "")
    except BadCellError:
        return False
    return True


def _arrow_type(field: Field, sample: object) -> pa.DataType | None:
    import pyarrow as pa

    from workloads.cells import is_date
    from workloads.column_names import LISTS, TEXTS

    if field.meaning in TEXTS or field.meaning in LISTS:
        return pa.string()
    if field.meaning == "arrival" and is_date(sample):
        zoned = str(sample).strip()[-6:]
        return pa.timestamp("ns", tz="UTC" if zoned.endswith("Z") or "+" in zoned or "-" in zoned else None)
    if is_missing(sample) and field.meaning == "arrival":
        return None
    return pa.float64()
