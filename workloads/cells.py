"""One cell at a time: what a text or value from a file means, or a complaint that says what was expected instead.

`workloads.reading.columns` converts plain cells by the column and asks here about all others.
"""

from __future__ import annotations

import datetime
import json
import math
import re

from workloads.column_names import NS_PER_UNIT

MAX_TOKENS = 100_000_000
"""No prompt or answer is longer: what is above is a wrong column or a broken number."""
MAX_SPAN_S = 10 * 365.25 * 86_400
"""No trace is longer than ten years: what is above is a wrong unit or a broken number."""
MAX_TIME_S = 1e10
"""No clock shows more."""
EPOCH_S = 1e8
"""Times from here on (three years in seconds) are clock readings, counted from the first of them."""

WHOLE_RANGES = {
    "max_output_tokens": (1, MAX_TOKENS),
    "turn": (0, 1_000_000),
    "predicted_tokens": (0, MAX_TOKENS),
    "priority": (-1_000_000_000, 1_000_000_000),
    "hash_tokens": (1, 1_000_000),
    "after_row": (-1, 1_000_000_000),
}
"""Optional whole numbers: what lies between is taken."""

SHARES = ("acceptance",)
"""Optional numbers from 0 to 1."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
_DATE = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?",
    re.ASCII,
)
_EMPTY = {"", "nan", "na", "n/a", "null", "none"}
_DAY_ONE = datetime.date(1970, 1, 1).toordinal()


LIST_EXPECTED = "a list of whole numbers such as [1, 2, 3]"


class BadCellError(Exception):
    """What a cell should have held."""


def is_missing(cell: object) -> bool:
    """Whether nothing stands there: None, NaN, an empty text or one of the usual words for it."""
    if cell is None:
        return True
    if isinstance(cell, float):
        return math.isnan(cell)
    return isinstance(cell, str) and cell.strip().lower() in _EMPTY


def number(cell: object, expected: str) -> float:
    """A finite number from a text or a value; raises BadCellError(expected)."""
    if isinstance(cell, str):
        if cell.isascii() and cell.isdigit() and len(cell) < 16:
            return float(cell)
        cell = cell.strip()
        if len(cell) < 400 and _NUMBER.fullmatch(cell):
            cell = float(cell)
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        raise BadCellError(expected)
    try:
        value = float(cell)
    except OverflowError:
        raise BadCellError(expected) from None
    if not math.isfinite(value):
        raise BadCellError(expected)
    return value


def share(cell: object) -> float:
    """A number from 0 to 1."""
    expected = "a number from 0 to 1"
    value = number(cell, expected)
    if not 0 <= value <= 1:
        raise BadCellError(expected)
    return value


def tokens(cell: object, least: int = 1) -> int:
    """A count of tokens: a whole number from `least` to MAX_TOKENS (`374` and `374.0` alike)."""
    if isinstance(cell, str) and len(cell) < 9 and cell.isascii() and cell.isdigit() and int(cell) >= least:
        return int(cell)  # nearly all of them, and this is asked a million times
    expected = f"a whole number of tokens from {least} to {MAX_TOKENS:,}"
    value = number(cell, expected)
    if value != int(value) or not least <= value <= MAX_TOKENS:
        raise BadCellError(expected)
    return int(value)


def whole(cell: object, low: int, high: int) -> int:
    """A whole number from low to high."""
    expected = f"a whole number from {low} to {high:,}"
    value = number(cell, expected)
    if value != int(value) or not low <= value <= high:
        raise BadCellError(expected)
    return int(value)


def _bounds(unit: str) -> tuple[float, str]:
    most = MAX_TIME_S * NS_PER_UNIT["s"] / NS_PER_UNIT[unit or "ns"]
    return most, f"a time as a number{unit and ' of ' + unit} from 0 to {most:.0e}"


def most_time(unit: str) -> float:
    """Largest time of a column in this unit, "" where that is not known yet."""
    return _TIME_BOUNDS[unit][0]


_TIME_BOUNDS = {unit: _bounds(unit) for unit in ("", *NS_PER_UNIT)}


def time(cell: object, unit: str) -> float:
    """A time as a number in its column's unit ("" where that is not known yet): 0 or more, and before the year 2286."""
    most, expected = _TIME_BOUNDS[unit]
    value = number(cell, expected)
    if not 0 <= value <= most:
        raise BadCellError(expected)
    return value


