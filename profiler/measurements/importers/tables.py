"""Reading a foreign CSV with errors that name file, row and column."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from policies.edges.input_file import checked_file
from profiler.errors import ProfileError

if TYPE_CHECKING:
    import pandas as pd


MAX_COLUMNS = 2000


def check_width(path: Path) -> None:
    """Refuses what is no regular file, and a table so wide that reading it alone would take minutes."""
    with checked_file(path, ProfileError).open("rb") as lines:
        for number in range(1, 3):
            columns = lines.readline(1 << 20).count(b",") + 1
            if columns > MAX_COLUMNS:
                raise ProfileError(f"{path}, line {number}: found {columns} columns, expected at most {MAX_COLUMNS}")


def read_csv(path: Path, numbers: Iterable[str], texts: Iterable[str] = (), optional: bool = False) -> pd.DataFrame:
    """The named columns of a CSV, numbers as float64; an empty table if the file is optional and absent."""
    import pandas as pd

    numbers, texts = list(numbers), list(texts)
    if optional and not path.exists() and not path.is_symlink():
        return pd.DataFrame(columns=[*texts, *numbers])
    check_width(path)
    try:
        # A .csv is plain: an archive under that name is not unpacked.
        table = pd.read_csv(path, encoding="utf-8-sig", low_memory=False, compression=None)
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: cannot be read as CSV: {str(error).splitlines()[0]}") from None
    for column in (*texts, *numbers):
        if column not in table:
            raise ProfileError(f"{path}: missing column {column!r}, found {', '.join(map(str, table.columns[:12]))}")
    for column in numbers:
        values = pd.to_numeric(table[column], errors="coerce")
        bad = (values.isna() & table[column].notna()).to_numpy()
        if bad.any():
            row = int(bad.argmax())
            found = table[column].iloc[row]
            raise ProfileError(f"{path}: row {row + 2}, {column}: found {found!r}, expected a number")
        table[column] = values.astype(float)
    for column in texts:
        table[column] = table[column].astype(str)
    return table[[*texts, *numbers]]


def read_header(path: Path) -> list[str]:
    """Column names of a CSV."""
    check_width(path)
    try:
        with path.open(encoding="utf-8-sig") as file:
            return [name.strip() for name in file.readline(1 << 20).split(",")]
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read as CSV: {str(error).splitlines()[0]}") from None
