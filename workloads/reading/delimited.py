"""CSV and its kin: any of , ; tab | between the cells, a header line, BOM and CRLF taken as they come.

Lines without a quote are split whole blocks at a time. From the first quote on, Python's csv module splits line by
line; a quoted cell may go on over some lines, and one that never ends costs its own line alone.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from workloads.cells import is_number, shown
from workloads.reading.chunk import BadRow, Chunk, as_numpy, taken
from workloads.source import MAX_LINE, Source
from workloads.trace import TraceError

_MAX_COLUMNS = 4096
_MOST_LINES = 100
"""Over so many lines a quoted cell may go."""
_ROWS = 1 << 14
_BLANK = " \t\n\r\x0b\x0c"


class DelimitedTable:
    """The cells of one delimited text file."""

    kind = "csv"
    late_names: tuple[str, ...] = ()

    def __init__(self, source: Source) -> None:
        self.path = source.path
        self._source = source
        head, self._header_line = self._first_line()
        self.delimiter = max(",;\t|", key=head.count)
        self.names = self._header(head)

    def _first_line(self) -> tuple[str, int]:
        line = 0
        for block in self._source.blocks():
            for raw in block.split(b"\n"):
                line += 1
                if raw.strip():
                    try:
                        return raw.decode("utf-8").strip("\r\n"), line
                    except UnicodeDecodeError:
                        where = f"{self.path}, line {line}"
                        what = "found bytes that are not UTF-8 text, expected a header line"
                        raise TraceError(f"{where}: {what}") from None
            line -= 1  # what follows a block's last line end is the next block's first line
        raise TraceError(f"{self.path}: found an empty file, expected a header line and one line per request")

    def _header(self, head: str) -> list[str]:
        where = f"{self.path}, line {self._header_line}"
        try:
            names = [name.strip() for name in next(csv.reader([head], delimiter=self.delimiter, strict=True))]
        except (csv.Error, StopIteration) as error:
            raise TraceError(f"{where}: found {shown(head)} ({error}), expected a header line") from None
        if len(names) > _MAX_COLUMNS:
            raise TraceError(f"{where}: found {len(names):,} columns, expected at most {_MAX_COLUMNS:,}")
        if any(is_number(name) for name in names):
            raise TraceError(
                f"{where}: found {shown(head)}, expected a header line with column names; "
                "put one first, such as arrival_s,prompt_tokens,output_tokens"
            )
        for position, name in enumerate(names):
            if name and name in names[:position]:
                raise TraceError(
                    f"{where}, column {position + 1}: found the name {name!r} again (column {names.index(name) + 1} "
                    "has it), expected every column name once; rename or remove one of them"
                )
        return names

    def chunks(self, wanted: Sequence[str]) -> Iterator[Chunk]:
        """The wanted cells as texts, block by block."""
        row, line = 1, 1
        blocks = self._source.blocks()
        for block in blocks:
            count = block.count(b"\n") + (not block.endswith(b"\n"))
            start = max(0, self._header_line + 1 - line)  # header, and what stands before it
            head = sum(len(text) + 1 for text in block.split(b"\n", start)[:start])
            if block.find(b'"', head) >= 0:
                yield from self._quoted(_numbered(block[head:], line + start, blocks), row, wanted)
                return
            chunk, row = self._split(block[head:], line + start, row, wanted)
            line += count
            yield chunk

    def _split(self, block: bytes, line: int, row: int, wanted: Sequence[str]) -> tuple[Chunk, int]:
        """Lines without a quote, and the number of the row after them."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if block and not block.endswith(b"\n"):
            block += b"\n"
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + 1
        offsets = np.concatenate([[0], ends]).astype(np.int32)
        # Cells may be no UTF-8; these functions look at bytes alone.
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(block)]
        texts = pc.ascii_rtrim(pa.Array.from_buffers(pa.string(), len(ends), buffers), characters="\r\n")
        numbers = line + np.arange(len(ends))
        blank = as_numpy(pc.ascii_is_space(texts)) | (as_numpy(pc.binary_length(texts)) == 0)
        if blank.any():
            texts, numbers = taken(texts, np.flatnonzero(~blank)), numbers[~blank]
        rows = row + np.arange(len(texts))
        parts = pc.split_pattern(texts, self.delimiter)
        counts = as_numpy(pc.list_value_length(parts))
        good = counts == len(self.names)
        bad = []
        if not good.all():
            before = np.cumsum(good)
            for at in np.flatnonzero(~good).tolist():
                problem = self._not_cells(f"found {counts[at]} cells")
                bad.append(BadRow(int(before[at]), int(rows[at]), int(numbers[at]), problem))
            parts = taken(parts, np.flatnonzero(good))
        flat, width, size = parts.flatten(), len(self.names), len(parts)
        starts = width * np.arange(size)
        cells = {name: taken(flat, starts + self.names.index(name)).view(pa.binary()) for name in wanted}
        return Chunk(rows[good], numbers[good], cells, bad), row + len(texts)

    def _quoted(self, lines: Iterator[tuple[int, str]], row: int, wanted: Sequence[str]) -> Iterator[Chunk]:
        positions = [self.names.index(name) for name in wanted]
        entries = self._rows_with_quotes(lines)
        while batch := list(islice(entries, _ROWS)):
            rows: list[int] = []
            numbers: list[int] = []
            good: list[list[str]] = []
            bad = []
            for line, cells, problem in batch:
                if cells is not None and (count := len(cells)) != len(self.names):
                    cells, problem = None, self._not_cells(f"found {count} cells")
                if cells is None:
                    bad.append(BadRow(len(good), row, line, problem))
                else:
                    good.append(cells)
                    rows.append(row)
                    numbers.append(line)
                row += 1
            columns = {name: [cells[at] for cells in good] for name, at in zip(wanted, positions)}
            yield Chunk(np.array(rows, np.int64), np.array(numbers, np.int64), columns, bad)

    def _rows_with_quotes(self, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, list[str] | None, str]]:
        """(line, cells or None, what is wrong) of each row; a row may take several lines."""
        csv.field_size_limit(MAX_LINE)
        ahead: list[tuple[int, str]] = []
        while True:
            line, text = ahead.pop(0) if ahead else next(lines, (0, ""))
            if not line:
                return
            if not text.strip(_BLANK):
                continue
            cells, problem = self._cells(text)
            if cells is None and text.count('"') % 2:
                # The quote may close on a later line, whose quotes are odd in number too.
                ahead += islice(lines, max(0, _MOST_LINES - len(ahead)))
                ends = next((at for at, (_, more) in enumerate(ahead) if more.count('"') % 2), None)
                if ends is not None:
                    joined, _ = self._cells("\n".join([text, *(more for _, more in ahead[: ends + 1])]))
                    if joined is not None and len(joined) == len(self.names):
                        cells = joined
                        del ahead[: ends + 1]
            yield line, cells, problem

    def _cells(self, text: str) -> tuple[list[str] | None, str]:
        if '"' not in text:
            return text.split(self.delimiter), ""
        try:
            return next(csv.reader([text], delimiter=self.delimiter, strict=True)), ""
        except (csv.Error, StopIteration) as error:
            return None, self._not_cells(f"found a line that cannot be split into cells ({error})")

    def _not_cells(self, found: str) -> str:
        return f"{found}, expected {len(self.names)} cells as in the header"


def _numbered(block: bytes | None, line: int, blocks: Iterator[bytes]) -> Iterator[tuple[int, str]]:
    """(number, text) of these lines, and of all that follow."""
    while block is not None:
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        for raw in lines:
            yield line, raw.decode("utf-8", "surrogateescape").rstrip("\r")
            line += 1
        block = next(blocks, None)
