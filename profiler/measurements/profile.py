"""A profile: measured times of operators or whole iterations, one row a measurement, in one tidy table.

Whoever measures (the executor, or another project through `profiler.measurements.importers`) writes this form;
whoever fits reads it and nothing else. Shapes are columns and never prose; times are seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.edges.input_file import checked_file
from policies.edges.output_file import whole_file
from policies.edges.settings import shown
from profiler.errors import ProfileError

if TYPE_CHECKING:
    import pandas as pd

UNGROUPED = "without grouped heads"
"""In the backend of a profile whose decodes read keys and values once per query head."""

TWIN = "even twin"
"""In the backend of a row: the even twin of an uneven batch, measured beside it. Only their difference is fitted."""

LAYER_GEMMS = ("qkv", "attention_out", "ffn_up", "ffn_down")
"""Linear layers of one transformer layer, named as `ModelSpec.gemms` names them."""

ROW_OPERATORS = ("norm", "activation", "rotary", "qk_norm")
"""Per-layer operators whose cost depends on the rows alone."""

OPERATORS = (
    *LAYER_GEMMS,
    *ROW_OPERATORS,
    "gemm",
    "experts",
    "attention",
    "embedding",
    "final_norm",
    "head",
    "sampler",
    "all_reduce",
    "send",
    "iteration",
    "after_chunks",
)
"""Names of the `operator` column.

`iteration` is a whole forward pass, `after_chunks` a decode some steps after one with chunks (the row has the shape of
the latter); `gemm` is a linear layer of no particular model; `experts` the whole FFN of a layer with experts, its
router included.
"""

TEXT_COLUMNS = ("device", "model", "dtype", "backend", "operator", "chunks")
COUNT_COLUMNS = (
    "tensor_parallel",
    "rows",
    "n",
    "k",
    "heads",
    "kv_heads",
    "head_dim",
    "decodes",
    "decode_context_total",
    "decode_context_max",
    "dummy_tokens",
    "sampled",
    "steps_since",
    "bytes",
    "repeats",
    "outlier",
    "experts",
)
TIME_COLUMNS = ("median_s", "min_s", "max_s")
LAPSE_COLUMNS = ("host_before_s", "host_after_s", "cpu_s", "at_s", "gauge_s")
COLUMNS = (
    "device",
    "model",
    "dtype",
    "tensor_parallel",
    "backend",
    "operator",
    "rows",
    "n",
    "k",
    "heads",
    "kv_heads",
    "head_dim",
    "chunks",
    "decodes",
    "decode_context_total",
    "decode_context_max",
    "dummy_tokens",
    "sampled",
    "steps_since",
    "bytes",
    "repeats",
    "outlier",
    "experts",
    *TIME_COLUMNS,
    *LAPSE_COLUMNS,
)
"""Columns in file order.

