"""What compressed keys and values cost a model's answers: the same text through a full and a compressed pool.

The text is fed in chunks, as prompts are; after each one, blocks older than the window are packed. Every token's logits
are compared with those of the full pool, so errors of all layers, and of everything read since, are in them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.batches.batch_arrays import Step
from executor.errors import ExecutorError
from executor.kv_memory.compressed_pool import CompressedKVCache
from executor.kv_memory.pool import KVCache
from executor.model.loading import Loaded
from profiler.compression_cost import PackingPrices, values_per_token
from profiler.specs.kv_compression import Compression
from profiler.specs.model_spec import ModelSpec


@dataclass(frozen=True)
class CompressionError:
    """One setting on one text. kl: mean Kullback-Leibler divergence of the next token's distribution, in nats.

    ratio: bytes of the text's KV in 16 bits / compressed, window included. packed_ratio: of old tokens alone.
    seal_us_per_token, read_us_per_token: packing, and unpacking what a decode over the whole text reads, all layers.
    """

    coding: str
    bits: int
    group: int
    window: int
    tokens: int
    perplexity: float
    perplexity_full: float
    logit_error_mean: float
    logit_error_max: float
    kl: float
    same_top: float
    ratio: float
    packed_ratio: float
    seal_us_per_token: float
    read_us_per_token: float
    read_full_us_per_token: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def prices(self, spec: ModelSpec, device: str) -> PackingPrices:
        """What was measured, per value: what the simulator charges for packed keys and values."""
        values = values_per_token(spec)
        old = max(0, self.tokens - self.window) // self.group * self.group
        more_us = max(0.0, self.read_us_per_token - self.read_full_us_per_token) * self.tokens / max(1, old)
        read_ns = more_us * 1e3 / values
        source = f"{device}, {spec.name}, groups of {self.group}"
        return PackingPrices(self.seal_us_per_token * 1e3 / values, read_ns, read_ns, source, measured=True)


def measure_compression(
    loaded: Loaded, ids: Sequence[int], settings: Sequence[Compression], *, chunk: int = 64
) -> list[CompressionError]:
    """Feed `ids` through the model once in full and once per setting. The model must have plain kernels."""
    if loaded.model.trim_last_layer or loaded.model.kernels.name != "torch":
        raise ExecutorError("compression: expected --kernels torch and --whole-last-layer, as every row is looked at")
    if len(ids) < 2:
        raise ExecutorError(f"compression: found {len(ids)} tokens of text, expected at least 2")
    found = []
    full: dict[int, tuple[Tensor, float]] = {}
    for setting in settings:
        size = setting.group
        if size not in full:
            cache = loaded.new_cache(-(-len(ids) // size), size)
            full[size] = _logits(loaded, ids, cache, chunk), _read_us(cache, len(ids))
        exact, read_full = full[size]
        room = -(-(setting.window + chunk) // size) + 2
        packed = CompressedKVCache(
            loaded.spec, -(-len(ids) // size) + 1, size, loaded.kv_dtype, loaded.device, setting, room
        )
        rough = _logits(loaded, ids, packed, chunk)
        seal_us = packed.seal_ns / max(1, packed.sealed_tokens) / 1e3
        found.append(
            CompressionError(
                coding=setting.coding,
                bits=setting.bits,
                group=size,
                window=setting.window,
                tokens=len(ids),
                perplexity=_perplexity(rough, ids),
                perplexity_full=_perplexity(exact, ids),
                logit_error_mean=float((rough - exact).abs().mean()),
                logit_error_max=float((rough - exact).abs().max()),
                kl=_divergence(exact, rough),
                same_top=float((rough.argmax(-1) == exact.argmax(-1)).double().mean()),
                ratio=setting.ratio(loaded.spec, len(ids)),
                packed_ratio=loaded.spec.kv_bytes_per_token() / setting.packed_bytes_per_token(loaded.spec),
                seal_us_per_token=seal_us,
                read_us_per_token=_read_us(packed, len(ids)),
                read_full_us_per_token=read_full,
            )
        )
    return found


@torch.inference_mode()
def _logits(loaded: Loaded, ids: Sequence[int], cache: KVCache, chunk: int) -> Tensor:
    """Logits [tokens, vocab] of a text on blocks 1, 2, ..."""
    rows = []
    table = np.arange(1, -(-len(ids) // cache.block_size) + 1, dtype=np.int32)
    for start in range(0, len(ids), chunk):
        part = np.asarray(ids[start : start + chunk], np.int64)
        step = _chunk_step(part, start, table, cache)
        rows.append(loaded.model.forward(step.tensor(step.token_ids), step, cache).float().clone())
        if isinstance(cache, CompressedKVCache):
            cache.seal_old(table, start + len(part))
    return torch.cat(rows)


def _chunk_step(ids: np.ndarray, prefix: int, table: np.ndarray, cache: KVCache) -> Step:
    count, size = len(ids), cache.block_size
    span = np.arange(prefix, prefix + count, dtype=np.int32)
    none = np.empty(0, np.int32)
    return Step(
        rows=count,
        token_ids=ids,
        positions=span,
        slots=table[span // size].astype(np.int64) * size + span % size,
        tables=table[None],
        chunk_row=np.zeros(1, np.int32),
        chunk_tokens=np.array([count], np.int32),
        chunk_prefix=np.array([prefix], np.int32),
        chunk_table=np.zeros(1, np.int32),
        decode_row=none,
        decode_context=none,
        decode_table=none,
        sampled_rows=np.arange(count, dtype=np.int32),
        sampled_table=np.zeros(count, np.int32),
        device=cache.device,
    )


@torch.inference_mode()
def _read_us(cache: KVCache, tokens: int, repeats: int = 3) -> float:
    table = torch.arange(1, -(-tokens // cache.block_size) + 1)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter_ns()
        for layer in range(cache.layers):
            cache.read(layer, table, tokens)
        best = min(best, time.perf_counter_ns() - started)
    return best / tokens / 1e3


def _perplexity(logits: Tensor, ids: Sequence[int]) -> float:
    wanted = torch.as_tensor(np.asarray(ids[1:], np.int64))
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), wanted).exp())


def _divergence(exact: Tensor, rough: Tensor) -> float:
    p, q = exact.double().log_softmax(-1), rough.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
