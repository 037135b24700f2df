"""Traces to files: CSV, JSONL or Parquet (told by the name's ending, plain or .gz), whole or not at all.

What is written reads back equal, to the nanosecond (for 48 days, as far as double precision goes).
Columns that a trace does not have are left out.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from policies.edges.output_file import write_bytes
from policies.work.request import NS_PER_S
from workloads.column_names import LISTS, TEXTS
from workloads.trace import Trace, TraceError

_ENDINGS = ".csv, .jsonl or .parquet (.csv.gz and .jsonl.gz too)"


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Writes a trace in the project's own columns: arrival_s, prompt_tokens, output_tokens and what else it has.

    An existing file is replaced. Raises TraceError when the ending is not known or the place cannot be written to.
    """
    path = Path(path)
    packed = path.suffix == ".gz"
    ending = path.with_suffix("").suffix if packed else path.suffix
    if ending == ".csv":
        content = _csv(trace).encode()
    elif ending == ".jsonl":
        content = _jsonl(trace).encode()
    elif ending == ".parquet" and not packed:
        content = _parquet(trace)
    else:
        raise TraceError(f"{path}: found the ending {path.suffix!r}, expected {_ENDINGS}")
    if packed:
        content = gzip.compress(content, mtime=0)
    return write_bytes(path, content, TraceError)


def file_columns(trace: Trace) -> dict[str, Any]:
    """Column name -> values as the files have them: times in ns (int64, -1 for none), counts, texts, lists."""
    columns: dict[str, Any] = {
        "arrival_s": trace.arrival_ns,
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
    }
    if not np.array_equal(trace.max_output_tokens, trace.output_tokens):
        columns["max_output_tokens"] = trace.max_output_tokens
    optional = {
        "session": trace.session,
        "turn": trace.turn,
        "after_row": trace.after_row,
        "think_s": trace.think_ns,
        "joins": trace.joins,
        "priority": trace.priority,
        "slo": trace.slo,
        "acceptance": trace.acceptance,
        "tenant": trace.tenant,
        "program": trace.program,
        "predicted_tokens": trace.predicted_tokens,
        "abort_s": trace.abort_ns,
        "prefix_hashes": trace.prefix_hashes,
        "hash_tokens": None if trace.prefix_hashes is None else np.full(len(trace), trace.hash_tokens),
        "prompt_ids": trace.prompt_ids,
    }
    return columns | {name: column for name, column in optional.items() if column is not None}


def seconds_text(nanoseconds: int) -> str:
    """Nanoseconds as decimal seconds, exact and without trailing zeros; empty for none (-1)."""
    if nanoseconds < 0:
        return ""
    whole, rest = divmod(nanoseconds, NS_PER_S)
    return f"{whole}.{rest:09d}".rstrip("0").rstrip(".") if rest else str(whole)


def _values(name: str, column: Any) -> Iterator[Any]:
    values = column.tolist() if isinstance(column, np.ndarray) else column
    if name.endswith("_s"):
        return map(seconds_text, values)
    return iter(values)


def _csv(trace: Trace) -> str:
    import csv

    columns = file_columns(trace)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    lists = {name for name in LISTS if name in columns}
    cells = [
        (" ".join(map(str, value)) for value in column) if name in lists else _values(name, column)
        for name, column in columns.items()
    ]
    writer.writerows(zip(*cells))
    return text.getvalue()


def _jsonl(trace: Trace) -> str:
    columns = file_columns(trace)
    keys = [json.dumps(name) for name in columns]
    lines = []
    for cells in zip(*(_values(name, column) for name, column in columns.items())):
        pairs = (
            f"{key}: {(cell or 'null') if name.endswith('_s') else json.dumps(cell)}"
            for key, name, cell in zip(keys, columns, cells)
        )
        lines.append("{" + ", ".join(pairs) + "}\n")
    return "".join(lines)


def _parquet(trace: Trace) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    arrays: dict[str, pa.Array] = {}
    for name, column in file_columns(trace).items():
        if name.endswith("_s"):
            arrays[name[:-2] + "_ns"] = pa.array(column, pa.int64(), mask=column < 0)
        elif name in TEXTS:
            arrays[name] = pa.array(column, pa.string())
        elif name in LISTS:
            arrays[name] = pa.array([list(row) for row in column], pa.list_(pa.int64()))
        else:
            arrays[name] = pa.array(column, pa.float64() if column.dtype == np.float64 else pa.int64())
    sink = io.BytesIO()
    parquet.write_table(pa.table(arrays), sink, compression="zstd")
    return sink.getvalue()
