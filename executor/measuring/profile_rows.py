"""Measurements as rows of a profile: whole iterations, outliers flagged, and single operators that explain them."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.measuring.batch_rig import BatchRig
from executor.measuring.operator_stopwatch import watching
from executor.model.loading import Loaded
from policies import BatchShape
from profiler.measurements.plan import Point
from profiler.measurements.profile import chunk_text

TAKEN_AWAY = 0.92
"""A single-threaded step whose processor time is less than this share of its wall time was interrupted."""
FAR_OFF = 1.25
"""A step this much slower than the quickest of its shape in the round is an outlier."""


def shape_of(entry: Mapping[str, Any]) -> BatchShape:
    """The shape of a noted measurement."""
    chunks, *numbers = entry["shape"]
    return BatchShape(tuple((tokens, prefix) for tokens, prefix in chunks), *numbers)


def iteration_rows(measured: Sequence[Mapping[str, Any]], loaded: Loaded) -> list[dict[str, Any]]:
    """Rows of a profile, one a measurement and one for each decode timed after it.

    Outliers are flagged by rule (TAKEN_AWAY, FAR_OFF) and kept, and so is a run that may have paid for compilation.
    """
    quickest: dict[tuple[BatchShape, int], int] = {}
    shapes = [shape_of(entry) for entry in measured]
    for shape, entry in zip(shapes, measured):
        if entry.get("first"):
            continue
        group = (shape, entry["key"][0])
        quickest[group] = min(quickest.get(group, entry["device_ns"]), entry["device_ns"])
    engine = engine_columns(loaded)
    alone = loaded.device.type == "cpu" and torch.get_num_threads() == 1
    rows = []
    for shape, entry in zip(shapes, measured):
        interrupted = alone and entry["cpu_ns"] < TAKEN_AWAY * entry["wall_ns"]
        first = bool(entry.get("first"))
        far_off = first or entry["device_ns"] > FAR_OFF * quickest[shape, entry["key"][0]]
        seconds = entry["device_ns"] / 1e9
        known = {
            **engine,
            "rows": max(shape.rows, entry.get("executed_rows", 0)),
            "chunks": chunk_text(shape.chunks),
            "decodes": shape.decodes,
            "decode_context_total": shape.decode_context_total,
            "decode_context_max": shape.decode_context_max,
            "dummy_tokens": shape.dummy_tokens,
            "sampled": shape.sampled,
            "repeats": 1,
            "experts": entry.get("experts", 0),
        }
        rows.append(
            {
                **known,
                "operator": "iteration",
                "steps_since": 0,
                "outlier": int(interrupted or far_off),
                "median_s": seconds,
                "min_s": seconds,
                "max_s": seconds,
                "host_before_s": entry["before_ns"] / 1e9,
                "host_after_s": entry["after_ns"] / 1e9,
                "cpu_s": entry["cpu_ns"] / 1e9,
                "at_s": entry["at_s"],
                "gauge_s": entry["gauge_ns"] / 1e9 if entry.get("gauge_ns") else float("nan"),
            }
        )
        for since, (device_ns, cpu_ns, wall_ns) in enumerate(entry.get("followers", ()), 1):
            seconds = device_ns / 1e9
            rows.append(
                {
                    **known,
                    "operator": "after_chunks",
                    "steps_since": since,
                    "outlier": int(first or (alone and cpu_ns < TAKEN_AWAY * wall_ns)),
                    "median_s": seconds,
                    "min_s": seconds,
                    "max_s": seconds,
                    "cpu_s": cpu_ns / 1e9,
                    "at_s": entry["at_s"],
                }
            )
    return rows


def operator_rows(rig: BatchRig, loaded: Loaded, points: Sequence[Point], repeats: int = 3) -> list[dict[str, Any]]:
    """The same points with a stopwatch on every operator: per layer the median over layers and repeats."""
    spec = loaded.spec
    widths = {
        "qkv": (spec.q_size + 2 * spec.kv_size, spec.hidden),
        "attention_out": (spec.hidden, spec.q_size),
        "ffn_up": (2 * spec.intermediate, spec.hidden),
        "ffn_down": (spec.hidden, spec.intermediate),
        "head": (spec.vocab, spec.hidden),
    }
    rows = []
    with rig.without_graphs(), watching(loaded.model) as watch:
        for point in points:
            times: dict[str, list[float]] = {}
            for _ in range(repeats):
                rig.measure(point, watch.take)
                for name, seconds in watch.take().items():
                    times.setdefault(name, []).extend(seconds)
            shape = point.shape
            for name, seconds in times.items():
                n, k = widths.get(name, (spec.hidden if name == "norm" else 0, 0))
                of_attention = name == "attention"
                rows.append(
                    {
                        **engine_columns(loaded),
                        "operator": name,
                        "rows": shape.sampled if name in ("head", "sampler") else shape.rows,
                        "n": n,
                        "k": k,
                        "heads": spec.heads if of_attention else 0,
                        "kv_heads": spec.kv_heads if of_attention else 0,
                        "head_dim": spec.head_dim if of_attention else 0,
                        "chunks": chunk_text(shape.chunks),
                        "decodes": shape.decodes,
                        "decode_context_total": shape.decode_context_total,
                        "decode_context_max": shape.decode_context_max,
                        "sampled": shape.sampled,
                        "repeats": len(seconds),
                        "median_s": float(np.median(seconds)),
                        "min_s": min(seconds),
                        "max_s": max(seconds),
                    }
                )
    return rows


def engine_columns(loaded: Loaded) -> dict[str, Any]:
    described = loaded.describe()
    return {
        "device": device_name(loaded.device),
        "model": loaded.spec.name,
        "dtype": str(described["dtype"]),
        "tensor_parallel": 1,
        "backend": f"{described['attention']} {described['kernels']}",
    }


def device_name(device: torch.device) -> str:
    """What the device calls itself; a CPU with the threads that run on it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the architecture has to do
    return platform.processor() or platform.machine()
