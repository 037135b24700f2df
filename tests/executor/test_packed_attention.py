"""Decodes over packed blocks in Triton (interpreted here) against the same pool unpacked as it is read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor.attention.packed import PackedDecodes
from executor.attention.reading import ReadingAttention
from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.kv_memory.compressed_pool import CompressedKVCache
from executor.serving.memory_measures import make_cache
from executor.serving.replay import load_for
from executor.triton_kernels.runtime import triton_reason
from profiler.specs.kv_compression import Compression
from profiler.specs.model_spec import ModelSpec
from tests.executor.batches import blocks_needed, make_step

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(bool(triton_reason(CPU)), reason=triton_reason(CPU))
CONTEXTS = [0, 3, 40, 97, 130]


def filled(spec: ModelSpec, bits: int, size: int, step) -> CompressedKVCache:  # type: ignore[no-untyped-def]
    """Every token of every request stored, and all whole blocks but the last three of each packed."""
    blocks = blocks_needed(step) + 1
    cache = CompressedKVCache(spec, blocks, size, torch.float32, CPU, Compression("kivi", bits, size, 3 * size), blocks)
    draw = torch.Generator().manual_seed(2)
    for table, context in zip(step.decode_table.tolist(), step.decode_context.tolist()):
        at = np.arange(context + 1)
        slots = torch.from_numpy(step.tables[table, at // size].astype(np.int64) * size + at % size)
        keys, values = (torch.randn(len(at), spec.kv_heads, spec.head_dim, generator=draw) for _ in range(2))
        for layer in range(spec.layers):
            cache.store(layer, keys + layer, values, slots)
    for table, context in zip(step.decode_table.tolist(), step.decode_context.tolist()):
        cache.seal_old(step.tables[table], context)
    return cache


@needs_triton
@pytest.mark.parametrize(
    ("bits", "size", "heads", "kv_heads", "head_dim", "window"),
    [
        (4, 16, 4, 2, 16, None),
        (2, 16, 4, 4, 8, None),
        (8, 5, 6, 2, 24, None),
        (4, 32, 8, 1, 64, None),
        (4, 16, 4, 2, 16, 50),
    ],
)
def test_packed_blocks_are_read_as_they_lie(
    bits: int, size: int, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    spec = ModelSpec(
        name="small", layers=2, hidden=heads * head_dim, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        intermediate=8, vocab=64, max_position=512, sliding_window=window,
    )  # fmt: skip
    step = make_step([], CONTEXTS, block_size=size)
    cache = filled(spec, bits, size, step)
    assert 0 < sum(cache.sealed(list(range(cache.blocks)))) < cache.blocks - 3, "the windows are not packed"
    q = torch.randn(step.rows, 2 * spec.q_size, generator=torch.Generator().manual_seed(4))[:, : spec.q_size]
    for layer in range(spec.layers):
        expected, got = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
        ReadingAttention(spec).attend(layer, q, expected, replace(step, arrays=None), cache)
        PackedDecodes(spec).attend(layer, q, got, step, cache)
        assert float((got - expected).abs().max()) < 5e-6


@needs_triton
def test_a_block_that_is_packed_between_two_steps_is_found_where_it_lies_then() -> None:
    spec = ModelSpec(
        name="small", layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=8, vocab=64, max_position=512
    )
    step = make_step([], [100])
    cache = filled(spec, 8, 16, step)
    before = cache.places().clone()
    assert cache.places() is cache.places() or cache._places is None
    block = int(step.tables[0, 4])
    assert int(before[block]) >= 0
    cache.seal([block])
    assert int(cache.places()[block]) == -1
    q = torch.randn(1, spec.q_size, generator=torch.Generator().manual_seed(4))
    expected, got = torch.empty_like(q), torch.empty_like(q)
    ReadingAttention(spec).attend(0, q, expected, replace(step, arrays=None), cache)
    PackedDecodes(spec).attend(0, q, got, step, cache)
    assert float((got - expected).abs().max()) < 5e-6


def test_one_flag_chooses_what_reads_a_compressed_pool() -> None:
    config = LiveConfig(model="nano", device="cpu", kv_compression="kivi4")
    loaded = load_for(config, 100)
    assert (loaded.model.attention.name, loaded.model.kernels.name) == ("reading", "torch")
    assert isinstance(make_cache(config, loaded, 20, 2, 64), CompressedKVCache)
    other = load_for(replace(config, attention="sdpa"), 100)
    with pytest.raises(
        ExecutorError, match="found --kernels torch and --attention sdpa, expected torch and one of packed"
    ):
        make_cache(config, other, 20, 2, 64)
