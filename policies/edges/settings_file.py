"""A file of settings as its reader means it: one spelling of a key, and file names relative to the file itself.

A run's TOML, a sweep's and an executor's follow the same two rules, so they lie here. A name that is found only from
the working folder still means that file: flags mean it so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from policies.edges.settings import check_value

FILES = ("trace", "file")
"""Keys whose value is a file, whatever it looks like; chunked, h100 and 4 are otherwise names."""


def one_spelling(values: Mapping[str, Any], where: str, error: type[Exception]) -> dict[str, Any]:
    """The same values with `_` for `-` in their keys; raises `error` for a key that stands there in both spellings."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in found:
            raise error(f"{where}: found {name!r} twice, as {name} and {name.replace('_', '-')}; expected one of them")
        found[name] = value
    return found


def knobs_of_file(values: dict[str, Any], error: type[Exception]) -> dict[str, Any]:
    """Take the policy's knobs out of a file's settings: its table `knobs`, and chunk_size, which may stand outside."""
    inside = values.pop("knobs", {})
    check_value("config: knobs", inside, (dict,), error)
    knobs = one_spelling(inside, "config: knobs", error)
    outside = values.pop("chunk_size", None)
    if outside is None:
        return knobs
    if knobs.get("chunk_size", outside) != outside:
        inner = knobs["chunk_size"]
        raise error(f"config: found chunk_size {outside} and knobs.chunk_size {inner}, expected one of them")
    return {**knobs, "chunk_size": outside}


def files_beside(
    values: Mapping[str, Any], folder: Path, *, told: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """The same settings with every file that lies in `folder`, beside the settings' own file, named in full.

    A text names a file alone (`t.csv`, `models/mine`), before a colon (`policy.py:Mine`) or after one
    (`empirical:lengths.txt`); tables and lists are looked into. told: gets a line where the working folder has another
    file of that name.
    """
    return {key: _beside(value, folder, key in FILES, told) for key, value in values.items()}


def _beside(value: Any, folder: Path, is_file: bool, told: Callable[[str], None] | None) -> Any:
    if isinstance(value, Mapping):
        return files_beside(value, folder, told=told)
    if isinstance(value, list):
        return [_beside(inner, folder, is_file, told) for inner in value]
    if not isinstance(value, str):
        return value
    before, first, after = value.partition(":")
    start, last, end = value.rpartition(":")
    for head, name, tail in (("", value, ""), ("", start, last + end), (before + first, after, "")):
        if name and (is_file or Path(name).suffix or "/" in name) and (file := _file(name, folder, told)) is not None:
            return f"{head}{file}{tail}"
    return value


def _file(name: str, folder: Path, told: Callable[[str], None] | None) -> Path | None:
    """The file or model folder of that relative name in `folder`."""
    path, ours = Path(name), folder / name
    try:
        if path.is_absolute() or not (ours.is_file() or (ours / "config.json").is_file()):
            return None
        if path.exists() and path.samefile(ours):
            return None  # named alike from both: it stays as it was written
        if told is not None and path.exists():
            told(f"{name} is the one beside the settings file, not the one in the working folder")
        return ours.resolve()
    except (OSError, ValueError, RuntimeError):
        return None  # no name that a file can have
