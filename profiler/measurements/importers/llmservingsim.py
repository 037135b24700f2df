"""LLMServingSim's profiles of vLLM kernels: HARDWARE/MODEL/meta.yaml and tpN/{dense,per_sequence,attention,skew}.csv.

Traps: times are microseconds of one layer (skew.csv: of `measurement_iterations` runs in a row, three in all known
files, found here by comparing with attention.csv); `layernorm` runs twice a layer; attention.csv is a grid of *mixed*
batches: one chunk of `prefill_chunk` tokens on `kv_prefill` cached ones, beside `n_decode` decodes of `kv_decode` each;
newer ones give `prefill_key` = kv_prefill + prefill_chunk / 2 instead, and list uneven batches request by request; they
keep the all-reduces of a card in HARDWARE/hardware.yaml, for all its models, in bytes of the whole message.
Kernels were measured eagerly; the attention time includes writing the new keys and values.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.edges.input_file import parse_json, read_text
from profiler.errors import ProfileError
from profiler.measurements.importers.tables import read_csv, read_header
from profiler.measurements.profile import TWIN, Profile, chunk_text, make_profile

if TYPE_CHECKING:
    import pandas as pd

    from profiler.specs.model_spec import ModelSpec

_DENSE = {
    "embedding": "embedding",
    "layernorm": "norm",
    "qkv_proj": "qkv",
    "qk_norm": "qk_norm",
    "rotary_emb": "rotary",
    "o_proj": "attention_out",
    "gate_up_proj": "ffn_up",
    "act_fn": "activation",
    "down_proj": "ffn_down",
    "final_layernorm": "final_norm",
}
_PER_SEQUENCE = {"lm_head": "head", "sampler": "sampler"}


def read(path: Path, tensor_parallel: int | None = None, model: str | None = None) -> Profile:
    """Profile of one hardware and model folder (or of one of its tpN folders): all degrees, or the one asked for."""
    import pandas as pd

    folder, degrees = _degrees(path, tensor_parallel)
    meta = _meta(folder / "meta.yaml")
    device = meta.get("gpu") or meta.get("hardware") or folder.parent.name
    spec = _spec(model or meta.get("model") or folder.name)
    parts = [_one_degree(folder / f"tp{tp}", spec, tp) for tp in degrees]
    parts.append(_all_reduces(folder))
    table = pd.concat(parts, ignore_index=True)
    table["device"], table["dtype"] = device, "bfloat16"
    table["model"] = np.where(table["operator"] == "all_reduce", "", spec.name)
    backend = f"vllm {meta.get('vllm_version', 'unknown')} eager"
    twin = table["backend"].eq(TWIN) if "backend" in table else np.zeros(len(table), bool)
    table["backend"] = np.where(twin, f"{backend}, {TWIN}", backend)
    provenance = {
        "source": "LLMServingSim",
        "licence": "MIT, casys-kaist/LLMServingSim",
        "device": device,
        "model": spec.name,
        "measured": "vLLM kernels, eager, one layer",
        **{key: meta[key] for key in ("vllm_version", "cuda_version", "profiled_at") if key in meta},
    }
    return make_profile(table, provenance, str(folder))


def _degrees(path: Path, wanted: int | None) -> tuple[Path, list[int]]:
    match = re.fullmatch(r"tp(\d{1,6})", path.name, re.ASCII)
    if match:
        return path.parent, [int(match[1])]
    found = _tp_folders(path)
    if not found:
        # HARDWARE/MODEL/VARIANT: the variant of 16 bits, if there is just one.
        inner = [entry for entry in sorted(path.glob("*")) if _tp_folders(entry)]
        plain = [entry for entry in inner if entry.name in ("bf16", "fp16")] or inner
        if len(plain) == 1:
            return _degrees(plain[0], wanted)
    if wanted is not None:
        found = [tp for tp in found if tp == wanted]
    if not found:
        raise ProfileError(f"{path}: no tpN folder{f' for tp {wanted}' if wanted else ''}, expected e.g. {path}/tp1")
    return path, found


def _tp_folders(path: Path) -> list[int]:
    return sorted(int(entry.name[2:]) for entry in path.glob("tp*") if re.fullmatch(r"tp\d{1,6}", entry.name, re.ASCII))


def _meta(path: Path) -> dict[str, str]:
    """Top-level `key: value` lines of meta.yaml; deeper levels are not needed (and YAML is no dependency)."""
    if not path.exists():
        return {}
    lines = read_text(path, ProfileError).splitlines()
    pairs = (re.match(r"(\w+):\s+(\S.*)", line) for line in lines)
    return {pair[1]: pair[2].strip().strip("'\"") for pair in pairs if pair}


_SAMPLE = re.compile(
    r"^ *- collective: *all_reduce *\n *bytes: *(\d{1,12}) *\n *us: *([0-9.eE+-]{1,30}) *$", re.ASCII | re.MULTILINE
)


def _all_reduces(folder: Path) -> pd.DataFrame:
    """What the card's hardware.yaml measured among its `npus`, where one lies up to three folders above (YAML is no
    dependency: the lines of its samples are read)."""
    import pandas as pd

    above = [parent / "hardware.yaml" for parent in list(folder.absolute().parents)[:3]]
    path = next((file for file in above if file.is_file()), None)
    if path is None:
        return pd.DataFrame()
    text = read_text(path, ProfileError)
    npus = re.search(r"^ *npus: *(\d{1,4}) *$", text, re.ASCII | re.MULTILINE)
    samples = _SAMPLE.findall(text)
    if npus is None or not samples:
        return pd.DataFrame()
    try:
        seconds = [float(us) * 1e-6 for _, us in samples]
    except ValueError:
        raise ProfileError(f"{path}: all_reduce: us: expected numbers") from None
    return pd.DataFrame(
        {
            "operator": "all_reduce",
            "tensor_parallel": int(npus[1]),
            "bytes": [int(size) for size, _ in samples],
            "repeats": 3,
            "median_s": seconds,
        }
    )


def _spec(name: str) -> ModelSpec:
    from profiler.specs.model_config import load_model_spec

    return load_model_spec(name)


def _one_degree(folder: Path, spec: ModelSpec, tp: int) -> pd.DataFrame:
    import pandas as pd

    heads = {"heads": spec.heads // tp, "kv_heads": spec.kv_heads_per_device(tp), "head_dim": spec.head_dim}
    parts = [_dense(folder, spec, tp), _attention(folder, heads), _skew(folder, heads)]
    table = pd.concat(parts, ignore_index=True)
    table["tensor_parallel"] = tp
    return table


def operator_width(operator: str, spec: ModelSpec, tp: int) -> tuple[int, int]:
    """(n, k) of an operator of a model on one of `tp` devices: what the profile's shape columns hold."""
    gemms = {gemm.name: (gemm.n, gemm.k) for gemm in (*spec.gemms(tp), spec.head_gemm(tp))}
    widths = {
        "activation": spec.intermediate // tp * (2 if spec.gated else 1),
        "rotary": spec.q_size // tp + spec.kv_heads_per_device(tp) * spec.head_dim,
        "sampler": spec.vocab,
    }
    widths["qk_norm"] = widths["rotary"]
    return gemms.get(operator) or (widths.get(operator, spec.hidden), 0)


