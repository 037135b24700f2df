"""Files written whole or not at all: into a scratch file of their own beside the target, then renamed into place.

Two processes that write one target never share a scratch file: a reader sees one result or the other, never a mixture.
What was there before stays until the new content is complete, also when the disk fills up or the process is killed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policies.input_file import shown_path


def check_place(path: str | os.PathLike[str], error: type[Exception]) -> None:
    """Raises `error` where nothing can be written later, so that it shows before the work and not after it."""
    place = Path(path)
    if "\0" in str(place):
        raise error(f"{str(place)!r}: found a name that no file can have, expected a path")
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        if place != Path(path) and not place.is_dir():
            raise error(f"{shown_path(path)}: cannot be written ({place} is not a folder)")
        if not os.access(place, os.W_OK):
            raise error(f"{shown_path(path)}: cannot be written (no right to write in {place})")
    except OSError as reason:
        raise error(f"{shown_path(path)}: cannot be written ({reason.strerror})") from None


@contextmanager
def whole_file(path: str | os.PathLike[str], error: type[Exception], *, sync: bool = False) -> Iterator[Path]:
    """A scratch file to write; it becomes `path` if the block ends well. Missing folders are made.

    error: raised instead of OSError, with the path. sync: on the disk before it is renamed, for results that took long.
    The scratch file keeps the path's ending, which some writers go by.
    """
    target = Path(path)
    scratch: Path | None = None
    if "\0" in str(target):
        raise error(f"{str(target)!r}: found a name that no file can have, expected a path")
    try:
        if target.exists() and not target.is_file():
            what = "a folder" if target.is_dir() else "a pipe or device"
            raise error(f"{target}: found {what}, expected a file or nothing; choose another place")
        target.parent.mkdir(parents=True, exist_ok=True)
        ending = f".part{target.suffix}"
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:80]}.", suffix=ending, dir=target.parent)
        os.close(handle)
        scratch = Path(name)
        scratch.chmod(0o666 & ~_umask())
        yield scratch
        if sync:
            with scratch.open("rb") as written:
                os.fsync(written.fileno())
        os.replace(scratch, target)
    except OSError as reason:
        said = reason.strerror or str(reason).splitlines()[0]
        raise error(f"{shown_path(target)}: cannot be written ({said})") from None
    finally:
        if scratch is not None:
            scratch.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str, error: type[Exception], *, sync: bool = False) -> Path:
    """Write a text as UTF-8, whole or not at all; raises `error`."""
    with whole_file(path, error, sync=sync) as scratch:
        scratch.write_text(text, encoding="utf-8")
    return Path(path)


def write_bytes(path: str | os.PathLike[str], content: bytes, error: type[Exception]) -> Path:
    """Write bytes, whole or not at all; raises `error`."""
    with whole_file(path, error) as scratch:
        scratch.write_bytes(content)
    return Path(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
