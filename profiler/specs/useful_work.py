"""How much useful work a batch is: model FLOPs and bytes, and the peaks they are held against (MFU and MBU).

Useful means: dummy rows and recomputation of a kernel count nothing, weights are read once an iteration, and each
query-key pair is computed once. Sums are over all devices of a replica, so that utilisation is work / (time * peaks).
"""

from __future__ import annotations

import numpy as np

from policies.work.batch import BatchShape
from profiler.specs.dtypes import dtype_bytes
from profiler.specs.hardware import Hardware
from profiler.specs.model_spec import AttentionKind, ModelSpec
from profiler.specs.shape_columns import Column, ShapeColumns, attended_pairs, within_range


def peaks(
    model: ModelSpec, hardware: Hardware, dtype: str = "bfloat16", tp: int = 1, pp: int = 1, replicas: int = 1
) -> dict[str, float]:
    """Peak rates of one device and the number of devices, as plain data for metrics/. The model must split over tp."""
    model.check_tp(tp, expert_ways=1)
    return {
        "peak_flops": hardware.peak(dtype),
        "peak_bytes_per_s": float(hardware.memory_bandwidth),
        "devices": float(tp * pp * replicas),
    }


def flop_coefficients(model: ModelSpec) -> dict[str, int]:
    """FLOPs per useful token, per query-key pair and per sampled row: plain data that metrics/ multiplies.

    Equal to flops_of except under a sliding window, which pairs alone cannot express.
    """
    return {
        "token": model.linear_flops_per_token(),
        "pair": sum(kind.layers * kind.pair_flops for kind in model.attention_kinds),
        "sampled": model.head_flops_per_row,
    }


def byte_coefficients(model: ModelSpec, dtype: str = "bfloat16", kv_dtype: str = "auto") -> dict[str, int]:
    """Bytes per iteration (weights), per token (embedding row read, KV written) and per token of KV read.

    Over all devices of a replica; replicated KV heads and norms of a tensor-parallel split count once.
    """
    model, dtype = model.served_as(dtype)
    kv_token = model.kv_bytes_per_token(model.kv_dtype(dtype, kv_dtype))
    return {
        "iteration": model.least_read_bytes(dtype),
        "token": model.hidden * dtype_bytes(dtype) + kv_token,
        "context": kv_token,
    }


def flops_of(model: ModelSpec, shapes: object) -> Column:
    """Model FLOPs of each shape: a sequence of BatchShape, ShapeColumns, or one BatchShape (a column of one)."""
    columns = _columns(shapes)
    per = flop_coefficients(model)
    pairs = [(kind.layers * kind.pair_flops, _pairs(columns, kind.window or None)) for kind in model.attention_kinds]
    return _sum("FLOPs", (per["token"], columns.tokens), *pairs, (per["sampled"], columns.sampled))


def bytes_of(model: ModelSpec, shapes: object, dtype: str = "bfloat16", kv_dtype: str = "auto") -> Column:
    """Bytes that must cross the memory bus at least: weights, KV read, new KV written, once each."""
    columns = _columns(shapes)
    per = byte_coefficients(model, dtype, kv_dtype)
    busy = (columns.tokens > 0).astype(np.int64)
    context = kv_tokens_of(model, columns)
    return _sum("bytes", (per["iteration"], busy), (per["token"], columns.tokens), (per["context"], context))


def _sum(what: str, *terms: tuple[int, Column]) -> Column:
    """Coefficients times columns; ProfileError where the largest sum would wrap around."""
    within_range(sum(float(each) * float(column.max(initial=0)) for each, column in terms), what)
    total: Column = sum(each * column for each, column in terms)  # type: ignore[assignment]
    return total


def pairs_of(model: ModelSpec, columns: ShapeColumns) -> Column:
    """Query-key pairs of each batch, in layers of the first kind; a decode sees its context and itself."""
    return _pairs(columns, model.sliding_window)


def _pairs(columns: ShapeColumns, window: int | None) -> Column:
    chunks = columns.per_batch(attended_pairs(columns.chunk_tokens, columns.chunk_prefix, window))
    decodes = columns.decode_context_total + columns.decodes
    return chunks + (decodes if window is None else np.minimum(decodes, columns.decodes * window))


def kv_tokens_of(model: ModelSpec, columns: ShapeColumns) -> Column:
    """Tokens of KV that attention reads in each batch, in the mean over layers: prefixes, contexts, own tokens."""
    read = columns.tokens.astype(np.float64)
    for kind in model.attention_kinds:
        prefix, context = columns.chunk_prefix, columns.decode_context_total
        if kind.window:
            prefix, context = np.minimum(prefix, kind.window), np.minimum(context, columns.decodes * kind.window)
        seen = columns.per_batch(prefix) + context
        read = read + seen * (_size(model, kind) / sum(_size(model, one) for one in model.attention_kinds))
    return np.rint(read).astype(np.int64)


def _size(model: ModelSpec, kind: AttentionKind) -> int:
    return kind.layers * kind.kv_heads * kind.head_dim


def _columns(shapes: object) -> ShapeColumns:
    return ShapeColumns.of([shapes] if isinstance(shapes, BatchShape) else shapes)
