"""Cells become columns: whole columns at once where every cell is plain, one by one where one is not.

`workloads.cells` decides what a cell means. What most cells look like (plain digits, dates in ISO form, numbers of a
typed file) is told by a pattern and converted by Arrow and numpy; all others go through those functions. So there is
one answer for a cell, whatever stands beside it.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads import cells as parse
from workloads.cells import MAX_TOKENS, SHARES, WHOLE_RANGES, BadCellError
from workloads.column_names import LISTS, REQUIRED, TEXTS, Field
from workloads.ragged import RaggedColumn
from workloads.reading.chunk import Chunk, as_numpy, place, taken
from workloads.source import MAX_ROWS
from workloads.trace import TraceError

Parser = Callable[[Any], Any]
Bad = dict[int, str]
"""Position in a chunk -> what was expected there."""

_SHOWN_PROBLEMS = 3
_SAMPLE = 1000
_NUMBER = r"^-?[0-9]{1,15}(\.[0-9]{1,15})?$"
_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?$"
_ZONED = _DATE.removesuffix("$") + r"(Z|[+-][0-9]{2}:?[0-9]{2})$"
_FIRST_NS, _LAST_NS = -70 * 366 * 86_400 * 10**9, 230 * 365 * 86_400 * 10**9
"""Dates well within 1900 to 2200."""


class Columns:
    """The understood cells of all chunks so far.

    found: the file's columns by meaning. least_output: 0 where a request may have failed. skip: leave bad rows out.
    """

    def __init__(self, path: str, found: Mapping[str, Field], *, skip: bool, least_output: int, max_bytes: int) -> None:
        self.path, self.found, self._skip, self._max_bytes = path, found, skip, max_bytes
        self._least = {"prompt_tokens": 1, "output_tokens": least_output}
        self._dated: bool | None = None
        self._parts: dict[str, list[Any]] = {meaning: [] for meaning in found}
        self._places: list[NDArray[np.int64]] = []
        self._problems: list[str] = []
        self._names: dict[str, str] = {}
        self._bytes = 0
        self.num_skipped = 0
        self.num_rows = 0

    def add(self, chunk: Chunk, keep: Callable[[Mapping[str, Any], Chunk], NDArray[np.bool_] | None]) -> None:
        """Understand a chunk. keep: which of its good rows stay, None for all. Raises TraceError for the first bad row,
        unless bad rows are skipped."""
        understood: dict[str, Any] = {}
        problems: dict[int, str] = {}
        for meaning, field in self.found.items():
            raw = chunk.cells[field.column]
            values, bad = self._column(meaning, field, raw)
            understood[meaning] = values
            for at, expected in bad.items():
                cell = _cell(raw, at)
                what = f"found {parse.shown(cell)}, expected {expected}{parse.comma_hint(cell)}"
                where = place(int(chunk.rows[at]), int(chunk.lines[at]))
                problems.setdefault(at, f"{where}, column {field.column!r}: {what}")
        wrong = [(bad.at, 0, f"{place(bad.row, bad.line)}: {bad.problem}") for bad in chunk.bad]
        wrong += [(at, 1, problem) for at, problem in problems.items()]
        self._tell(sorted(wrong))
        kept = np.ones(len(chunk.rows), bool)
        kept[list(problems)] = False
        if problems:
            chunk, understood = _only(chunk, kept), {name: _part(column, kept) for name, column in understood.items()}
        if (chosen := keep(understood, chunk)) is not None:
            chunk = _only(chunk, chosen)
            understood = {name: _part(column, chosen) for name, column in understood.items()}
        self._places.append(np.stack([chunk.rows, chunk.lines], axis=1))
        self.num_rows += len(chunk.rows)
        for meaning, column in understood.items():
            self._parts[meaning].append(column)
            self._bytes += column.nbytes if not isinstance(column, list) else 56 * len(column)
        self._refuse_too_much()

    def look_at(self, chunk: Chunk) -> None:
        """Before a chunk is cut for a limit: its first rows tell whether arrivals are dates, whatever is asked for."""
        if self._dated is None and "arrival" in self.found and len(chunk.rows):
            self._dated = _are_dates(chunk.cells[self.found["arrival"].column])

    def notes(self) -> list[str]:
        """How many rows were skipped, and the first few reasons."""
        if not self.num_skipped:
            return []
        more = " ..." if self.num_skipped > len(self._problems) else ""
        count = f"{self.num_skipped} bad row{'s' if self.num_skipped > 1 else ''}"
        return [f"{count} skipped: {'; '.join(self._problems)}{more}."]

    def cells(self) -> dict[str, Any]:
        """Meaning -> float64 column (NaN: nothing stands there), int64 ns (dates), list of texts, or RaggedColumn."""
        return {meaning: _joined(parts) for meaning, parts in self._parts.items()}

    def places(self) -> NDArray[np.int64]:
        """(row, line) of every row kept; shape (n, 2)."""
        return np.concatenate(self._places) if self._places else np.empty((0, 2), np.int64)

    def refuse_none(self) -> None:
        """TraceError where there was no row at all, or no good one."""
        if self._problems:
            what = f"no good row ({self.num_skipped} bad; first: {self._problems[0]})"
        else:
            what = "no rows"
        raise TraceError(f"{self.path}: found {what}, expected one line per request")

    def _tell(self, wrong: list[tuple[int, int, str]]) -> None:
        if wrong and not self._skip:
            raise TraceError(f"{self.path}, {wrong[0][2]}; mend the row, or pass --on-bad-row skip")
        self.num_skipped += len(wrong)
        self._problems += [problem for _, _, problem in wrong[: _SHOWN_PROBLEMS - len(self._problems)]]

    def _refuse_too_much(self) -> None:
        if self.num_rows > MAX_ROWS:
            raise TraceError(f"{self.path}: found more than {MAX_ROWS:,} requests, expected at most that; {_LESS}")
        if self._bytes > self._max_bytes:
            raise TraceError(
                f"{self.path}: found requests whose columns take more than {self._max_bytes:,} bytes, expected at most "
                f"{self._max_bytes:,} bytes; {_LESS}"
            )

    # One column of one chunk

    def _column(self, meaning: str, field: Field, raw: Any) -> tuple[Any, Bad]:
        if meaning in LISTS:
            return _lists(raw)
        if meaning in TEXTS:
            return self._texts(raw)
        parser = self._parser(meaning, field)
        values: NDArray[Any]
        if meaning == "arrival" and self._dated:
            values, sure = fast_dates(raw)
        else:
            values, sure = fast_numbers(raw)
            sure = sure & self._plain(meaning, field, values)
        bad: Bad = {}
        unsure = np.flatnonzero(~sure).tolist()
        for at, cell in zip(unsure, _cells(raw, unsure)):
            try:
                values[at] = parser(cell)
            except BadCellError as expected:
                bad[at] = str(expected)
                if not self._skip:
                    break
        return values, bad

    def _plain(self, meaning: str, field: Field, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which numbers are what they are, without a look at their cells."""
        if meaning in SHARES:
            return (values >= 0) & (values <= 1)
        whole = meaning in REQUIRED or meaning in WHOLE_RANGES
        low, high = (self._least[meaning], MAX_TOKENS) if meaning in REQUIRED else WHOLE_RANGES.get(meaning, (0, 0))
        plain: NDArray[np.bool_] = (values >= low) & (values <= (high if whole else parse.most_time(field.unit)))
        return plain & (values == np.floor(values)) if whole else plain

    def _parser(self, meaning: str, field: Field) -> Parser:
        if meaning in REQUIRED:
            return partial(parse.tokens, least=self._least[meaning])
        if meaning == "arrival":
            moment = parse.date_ns if self._dated else partial(parse.time, unit=field.unit)
            return _or_nan(moment) if "delay" in self.found and not self._dated else moment
        if meaning in WHOLE_RANGES:
            low, high = WHOLE_RANGES[meaning]
            return _or_nan(partial(parse.whole, low=low, high=high))
        if meaning in SHARES:
            return _or_nan(parse.share)
        return _or_nan(partial(parse.time, unit=field.unit))

    def _texts(self, raw: Any) -> tuple[list[str | None], Bad]:
        texts: list[str | None] = []
        bad: Bad = {}
        names = self._names
        for at, cell in enumerate(_cells(raw)):
            try:
                name = None if parse.is_missing(cell) else parse.text(cell)
            except BadCellError as expected:
                name, bad[at] = None, str(expected)
            texts.append(None if name is None else names.setdefault(name, name))
        return texts, bad


