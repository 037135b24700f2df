"""From a path to bytes that can be trusted to be text or Parquet: gz undone, size bounded, nonsense refused early.

A file from the outside may be a folder, a pipe that never ends, a picture, or a small .gz that grows to terabytes.
Each gets one line that says so; none gets the machine's memory.
"""

from __future__ import annotations

import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path

from policies.edges.input_file import shown_path
from workloads.trace import TraceError

MAX_BYTES = 1 << 30
"""Most bytes read from one file, after unpacking: some thirty million requests."""
MAX_ROWS = 50_000_000
"""Most requests of one file, in whatever form: their columns alone take gigabytes."""
MAX_LINE = 64 << 20
"""Longest line: a prompt of ten million token ids."""

_PROBE = 1 << 16
_PACKED = {
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "zstd data",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ": "xz data",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"%PDF": "a PDF",
    b"\x7fELF": "a program",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook",
}


@dataclass(frozen=True)
class Source:
    """The unpacked content of one file. kind: csv, jsonl, json or parquet."""

    path: str
    content: bytes
    kind: str


def open_source(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> Source:
    """Reads a whole file and finds out what it holds, by content and not by name.

    Raises TraceError for what cannot be a trace: no such file, a folder, empty, binary, UTF-16, above max_bytes.
    """
    shown = shown_path(path)
    content = _read(Path(path), shown, max_bytes)
    if content.startswith(b"PAR1"):
        return Source(shown, content, "parquet")
    text = _checked_text(content, shown)
    start = text[:_PROBE].lstrip()[:1]
    kind = {b"{": "jsonl", b"[": "json"}.get(start, "csv")
    if len(text) > 2 * MAX_ROWS and (lines := text.count(b"\n")) > MAX_ROWS:
        raise TraceError(f"{shown}: found {lines:,} lines, expected at most {MAX_ROWS:,}; split the file")
    return Source(shown, text, kind)


def refuse_settings(source: Source) -> None:
    """TraceError for what is readable and no file of requests: a run's config.json, a TOML file."""
    if source.kind == "jsonl" and source.content[:_PROBE].lstrip().partition(b"\n")[0].strip() == b"{":
        raise TraceError(
            f"{source.path}: found one JSON object over several lines, expected one request per line; settings and a "
            "run's config.json go to --config, the requests of a run are its requests.parquet"
        )
    if source.kind == "json" and source.path.endswith(".toml"):
        raise TraceError(f"{source.path}: found a TOML file, expected a file of requests; settings go to --config")


def _read(path: Path, shown: str, max_bytes: int) -> bytes:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            inside = "requests.parquet"
            hint = f"; those of a run are {path / inside}" if (path / inside).exists() else ""
            raise TraceError(f"{shown}: found a folder, expected a file of requests{hint}")
        if not stat.S_ISREG(status.st_mode):
            raise TraceError(f"{shown}: found a pipe or device, expected a regular file; save its content to one first")
        if status.st_size > max_bytes:
            raise TraceError(_too_large(shown, f"{status.st_size:,} bytes", max_bytes))
        with path.open("rb") as file:
            _check_beginning(file.read(min(MAX_LINE, max_bytes) + 1), shown)
            file.seek(0)
            content = file.read(max_bytes + 1)
    except TraceError:
        raise
    except OSError as error:
        raise TraceError(f"{shown}: cannot be read ({error.strerror or error})") from None
    except ValueError:
        raise TraceError(f"{shown!r}: found a name that no file can have, expected a path") from None
    if len(content) > max_bytes:
        raise TraceError(_too_large(shown, "a growing file", max_bytes))
    if content.startswith(b"\x1f\x8b"):
        content = _unpacked(content, shown, max_bytes)
    if not content.strip():
        raise TraceError(f"{shown}: found an empty file, expected a header line and one line per request")
    return content


def _check_beginning(start: bytes, shown: str) -> None:
    """Refuses what cannot be a trace by its first bytes or its first line, before all of it is read."""
    if not start.startswith((b"\x1f\x8b", b"PAR1")) and start.strip():
        _checked_text(start, shown)


def _unpacked(packed: bytes, shown: str, max_bytes: int) -> bytes:
    """Undoes gzip (also several members in a row) without ever holding more than max_bytes."""
    parts: list[bytes] = []
    size = 0
    while packed[:2] == b"\x1f\x8b":
        unpacker = zlib.decompressobj(wbits=31)
        try:
            while not unpacker.eof and packed:
                part = unpacker.decompress(packed, 1 << 24)
                packed = unpacker.unconsumed_tail
                size += len(part)
                parts.append(part)
                if size > max_bytes:
                    raise TraceError(_too_large(shown, f"more than {max_bytes:,} bytes after unpacking", max_bytes))
                if not part and not packed:
                    break
        except zlib.error as error:
            found = f"found damaged gzip data ({error})"
            raise TraceError(f"{shown}: {found}, expected a whole .gz file; fetch it again") from None
        if not unpacker.eof:
            raise TraceError(f"{shown}: found gzip data that stops early, expected a whole .gz file; fetch it again")
        packed = unpacker.unused_data
    return b"".join(parts)


def _checked_text(content: bytes, shown: str) -> bytes:
    for magic, what in _PACKED.items():
        if content.startswith(magic):
            raise TraceError(f"{shown}: found {what}, expected CSV, JSONL or Parquet (plain or .gz)")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise TraceError(f"{shown}: found UTF-16 text, expected UTF-8; save it again as UTF-8")
    probe = content[:_PROBE]
    if b"\0" in probe:
        raise TraceError(f"{shown}: found binary data, expected CSV, JSONL or Parquet (plain or .gz)")
    content = content.removeprefix(b"\xef\xbb\xbf")
    if b"\n" not in probe and b"\r" in probe:
        content = content.replace(b"\r", b"\n")
    end = content.find(b"\n", 0, MAX_LINE)
    if end < 0 and len(content) > MAX_LINE:
        raise TraceError(
            f"{shown}, line 1: found more than {MAX_LINE:,} bytes without a line end, expected one request per line"
        )
    return content


def _too_large(shown: str, found: str, max_bytes: int) -> str:
    return f"{shown}: found {found}, expected at most {max_bytes:,} bytes; split the file or raise max_bytes"
