"""From a path to blocks of whole lines that can be trusted to be text, or to a Parquet file: gz undone, nonsense out.

A file from the outside may be a folder, a pipe that never ends, a picture, or a small .gz that grows to terabytes.
Each gets one line that says so; none gets the machine's memory: text is read block by block, however large the file.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from policies.edges.input_file import shown_path
from workloads.trace import TraceError

MAX_BYTES = 4 << 30
"""Most bytes that a file's requests take as columns: what --window and --limit leave of them."""
MAX_ROWS = 50_000_000
"""Most requests that a file may leave to a trace."""
MAX_LINE = 64 << 20
"""Longest line: a prompt of ten million token ids."""
MAX_WHOLE = 1 << 30
"""Most bytes of a file that can only be read whole: ServeGen's, a packed Parquet file."""
BLOCK = 8 << 20

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


class Source:
    """One file whose beginning is that of a trace. kind: csv, jsonl, json or parquet. packed: it is a .gz."""

    def __init__(self, file: Path, shown: str) -> None:
        """Raises TraceError for what cannot be a trace: no such file, a folder, empty, binary, UTF-16."""
        self.file, self.path = file, shown
        _check_place(file, shown)
        start = next(self._unpacked(), b"")
        self.packed = self._starts_with(b"\x1f\x8b")
        if start.startswith(b"PAR1"):
            self.kind = "parquet"
            return
        _check_text(start, shown)
        probe = start[:_PROBE].removeprefix(b"\xef\xbb\xbf")
        self._old_line_ends = b"\n" not in probe and b"\r" in probe
        self.beginning = probe.lstrip()
        self.kind = {b"{": "jsonl", b"[": "json"}.get(self.beginning[:1], "csv")

    def blocks(self) -> Iterator[bytes]:
        """The text in blocks of whole lines, each with its line end; UTF-8 mark and old line ends taken away."""
        parts: list[bytes] = []
        size, line, first = 0, 1, True
        for part in self._unpacked():
            if first:
                part, first = part.removeprefix(b"\xef\xbb\xbf"), False
            if self._old_line_ends:
                part = part.replace(b"\r", b"\n")
            end = part.rfind(b"\n") + 1
            if end:
                block = b"".join([*parts, part[:end]])
                self._check_lines(block, line)
                line += block.count(b"\n")
                yield block
                parts, size = [], 0
            parts.append(part[end:])
            size += len(part) - end
            if size > MAX_LINE:
                raise TraceError(_too_long(self.path, line))
        if size:
            yield b"".join(parts)

    def whole(self, most: int) -> bytes:
        """All of the content, for what has to be held whole."""
        parts: list[bytes] = []
        size = 0
        for part in self._unpacked():
            size += len(part)
            if size > most:
                raise TraceError(f"{self.path}: found more than {most:,} bytes, expected at most that; split the file")
            parts.append(part)
        return b"".join(parts)

    def sha256(self) -> str:
        """Of the content, unpacked: what `sha256sum` prints for a file that is no .gz."""
        digest = hashlib.sha256()
        for part in self._unpacked():
            digest.update(part)
        return digest.hexdigest()

    def _check_lines(self, block: bytes, line: int) -> None:
        """A block may be longer than one may be, but none of its lines."""
        if len(block) <= MAX_LINE:
            return
        for text in block.split(b"\n"):
            if len(text) > MAX_LINE:
                raise TraceError(_too_long(self.path, line))
            line += 1

    def _starts_with(self, magic: bytes) -> bool:
        with self.file.open("rb") as file:
            return file.read(len(magic)) == magic

    def _unpacked(self) -> Iterator[bytes]:
        """The content as it comes, gzip undone (also several members in a row)."""
        try:
            with self.file.open("rb") as file:
                block = file.read(BLOCK)
                if not block.startswith(b"\x1f\x8b"):
                    while block:
                        yield block
                        block = file.read(BLOCK)
                    return
                unpacker = zlib.decompressobj(wbits=31)
                while block:
                    part = unpacker.decompress(block, BLOCK)
                    if part:
                        yield part
                    block = unpacker.unconsumed_tail or (unpacker.unused_data if unpacker.eof else b"")
                    if unpacker.eof and (block := block or file.read(BLOCK)).startswith(b"\x1f\x8b"):
                        unpacker = zlib.decompressobj(wbits=31)
                    elif unpacker.eof:
                        return
                    block = block or file.read(BLOCK)
                if not unpacker.eof:
                    found = "found gzip data that stops early"
                    raise TraceError(f"{self.path}: {found}, expected a whole .gz file; fetch it again")
        except zlib.error as error:
            found = f"found damaged gzip data ({error})"
            raise TraceError(f"{self.path}: {found}, expected a whole .gz file; fetch it again") from None
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be read ({error.strerror or error})") from None


def open_source(path: str | os.PathLike[str]) -> Source:
    """Finds out what a file holds, by content and not by name; raises TraceError as Source does."""
    return Source(Path(path), shown_path(path))


def refuse_settings(source: Source) -> None:
    """TraceError for what is readable and no file of requests: a run's config.json, a TOML file."""
    if source.kind == "jsonl" and source.beginning.partition(b"\n")[0].strip() == b"{":
        raise TraceError(
            f"{source.path}: found one JSON object over several lines, expected one request per line; settings and a "
            "run's config.json go to --config, the requests of a run are its requests.parquet"
        )
    if source.kind == "json" and source.path.endswith(".toml"):
        raise TraceError(f"{source.path}: found a TOML file, expected a file of requests; settings go to --config")


def _check_place(path: Path, shown: str) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise TraceError(f"{shown}: cannot be read ({error.strerror or error})") from None
    except ValueError:
        raise TraceError(f"{shown!r}: found a name that no file can have, expected a path") from None
    if stat.S_ISDIR(status.st_mode):
        inside = "requests.parquet"
        hint = f"; those of a run are {path / inside}" if (path / inside).exists() else ""
        raise TraceError(f"{shown}: found a folder, expected a file of requests{hint}")
    if not stat.S_ISREG(status.st_mode):
        raise TraceError(f"{shown}: found a pipe or device, expected a regular file; save its content to one first")


def _check_text(start: bytes, shown: str) -> None:
    for magic, what in _PACKED.items():
        if start.startswith(magic):
            raise TraceError(f"{shown}: found {what}, expected CSV, JSONL or Parquet (plain or .gz)")
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise TraceError(f"{shown}: found UTF-16 text, expected UTF-8; save it again as UTF-8")
    if b"\0" in start[:_PROBE]:
        raise TraceError(f"{shown}: found binary data, expected CSV, JSONL or Parquet (plain or .gz)")
    if not start.strip() and len(start) < BLOCK:
        raise TraceError(f"{shown}: found an empty file, expected a header line and one line per request")


def _too_long(shown: str, line: int) -> str:
    return f"{shown}, line {line}: found more than {MAX_LINE:,} bytes without a line end, expected one request per line"
