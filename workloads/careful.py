"""The careful way through a file: row by row, every cell understood or complained about in full."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from workloads import cells as parse
from workloads.assembly import Cells, Options, Places
from workloads.cells import BadCellError
from workloads.fields import LISTS, REQUIRED, TEXTS, Field
from workloads.row import RawRow
from workloads.trace import TraceError

_SHOWN_SKIPS = 3


def careful_cells(table: Any, found: dict[str, Field], options: Options) -> tuple[Cells, Places]:
    """All good rows of a table, by meaning, and where each stood. Bad rows are errors, or skipped and counted."""
    columns: dict[str, list[Any]] = {meaning: [] for meaning in found}
    places: list[tuple[int, int]] = []
    skipped: list[str] = []
    num_skipped = 0
    dated: bool | None = None
    for raw in table.rows():
        if dated is None and raw.cells is not None and "arrival" in found:
            dated = parse.is_date(raw.cells.get(found["arrival"].column))
        problem, values = _understood(raw, found, options, bool(dated))
        if problem:
            if not options.skip:
                raise TraceError(f"{options.path}, {problem}; mend the row, or pass --on-bad-row skip")
            num_skipped += 1
            if len(skipped) < _SHOWN_SKIPS:
                skipped.append(problem)
            continue
        for meaning, value in values.items():
            columns[meaning].append(value)
        places.append((raw.row, raw.line))
    if not places:
        what = f"no good row ({num_skipped} bad; first: {skipped[0]})" if skipped else "no rows"
        raise TraceError(f"{options.path}: found {what}, expected one line per request")
    notes = []
    if num_skipped:
        more = " ..." if num_skipped > len(skipped) else ""
        count = f"{num_skipped} bad row{'s' if num_skipped > 1 else ''}"
        notes.append(f"{count} skipped: {'; '.join(skipped)}{more}.")
    cells: Cells = {meaning: _column(meaning, values, bool(dated)) for meaning, values in columns.items()}
    return cells, Places(np.array(places, np.int64), tuple(notes))


def _understood(raw: RawRow, found: dict[str, Field], options: Options, dated: bool) -> tuple[str, dict[str, Any]]:
    if raw.cells is None:
        return f"{raw.place}: {raw.problem}, expected {raw.expected}", {}
    values: dict[str, Any] = {}
    for meaning, field in found.items():
        cell = raw.cells.get(field.column)
        try:
            values[meaning] = _value(field, cell, options, dated)
        except BadCellError as expected:
            return f"{raw.place}, column {field.column!r}: found {parse.shown(cell)}, expected {expected}", {}
    return "", values


def _value(field: Field, cell: object, options: Options, dated: bool) -> Any:
    meaning = field.meaning
    if meaning in REQUIRED:
        return float(parse.tokens(cell, 0 if meaning == "output_tokens" and options.kind == "burstgpt" else 1))
    if meaning == "arrival":
        return parse.date_ns(cell) if dated else parse.time(cell, field.unit)
    if meaning in LISTS:
        return [] if parse.is_missing(cell) else parse.integers(cell)
    if parse.is_missing(cell):
        return None if meaning in TEXTS else math.nan
    if meaning in TEXTS:
        return parse.text(cell)
    if meaning in parse.WHOLE_RANGES:
        return float(parse.whole(cell, *parse.WHOLE_RANGES[meaning]))
    return parse.time(cell, field.unit)


def _column(meaning: str, values: list[Any], dated: bool) -> Any:
    if meaning in TEXTS or meaning in LISTS:
        return values
    return np.array(values, np.int64 if meaning == "arrival" and dated else np.float64)