_LESS = "pass --limit or --window, or split the file"


def fast_numbers(raw: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The cells as numbers, and of which that is certain: plain digits, and values of a numeric type."""
    import pyarrow as pa

    raw = _simple(raw)
    if isinstance(raw, list):
        kinds = set(map(type, raw))
        if kinds <= {int, float, type(None)}:
            try:
                values = np.array([math.nan if cell is None else cell for cell in raw], np.float64)
                return values, np.isfinite(values)
            except OverflowError:
                pass
    elif pa.types.is_integer(raw.type) or pa.types.is_floating(raw.type):
        numbers = raw.cast(pa.float64(), safe=False)
        values = np.array(as_numpy(numbers.fill_null(math.nan) if numbers.null_count else numbers))
        return values, np.isfinite(values)
    elif pa.types.is_binary(raw.type) or pa.types.is_large_binary(raw.type):
        return _matching(raw, _NUMBER, lambda texts: as_numpy(texts.cast(pa.float64())), np.float64, may_be_digits=True)
    return np.full(len(raw), math.nan), np.zeros(len(raw), bool)


def fast_dates(raw: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The cells as ns since 1970 UTC, and of which that is certain: dates in ISO form, and values of a time type."""
    import pyarrow as pa

    raw = _simple(raw)
    values, sure = np.zeros(len(raw), np.int64), np.zeros(len(raw), bool)
    if isinstance(raw, list):
        return values, sure
    try:
        if pa.types.is_timestamp(raw.type):
            zone = raw.type.tz
            values = np.array(as_numpy(raw.cast(pa.timestamp("ns", tz=zone)).cast(pa.int64()).fill_null(-(2**62))))
            sure = values > -(2**62)
        elif pa.types.is_binary(raw.type) or pa.types.is_large_binary(raw.type):
            forms = ((_DATE, pa.timestamp("ns")), (_ZONED, pa.timestamp("ns", tz="UTC")))
            first = _cells(raw[:1])
            for pattern, kind in forms if first and re.match(_DATE, str(first[0])) else forms[::-1]:
                as_ns = lambda texts, kind=kind: as_numpy(texts.cast(kind).cast(pa.int64()))  # noqa: E731
                some, which = _matching(raw, pattern, as_ns, np.int64)
                values[which], sure = some[which], sure | which
                if sure.all():
                    break
    except pa.ArrowException:
        return values, np.zeros(len(raw), bool)
    return values, sure & (values > _FIRST_NS) & (values < _LAST_NS)


def _matching(
    raw: Any, pattern: str, convert: Callable[[Any], Any], dtype: Any, may_be_digits: bool = False
) -> tuple[Any, NDArray[np.bool_]]:
    """Texts (as binary) that match, converted. may_be_digits: plain digits match, and are told apart faster."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = np.zeros(len(raw), dtype)
    truths = None
    if may_be_digits and not raw.null_count and pa.types.is_binary(raw.type):
        digits = pc.ascii_is_decimal(raw.view(pa.string()))
        if len(raw) and pc.all(digits).as_py() and pc.max(pc.binary_length(raw)).as_py() < 16:
            truths = digits
    if truths is None:
        truths = pc.match_substring_regex(raw, pattern)
        truths = truths.fill_null(False) if truths.null_count else truths
    sure = as_numpy(truths)
    if sure.any():
        texts = raw if sure.all() else raw.filter(truths)
        values[sure] = convert(texts.cast(pa.string()))
    return values, sure


def _lists(raw: Any) -> tuple[RaggedColumn, Bad]:
    import pyarrow as pa

    raw = _simple(raw)
    if not isinstance(raw, list) and (pa.types.is_list(raw.type) or pa.types.is_large_list(raw.type)):
        if pa.types.is_integer(raw.type.value_type) and not raw.null_count and not raw.flatten().null_count:
            try:
                values = as_numpy(raw.flatten().cast(pa.int64()))
                lengths = as_numpy(raw.value_lengths().cast(pa.int64()))
                return RaggedColumn(values, np.concatenate([[0], np.cumsum(lengths)])), {}
            except pa.ArrowException:
                pass
    flat = array("q")
    offsets = [0]
    bad: Bad = {}
    for at, cell in enumerate(_cells(raw)):
        try:
            if not parse.is_missing(cell):
                flat.extend(cell if _are_integers(cell) else parse.integers(cell))
        except (BadCellError, OverflowError) as expected:
            del flat[offsets[-1] :]
            bad[at] = str(expected) if isinstance(expected, BadCellError) else parse.LIST_EXPECTED
        offsets.append(len(flat))
    return RaggedColumn(np.array(flat, np.int64), np.array(offsets, np.int64)), bad


def _are_integers(cell: object) -> bool:
    return isinstance(cell, list) and set(map(type, cell)) <= {int}


def _simple(raw: Any) -> Any:
    """A column as a list of Python values, or as an Arrow array: texts as binary, dictionaries undone."""
    import pyarrow as pa

    if isinstance(raw, list):
        if raw and set(map(type, raw)) == {str}:
            return pa.array([cell.encode("utf-8", "surrogatepass") for cell in raw], pa.binary())
        return raw
    if pa.types.is_dictionary(raw.type):
        raw = raw.dictionary_decode()
    if pa.types.is_string(raw.type):
        return raw.cast(pa.binary())
    return raw.cast(pa.large_binary()) if pa.types.is_large_string(raw.type) else raw


def _cells(raw: Any, which: Sequence[int] | None = None) -> Sequence[Any]:
    """Cells as Python has them: all, or those at some positions."""
    import pyarrow as pa

    if isinstance(raw, list):
        return raw if which is None else [raw[at] for at in which]
    if which is not None:
        raw = taken(raw, np.array(which, np.int64))
    if pa.types.is_timestamp(raw.type):
        raw = raw.cast(pa.string())  # keeps all nine digits, which datetime would not
    try:
        cells = raw.to_pylist()
    except (ValueError, pa.ArrowException):
        return [None] * len(raw)
    return [cell.decode("utf-8", "surrogateescape") if isinstance(cell, bytes) else cell for cell in cells]


def _cell(raw: Any, at: int) -> Any:
    return _cells(raw, [at])[0]


def _are_dates(raw: Any) -> bool:
    """Whether a column's times are dates: what more of its first cells are. One odd cell decides nothing."""
    some = _cells(raw[:_SAMPLE])
    dates = sum(map(parse.is_date, some))
    numbers = sum(not parse.is_date(cell) and not parse.is_missing(cell) and parse.is_number(cell) for cell in some)
    return dates > numbers


def _or_nan(parser: Parser) -> Parser:
    return lambda cell: math.nan if parse.is_missing(cell) else parser(cell)


def _only(chunk: Chunk, kept: NDArray[np.bool_]) -> Chunk:
    return Chunk(chunk.rows[kept], chunk.lines[kept], {})


def _part(column: Any, kept: NDArray[np.bool_]) -> Any:
    if isinstance(column, list):
        return [column[at] for at in np.flatnonzero(kept).tolist()]
    return column.take(np.flatnonzero(kept)) if isinstance(column, RaggedColumn) else column[kept]


def _joined(parts: list[Any]) -> Any:
    if not parts:
        return np.empty(0)
    if isinstance(parts[0], list):
        return [cell for part in parts for cell in part]
    if isinstance(parts[0], RaggedColumn):
        lengths = np.concatenate([part.lengths for part in parts])
        values = np.concatenate([part.values[part.offsets[0] : part.offsets[-1]] for part in parts])
        return RaggedColumn(values, np.concatenate([[0], np.cumsum(lengths)]))
    return np.concatenate(parts)
