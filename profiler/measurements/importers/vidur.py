"""Vidur's profiling folders: mlp.csv, attention.csv, all_reduce.csv, send_recv.csv, whichever are there.

Traps: times are milliseconds in columns time_stats.OP.{min,max,mean,median,std}; kv_cache_size is a request's context
before the step, for decodes and for chunks alike (LLMServingSim's first form reuses the columns and counts the whole
batch instead); attention is split into reshape, cache write and kernel, which are added here; up and gate projections
are one operator; collective sizes are bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from policies.edges.input_file import checked_file
from profiler.errors import ProfileError
from profiler.measurements.importers.llmservingsim import operator_width
from profiler.measurements.importers.tables import read_csv
from profiler.measurements.profile import Profile, make_profile

if TYPE_CHECKING:
    import pandas as pd

    from profiler.specs.model_spec import ModelSpec

_OPERATORS = {
    "emb": "embedding",
    "input_layernorm": "norm",
    "attn_pre_proj": "qkv",
    "attn_rope": "rotary",
    "attn_post_proj": "attention_out",
    "mlp_up_proj": "ffn_up",
    "mlp_act": "activation",
    "mlp_down_proj": "ffn_down",
}
_STATISTICS = ("median", "min", "max")
_AROUND = ("attn_input_reshape", "attn_kv_cache_save", "attn_output_reshape")


def read(
    path: Path, model: str | None = None, device: str | None = None, tensor_parallel: int | None = None
) -> Profile:
    """Profile of one folder DEVICE/ORGANISATION/MODEL (names are taken from it unless given)."""
    import pandas as pd

    from profiler.specs.model_config import load_model_spec

    spec = load_model_spec(model or path.name)
    name = device or path.parent.parent.name
    parts = [_mlp(path, spec), _attention(path, spec), _all_reduce(path), _send(path)]
    table = pd.concat([part for part in parts if len(part)] or [pd.DataFrame()], ignore_index=True)
    if not len(table):
        raise ProfileError(f"{path}: found none of mlp.csv, attention.csv, all_reduce.csv, send_recv.csv")
    if tensor_parallel is not None:
        table = table[table["tensor_parallel"] == tensor_parallel]
    table["device"], table["dtype"], table["backend"] = name, "float16", "vidur"
    table["model"] = spec.name
    provenance = {
        "source": "Vidur",
        "licence": "MIT, microsoft/vidur",
        "device": name,
        "model": spec.name,
        "measured": "operators of one layer, CUDA events",
    }
    return make_profile(table, provenance, str(path))


def _times(table: pd.DataFrame, operator: str) -> dict[str, pd.Series]:
    return {f"{stat}_s": table[f"time_stats.{operator}.{stat}"] * 1e-3 for stat in _STATISTICS}


def _columns(operators: tuple[str, ...]) -> list[str]:
    return [f"time_stats.{name}.{stat}" for name in operators for stat in _STATISTICS]


def _header(file: Path) -> list[str]:
    with checked_file(file, ProfileError).open("rb") as lines:
        return lines.readline(1 << 20).decode("utf-8-sig", "replace").strip().split(",")


def _mlp(path: Path, spec: ModelSpec) -> pd.DataFrame:
    import pandas as pd

    file = path / "mlp.csv"
    if not file.exists():
        return pd.DataFrame()
    header = set(_header(file))
    present = tuple(name for name in _OPERATORS if f"time_stats.{name}.median" in header)
    table = read_csv(file, ["num_tokens", "num_tensor_parallel_workers", *_columns(present)])
    parts = []
    for name in present:
        operator = _OPERATORS[name]
        widths = {
            degree: operator_width(operator, spec, int(degree))
            for degree in table["num_tensor_parallel_workers"].unique()
        }
        part = pd.DataFrame({"operator": operator, "rows": table["num_tokens"], **_times(table, name)})
        part["tensor_parallel"] = table["num_tensor_parallel_workers"]
        part["n"] = [widths[degree][0] for degree in part["tensor_parallel"]]
        part["k"] = [widths[degree][1] for degree in part["tensor_parallel"]]
        parts.append(part[part["median_s"].notna()])
    return pd.concat(parts, ignore_index=True)


def _attention(path: Path, spec: ModelSpec) -> pd.DataFrame:
    import pandas as pd

    file = path / "attention.csv"
    if not file.exists():
        return pd.DataFrame()
    header = set(_header(file))
    around = tuple(name for name in _AROUND if f"time_stats.{name}.median" in header)
    numbers = ["batch_size", "prefill_chunk_size", "kv_cache_size", "num_tensor_parallel_workers"]
    table = read_csv(file, [*numbers, *_columns(("attn_prefill", "attn_decode", *around))], ["is_prefill"])
    prefill = table["is_prefill"].str.lower().isin(("true", "1"))
    batch, context, tokens = table["batch_size"], table["kv_cache_size"], table["prefill_chunk_size"]
    out = pd.DataFrame({"operator": "attention"}, index=table.index)
    out["chunks"] = [
        (f"{int(t)}:{int(c)}" + (f"x{int(b)}" if b > 1 else "")) if p else ""
        for t, c, b, p in zip(tokens, context, batch, prefill, strict=True)
    ]
    out["tensor_parallel"] = table["num_tensor_parallel_workers"]
    out["heads"] = spec.heads // out["tensor_parallel"]
    out["kv_heads"] = [spec.kv_heads_per_device(int(degree)) for degree in out["tensor_parallel"]]
    out["head_dim"] = spec.head_dim
    out["rows"] = (tokens * batch).where(prefill, batch)
    out["decodes"] = batch.where(~prefill, 0)
    out["decode_context_total"] = (batch * context).where(~prefill, 0)
    out["decode_context_max"] = context.where(~prefill, 0)
    for stat in _STATISTICS:
        kernel = table[f"time_stats.attn_prefill.{stat}"].where(prefill, table[f"time_stats.attn_decode.{stat}"])
        rest = sum((table[f"time_stats.{name}.{stat}"].fillna(0) for name in around), start=0.0)
        out[f"{stat}_s"] = (kernel + rest) * 1e-3
    return out[out["median_s"].notna()]


def _all_reduce(path: Path) -> pd.DataFrame:
    return _collective(path / "all_reduce.csv", "all_reduce", "all_reduce")


def _send(path: Path) -> pd.DataFrame:
    return _collective(path / "send_recv.csv", "send_recv", "send")


def _collective(file: Path, operator: str, name: str) -> pd.DataFrame:
    import pandas as pd

    if not file.exists():
        return pd.DataFrame()
    table = read_csv(file, ["num_workers", "size", *_columns((operator,))])
    out = pd.DataFrame({"operator": name, "bytes": table["size"], **_times(table, operator)})
    out["tensor_parallel"] = table["num_workers"] if name == "all_reduce" else 1
    return out[out["median_s"].notna()]
