"""What share of a GPU's peak measured kernels reach: the evidence behind the roofline's constants.

Reads NVIDIA aiconfigurator's kernel tables (latency in ms, message sizes in 16-bit elements) and step logs of vLLM. The
roofline does not read them; its constants are round numbers near these medians, the same for every GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.edges.input_file import LOG_BYTES, parse_json, read_text
from profiler.errors import ProfileError
from profiler.measurements.bounded_parquet import read_parquet
from profiler.roofline.constants import RooflineConstants
from profiler.roofline.gemm_time import gemm_ns
from profiler.specs.hardware import Hardware, load_hardware
from profiler.specs.model_spec import Gemm

if TYPE_CHECKING:
    import pandas as pd

GPUS = ("a100", "h100", "h200")
Row = dict[str, Any]


def kernel_rates(folder: str | Path) -> list[Row]:
    """For each GPU and kind of kernel: how many, the quartiles of the share (or of the time), and our constant."""
    c = RooflineConstants()
    rows: list[Row] = []
    for name in GPUS:
        gpu = load_hardware(name)
        gemm = _gemms(folder, name)
        seconds = gemm.latency * 1e-3
        flops_share = 2.0 * gemm.m * gemm.n * gemm.k / seconds / gpu.peak("bfloat16")
        weight_share = 2.0 * gemm.n * gemm.k / (seconds - c.kernel_ns * 1e-9) / gpu.memory_bandwidth
        large = (gemm.m >= 2048) & (gemm.n >= 4096) & (gemm.k >= 4096)
        one_tile = (gemm.m <= 8) & (gemm.n * gemm.k > 15_000_000)
        smallest = (gemm.m <= 8) & (gemm.n * gemm.k < 1_000_000)
        shares = {
            "large GEMMs, share of peak FLOPs": (flops_share[large], c.matmul_efficiency),
            "GEMMs of up to 8 rows, share of bandwidth": (weight_share[one_tile], c.memory_efficiency),
            "smallest GEMMs, us": (seconds[smallest] * 1e6, c.kernel_ns / 1e3),
            **_attention(folder, name, gpu, c),
            **_all_reduce(folder, name, gpu, c),
        }
        for kernels, (values, constant) in shares.items():
            p25, p50, p75 = (float(values.quantile(q)) for q in (0.25, 0.5, 0.75))
            rows.append(
                {
                    "gpu": name,
                    "kernels": kernels,
                    "count": len(values),
                    "constant": constant,
                    "p25": p25,
                    "p50": p50,
                    "p75": p75,
                }
            )
    return rows


def gemm_errors(folder: str | Path) -> list[Row]:
    """Relative error of the roofline's GEMM term by number of rows, on the GEMMs of a model's size."""
    import numpy as np

    rows: list[Row] = []
    for name in GPUS:
        gpu, table = load_hardware(name), _gemms(folder, name)
        table = table[(table.n >= 2048) & (table.k >= 2048) & (table.n <= 65536) & (table.k <= 32768)]
        for low, high in ((1, 64), (65, 128), (129, 256), (257, 512), (513, 2048), (2049, 1 << 20)):
            part = table[(table.m >= low) & (table.m <= high)]
            errors = []
            for _, group in part.groupby(["n", "k"]):
                m = group.m.to_numpy(np.float64)
                predicted = gemm_ns(
                    Gemm("gemm", int(group.n.iloc[0]), int(group.k.iloc[0])),
                    m,
                    gpu,
                    RooflineConstants(),
                    "bfloat16",
                    2,
                    128,
                )
                errors.append(predicted / (group.latency.to_numpy() * 1e6) - 1)
            error = np.concatenate(errors)
            rows.append(
                {
                    "gpu": name,
                    "rows": f"{low} to {high}" if high < 1 << 20 else f"above {low - 1}",
                    "count": len(error),
                    "median": float(np.median(error)),
                    "median_abs": float(np.median(np.abs(error))),
                }
            )
    return rows


def host_rates(folder: str | Path) -> list[Row]:
    """Scheduling and output handling of a step in logs of real vLLM: least squares, fixed + each * sequences."""
    import numpy as np

    paths = sorted(Path(folder).glob("steps_*.jsonl"))
    if not paths:
        raise ProfileError(f"{folder}: no steps_*.jsonl; expected a folder of vLLM step logs")
    rows: list[Row] = []
    for path in paths:
        lines = read_text(path, ProfileError, LOG_BYTES).splitlines()
        steps = [parse_json(line, str(path), ProfileError) for line in lines]
        sequences = np.array([len(step["reqs"]) for step in steps], float)
        design = np.column_stack([np.ones_like(sequences), sequences])
        for part, key in (("scheduling", "sched_ms"), ("output handling", "update_ms")):
            times = np.array([step[key] for step in steps])
            fixed, each = np.linalg.lstsq(design, times, rcond=None)[0]
            row = {"log": path.stem, "part": part, "fixed_us": 1e3 * float(fixed), "each_us": 1e3 * float(each)}
            rows.append(row | {"steps": len(steps)})
    return rows


def _attention(folder: str | Path, name: str, gpu: Hardware, c: RooflineConstants) -> dict[str, tuple[Any, float]]:
    context = _attention_table(folder, name, "context_attention_perf")
    pairs = context.isl * (context.isl + 1) / 2 * context.batch_size
    compute = 4.0 * context.num_heads * context.head_dim * pairs / (context.latency * 1e-3) / gpu.peak("bfloat16")
    long = (context.isl >= 4096) & (context.num_heads * context.batch_size >= 32)
    decode = _attention_table(folder, name, "generation_attention_perf")
    moved = 4.0 * decode.num_key_value_heads * decode.head_dim * decode.batch_size * (decode.step + 1)
    bandwidth = moved / (decode.latency * 1e-3) / gpu.memory_bandwidth
    grouped = (moved >= 1e8) & (decode.num_key_value_heads < decode.num_heads)
    return {
        "attention, prompts from 4096 tokens, share of FLOPs": (compute[long], c.attention_efficiency),
        "decode attention over 100 MB, share of bandwidth": (bandwidth[grouped], c.kv_efficiency),
    }


def _all_reduce(folder: str | Path, name: str, gpu: Hardware, c: RooflineConstants) -> dict[str, tuple[Any, float]]:
    table = _read(folder, name, "custom_allreduce_perf")
    table = table[table.kernel_source.str.endswith("graph")]
    bus = 2.0 * (table.num_gpus - 1) / table.num_gpus * 2 * table.message_size / (table.latency * 1e-3)
    large, small = table.message_size >= 1 << 28, table.message_size <= 4096
    return {
        "all-reduce from 512 MB, share of the ring bound": (bus[large] / gpu.link_bandwidth, c.link_efficiency),
        "all-reduce up to 8 KB, us": (table.latency[small] * 1e3, c.all_reduce_ns / 1e3),
    }


def _gemms(folder: str | Path, name: str) -> pd.DataFrame:
    table = _read(folder, name, "gemm_perf")
    return table[table.gemm_dtype == "bfloat16"]


def _attention_table(folder: str | Path, name: str, file: str) -> pd.DataFrame:
    table = _read(folder, name, file)
    table = table[(table.attn_dtype == "bfloat16") & (table.kv_cache_dtype == "bfloat16") & (table.head_dim == 128)]
    return table[table.window_size == 0] if "window_size" in table else table


def _read(folder: str | Path, name: str, file: str) -> pd.DataFrame:
    path = Path(folder) / f"{name}_sxm" / f"{file}.parquet"
    if not path.exists():
        raise ProfileError(f"{path}: no such file; expected a folder of aiconfigurator tables")
    return read_parquet(path).to_pandas()
