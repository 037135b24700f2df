"""What share of a GPU's peak measured kernels reach: the evidence behind the roofline's constants.

Reads the carried profiles of single kernels and step logs of vLLM. The roofline does not read them; its constants are
round numbers near these medians, the same for every GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiler.errors import ProfileError
from profiler.measurements.bounded_parquet import log_rows
from profiler.measurements.facts import STEP_LOGS, carried_profile
from profiler.measurements.profile import Profile, parse_chunks
from profiler.roofline.constants import RooflineConstants
from profiler.roofline.gemm_time import gemm_ns
from profiler.specs.hardware import Hardware, load_hardware
from profiler.specs.model_spec import Gemm

GPUS = ("a100", "h100", "h200")
Row = dict[str, Any]


def kernel_profiles(folder: str | Path | None = None) -> dict[str, Profile]:
    """GPU -> profile of its kernels: those carried, or imported from a folder of aiconfigurator's (a100_sxm, ...)."""
    from profiler.measurements.importers import import_profile

    if folder is None:
        return {name: carried_profile(name) for name in GPUS}
    return {name: import_profile("aiconfigurator", Path(folder) / f"{name}_sxm") for name in GPUS}


def kernel_rates(profiles: Mapping[str, Profile]) -> list[Row]:
    """For each GPU and kind of kernel: how many, the quartiles of the share (or of the time), and our constant."""
    c = RooflineConstants()
    found: list[Row] = []
    for name, profile in profiles.items():
        gpu = load_hardware(name)
        gemm = profile.rows_of("gemm")
        rows, n, k, seconds = gemm["rows"], gemm["n"], gemm["k"], gemm["median_s"]
        flops_share = 2.0 * rows * n * k / seconds / gpu.peak("bfloat16")
        weight_share = 2.0 * n * k / (seconds - c.kernel_ns * 1e-9) / gpu.memory_bandwidth
        large = (rows >= 2048) & (n >= 4096) & (k >= 4096)
        one_tile = (rows <= 8) & (n * k > 15_000_000)
        smallest = (rows <= 8) & (n * k < 1_000_000)
        shares = {
            "large GEMMs, share of peak FLOPs": (flops_share[large], c.matmul_efficiency),
            "GEMMs of up to 8 rows, share of bandwidth": (weight_share[one_tile], c.memory_efficiency),
            "smallest GEMMs, us": (seconds[smallest] * 1e6, c.kernel_ns / 1e3),
            **_attention(profile, gpu, c),
            **_all_reduce(profile, gpu, c),
        }
        for kernels, (values, constant) in shares.items():
            p25, p50, p75 = (float(values.quantile(q)) for q in (0.25, 0.5, 0.75))
            found.append(
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
    return found


def gemm_errors(profiles: Mapping[str, Profile]) -> list[Row]:
    """Relative error of the roofline's GEMM term by number of rows, on the GEMMs of a model's size."""
    import numpy as np

    rows: list[Row] = []
    for name, profile in profiles.items():
        gpu, table = load_hardware(name), profile.rows_of("gemm")
        table = table[(table.n >= 2048) & (table.k >= 2048) & (table.n <= 65536) & (table.k <= 32768)]
        for low, high in ((1, 64), (65, 128), (129, 256), (257, 512), (513, 2048), (2049, 1 << 20)):
            part = table[(table["rows"] >= low) & (table["rows"] <= high)]
            errors = []
            for _, group in part.groupby(["n", "k"]):
                m = group["rows"].to_numpy(np.float64)
                predicted = gemm_ns(
                    Gemm("gemm", int(group.n.iloc[0]), int(group.k.iloc[0])),
                    m,
                    gpu,
                    RooflineConstants(),
                    "bfloat16",
                    2,
                    128,
                )
                errors.append(predicted / (group["median_s"].to_numpy() * 1e9) - 1)
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


def host_rates(folder: str | Path = STEP_LOGS) -> list[Row]:
    """Scheduling and output handling of a step in logs of real vLLM: least squares, fixed + each * sequences."""
    import numpy as np

    paths = sorted(path for path in Path(folder).glob("steps_*") if path.suffix in (".jsonl", ".parquet"))
    if not paths:
        raise ProfileError(f"{folder}: no steps_*.jsonl or .parquet; expected a folder of vLLM step logs")
    rows: list[Row] = []
    for path in paths:
        steps = [step for _, step in log_rows(path)]
        sequences = np.array([len(step["reqs"]) for step in steps], float)
        design = np.column_stack([np.ones_like(sequences), sequences])
        for part, key in (("scheduling", "sched_ms"), ("output handling", "update_ms")):
            times = np.array([step[key] for step in steps])
            fixed, each = np.linalg.lstsq(design, times, rcond=None)[0]
            row = {"log": path.stem, "part": part, "fixed_us": 1e3 * float(fixed), "each_us": 1e3 * float(each)}
            rows.append(row | {"steps": len(steps)})
    return rows


def _attention(profile: Profile, gpu: Hardware, c: RooflineConstants) -> dict[str, tuple[Any, float]]:
    table = profile.rows_of("attention")
    table = table[table["head_dim"] == 128]
    whole = table[table["chunks"] != ""]
    prompts = whole["chunks"].map(parse_chunks)
    tokens, count = prompts.map(lambda chunks: chunks[0][0]), prompts.map(len)
    flops = 4.0 * whole["heads"] * whole["head_dim"] * (tokens * (tokens + 1) / 2 * count)
    compute = flops / whole["median_s"] / gpu.peak("bfloat16")
    long = (tokens >= 4096) & (whole["heads"] * count >= 32)
    decode = table[table["chunks"] == ""]
    moved = 4.0 * decode["kv_heads"] * decode["head_dim"] * (decode["decode_context_total"] + decode["decodes"])
    bandwidth = moved / decode["median_s"] / gpu.memory_bandwidth
    grouped = (moved >= 1e8) & (decode["kv_heads"] < decode["heads"])
    return {
        "attention, prompts from 4096 tokens, share of FLOPs": (compute[long], c.attention_efficiency),
        "decode attention over 100 MB, share of bandwidth": (bandwidth[grouped], c.kv_efficiency),
    }


def _all_reduce(profile: Profile, gpu: Hardware, c: RooflineConstants) -> dict[str, tuple[Any, float]]:
    table = profile.rows_of("all_reduce")
    gpus, size, seconds = table["tensor_parallel"], table["bytes"], table["median_s"]
    bus = 2.0 * (gpus - 1) / gpus * size / seconds
    large, small = size >= 1 << 29, size <= 8192
    return {
        "all-reduce from 512 MB, share of the ring bound": (bus[large] / gpu.link_bandwidth, c.link_efficiency),
        "all-reduce up to 8 KB, us": (seconds[small] * 1e6, c.all_reduce_ns / 1e3),
    }
