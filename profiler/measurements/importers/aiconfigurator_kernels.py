"""The other kernel tables of NVIDIA aiconfigurator for vLLM, fitted into a card's `CardKernels`: GPU/X_perf.parquet,
with X one of moe, mla_generation_module, mla_context_module, nccl, computescale.

Traps: latency is milliseconds. moe: time of one layer's experts on one device, router left out; num_tokens are those of
the whole layer, of which a device with whole experts (moe_ep_size) works on what it is sent, and the fullest device was
measured; one format may have several kernels, which devices of their own experts and of parts of all do not share. MLA:
whole modules with their projections, tp_size always 1 and num_heads what one device has; step is the context, prompts
have none. nccl: message_size counts elements of the whole message, 2 bytes each where nccl_dtype is half; the
all-reduces are not vLLM's own and not taken. computescale: what finding a scale for each row adds to quantising with a
fixed one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.errors import ProfileError
from profiler.experts.expert_fit import ExpertFit, ExpertTable, fit_experts
from profiler.experts.expert_law import ExpertShape
from profiler.measurements.bounded_parquet import read_parquet
from profiler.operators.card_kernels import CardKernels
from profiler.operators.latent_attention import LatentFit
from profiler.operators.laws.lattice import Lattice
from profiler.operators.laws.row_curves import RowCurve

if TYPE_CHECKING:
    import pandas as pd

    from profiler.specs.hardware import Hardware

HALF_BYTES = 2
LEAST_MS = 1e-5
NOT_GATED = (("nemotron", 2688, 1856),)
"""Layers of which experts have two matrices: (family, hidden, width). All others have three."""
_OLD_NAMES = {"vllm_fused_moe": "vllm_unquantizedfusedmoe_triton_tritonexperts"}


def fit_card(path: Path, hardware: Hardware, *, check: bool = True) -> CardKernels:
    """Everything of one GPU's folder; tables that it lacks are left out, and what they would tell is refused later."""
    moe = _table(path, "moe_perf", ["num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_dtype"])
    if moe is None:
        raise ProfileError(f"{path}: found no moe_perf.parquet, expected a folder such as h100_sxm")
    return CardKernels(
        gpu=hardware.name,
        experts=_experts(moe, hardware, check),
        latent=_latent(path),
        collectives=_collectives(path),
        scaling=_scaling(path),
        provenance={
            "source": "NVIDIA aiconfigurator-core 0.12.0",
            "licence": "Apache-2.0, NVIDIA CORPORATION & AFFILIATES",
            "device": str(moe["device"].iloc[0]),
            "vllm_version": str(moe["version"].iloc[0]),
        },
    )


def _table(path: Path, name: str, columns: list[str]) -> pd.DataFrame | None:
    file = path / f"{name}.parquet"
    if not file.exists():
        return None
    table = read_parquet(file).to_pandas()
    for column in (*columns, "latency"):
        if column not in table:
            raise ProfileError(f"{file}: missing column {column!r}, found {', '.join(map(str, table.columns))}")
    return table


def _experts(moe: pd.DataFrame, hardware: Hardware, check: bool) -> dict[str, ExpertFit]:
    from profiler.specs.number_format import FORMATS

    found = {}
    keys = ["kernel_source", "hidden_size", "inter_size", "num_experts", "topk", "moe_tp_size", "moe_ep_size"]
    for number_format, rows in moe.groupby("moe_dtype", sort=True):
        products = FORMATS[number_format].products if number_format in FORMATS else "bfloat16"
        if number_format not in (*FORMATS, "bfloat16") or (products or "bfloat16") not in hardware.peak_flops:
            continue
        tables = []
        for values, layer in rows.groupby(keys, sort=True):
            kernel, hidden, inter, experts, top_k, tp, ep = values
            if inter % tp or experts % ep:
                continue
            each = layer.pivot_table(index="distribution", columns="num_tokens", values="latency", aggfunc="median")
            each = each.dropna(axis=1)
            if each.shape[1] < 3:
                continue
            gated = (hidden, inter) not in [one[1:] for one in NOT_GATED]
            shape = ExpertShape(int(hidden), int(inter // tp), int(experts), int(top_k), int(ep), gated)
            us = each.to_numpy() * 1e3
            kernel = _OLD_NAMES.get(str(kernel), str(kernel))
            tables.append(ExpertTable(kernel, shape, tuple(each.index), each.columns.to_numpy(float), us))
        if tables:
            found[str(number_format)] = fit_experts(str(number_format), tables, hardware, check=check)
    return found


def _latent(path: Path) -> dict[tuple[str, str], LatentFit]:
    columns = ["num_heads", "batch_size", "step", "isl", "gemm_type", "kv_cache_dtype"]
    decode = _table(path, "mla_generation_module_perf", columns)
    prefill = _table(path, "mla_context_module_perf", columns)
    if decode is None or prefill is None:
        return {}
    found = {}
    for key, rows in decode.groupby(["gemm_type", "kv_cache_dtype"], sort=True):
        prompts = prefill[(prefill["gemm_type"] == key[0]) & (prefill["kv_cache_dtype"] == key[1])]
        decodes, alone = {}, {}
        for heads, own in rows.groupby("num_heads", sort=True):
            decodes[int(heads)] = Lattice.from_points(
                [own["batch_size"], own["step"]], np.log(own["latency"].to_numpy() * 1e3)
            )
        single = prompts[prompts["batch_size"] == 1]
        for heads, own in single.groupby("num_heads", sort=True):
            alone[int(heads)] = Lattice.from_points([own["isl"]], np.log(own["latency"].to_numpy() * 1e3))
        both = sorted(set(decodes) & set(alone))
        if both:
            kept = {"fp8": "float8"}.get(str(key[1]), str(key[1]))
            decodes, alone = ({heads: each[heads] for heads in both} for each in (decodes, alone))
            found[str(key[0]), kept] = LatentFit(str(key[0]), kept, decodes, alone)
    return found


def _collectives(path: Path) -> dict[tuple[str, int], RowCurve]:
    nccl = _table(path, "nccl_perf", ["op_name", "nccl_dtype", "num_gpus", "message_size"])
    if nccl is None:
        return {}
    nccl = nccl[(nccl["nccl_dtype"] == "half") & nccl["op_name"].isin(("all_gather", "reduce_scatter"))]
    return {
        (str(operation), int(devices)): _over(rows["message_size"] * HALF_BYTES, rows["latency"])
        for (operation, devices), rows in nccl.groupby(["op_name", "num_gpus"], sort=True)
    }


def _scaling(path: Path) -> dict[int, RowCurve]:
    table = _table(path, "computescale_perf", ["m", "k"])
    if table is None:
        return {}
    # A difference of two times, which is nothing but noise where rows are few and narrow.
    return {
        int(width): _over(rows["m"], rows["latency"].clip(lower=LEAST_MS))
        for width, rows in table.groupby("k", sort=True)
    }


def _over(rows: Any, latency: Any) -> RowCurve:
    return RowCurve.from_points("", 0, 0, rows, latency.to_numpy() * 1e3)
