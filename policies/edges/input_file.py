"""Files that come from outside, opened with suspicion: a regular file of bounded size, or one line that says why not.

A path that a user or a config names may be a folder, a pipe that never ends, /dev/zero, a link to itself, or a gigabyte
without a line end. Every reader of the project asks here first, and gets its own folder's exception type.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, NoReturn

SETTINGS_BYTES = 16 << 20
"""Most bytes of a file of settings (TOML, JSON)."""

LOG_BYTES = 1 << 30
"""Most bytes of a table or log."""

DEEPEST_JSON = 100

LARGEST_NUMBER = 10**300
_LONG_NUMBER = re.compile(r"\d{300}")


def checked_file(path: str | os.PathLike[str], error: type[Exception], max_bytes: int = LOG_BYTES) -> Path:
    """The path of a regular file of at most max_bytes, for libraries that open files themselves; raises `error`."""
    file = Path(path)
    shown = shown_path(path)
    try:
        status = file.stat()
    except FileNotFoundError:
        raise error(f"{shown}: no such file") from None
    except OSError as reason:
        raise error(f"{shown}: cannot be read ({reason.strerror})") from None
    except ValueError:
        raise error(f"{shown!r}: found a name that no file can have, expected a path") from None
    if stat.S_ISDIR(status.st_mode):
        raise error(f"{shown}: found a folder, expected a file")
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{shown}: found a pipe or device, expected a regular file")
    if status.st_size > max_bytes:
        raise error(f"{shown}: found {status.st_size:,} bytes, expected at most {max_bytes:,}")
    return file


def read_text(path: str | os.PathLike[str], error: type[Exception], max_bytes: int = SETTINGS_BYTES) -> str:
    """A whole UTF-8 text (with or without a byte order mark); raises `error`."""
    file = checked_file(path, error, max_bytes)
    try:
        with file.open("rb") as stream:
            content = stream.read(max_bytes + 1)
    except OSError as reason:
        raise error(f"{shown_path(path)}: cannot be read ({reason.strerror})") from None
    if len(content) > max_bytes:
        raise error(f"{shown_path(path)}: found a growing file, expected at most {max_bytes:,} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        raise error(f"{shown_path(path)}: cannot be read: not UTF-8 text (byte {reason.start})") from None
    return text.replace("\r\n", "\n")


def read_json(path: str | os.PathLike[str], error: type[Exception], max_bytes: int = SETTINGS_BYTES) -> Any:
    """One JSON value; raises `error`, also for NaN, infinities and what nests absurdly deep."""
    return parse_json(read_text(path, error, max_bytes), shown_path(path), error)


def parse_json(text: str, where: str, error: type[Exception], *, constants: bool = False) -> Any:
    """The value of a JSON text; where: how messages begin; constants: accept NaN and Infinity, as some logs have."""
    try:
        value = json.loads(text, parse_constant=None if constants else _no_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair could never be written again
    except UnicodeEncodeError:
        raise error(f"{where}: found half a surrogate pair, expected JSON with whole characters") from None
    except (ValueError, RecursionError) as reason:
        raise error(f"{where}: cannot be read as JSON: {_reason(reason)}") from None
    if text.count("[") + text.count("{") > DEEPEST_JSON and len(_layers(value)) > DEEPEST_JSON:
        raise error(f"{where}: found JSON nested more than {DEEPEST_JSON} deep")
    _check_lengths(value, text, where, error)
    return value


def read_toml(path: str | os.PathLike[str], error: type[Exception], max_bytes: int = SETTINGS_BYTES) -> dict[str, Any]:
    """The tables of a TOML file; raises `error`."""
    text = read_text(path, error, max_bytes)
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as reason:
        raise error(f"{shown_path(path)}: cannot be read as TOML: {_reason(reason)}") from None
    _check_lengths(tables, text, shown_path(path), error)
    return tables


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as messages show it: never long enough to hide what is said about it."""
    text = os.fspath(path)
    return text if len(text) <= 300 else f"{text[:140]}...{text[-140:]}"


def _reason(error: BaseException) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0][:300]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"found {name}, which JSON does not have")


def _check_lengths(value: Any, text: str, where: str, error: type[Exception]) -> None:
    """Whole numbers that no float can hold would break the first sum that meets them."""
    if _LONG_NUMBER.search(text) is None:
        return
    for item in itertools.chain.from_iterable(_layers(value)):
        if isinstance(item, int) and abs(item) > LARGEST_NUMBER:
            raise error(f"{where}: found a whole number of {len(str(abs(item)))} digits")


def _layers(value: Any) -> list[list[Any]]:
    """The values of lists and tables, outermost first, by layers and not by recursion."""
    layers = [[value]]
    while layers[-1]:
        layers.append(
            [
                inner
                for item in layers[-1]
                for inner in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
            ]
        )
    return layers[:-1]
