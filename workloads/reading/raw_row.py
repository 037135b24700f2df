"""One row of a request file before its cells are understood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class RawRow(NamedTuple):
    """row: 1 for the first request. line: of the file, from 1; 0 where the format has no lines.

    cells: column name -> text or value; None when the row could not be taken apart: then `problem` tells what was
    found and `expected` what was not.
    """

    row: int
    line: int
    cells: Mapping[str, object] | None
    problem: str = ""
    expected: str = ""

    @property
    def place(self) -> str:
        return f"row {self.row} (line {self.line})" if self.line else f"row {self.row}"
