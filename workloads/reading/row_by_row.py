"""The careful way through a file: row by row, every cell understood or complained about in full."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from workloads import cells as parse
from workloads.cells import BadCellError
from workloads.column_names import LISTS, REQUIRED, TEXTS, Field
from workloads.reading.assembly import Cells, Options, Places
from workloads.reading.raw_row import RawRow
from workloads.trace import TraceError

Parser = Callable[[Any], Any]
_SHOWN_PROBLEMS = 3


def careful_cells(table: Any, found: dict[str, Field], options: Options) -> tuple[Cells, Places]:
    """All good rows of a table, by meaning, and where each stood. Bad rows are errors, or skipped and counted."""
    dated = _dated(table, found)
    parsers = [(field.column, _parser(field, options, dated)) for field in found.values()]
    columns: list[Any] = [_empty_column(meaning, dated) for meaning in found]
    places = array("q")
    problems: list[str] = []
    num_skipped = 0
    for raw in table.rows():
        try:
            values = _understood(raw, parsers)
        except BadCellError as problem:
            if not options.skip:
                raise TraceError(f"{options.path}, {problem}; mend the row, or pass --on-bad-row skip") from None
            num_skipped += 1
            if len(problems) < _SHOWN_PROBLEMS:
                problems.append(str(problem))
            continue
        for column, value in zip(columns, values):
            column.append(value)
        places.append(raw.row)
        places.append(raw.line)
    if not places:
        what = f"no good row ({num_skipped} bad; first: {problems[0]})" if problems else "no rows"
        raise TraceError(f"{options.path}: found {what}, expected one line per request")
    notes = []
    if num_skipped:
        more = " ..." if num_skipped > len(problems) else ""
        count = f"{num_skipped} bad row{'s' if num_skipped > 1 else ''}"
        notes.append(f"{count} skipped: {'; '.join(problems)}{more}.")
    cells: Cells = {meaning: _finished(column) for meaning, column in zip(found, columns)}
    return cells, Places(np.array(places, np.int64).reshape(-1, 2), tuple(notes))


def _understood(raw: RawRow, parsers: list[tuple[str, Parser]]) -> list[Any]:
    """The row's values, field by field; raises BadCellError with the place and what was found and expected."""
    if raw.cells is None:
        raise BadCellError(f"{raw.place}: {raw.problem}, expected {raw.expected}")
    values = []
    for column, parser in parsers:
        cell = raw.cells.get(column)
        try:
            values.append(parser(cell))
        except BadCellError as expected:
            what = f"found {parse.shown(cell)}, expected {expected}{parse.comma_hint(cell)}"
            raise BadCellError(f"{raw.place}, column {column!r}: {what}") from None
    return values


def _dated(table: Any, found: dict[str, Field]) -> bool:
    """Whether arrivals are dates: the first row that can be taken apart decides."""
    if "arrival" not in found:
        return False
    first = next((raw for raw in table.rows() if raw.cells is not None), None)
    return first is not None and parse.is_date(first.cells.get(found["arrival"].column))


def _parser(field: Field, options: Options, dated: bool) -> Parser:
    meaning = field.meaning
    if meaning in REQUIRED:
        return partial(parse.tokens, least=0 if meaning == "output_tokens" and options.kind == "burstgpt" else 1)
    if meaning == "arrival":
        return parse.date_ns if dated else partial(parse.time, unit=field.unit)
    if meaning in LISTS:
        return _optional(parse.integers, list)
    if meaning in TEXTS:
        return _optional(parse.text, lambda: None)
    if meaning in parse.WHOLE_RANGES:
        low, high = parse.WHOLE_RANGES[meaning]
        return _optional(partial(parse.whole, low=low, high=high), lambda: math.nan)
    return _optional(partial(parse.time, unit=field.unit), lambda: math.nan)


def _optional(parser: Parser, missing: Callable[[], Any]) -> Parser:
    return lambda cell: missing() if parse.is_missing(cell) else parser(cell)


def _empty_column(meaning: str, dated: bool) -> Any:
    """Something to append to: eight bytes a cell, whatever a hostile file holds."""
    if meaning in TEXTS or meaning in LISTS:
        return []
    return array("q" if meaning == "arrival" and dated else "d")


def _finished(column: Any) -> Any:
    if not isinstance(column, array):
        return column
    return np.array(column, np.int64 if column.typecode == "q" else np.float64)
