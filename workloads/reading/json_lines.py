"""JSON: one object per line (JSONL), or one array of objects (small files only, since it must be held whole).

As in delimited.py, `columns` is the fast way and `rows` the careful one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.cells import is_date, shown
from workloads.column_names import LISTS, TEXTS, Field
from workloads.reading.raw_row import RawRow
from workloads.source import MAX_LINE, Source
from workloads.trace import TraceError

if TYPE_CHECKING:
    import pyarrow as pa

_PROBED_ROWS = 100
_MAX_ARRAY_BYTES = 256 << 20
_ONE_OBJECT = 'one whole JSON object per line, such as {"arrival_s": 0.5, "prompt_tokens": 374, "output_tokens": 44}'


class JsonTable:
    """The cells of one JSONL file, or of one JSON array of objects."""

    kind = "jsonl"

    def __init__(self, source: Source) -> None:
        self.path = source.path
        self._content = source.content
        self._array = _parsed_array(source) if source.kind == "json" else None
        names: dict[str, None] = {}
        self._dates: set[str] = set()
        for raw, _ in zip(self.rows(), range(_PROBED_ROWS)):
            if raw.cells is None:
                if not names:
                    raise TraceError(f"{self.path}, {raw.place}: {raw.problem}, expected {raw.expected}")
                continue
            names.update(dict.fromkeys(raw.cells))
            self._dates.update(name for name, cell in raw.cells.items() if is_date(cell))
        if not names:
            raise TraceError(f"{self.path}: found no rows, expected {_ONE_OBJECT}")
        self.names = list(names)

    def columns(self, wanted: Sequence[Field]) -> dict[str, pa.ChunkedArray] | None:
        """The wanted columns by meaning: numbers (float64), lists, text (dates too). None: something is odd."""
        if self._array is not None:
            return None
        import pyarrow as pa
        from pyarrow import json as arrow_json

        schema = pa.schema([(field.column, self._arrow_type(field)) for field in wanted])
        block_size = min(max(1 << 23, 2 * self._longest_probed_line()), 1 << 30)
        try:
            table = arrow_json.read_json(
                pa.BufferReader(self._content),
                read_options=arrow_json.ReadOptions(use_threads=False, block_size=block_size),
                parse_options=arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
            )
            return {field.meaning: table.column(field.column) for field in wanted}
        except (pa.ArrowException, KeyError):
            return None

    def _arrow_type(self, field: Field) -> pa.DataType:
        import pyarrow as pa

        if field.meaning in LISTS:
            return pa.list_(pa.int64())
        if field.meaning in TEXTS or field.column in self._dates:
            return pa.string()
        return pa.float64()

    def _longest_probed_line(self) -> int:
        return max(map(len, self._content[: 1 << 22].split(b"\n")))

    def rows(self) -> Iterator[RawRow]:
        """Every object with its line; a line that is not a whole object comes with a problem instead."""
        if self._array is not None:
            for row, cells in enumerate(self._array, 1):
                yield _checked(cells, row, 0)
            return
        start, line, row = 0, 0, 0
        while start < len(self._content):
            end = self._content.find(b"\n", start)
            end = len(self._content) if end < 0 else end
            raw, start, line = self._content[start:end].strip(), end + 1, line + 1
            if not raw:
                continue
            row += 1
            if len(raw) > MAX_LINE:
                yield RawRow(row, line, None, f"found a line of {len(raw):,} bytes", f"at most {MAX_LINE:,}")
                continue
            try:
                cells = json.loads(raw)
            except (ValueError, RecursionError) as error:
                where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
                text = shown(raw.decode("utf-8", "replace"))
                yield RawRow(row, line, None, f"found {text}, broken or cut off{where}", _ONE_OBJECT)
                continue
            yield _checked(cells, row, line)


def _checked(cells: object, row: int, line: int) -> RawRow:
    if isinstance(cells, Mapping):
        return RawRow(row, line, cells)
    return RawRow(row, line, None, f"found {shown(cells)}", _ONE_OBJECT)


def _parsed_array(source: Source) -> list[object]:
    if len(source.content) > _MAX_ARRAY_BYTES:
        raise TraceError(
            f"{source.path}: found a JSON array of {len(source.content):,} bytes, expected at most "
            f"{_MAX_ARRAY_BYTES:,}; write one object per line (JSONL) instead"
        )
    try:
        parsed = json.loads(source.content)
    except json.JSONDecodeError as error:
        raise TraceError(
            f"{source.path}, line {error.lineno}, column {error.colno}: found JSON that is broken or cut off "
            f"({error.msg}), expected a whole array of objects"
        ) from None
    except (ValueError, RecursionError) as error:
        what = f"found JSON that cannot be read ({type(error).__name__})"
        raise TraceError(f"{source.path}: {what}, expected an array of objects") from None
    assert isinstance(parsed, list)
    return parsed
