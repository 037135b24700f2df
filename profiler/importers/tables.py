"""Reading a foreign CSV with errors that name file, row and column."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.errors import ProfileError

if TYPE_CHECKING:
    import pandas as pd


def read_csv(path: Path, numbers: Iterable[str], texts: Iterable[str] = (), optional: bool = False) -> pd.DataFrame:
    """The named columns of a CSV, numbers as float64; an empty table if the file is optional and absent."""
    import pandas as pd

    numbers, texts = list(numbers), list(texts)
    try:
        table = pd.read_csv(path, encoding="utf-8-sig", low_memory=False)
    except FileNotFoundError:
        if optional:
            return pd.DataFrame(columns=[*texts, *numbers])
        raise ProfileError(f"{path}: no such file") from None
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
    try:
        with path.open(encoding="utf-8-sig") as file:
            return [name.strip() for name in file.readline().split(",")]
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read as CSV: {str(error).splitlines()[0]}") from None
