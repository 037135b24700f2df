"""JSON: one object per line (JSONL), or one array of objects (small files only, since it must be held whole)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from workloads.cells import shown
from workloads.reading.chunk import BadRow, Chunk, place
from workloads.source import BLOCK, Source
from workloads.trace import TraceError

PROBED_ROWS = 100
_MAX_ARRAY_BYTES = 256 << 20
_MOST_ROWS, _MOST_LATE = 1 << 14, 100
_ONE_OBJECT = 'one whole JSON object per line, such as {"arrival_s": 0.5, "prompt_tokens": 374, "output_tokens": 44}'


class JsonTable:
    """The cells of one JSONL file, or of one JSON array of objects."""

    kind = "jsonl"

    def __init__(self, source: Source) -> None:
        self.path = source.path
        self._source = source
        self._array = _parsed_array(source) if source.kind == "json" else None
        names: dict[str, None] = {}
        probed = 0
        for row, line, parsed, problem, _ in self._objects():
            if problem:
                if not names:
                    raise TraceError(f"{self.path}, {place(row, line)}: {problem}")
                continue
            names.update(dict.fromkeys(parsed))
            probed += 1
            if probed == PROBED_ROWS:
                break
        if not names:
            raise TraceError(f"{self.path}: found no rows, expected {_ONE_OBJECT}")
        self.names = list(names)
        self.late_names: dict[str, None] = {}

    def chunks(self, wanted: Sequence[str]) -> Iterator[Chunk]:
        """The wanted values as Python has them, block by block."""
        objects, known = self._objects(), set(self.names)
        going = True
        while going:
            good: list[Mapping[str, object]] = []
            rows: list[int] = []
            lines: list[int] = []
            bad = []
            going = False
            size = 0
            for row, line, parsed, problem, length in objects:
                going = True
                size += length
                if problem:
                    bad.append(BadRow(len(good), row, line, problem))
                else:
                    good.append(parsed)
                    rows.append(row)
                    lines.append(line)
                if len(good) + len(bad) == _MOST_ROWS or size > BLOCK:
                    break
            cells = {name: [each.get(name) for each in good] for name in wanted}
            late = {name: None for each in good for name in each if name not in known}
            self.late_names |= dict(islice(late.items(), _MOST_LATE))
            known |= self.late_names.keys()
            yield Chunk(np.array(rows, np.int64), np.array(lines, np.int64), cells, bad)

    def _objects(self) -> Iterator[tuple[int, int, Mapping[str, object], str, int]]:
        """(row, line, object, "", bytes) of every line that holds one, with {} and what is wrong of the others."""
        if self._array is not None:
            for row, parsed in enumerate(self._array, 1):
                yield (row, 0, *_checked(parsed), 0)
            return
        row, line = 0, 0
        for block in self._source.blocks():
            lines = block.split(b"\n")
            if not lines[-1]:
                lines.pop()
            for raw in lines:
                line += 1
                if not (raw := raw.strip()):
                    continue
                row += 1
                try:
                    parsed = json.loads(raw)
                except (ValueError, RecursionError) as error:
                    where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
                    text = shown(raw[:200].decode("utf-8", "replace"))
                    yield row, line, {}, f"found {text}, broken or cut off{where}, expected {_ONE_OBJECT}", len(raw)
                    continue
                yield (row, line, *_checked(parsed), len(raw))


def _checked(parsed: object) -> tuple[Mapping[str, object], str]:
    if isinstance(parsed, dict):
        return parsed, ""
    return {}, f"found {shown(parsed)}, expected {_ONE_OBJECT}"


def _parsed_array(source: Source) -> list[object]:
    try:
        parsed = json.loads(source.whole(_MAX_ARRAY_BYTES))
    except TraceError:
        raise TraceError(
            f"{source.path}: found a JSON array of more than {_MAX_ARRAY_BYTES:,} bytes, expected at most that; write "
            "one object per line (JSONL) instead"
        ) from None
    except json.JSONDecodeError as error:
        raise TraceError(
            f"{source.path}, line {error.lineno}, column {error.colno}: found JSON that is broken or cut off "
            f"({error.msg}), expected a whole array of objects"
        ) from None
    except (ValueError, RecursionError) as error:
        what = f"found JSON that cannot be read ({type(error).__name__})"
        raise TraceError(f"{source.path}: {what}, expected an array of objects") from None
    assert isinstance(parsed, list)
    return parsed
