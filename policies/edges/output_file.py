"""Files written whole or not at all: into a scratch file of their own beside the target, then renamed into place.

Two processes that write one target never share a scratch file: a reader sees one result or the other, never a mixture.
What was there before stays until the new content is complete, also when the disk fills up or the process is killed.
A scratch file says by its name whose it is, `.NAME.PID-HOST.xxxxxxxx.part`: what a killed process could not take away,
the next one that writes into the same folder does.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from policies.edges.input_file import shown_path


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


def scratch_prefix(name: str) -> str:
    """How the name of a scratch file or folder begins that stands in for `name`; `.part` or `.old` has to follow."""
    return f".{name[:80]}.{os.getpid()}-{_host()}."


_SCRATCH = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d{1,9})-(?P<host>[0-9a-f]{8})\.[^.]+\.(?P<kind>part|old)(\.[^.]*)?")


def clear_leftovers(folder: Path) -> None:
    """Remove scratch files and folders of processes of this machine that are gone.

    A folder that was set aside (`.old`) for a new one that never came goes back to its place. Only the first call for a
    folder looks, since a sweep writes thousands of files into one.
    """
    if folder in _cleared:
        return
    _cleared.add(folder)
    with suppress(OSError), os.scandir(folder) as entries:
        ours = [found for entry in entries if (found := _SCRATCH.fullmatch(entry.name)) and found["host"] == _host()]
        for found in ours:
            if _is_alive(int(found["pid"])):
                continue
            place = folder / found[0]
            if found["kind"] == "old":
                for aside in place.iterdir():
                    if not (folder / aside.name).exists():
                        aside.rename(folder / aside.name)
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place, ignore_errors=True)
            else:
                place.unlink(missing_ok=True)


_cleared: set[Path] = set()


def _is_alive(pid: int) -> bool:
    if os.name != "posix":
        return True  # elsewhere asking might end it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # somebody else's
    return True


@cache
def _host() -> str:
    """Of the processes that can see each other: the machine's name and, in containers, their space of process ids."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    name = os.uname().nodename if hasattr(os, "uname") else ""
    return f"{zlib.crc32(f'{name} {space}'.encode()):08x}"


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
        clear_leftovers(target.parent)
        handle, name = tempfile.mkstemp(prefix=scratch_prefix(target.name), suffix=ending, dir=target.parent)
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