rows: rows of the operator's input (tokens, or sampled rows for head and sampler). n, k: width out and in of a GEMM, of
a norm or activation (n elements read a row). chunks: prefill chunks as text, see `chunk_text`. decode_context_*:
contexts before the step; dummy_tokens, sampled: as in `BatchShape`. steps_since: of `after_chunks`, 1 right after.
bytes: message size of all_reduce and send. repeats: measurements behind the row, 0 where unknown. outlier: 1 where the
measurer's rule says that something disturbed it. min_s, max_s: NaN where unknown. Of an iteration also host_before_s
and host_after_s (median_s is the device's part alone), cpu_s (processor time of the whole of it), at_s (when, since
measuring began) and gauge_s (what a fixed bit of work took just before, which tells the machine's speed); NaN where
unknown. experts: of an iteration, experts that it touched, all layers together. A shape column that does not apply is
0, a text column empty.
"""

_CHUNK = re.compile(r"(\d{1,9}):(\d{1,9})(?:x(\d{1,9}))?\Z", re.ASCII)


def chunk_text(chunks: Sequence[tuple[int, int]]) -> str:
    """Chunks (tokens, prefix) in batch order as "512:0 128:1024x3" (x3: three equal chunks in a row)."""
    runs: list[tuple[tuple[int, int], int]] = []
    for tokens, prefix in chunks:
        if runs and runs[-1][0] == (tokens, prefix):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append(((tokens, prefix), 1))
    return " ".join(f"{t}:{p}" + (f"x{n}" if n > 1 else "") for (t, p), n in runs)


def parse_chunks(text: str) -> tuple[tuple[int, int], ...]:
    """The inverse of `chunk_text`; raises ProfileError."""
    chunks: list[tuple[int, int]] = []
    for part in text.split():
        match = _CHUNK.match(part)
        if match is None or int(match[1]) < 1 or int(match[3] or 1) > 65536:
            raise ProfileError(f"chunks: found {shown(part)}, expected tokens:prefix, e.g. 512:0 or 128:1024x3")
        chunks += [(int(match[1]), int(match[2]))] * int(match[3] or 1)
    return tuple(chunks)


@dataclass(frozen=True)
class Profile:
    """A validated table and where it comes from.

    table: one row a measurement with COLUMNS. provenance: plain data: source, licence, version, notes.
    """

    table: pd.DataFrame
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def rows_of(self, operator: str) -> pd.DataFrame:
        """The rows of one operator, in file order."""
        return self.table[self.table["operator"] == operator]

    def scaled(self, factor: float) -> Profile:
        """The same profile with every time multiplied by `factor`: a slower or faster device."""
        table = self.table.copy()
        for column in TIME_COLUMNS:
            table[column] = table[column] * factor
        return Profile(table, {**self.provenance, "scaled": factor})

    def only(self, **values: object) -> Profile:
        """Rows whose columns equal the given values, e.g. only(tensor_parallel=2)."""
        table = self.table
        for column, value in values.items():
            table = table[table[column] == value]
        return Profile(table.reset_index(drop=True), self.provenance)


def make_profile(table: pd.DataFrame, provenance: Mapping[str, Any], where: str = "profile") -> Profile:
    """Complete missing optional columns, order them, check every value; raises ProfileError naming row and column."""
    import numpy as np
    import pandas as pd

    table = table.copy()
    for column in ("device", "operator", "median_s"):
        if column not in table:
            raise ProfileError(f"{where}: missing column {column}, expected {', '.join(COLUMNS)}")
    unknown = [column for column in table if column not in COLUMNS]
    if unknown:
        raise ProfileError(f"{where}: unknown column {unknown[0]!r}, expected {', '.join(COLUMNS)}")
    if not len(table):
        raise ProfileError(f"{where}: no rows, expected at least one measurement")
    for column in TEXT_COLUMNS:
        texts = table[column].astype(object) if column in table else pd.Series("", index=table.index)
        table[column] = texts.where(texts.notna(), "").astype(str)
    for column in COUNT_COLUMNS:
        default = 1 if column == "tensor_parallel" else 0
        if column not in table:
            table[column] = default
        values = pd.to_numeric(table[column].where(table[column].notna(), default), errors="coerce").to_numpy(float)
        whole = (values >= 0) & (values == np.floor(values)) & (values < 2**53)
        _reject(where, table, column, ~whole, "a whole number")
        table[column] = values.astype(np.int64)
    for column in TIME_COLUMNS:
        if column not in table:
            table[column] = np.nan
        values = pd.to_numeric(table[column], errors="coerce").to_numpy(float)
        blank = pd.isna(table[column]).to_numpy() & (column != "median_s")
        _reject(where, table, column, ~(blank | ((values > 0) & (values < 1e6))), "seconds above 0")
        table[column] = values
    for column in LAPSE_COLUMNS:
        lapses = pd.to_numeric(table[column], errors="coerce").to_numpy(float) if column in table else np.nan
        table[column] = lapses
        bad = (table[column] < 0) | (table[column] >= 1e6)
        _reject(where, table, column, bad.to_numpy(), "seconds, 0 or more")
    _reject(where, table, "operator", ~table["operator"].isin(OPERATORS).to_numpy(), f"one of {', '.join(OPERATORS)}")
    _reject(where, table, "min_s", (table["min_s"] > table["median_s"] * (1 + 1e-9)).to_numpy(), "at most median_s")
    _reject(where, table, "max_s", (table["max_s"] < table["median_s"] * (1 - 1e-9)).to_numpy(), "at least median_s")
    for text in table["chunks"].unique():
        try:
            parse_chunks(text)
        except ProfileError as error:
            row = int((table["chunks"] == text).to_numpy().argmax())
            raise ProfileError(f"{where}: row {row + 1}: {error}") from None
    return Profile(table[list(COLUMNS)].reset_index(drop=True), dict(provenance))


def _reject(where: str, table: pd.DataFrame, column: str, bad: Any, expected: str) -> None:
    if bad.any():
        row = int(bad.argmax())
        raise ProfileError(f"{where}: row {row + 1}, {column}: found {table[column].iloc[row]!r}, expected {expected}")


def write_profile(profile: Profile, path: str | Path) -> None:
    """Write `.parquet` or `.csv` (provenance inside: parquet metadata, or a first line `# {json}`), whole or not."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    note = json.dumps(dict(profile.provenance), sort_keys=True)
    if path.suffix not in (".csv", ".parquet"):
        raise ProfileError(f"{path}: found suffix {path.suffix!r}, expected .parquet or .csv")
    with whole_file(path, ProfileError) as part:
        if path.suffix == ".csv":
            with part.open("w", encoding="utf-8", newline="") as file:
                file.write(f"# {note}\n")
                profile.table.to_csv(file, index=False, lineterminator="\n")
        else:
            table = pa.Table.from_pandas(profile.table, preserve_index=False)
            pq.write_table(table.replace_schema_metadata({b"charioteer.profile": note.encode()}), part)


def read_profile(path: str | Path) -> Profile:
    """Read what `write_profile` wrote (a CSV may lack the first line); raises ProfileError."""
    import pandas as pd

    from profiler.measurements.bounded_parquet import read_parquet
    from profiler.measurements.importers.tables import check_width

    path = Path(path)
    try:
        if path.suffix == ".parquet":
            data = read_parquet(path)
            note = (data.schema.metadata or {}).get(b"charioteer.profile", b"{}").decode()
            table = data.to_pandas()
        elif path.suffix == ".csv":
            with checked_file(path, ProfileError).open("rb") as file:
                first = file.readline(1 << 20).decode("utf-8-sig")
            note = first[1:].strip() if first.startswith("#") else "{}"
            check_width(path)
            skipped = int(first.startswith("#"))
            table = pd.read_csv(path, skiprows=skipped, encoding="utf-8-sig", compression=None)
        else:
            raise ProfileError(f"{path}: found suffix {path.suffix!r}, expected .parquet or .csv")
        provenance = json.loads(note)
    except ProfileError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: cannot be read as a profile: {str(error).splitlines()[0]}") from None
    if not isinstance(provenance, dict):
        raise ProfileError(f"{path}: provenance: found {provenance!r}, expected a JSON object")
    return make_profile(table, provenance, str(path))
