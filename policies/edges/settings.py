"""Settings of a run as plain data: every field has the type it says, and a finite value, wherever it came from.

A flag is checked by the command line, a key of a TOML file or of an earlier run's config.json by nobody: here both are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

LARGEST = 10**15
"""Largest whole number that a setting may have, up or down."""
LONGEST_TEXT = 10_000

_SAID: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    tuple: "a list",
    dict: "a table",
}


def check_settings(settings: Any, error: type[Exception], *, named: Callable[[str], str] | None = None) -> None:
    """Raises `error` for the first field of a dataclass whose value is not of the type that it is declared with.

    Only plain data is looked at; an object that a Python caller passes (a path, a model's shape) is his own affair.
    named: what a message calls a field; the option of that name unless given.
    """
    cls: type = type(settings)
    hints = _hints(cls)
    for entry in fields(settings):
        name = named(entry.name) if named else "--" + entry.name.replace("_", "-")
        check_value(name, getattr(settings, entry.name), hints[entry.name], error)


def check_value(name: str, value: Any, wanted: tuple[type, ...], error: type[Exception]) -> None:
    """Raises `error`, beginning with `name`, for a plain value of another type, and for one out of all bounds."""
    if not isinstance(value, bool | int | float | str | list | tuple | dict | None):
        return
    kind = type(value)
    fits = kind in wanted or (kind is int and float in wanted) or (kind is list and tuple in wanted)
    if value is None:
        fits = type(None) in wanted
    if not fits:
        expected = " or ".join(_SAID[one] for one in wanted if one in _SAID)
        raise error(f"{name}: found {shown(value)}, expected {expected or 'nothing'}")
    if isinstance(value, float) and not math.isfinite(value):
        raise error(f"{name}: found {value}, expected a finite number")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise error(f"{name}: found {shown(value)}, expected at most {LARGEST:.0e}")
    if isinstance(value, str) and (len(value) > LONGEST_TEXT or "\0" in value):
        raise error(f"{name}: found {shown(value)}, expected at most {LONGEST_TEXT:,} characters and no NUL")


def whole_number(text: str) -> int | None:
    """What plain digits spell, up to LARGEST; None for anything else, be it ² or five thousand digits."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(LARGEST))):
        return None
    return number if (number := int(text)) <= LARGEST else None


def listed(name: str, value: Any, of: type, error: type[Exception]) -> tuple[Any, ...]:
    """A list of a file of settings as a tuple of plain values of one type; raises `error` for anything else."""
    if not isinstance(value, list | tuple):
        raise error(f"{name}: found {shown(value)}, expected a list")
    for entry in value:
        check_value(f"{name}: entry", entry, (of,), error)
    return tuple(value)


@cache
def _hints(cls: type) -> Mapping[str, tuple[type, ...]]:
    return {name: _types(hint) for name, hint in get_type_hints(cls).items()}


def _types(hint: Any) -> tuple[type, ...]:
    """The plain types that an annotation allows."""
    origin = get_origin(hint)
    if origin is None:
        return (hint,) if isinstance(hint, type) else ()
    if isinstance(origin, type) and issubclass(origin, tuple):
        return (tuple,)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return (dict,)
    return tuple(kind for inner in get_args(hint) for kind in _types(inner))


def shown(value: Any) -> str:
    """A value as a message quotes it: 60 characters of it at most."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a very large number"
    return text if len(text) <= 60 else text[:57] + "..."