def _dense(folder: Path, spec: ModelSpec, tp: int) -> pd.DataFrame:
    import pandas as pd

    dense = read_csv(folder / "dense.csv", ["tokens", "time_us"], ["layer"]).rename(columns={"tokens": "rows"})
    heads = read_csv(folder / "per_sequence.csv", ["sequences", "time_us"], ["layer"])
    table = pd.concat([dense, heads.rename(columns={"sequences": "rows"})], ignore_index=True)
    names = {**_DENSE, **_PER_SEQUENCE}
    unknown = sorted(set(table["layer"]) - set(names))
    if unknown:
        raise ProfileError(f"{folder}/dense.csv: layer: found {unknown[0]!r}, expected one of {', '.join(names)}")
    operators = table["layer"].map(names)
    widths = {name: operator_width(name, spec, tp) for name in operators.unique()}
    return pd.DataFrame(
        {
            "operator": operators,
            "rows": table["rows"],
            "n": [widths[name][0] for name in operators],
            "k": [widths[name][1] for name in operators],
            "repeats": 3,
            "median_s": table["time_us"] * 1e-6,
        }
    )


def _grid(folder: Path) -> pd.DataFrame:
    """attention.csv in the columns of its first form. Newer ones name the chunk's mean key length (half of its own
    tokens included) instead of its prefix, several kernels, and decodes of several query tokens."""
    header = read_header(folder / "attention.csv")
    tokens = "prefill_tokens" if "prefill_tokens" in header else "prefill_chunk"
    prefix = "prefill_key" if "prefill_key" in header else "kv_prefill"
    more = ["decode_q_len"] if "decode_q_len" in header else []
    numbers = [tokens, prefix, "n_decode", "kv_decode", *more, "time_us"]
    grid = read_csv(folder / "attention.csv", numbers, ["layer"] if "layer" in header else [])
    if "layer" in header:
        grid = grid[grid["layer"] == "attention"]
    if more:
        grid = grid[(grid["decode_q_len"] <= 1) | (grid["n_decode"] == 0)]
    if not len(grid):
        raise ProfileError(f"{folder}/attention.csv: no row of the kernel `attention` with one query token a decode")
    grid = grid.rename(columns={tokens: "prefill_chunk", prefix: "kv_prefill"})
    if prefix == "prefill_key":
        before = grid["kv_prefill"] - grid["prefill_chunk"] / 2
        grid["kv_prefill"] = before.round().clip(lower=0).where(grid["prefill_chunk"] > 0, 0)
    return grid


