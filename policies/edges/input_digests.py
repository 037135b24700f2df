"""What a result was made from, by content: SHA-256 of every file that its settings name.

A name alone is no identity: a trace, a policy's file or a fitted model may be edited between two points of a sweep or
two starts of a validation. Results of different inputs are never put into one table without a word.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from policies.edges.settings_file import FILES

WHOLE_BYTES = 256 << 20
"""Of a file in a folder (the shards of a checkpoint), beyond which its size and its two ends stand for its content."""
_ENDS = 1 << 20
_KNOWN: dict[tuple[Any, ...], str] = {}
"""File, inode, size and times of change -> digest, so that a file is read again only when it was written again."""


def named_files(value: Any) -> list[str]:
    """What exists of the files and model folders that plain data names, alone or as part of a text.

    Such texts are `policy.py:Class` and `empirical:FILE`; under the keys `trace` and `file` any name is one.
    """
    return list(dict.fromkeys(_named(value, False)))


def _named(value: Any, is_file: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named(inner, key in FILES)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _named(inner, is_file)
    elif isinstance(value, str) and value:
        for part in dict.fromkeys((value, value.partition(":")[2], value.rpartition(":")[0])):
            if part and (is_file or Path(part).suffix or "/" in part) and _exists(part):
                yield part


def _exists(name: str) -> bool:
    try:
        return Path(name).is_file() or (Path(name) / "config.json").is_file()
    except (OSError, ValueError):
        return False


def parts_of(name: str) -> list[Path]:
    """The files behind a name, itself first: with a fitted model its arrays and stages, a client its lengths."""
    file = Path(name)
    if file.is_dir():
        return sorted(inner for inner in file.iterdir() if inner.is_file() and not inner.name.startswith("."))
    if file.suffix == ".json":
        stages = sorted(file.parent.glob(f"{glob.escape(file.stem)}.stage*.json"))
        models = [file, *(stage for stage in stages if stage != file)]
        return [part for model in models for part in (model, model.with_suffix(".npz")) if part.is_file()]
    if file.name.endswith("-trace.csv"):
        lengths = file.with_name(file.name.removesuffix("-trace.csv") + "-dataset.json")
        return [part for part in (file, lengths) if part.is_file()]
    return [file]


def digest_of(name: str) -> str:
    """SHA-256 of a file, of a file with those that belong to it, or of a folder. Raises OSError."""
    parts = parts_of(name)
    if len(parts) == 1 and not Path(name).is_dir():
        return _digest(parts[0], whole=True)
    own = [f"{part.name} {_digest(part, whole=not Path(name).is_dir())}" for part in parts]
    return hashlib.sha256("\n".join(own).encode()).hexdigest()


def digests_of(settings: Any) -> dict[str, str]:
    """Name -> digest of every file that plain data names. Raises OSError for one that cannot be read."""
    return {name: digest_of(name) for name in named_files(settings)}


def changed_inputs(then: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    """What differs between two records of inputs, of the names that both have, in words."""
    return [
        f"{name} (sha256 {str(then[name])[:12]} then, {digest[:12]} now)"
        for name, digest in now.items()
        if name in then and then[name] != digest
    ]


def _digest(file: Path, *, whole: bool) -> str:
    status = file.stat()
    key = (str(file.absolute()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, whole)
    if key not in _KNOWN:
        with file.open("rb") as stream:
            if whole or status.st_size <= WHOLE_BYTES:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            else:
                first = stream.read(_ENDS)
                stream.seek(-_ENDS, os.SEEK_END)
                found = hashlib.sha256(b"%d" % status.st_size + first + stream.read()).hexdigest()
        _KNOWN[key] = found
    return _KNOWN[key]