def is_number(cell: object) -> bool:
    """Whether the cell is a finite number."""
    try:
        number(cell, "")
    except BadCellError:
        return False
    return True


def is_date(cell: object) -> bool:
    """Whether the cell is a calendar date with a time of day."""
    return isinstance(cell, datetime.datetime) or (isinstance(cell, str) and _DATE.fullmatch(cell.strip()) is not None)


def date_ns(cell: object) -> int:
    """A date and time in ISO form (up to nine fractional digits, optional zone) in ns since 1970 UTC."""
    expected = "a date and time such as 2023-11-16 18:15:46.6805900, as in the first row"
    if isinstance(cell, datetime.datetime):
        cell = cell.isoformat()
    match = _DATE.fullmatch(cell.strip()) if isinstance(cell, str) else None
    if match is None:
        raise BadCellError(expected)
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    try:
        days = datetime.date(year, month, day).toordinal() - _DAY_ONE
    except ValueError:
        raise BadCellError(expected) from None
    if not (1900 <= year <= 2200 and hour < 24 and minute < 60 and second < 60):
        raise BadCellError(expected)
    shift_min = 0
    if (zone := match[8]) and zone != "Z":
        shift_min = int(zone[0] + "1") * (int(zone[1:3]) * 60 + int(zone[-2:]))
    whole_s = ((days * 24 + hour) * 60 + minute - shift_min) * 60 + second
    return whole_s * NS_PER_UNIT["s"] + int((match[7] or "").ljust(9, "0"))


def integers(cell: object) -> list[int]:
    """A list of whole numbers: a list, or a text such as `1 2 3` or `[1, 2, 3]`."""
    expected = LIST_EXPECTED
    if isinstance(cell, str):
        text = cell.strip()
        try:
            cell = json.loads(text) if text.startswith("[") else [int(part) for part in text.replace(",", " ").split()]
        except (ValueError, RecursionError):
            raise BadCellError(expected) from None
    if not isinstance(cell, list):
        raise BadCellError(expected)
    for value in cell:
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
            raise BadCellError(expected)
    return cell


def text(cell: object) -> str:
    """A name of at most 1,000 characters: a text, or a whole number."""
    expected = "a name of at most 1,000 characters"
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    if isinstance(cell, bool) or not isinstance(cell, (str, int)):
        raise BadCellError(expected)
    try:
        name = str(cell).strip()
        name.encode("utf-8")
    except ValueError:
        raise BadCellError(expected) from None
    if len(name) > 1000:
        raise BadCellError(expected)
    return name


def comma_hint(cell: object) -> str:
    """How to write a number that has a comma or thousands separators in it; "" for anything else."""
    text = cell.strip() if isinstance(cell, str) and len(cell) < 60 else ""
    if re.fullmatch(r"[+-]?\d+,\d+", text, re.ASCII):
        grouped = re.fullmatch(r"[+-]?[1-9]\d{0,2},\d{3}", text, re.ASCII)
        either = f" or {text.replace(',', '')}" if grouped else ""
        return f", written without a comma: {text.replace(',', '.')}{either}"
    if re.fullmatch(r"[+-]?\d{1,3}([ ,.']\d{3}){2,}|[+-]?\d{1,3}([ ']\d{3})+", text, re.ASCII):
        return f", written without separators: {re.sub(r'[^0-9+-]', '', text)}"
    return ""


def shown(cell: object) -> str:
    """A cell as an error message quotes it: short, on one line."""
    if cell is None:
        return "nothing"
    text = repr(cell)
    return text if len(text) <= 60 else text[:57] + "..."
