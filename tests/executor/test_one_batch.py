"""One mixed batch against its parts run by themselves: the causes for which fused batches have gone wrong before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.batches.batch_arrays import Step
from executor.model.loading import Loaded, load_model
from executor.native.library import native_reason
from profiler.specs.model_spec import ModelSpec
from tests.executor.batches import blocks_needed, make_step

SPECS = {
    "grouped heads": {},
    "window": {"sliding_window": 20},
    "three heads share, q/k norm": {"heads": 6, "kv_heads": 2, "head_dim": 24, "qk_norm": True},
    "wide heads, biases": {"heads": 2, "kv_heads": 1, "head_dim": 64, "qkv_bias": True},
    "odd sizes": {"hidden": 40, "intermediate": 41, "vocab": 53, "heads": 5, "kv_heads": 1, "head_dim": 16},
}
BACKENDS = [("torch", "reference"), ("torch", "sdpa"), ("native", "native"), ("native", "sdpa")]


def load(kernels: str, attention: str, dtype: str = "float32", **changes: object) -> Loaded:
    if "native" in (kernels, attention) and native_reason():
        pytest.skip(native_reason())
    shape = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48, "vocab": 64, **changes}
    spec = ModelSpec(name="small", layers=2, max_position=512, **shape)  # type: ignore[arg-type]
    return load_model(spec, device="cpu", dtype=dtype, kernels=kernels, attention=attention, seed=2)


def run(loaded: Loaded, step: Step, *, block_size: int = 16, fill: float | None = None) -> torch.Tensor:
    """Logits over a pool of seeded noise, or of one value."""
    cache = loaded.new_cache(blocks_needed(step), block_size)
    if fill is None:
        cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(0)))
    else:
        cache.pool.fill_(fill)
    return loaded.model.forward(torch.from_numpy(step.token_ids), step, cache).double().clone()


@pytest.mark.parametrize("shape", SPECS)
@pytest.mark.parametrize(("kernels", "attention"), BACKENDS)
def test_every_backend_equals_the_reference_in_float64(kernels: str, attention: str, shape: str) -> None:
    changes = SPECS[shape]
    for block_size in (16, 5):
        step = make_step(
            [(40, 0), (9, 31), (1, 17), (70, 0)], [3, 99, 15, 0], block_size=block_size, vocab=50, dummies=3
        )
        exact = run(load("torch", "reference", "float64", **changes), step, block_size=block_size)
        ours = run(load(kernels, attention, **changes), step, block_size=block_size)
        assert float((exact - ours).abs().max()) < 2e-6 * max(1.0, float(exact.abs().max()) * 10)


@pytest.mark.parametrize(("kernels", "attention"), BACKENDS)
def test_the_last_layer_may_leave_unsampled_rows_out(kernels: str, attention: str) -> None:
    loaded = load(kernels, attention)
    step = make_step([(40, 0), (9, 31)], [3, 99], dummies=3)
    trimmed = run(loaded, step)
    loaded.model.trim_last_layer = False
    whole = run(loaded, step)
    loaded.model.trim_last_layer = True
    assert torch.allclose(trimmed, whole, atol=1e-6)


@pytest.mark.parametrize(("kernels", "attention"), BACKENDS)
def test_mask_a_chunk_sees_its_prefix_and_nothing_after_itself(kernels: str, attention: str) -> None:
    """Changing a later token of the chunk leaves an earlier row alone; changing the prefix does not."""
    loaded = load(kernels, attention)
    loaded.model.trim_last_layer = False

    def rows(step: Step) -> torch.Tensor:
        step.sampled_rows = np.arange(step.rows, dtype=np.int32)
        return run(loaded, step)

    before = rows(make_step([(12, 20)], []))
    later = make_step([(12, 20)], [])
    later.token_ids[7] = (later.token_ids[7] + 1) % 64
    after = rows(later)
    assert torch.equal(before[:7], after[:7])
    assert not torch.allclose(before[7:], after[7:])
    other_prefix = make_step([(12, 20)], [])
    cache = loaded.new_cache(blocks_needed(other_prefix), 16)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(9)))
    other_prefix.sampled_rows = np.arange(12, dtype=np.int32)
    changed = loaded.model.forward(torch.from_numpy(other_prefix.token_ids), other_prefix, cache).double()
    assert not torch.allclose(before[0], changed[0])


@pytest.mark.parametrize(("kernels", "attention"), BACKENDS)
def test_positions_go_on_across_chunks(kernels: str, attention: str) -> None:
    """A prompt in chunks of 7, 20 and 13 gives the logits of the whole prompt, and not those of restarted positions."""
    loaded = load(kernels, attention)
    whole = make_step([(40, 0)], [])
    expected = run(loaded, whole)
    cache = loaded.new_cache(blocks_needed(whole), 16)
    done = 0
    for tokens in (7, 20, 13):
        step = make_step([(tokens, done)], [])
        step.tables = whole.tables
        step.slots = whole.slots[done : done + tokens].copy()
        step.token_ids = whole.token_ids[done : done + tokens].copy()
        got = loaded.model.forward(torch.from_numpy(step.token_ids), step, cache).double().clone()
        done += tokens
    assert torch.allclose(got, expected, atol=1e-6)
    restarted = make_step([(13, 27)], [])
    restarted.tables, restarted.slots = whole.tables, whole.slots[27:].copy()
    restarted.token_ids = whole.token_ids[27:].copy()
    restarted.positions = np.arange(13, dtype=np.int32)
    wrong = loaded.model.forward(torch.from_numpy(restarted.token_ids), restarted, cache).double()
    assert not torch.allclose(wrong, expected, atol=1e-4)


@pytest.mark.parametrize(("kernels", "attention"), BACKENDS)
def test_chunk_and_decode_rows_are_both_there_before_the_norm(kernels: str, attention: str) -> None:
    """Each part of a mixed batch equals that part run alone: nobody's attention output is missing or another's."""
    loaded = load(kernels, attention)
    mixed = make_step([(9, 31), (16, 0)], [3, 60, 15])
    together = run(loaded, mixed)
    chunk_rows = int(mixed.chunk_tokens.sum())
    none = np.empty(0, np.int32)

    def part(rows: slice, keep_chunks: bool) -> Step:
        first = rows.start or 0
        picked = slice(0, 2) if keep_chunks else slice(2, None)
        return Step(
            rows=len(mixed.positions[rows]),
            token_ids=mixed.token_ids[rows],
            positions=mixed.positions[rows],
            slots=mixed.slots[rows],
            tables=mixed.tables,
            chunk_row=mixed.chunk_row if keep_chunks else none,
            chunk_tokens=mixed.chunk_tokens if keep_chunks else none,
            chunk_prefix=mixed.chunk_prefix if keep_chunks else none,
            chunk_table=mixed.chunk_table if keep_chunks else none,
            decode_row=none if keep_chunks else mixed.decode_row - first,
            decode_context=none if keep_chunks else mixed.decode_context,
            decode_table=none if keep_chunks else mixed.decode_table,
            sampled_rows=mixed.sampled_rows[picked] - first,
            sampled_table=mixed.sampled_table[picked],
        )

    chunks = run(loaded, part(slice(0, chunk_rows), True))
    decodes = run(loaded, part(slice(chunk_rows, None), False))
    assert torch.allclose(together, torch.cat((chunks, decodes)), atol=1e-6)


@pytest.mark.parametrize(("kernels", "attention"), BACKENDS)
def test_poisoned_slots_and_dummy_rows_reach_no_output(kernels: str, attention: str) -> None:
    """Every slot that the batch does not write holds NaN; with no prefix, nothing may read one."""
    loaded = load(kernels, attention)
    step = make_step([(40, 0), (3, 0)], [0], dummies=5)
    assert torch.equal(run(loaded, step, fill=float("nan")), run(loaded, step, fill=0.0))


def test_two_threads_give_the_bits_of_one() -> None:
    loaded = load("native", "native", hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=500, vocab=900)
    step = make_step([(300, 0), (70, 40)], [3, 200, 15, 90], vocab=900)
    one = run(loaded, step)
    torch.set_num_threads(2)
    try:
        for _ in range(5):
            assert torch.equal(one, run(loaded, step))
    finally:
        torch.set_num_threads(1)
