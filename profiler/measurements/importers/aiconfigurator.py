"""NVIDIA aiconfigurator's kernel tables for vLLM: GPU_sxm/X_perf.parquet, with X one of gemm,
context_attention, generation_attention, custom_allreduce.

Traps: latency is milliseconds; all-reduce message_size counts 16-bit elements, not bytes; context attention never has a
prefix (`step` is always 0) and always whole prompts, `batch_size` of them; in generation attention `step` is the
context before the token, and `isl` (1) is nothing to go by; attention times include writing the new keys and values.
Tables hold several number formats, head sizes and windows: 16-bit ones (or those of the `weights` asked for) without a
window and with common head sizes are taken. Of the two all-reduce series the one inside a CUDA graph is taken: the
eager one is mostly its launch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from profiler.errors import ProfileError
from profiler.measurements.bounded_parquet import read_parquet
from profiler.measurements.profile import Profile, chunk_text, make_profile

if TYPE_CHECKING:
    import pandas as pd

HEAD_DIMS = (64, 128)
ELEMENT_BYTES = 2


def read(path: Path, tensor_parallel: int | None = None, weights: str = "bfloat16", window: int = 0) -> Profile:
    """Profile of one GPU's folder. tensor_parallel keeps the all-reduces of one degree only.

    weights: the number format of its products. "fp8" has attention over 8-bit keys and values beside them, "fp8_block"
    products alone; what both share with 16 bits is not read twice. window: attention with a sliding window of so many
    tokens alone, in 16 bits.
    """
    import pandas as pd

    gemm = _table(path, "gemm_perf", ["m", "n", "k", "gemm_dtype"])
    if weights not in set(gemm["gemm_dtype"]):
        known = ", ".join(sorted(map(str, gemm["gemm_dtype"].unique())))
        raise ProfileError(f"{path}: no products in {weights!r} were measured on this card, expected one of {known}")
    parts = [] if window else [_gemms(gemm, weights)]
    if window:
        parts += [_context(path, window=window), _generation(path, window=window)]
        if not sum(map(len, parts)):
            raise ProfileError(f"{path}: no attention with a window of {window} was measured")
    elif weights == "bfloat16":
        parts += [_context(path), _generation(path), _all_reduce(path, tensor_parallel)]
    elif weights == "fp8":
        parts += [_context(path, "fp8"), _generation(path, "fp8")]
    table = pd.concat([part for part in parts if len(part)], ignore_index=True)
    table["device"], table["dtype"] = str(gemm["device"].iloc[0]), weights
    provenance = {
        "source": "NVIDIA aiconfigurator-core 0.12.0",
        "licence": "Apache-2.0, NVIDIA CORPORATION & AFFILIATES",
        "device": str(gemm["device"].iloc[0]),
        "vllm_version": str(gemm["version"].iloc[0]),
        "measured": "vLLM kernels one by one; attention without prefixes and without mixed batches",
    }
    return make_profile(table, provenance, str(path))


def _table(path: Path, name: str, columns: list[str]) -> pd.DataFrame:
    file = path / f"{name}.parquet"
    try:
        table = read_parquet(file).to_pandas()
    except ProfileError as error:
        raise ProfileError(f"{error}; expected a folder such as h100_sxm") from None
    for column in (*columns, "latency", "device", "version", "kernel_source"):
        if column not in table:
            raise ProfileError(f"{file}: missing column {column!r}, found {', '.join(map(str, table.columns))}")
    return table


def _gemms(table: pd.DataFrame, weights: str) -> pd.DataFrame:
    import pandas as pd

    table = _without_launches(table) if weights == "fp8_block" else table[table["gemm_dtype"] == weights]
    return pd.DataFrame(
        {
            "operator": "gemm",
            "backend": _backend(table),
            "rows": table["m"],
            "n": table["n"],
            "k": table["k"],
            "median_s": table["latency"] * 1e-3,
        }
    )


LAUNCHES = 1.5
"""Times what the tiniest products of a kernel take, up to which a time may be its launch from Python."""
TINY = 1 << 16
"""Weights of products that take nothing but their launch."""


def _without_launches(table: pd.DataFrame) -> pd.DataFrame:
    """Block-wise fp8 products were timed with their launches: products of 1,024 weights take as long as those of 30
    million (59, 89 or 176 us by kernel, on every card), while whole modules with five of them take less than one. A
    product that takes no more than that is taken to take what the one with a scale a tensor does, the same bytes and
    FLOPs; larger ones, which take what these do, are kept.
    """
    import numpy as np

    blocks, plain = (table[table["gemm_dtype"] == one] for one in ("fp8_block", "fp8"))
    tiny = blocks[blocks["n"] * blocks["k"] <= TINY]
    launch = tiny.groupby("kernel_source")["latency"].median()
    floor = blocks["kernel_source"].map(launch).fillna(0.0).to_numpy()
    keys = ["m", "n", "k"]
    one = plain.groupby(keys)["latency"].median()
    alike = blocks.set_index(keys).index.map(one).to_numpy(float)
    launched = (blocks["latency"].to_numpy() < LAUNCHES * floor) & (alike < blocks["latency"].to_numpy())
    return blocks.assign(latency=np.where(launched, alike, blocks["latency"]))


def _backend(table: pd.DataFrame) -> pd.Series:
    return "vllm " + table["version"].astype(str) + " " + table["kernel_source"].astype(str)


def _attention(path: Path, name: str, kv_dtype: str, window: int) -> pd.DataFrame:
    columns = ["batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "step"]
    table = _table(path, name, columns)
    table = table[(table["kv_cache_dtype"] == kv_dtype) & table["head_dim"].isin(HEAD_DIMS)]
    return table[table["window_size"] == window] if "window_size" in table else table


def _heads(table: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(
        {
            "operator": "attention",
            "backend": _backend(table),
            "heads": table["num_heads"],
            "kv_heads": table["num_key_value_heads"],
            "head_dim": table["head_dim"],
            "median_s": table["latency"] * 1e-3,
        }
    )


def _context(path: Path, kv_dtype: str = "bfloat16", window: int = 0) -> pd.DataFrame:
    table = _attention(path, "context_attention_perf", kv_dtype, window)
    out = _heads(table)
    pairs = zip(table["isl"], table["batch_size"], strict=True)
    out["chunks"] = [chunk_text([(int(tokens), 0)] * int(batch)) for tokens, batch in pairs]
    out["rows"] = table["isl"] * table["batch_size"]
    return out


def _generation(path: Path, kv_dtype: str = "bfloat16", window: int = 0) -> pd.DataFrame:
    table = _attention(path, "generation_attention_perf", kv_dtype, window)
    out = _heads(table)
    out["rows"] = out["decodes"] = table["batch_size"]
    out["decode_context_total"] = table["step"] * table["batch_size"]
    out["decode_context_max"] = table["step"]
    return out


def _all_reduce(path: Path, tensor_parallel: int | None) -> pd.DataFrame:
    import pandas as pd

    table = _table(path, "custom_allreduce_perf", ["num_gpus", "message_size", "backend"])
    table = table[table["backend"] == "vllm_graph"]
    if tensor_parallel is not None:
        table = table[table["num_gpus"] == tensor_parallel]
    return pd.DataFrame(
        {
            "operator": "all_reduce",
            "backend": _backend(table),
            "tensor_parallel": table["num_gpus"],
            "bytes": table["message_size"] * ELEMENT_BYTES,
            "median_s": table["latency"] * 1e-3,
        }
    )
