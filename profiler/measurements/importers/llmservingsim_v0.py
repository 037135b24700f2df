"""LLMServingSim's first profile form: tpN/{layers,attention}.csv, one FlashAttention call or one layer's kernel a row.

Traps: layers.csv is nanoseconds, attention.csv milliseconds; attention's kv_cache_size counts the whole batch, not a
request (a batch of 2 at 1024 costs what a batch of 1 costs at 512), each request got its whole-number share of it
rounded down (94 decodes of 3072 tokens walk 32 each, 93 of them 33, which is a step more and 50 % slower), and the
tokens of the step itself are among it; decode rows with fewer tokens than requests measured an empty launch; q, k and
v, and gate and up, are separate. The `attn` rows of layers.csv repeat attention.csv without a prefix. Decodes were
called without grouping the query heads of a KV head (four times the reads: 210 GB/s of keys and values on a card of
768), unlike vLLM's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from profiler.errors import ProfileError
from profiler.measurements.importers.llmservingsim import _degrees, _spec, operator_width
from profiler.measurements.importers.tables import read_csv
from profiler.measurements.profile import UNGROUPED, Profile, make_profile

if TYPE_CHECKING:
    import pandas as pd

    from profiler.specs.model_spec import ModelSpec

_LAYERS = {
    "embedding": "embedding",
    "input_layernorm": "norm",
    "rope": "rotary",
    "o_proj": "attention_out",
    "act_fn": "activation",
    "down_proj": "ffn_down",
    "final_layernorm": "final_norm",
    "lm_head": "head",
    "q_proj": "gemm",
    "k_proj": "gemm",
    "gate_proj": "gemm",
}
_LEFT_OUT = {"v_proj", "up_proj", "attn", "post_layernorm"}


def read(
    path: Path, tensor_parallel: int | None = None, model: str | None = None, device: str | None = None
) -> Profile:
    """Profile of HARDWARE/ORGANISATION/MODEL (or one of its tpN folders); the device is the HARDWARE folder's name."""
    import pandas as pd

    folder, degrees = _degrees(path, tensor_parallel)
    spec = _spec(model or folder.name)
    name = device or folder.parent.parent.name
    parts = []
    for tp in degrees:
        part = pd.concat([_layers(folder / f"tp{tp}", spec, tp), _attention(folder / f"tp{tp}", spec, tp)])
        part["tensor_parallel"] = tp
        parts.append(part)
    table = pd.concat(parts, ignore_index=True)
    table["device"], table["model"], table["dtype"] = name, spec.name, "bfloat16"
    table["backend"] = f"transformers layers, FlashAttention {UNGROUPED}"
    provenance = {
        "source": "LLMServingSim v0",
        "licence": "MIT, casys-kaist/LLMServingSim",
        "device": name,
        "model": spec.name,
        "measured": "eager layers (unfused norm and rotary), FlashAttention calls",
    }
    return make_profile(table, provenance, str(folder))


def _layers(folder: Path, spec: ModelSpec, tp: int) -> pd.DataFrame:
    import pandas as pd

    table = read_csv(folder / "layers.csv", ["input", "latency(ns)"], ["layer_name"])
    unknown = sorted(set(table["layer_name"]) - set(_LAYERS) - _LEFT_OUT)
    if unknown:
        raise ProfileError(f"{folder}/layers.csv: layer_name: found {unknown[0]!r}, expected {', '.join(_LAYERS)}")
    table = table[table["layer_name"].isin(_LAYERS)]
    kv = spec.kv_heads_per_device(tp) * spec.head_dim
    widths = {layer: operator_width(name, spec, tp) for layer, name in _LAYERS.items()}
    widths["q_proj"] = (spec.q_size // tp, spec.hidden)
    widths["k_proj"] = (kv, spec.hidden)
    widths["gate_proj"] = (spec.intermediate // tp, spec.hidden)
    return pd.DataFrame(
        {
            "operator": table["layer_name"].map(_LAYERS),
            "rows": table["input"],
            "n": [widths[layer][0] for layer in table["layer_name"]],
            "k": [widths[layer][1] for layer in table["layer_name"]],
            "median_s": table["latency(ns)"] * 1e-9,
        }
    )


def _attention(folder: Path, spec: ModelSpec, tp: int) -> pd.DataFrame:
    import pandas as pd

    kinds = [f"time_stats.attn_{kind}.{stat}" for kind in ("prefill", "decode") for stat in ("median", "min", "max")]
    path = folder / "attention.csv"
    table = read_csv(path, ["batch_size", "prefill_chunk_size", "kv_cache_size", *kinds], ["is_prefill"])
    prefill = table["is_prefill"].str.lower().isin(("true", "1"))
    batch, total, tokens = table["batch_size"], table["kv_cache_size"], table["prefill_chunk_size"]
    keys = total // batch
    usable = prefill | (keys >= 1)
    chunks = [f"{int(t)}:{int(kv - t)}" if p else "" for t, kv, p in zip(tokens, total, prefill, strict=True)]
    out = pd.DataFrame({"operator": "attention", "chunks": chunks}, index=table.index)
    out["heads"], out["kv_heads"] = spec.heads // tp, spec.kv_heads_per_device(tp)
    out["head_dim"] = spec.head_dim
    out["rows"] = tokens.where(prefill, batch)
    out["decodes"] = batch.where(~prefill, 0)
    out["decode_context_total"] = (batch * (keys - 1)).where(~prefill, 0)
    out["decode_context_max"] = (keys - 1).where(~prefill, 0)
    for stat in ("median", "min", "max"):
        one, other = table[f"time_stats.attn_prefill.{stat}"], table[f"time_stats.attn_decode.{stat}"]
        out[f"{stat}_s"] = one.where(prefill, other) * 1e-3
    return out[usable & out["median_s"].notna()]
