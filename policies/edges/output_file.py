"""Files written whole or not at all: into a scratch file of their own beside the target, then renamed into place.

Two processes that write one target never share a scratch file: a reader sees one result or the other, never a mixture.
What was there before stays until the new content is complete, also when the disk fills up or the process is killed.
A scratch file says by its name whose it is, `.NAME.PID-HOST.xxxxxxxx.part`: what a killed process could not take away,
the next one that writes into the same folder does. A link is followed: what it points to is written, the link stays.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
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
        while not os.access(place, os.F_OK) and place != place.parent:
            place = place.parent
        if place != Path(path) and not place.is_dir():
            raise error(f"{shown_path(path)}: cannot be written ({place} is not a folder)")
        if not os.access(place, os.W_OK) and os.access(place, os.F_OK):  # not gone since, as another writer's folder
            raise error(f"{shown_path(path)}: cannot be written (no right to write in {place})")
    except OSError as reason:
        raise error(f"{shown_path(path)}: cannot be written ({reason.strerror})") from None


def followed(path: str | os.PathLike[str]) -> Path:
    """Where a path leads, every link followed: the place that is written. A link to itself stays a link."""
    return Path(os.path.realpath(path))


def new_mode(mode: int) -> int:
    """The rights that the user's umask leaves to something new; mode: 0o666 for files, 0o777 for folders."""
    return mode & ~_umask()


def refuse_strangers(path: Path, error: type[Exception]) -> None:
    """Raises `error` for a file or folder that somebody else owns or can write to: code is read from it."""
    if not hasattr(os, "geteuid"):
        return
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise error(
            f"{path}: found a link, or something that others own or can write to, expected a place of your own, since "
            "code is run from it; remove it, or choose another place"
        )


def scratch_prefix(name: str) -> str:
    """How the name of a scratch file or folder begins that stands in for `name`; `.part` or `.old` has to follow."""
    return f".{name[:80]}.{os.getpid()}-{_host()}."


_SCRATCH = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d{1,9})-(?P<host>[0-9a-f]{8})\.[^.]+\.(?P<kind>part|old)(\.[^.]*)?")


def is_scratch(name: str) -> bool:
    """Whether a file of this name is half of something that one of our processes, here or elsewhere, was writing."""
    return _SCRATCH.fullmatch(name) is not None


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
    if "\0" in str(path):
        raise error(f"{str(path)!r}: found a name that no file can have, expected a path")
    target = followed(path)
    scratch: Path | None = None
    try:
        if target.is_symlink():
            raise error(f"{shown_path(path)}: found a link to itself, expected a file or nothing")
        if target.exists() and not target.is_file():
            what = "a folder" if target.is_dir() else "a pipe or device"
            raise error(f"{shown_path(path)}: found {what}, expected a file or nothing; choose another place")
        target.parent.mkdir(parents=True, exist_ok=True)
        ending = f".part{target.suffix}"
        clear_leftovers(target.parent)
        handle, name = tempfile.mkstemp(prefix=scratch_prefix(target.name), suffix=ending, dir=target.parent)
        os.close(handle)
        scratch = Path(name)
        scratch.chmod(new_mode(0o666))
        yield scratch
        if sync:
            with scratch.open("rb") as written:
                os.fsync(written.fileno())
        os.replace(scratch, target)
    except Exception as reason:
        refused = _refusal_of_the_disk(reason)
        if refused is None or isinstance(reason, error):
            raise
        said = refused.strerror or str(refused).partition("\n")[0]
        raise error(f"{shown_path(path)}: cannot be written ({said})") from None
    finally:
        if scratch is not None:
            scratch.unlink(missing_ok=True)


def _refusal_of_the_disk(reason: BaseException | None) -> OSError | None:
    """The OSError behind an exception: libraries that tidy up after one (matplotlib's PDF) may fail at that in turn."""
    for _ in range(10):
        if reason is None or isinstance(reason, OSError):
            return reason
        reason = reason.__cause__ or reason.__context__
    return None


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


def put_folder(scratch: Path, target: Path, may_go: Callable[[Path, Path], None]) -> None:
    """Rename a finished folder to `target`; what was there is removed. Of writers that race, one stays, whole.

    may_go(folder, target): raises where the folder that was there may not be removed; it is asked once the folder is
    out of reach of writers, and a refusal brings it back. Raises OSError where the disk refuses.
    """
    for _ in range(_MOST_RACES):
        try:
            if not os.path.lexists(target):
                scratch.rename(target)
                return
            if _exchange(scratch, target):
                try:
                    may_go(scratch, target)
                except BaseException:
                    _exchange(scratch, target)
                    raise
                shutil.rmtree(scratch, ignore_errors=True)
                return
            _put_by_setting_aside(scratch, target, may_go)
            return
        except OSError as reason:
            if reason.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST) or not scratch.exists():
                raise
            # Somebody else's folder came or went between two steps: look again.
    raise OSError(errno.EBUSY, "other writers replace it all the time")


_MOST_RACES = 1_000


def _put_by_setting_aside(scratch: Path, target: Path, may_go: Callable[[Path, Path], None]) -> None:
    """Where two folders cannot change places at once: between two renames there is none at `target`."""
    aside = Path(tempfile.mkdtemp(prefix=scratch_prefix(target.name), suffix=".old", dir=target.parent))
    old = aside / target.name
    try:
        target.rename(old)
        try:
            may_go(old, target)
            scratch.rename(target)
        except BaseException:
            with suppress(OSError):  # another writer's folder is there now: newer than the old one
                old.rename(target)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change places in one step; False where the system or the disk cannot."""
    rename = _renameat2()
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(other))


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@cache
def _renameat2() -> Callable[..., int] | None:
    """Linux' renameat2(2), None elsewhere."""
    try:
        found = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return found


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
