"""The Triton attention kernels in Triton's interpreter (compiled, on a GPU) against the reference, on random pools."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.attention.base import AttentionBackend
from executor.attention.paged import PagedAttention
from executor.attention.reference import ReferenceAttention
from executor.attention.triton import TritonAttention, num_splits
from executor.batches.batch_arrays import Step
from executor.batches.device_arrays import Sizes, pack, sizes_of
from executor.errors import ExecutorError
from executor.kv_memory.pool import KVCache
from executor.triton_kernels.runtime import interpreted, triton_reason
from profiler.specs.model_spec import ModelSpec
from tests.executor.batches import blocks_needed, make_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(bool(triton_reason(DEVICE)), reason=triton_reason(DEVICE))
NAN = float("nan")


def spec(heads: int = 4, kv_heads: int = 2, head_dim: int = 16, window: int | None = None) -> ModelSpec:
    return ModelSpec(
        name="small",
        layers=1,
        hidden=heads * head_dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=8,
        vocab=64,
        max_position=4096,
        sliding_window=window,
    )


def filled_cache(model: ModelSpec, step: Step, block_size: int, dtype: torch.dtype, stale: float) -> KVCache:
    """Random keys and values wherever the batch may look, `stale` everywhere else."""
    cache = KVCache(model, blocks_needed(step) + 2, block_size, dtype, DEVICE)
    values = torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(3))
    seen = torch.zeros(cache.blocks, block_size, dtype=torch.bool)
    lengths = [*(step.chunk_prefix + step.chunk_tokens).tolist(), *(step.decode_context + 1).tolist()]
    for table, length in zip([*step.chunk_table.tolist(), *step.decode_table.tolist()], lengths):
        at = np.arange(length)
        seen[torch.from_numpy(step.tables[table, at // block_size]).long(), torch.from_numpy(at % block_size)] = True
    values[:, :, ~seen.any(1)] = stale
    cache.pool.copy_(values.masked_fill(~seen[None, None, :, None, :, None], stale))
    return cache


def attended(backend: AttentionBackend, step: Step, cache: KVCache, q: torch.Tensor) -> torch.Tensor:
    step.arrays, step.device = None, DEVICE
    for name in ("block_tables", "row_positions", "row_slots"):
        step.__dict__.pop(name, None)
    qkv = torch.cat((q, torch.full_like(q, NAN)), dim=1)  # queries are a strided view of a wider buffer
    out = torch.full_like(q, 7.0)
    backend.attend(0, qkv[:, : q.shape[1]], out, step, cache)
    return out.double().cpu()


def check(
    chunks: Sequence[tuple[int, int]],
    decodes: Sequence[int],
    *,
    backend: type[AttentionBackend] = TritonAttention,
    model: ModelSpec | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    splits: int = 0,
    dummies: int = 0,
    tolerance: float = 3e-6,
    seed: int = 0,
) -> None:
    model = model or spec()
    step = make_step(chunks, decodes, block_size=block_size, dummies=dummies, seed=seed)
    cache = filled_cache(model, step, block_size, dtype, NAN)
    exact = filled_cache(model, step, block_size, dtype, 0.0)
    exact.pool, exact.dtype = exact.pool.double(), torch.float64
    q = torch.randn(step.rows, model.q_size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    expected = attended(ReferenceAttention(model), step, exact, q.double())
    ours = backend(model)
    if isinstance(ours, TritonAttention):
        ours.forced_splits = splits
    got = attended(ours, step, cache, q)
    assert torch.isfinite(got).all()
    assert float((got - expected).abs().max()) < tolerance


BACKENDS = [pytest.param(TritonAttention, marks=needs_triton, id="triton"), pytest.param(PagedAttention, id="paged")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 5])
def test_a_mixed_batch_is_right_for_every_block_size_over_a_pool_of_stale_nan(
    backend: type[AttentionBackend], block_size: int
) -> None:
    check([(20, 0), (9, 31), (1, 17)], [3, 99, 0], backend=backend, block_size=block_size, dummies=3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 24), (5, 1, 8), (8, 1, 64)], ids=lambda value: str(value)
)
def test_heads_share_keys_in_every_grouping(
    backend: type[AttentionBackend], heads: int, kv_heads: int, head_dim: int
) -> None:
    check([(17, 5)], [40, 1], backend=backend, model=spec(heads, kv_heads, head_dim))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 20, 64])
def test_a_window_hides_what_lies_before_it(backend: type[AttentionBackend], window: int) -> None:
    check([(40, 0), (9, 100)], [3, 130], backend=backend, model=spec(window=window))


@needs_triton
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_a_decode_split_over_its_context_equals_the_whole(splits: int) -> None:
    """Contexts shorter than the number of splits leave some of them without a key."""
    check([], [0, 15, 64, 200, 401], splits=splits)
    check([(5, 3)], [150, 2], splits=splits, model=spec(window=70))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("chunks", "decodes"),
    [([(1, 0)], []), ([], [0]), ([(128, 0)], []), ([(129, 127)], []), ([(16, 48), (16, 16)], [])],
)
def test_edges_of_tiles_blocks_and_empty_parts(
    backend: type[AttentionBackend], chunks: list[tuple[int, int]], decodes: list[int]
) -> None:
    check(chunks, decodes, backend=backend, model=spec(2, 1, 16))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_its_rounding(dtype: torch.dtype) -> None:
    """8 (11) bits of mantissa on outputs of order 1."""
    check([(20, 30)], [99], dtype=dtype, tolerance=0.02 if dtype == torch.bfloat16 else 0.003)


@needs_triton
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 70)), max_size=3),
    st.lists(st.integers(0, 150), max_size=4),
    st.sampled_from([16, 32]),
    st.integers(0, 3),
)
def test_any_batch(chunks: list[tuple[int, int]], decodes: list[int], block_size: int, splits: int) -> None:
    if chunks or decodes:
        check(chunks, decodes, block_size=block_size, splits=splits, model=spec(2, 1, 16))


def test_padding_writes_nothing_and_moves_decodes_behind_the_padded_chunks() -> None:
    """3 chunk rows and 2 decodes in arrays for 16 and 4: by hand."""
    step = make_step([(3, 1)], [4, 9], dummies=2)
    exact = sizes_of(step, 16)
    assert (exact.rows, exact.chunk_rows, exact.decodes, exact.tiles, exact.blocks) == (7, 3, 2, 1, 1)
    roomy = Sizes(rows=20, chunk_rows=16, decodes=4, chunks=2, tiles=3, tile_rows=exact.tile_rows, sampled=6, blocks=2)
    assert roomy.holds(exact)
    assert not exact.holds(roomy)
    packed = pack(step, roomy)
    parts = {name: packed[place] for name, place in roomy.places.items()}
    assert all(place.start % 4 == 0 for place in roomy.places.values()), "16 bytes hold four numbers"
    assert len(packed) == roomy.total
    assert (parts["slots"] >= 0).nonzero()[0].tolist() == [0, 1, 2, 16, 17]
    assert parts["positions"][[0, 1, 2, 16, 17]].tolist() == [1, 2, 3, 4, 9]
    assert parts["decode_length"].tolist() == [5, 10, 0, 0]
    assert parts["tile_count"].tolist() == [3, 0, 0]
    assert parts["chunk_start"].tolist() == [0, 3, 3]
    assert parts["sampled"].tolist() == [2, 16, 17, 0, 0, 0]
    with pytest.raises(ExecutorError, match="does not fit"):
        pack(roomy_step(), exact)


def roomy_step() -> Step:
    return make_step([(9, 1)], [4, 9])


def test_splits_fill_the_processors_and_are_never_short() -> None:
    assert num_splits(64 * 8, 8192, 132) == 1  # 512 programs on 132 processors are enough
    assert num_splits(1 * 8, 8192, 132) == 32  # 33 would be wanted, 32 is the most
    assert num_splits(1 * 8, 600, 132) == 2  # 600 keys make two splits of 256 or more
    assert num_splits(1, 100, 132) == 1


def test_these_tests_interpret_or_compile_on_purpose() -> None:
    if "triton" in sys.modules:
        assert interpreted() or DEVICE.type == "cuda"
