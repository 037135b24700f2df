"""How much useful work a batch is: model FLOPs and bytes, and the peaks they are held against (MFU and MBU).

Useful means: dummy rows and recomputation of a kernel count nothing, weights are read once an iteration, and each
query-key pair is computed once. Sums are over all devices of a replica, so that utilisation is work / (time * peaks).
"""

from __future__ import annotations

from typing import overload

import numpy as np

from policies.batch import BatchShape
from profiler.dtypes import canonical_dtype, dtype_bytes
from profiler.hardware import Hardware
from profiler.model_spec import ModelSpec
from profiler.shapes import Column, ShapeColumns, attended_pairs


def peaks(model: ModelSpec, hardware: Hardware, dtype: str = "bfloat16", tp: int = 1, pp: int = 1) -> dict[str, float]:
    """Peak FLOPs per second and bytes per second of a replica of tp x pp devices, as plain data for metrics/."""
    model.check_tp(tp)
    devices = tp * pp
    return {
        "peak_flops": hardware.peak(dtype) * devices,
        "memory_bandwidth": hardware.memory_bandwidth * devices,
        "devices": float(devices),
    }


def work_coefficients(model: ModelSpec, dtype: str = "bfloat16", kv_dtype: str = "auto") -> dict[str, int]:
    """The constants of flops_of and bytes_of as plain data, for whoever may not import this package.

    FLOPs = flops_per_token * tokens + flops_per_pair * query-key pairs + flops_per_sampled * sampled rows.
    Bytes = weight_bytes + embedding_bytes_per_token * tokens + kv_bytes_per_token * (KV tokens read and written).
    """
    weights = canonical_dtype(dtype)
    if kv_dtype == "auto":
        kv_dtype = weights if dtype_bytes(weights) >= 2 else "bfloat16"
    # The embedding is looked up, not read; a tied matrix is read whole by the output head all the same.
    read = model.params if model.tied_embeddings else model.params - model.embedding_params
    return {
        "flops_per_token": model.linear_flops_per_token(),
        "flops_per_pair": 4 * model.layers * model.q_size,
        "flops_per_sampled": model.head_flops_per_row,
        "weight_bytes": read * dtype_bytes(weights),
        "embedding_bytes_per_token": model.hidden * dtype_bytes(weights),
        "kv_bytes_per_token": model.kv_bytes_per_token(kv_dtype),
    }


@overload
def flops_of(model: ModelSpec, shapes: BatchShape) -> int: ...
@overload
def flops_of(model: ModelSpec, shapes: object) -> Column: ...
def flops_of(model: ModelSpec, shapes: object) -> Column | int:
    """Model FLOPs of one BatchShape, or int64 FLOPs of each in a sequence of them or in ShapeColumns."""
    if isinstance(shapes, BatchShape):
        return int(flops_of(model, [shapes])[0])
    columns = ShapeColumns.of(shapes)
    per = work_coefficients(model)
    return (
        per["flops_per_token"] * columns.tokens
        + per["flops_per_pair"] * pairs_of(model, columns)
        + per["flops_per_sampled"] * columns.sampled
    )


@overload
def bytes_of(model: ModelSpec, shapes: BatchShape, dtype: str = ..., kv_dtype: str = ...) -> int: ...
@overload
def bytes_of(model: ModelSpec, shapes: object, dtype: str = ..., kv_dtype: str = ...) -> Column: ...
def bytes_of(model: ModelSpec, shapes: object, dtype: str = "bfloat16", kv_dtype: str = "auto") -> Column | int:
    """Bytes that must cross the memory bus at least: weights once, KV read once, new KV written once."""
    if isinstance(shapes, BatchShape):
        return int(bytes_of(model, [shapes], dtype, kv_dtype)[0])
    columns = ShapeColumns.of(shapes)
    per = work_coefficients(model, dtype, kv_dtype)
    read, written = kv_tokens_of(model, columns)
    weights = per["weight_bytes"] * (columns.tokens > 0)
    lookups = per["embedding_bytes_per_token"] * columns.tokens
    return weights + lookups + per["kv_bytes_per_token"] * (read + written)


def pairs_of(model: ModelSpec, columns: ShapeColumns) -> Column:
    """Query-key pairs of each batch; a decode sees its context and itself."""
    window = model.sliding_window
    chunks = columns.per_batch(attended_pairs(columns.chunk_tokens, columns.chunk_prefix, window))
    decodes = columns.decode_context_total + columns.decodes
    return chunks + (decodes if window is None else np.minimum(decodes, columns.decodes * window))


def kv_tokens_of(model: ModelSpec, columns: ShapeColumns) -> tuple[Column, Column]:
    """(tokens of KV read from the cache, tokens written to it) of each batch."""
    window = model.sliding_window
    prefix, context = columns.chunk_prefix, columns.decode_context_total
    if window is not None:
        prefix, context = np.minimum(prefix, window), np.minimum(context, columns.decodes * window)
    return columns.per_batch(prefix) + context, columns.tokens