def _attention(folder: Path, heads: dict[str, int]) -> pd.DataFrame:
    grid = _grid(folder)
    return _batches(grid, heads, grid["kv_decode"] * grid["n_decode"], grid["kv_decode"], grid["time_us"] * 1e-6)


def _skew(folder: Path, heads: dict[str, int]) -> pd.DataFrame:
    """Uneven batches, where they were measured: in one of two forms."""
    import pandas as pd

    skew = folder / "skew.csv"
    if not skew.exists() and not skew.is_symlink():
        return pd.DataFrame()
    if "requests_json" in read_header(skew):
        return _listed_batches(folder, heads)
    return _two_lengths(folder, heads)


def _listed_batches(folder: Path, heads: dict[str, int]) -> pd.DataFrame:
    """Newer form: (query tokens, history) of every request of a batch; times of one forward."""
    import pandas as pd

    header = read_header(folder / "skew.csv")
    table = read_csv(folder / "skew.csv", ["t_skew_us"], [*(["layer"] if "layer" in header else []), "requests_json"])
    rows = []
    for number, row in table.iterrows():
        if row.get("layer", "attention") != "attention":
            continue
        try:
            listed = parse_json(row["requests_json"], "requests_json", ProfileError)
            pairs = [(int(query), int(history)) for query, history in listed]
        except (TypeError, ValueError, OverflowError):
            where = f"{folder}/skew.csv: row {int(str(number)) + 2}, requests_json"
            raise ProfileError(
                f"{where}: found {row['requests_json'][:40]!r}, expected [[query, history], ...]"
            ) from None
        chunks = [(query, history) for query, history in pairs if query > 1]
        contexts = [history for query, history in pairs if query == 1]
        rows.append(
            {
                "operator": "attention",
                "rows": sum(query for query, _ in pairs),
                **heads,
                "chunks": chunk_text(chunks),
                "repeats": 3,
                "decodes": len(contexts),
                "decode_context_total": sum(contexts),
                "decode_context_max": max(contexts, default=0),
                "median_s": row["t_skew_us"] * 1e-6,
            }
        )
    return pd.DataFrame(rows)


def _two_lengths(folder: Path, heads: dict[str, int]) -> pd.DataFrame:
    """Decodes of two lengths: `nb` of `n` have kv_big tokens, the others kvs; and their even twins (all contexts the
    mean), measured beside them, which tell what being uneven costs."""
    import pandas as pd

    numbers = ["n", "nb", "pc", "kp", "kvs", "kv_big", "t_mean_us", "t_max_us", "t_skew_us"]
    skew = read_csv(folder / "skew.csv", numbers)
    skew = skew.rename(columns={"pc": "prefill_chunk", "kp": "kv_prefill", "n": "n_decode"})
    runs = _runs_in_a_row(skew, _grid(folder))
    total = skew["nb"] * skew["kv_big"] + (skew["n_decode"] - skew["nb"]) * skew["kvs"]
    uneven = _batches(skew, heads, total, skew["kv_big"], skew["t_skew_us"] * (1e-6 / runs))
    mean = np.ceil(total / skew["n_decode"]).astype(int)
    even = _batches(skew, heads, total, mean, skew["t_mean_us"] * (1e-6 / runs))
    even["backend"] = TWIN
    return pd.concat([uneven, even], ignore_index=True)


_GRID = ["prefill_chunk", "kv_prefill", "n_decode"]


def _runs_in_a_row(skew: pd.DataFrame, grid: pd.DataFrame) -> int:
    """How many runs one time of skew.csv covers: its all-long batches are points of the grid too."""
    both = skew.merge(grid, left_on=[*_GRID, "kv_big"], right_on=[*_GRID, "kv_decode"])
    if not len(both):
        raise ProfileError("skew.csv: no batch in common with attention.csv, so its unit cannot be told")
    ratio = float((both["t_max_us"] / both["time_us"]).median())
    if abs(ratio - round(ratio)) > 0.1 * ratio or round(ratio) < 1:
        raise ProfileError(f"skew.csv: found times {ratio:.2f} x those of attention.csv, expected a whole number")
    return round(ratio)


def _batches(grid: pd.DataFrame, heads: dict[str, int], total: Any, largest: Any, seconds: Any) -> pd.DataFrame:
    import pandas as pd

    tokens, prefix = grid["prefill_chunk"].astype(int), grid["kv_prefill"].astype(int)
    decodes = grid["n_decode"]
    chunks = [f"{t}:{p}" if t else "" for t, p in zip(tokens, prefix, strict=True)]
    table = pd.DataFrame({"operator": "attention", "rows": tokens + decodes, **heads, "chunks": chunks, "repeats": 3})
    table["decodes"], table["decode_context_total"] = decodes, total.where(decodes > 0, 0)
    table["decode_context_max"], table["median_s"] = largest.where(decodes > 0, 0), seconds
    return table
