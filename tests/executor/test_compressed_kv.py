"""Packed keys and values: exact bits, bounded errors, the bytes that were promised, and answers that survive."""

from __future__ import annotations

import pytest
import torch

from executor.errors import ExecutorError
from executor.kv_memory.compressed_pool import (
    CompressedKVCache,
    dequantise,
    pack,
    pack_codes,
    quantise,
    unpack,
    unpack_codes,
)
from executor.kv_memory.packed_host_copies import PackedHostCache
from executor.model.loading import load_model
from policies.kv_memory.swap import Move
from profiler.errors import ProfileError
from profiler.specs.kv_compression import Compression
from profiler.specs.model_spec import ModelSpec
from tests.executor.test_mixed_batches import LENGTHS, small_trace

SPEC = ModelSpec(
    name="small", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=40, vocab=61, max_position=512
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_come_back_bit_for_bit(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 5, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, 5, 16 * bits // 8)
    assert torch.equal(unpack_codes(packed, bits), codes)
    assert pack_codes(torch.tensor([[1, 2, 3, 0]], dtype=torch.uint8), 2).item() == 1 + 2 * 4 + 3 * 16


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_no_value_is_off_by_more_than_half_a_step(bits: int) -> None:
    values = random(4, 32, 16)
    codes, scale, low = quantise(values, bits, over=-2)
    error = (dequantise(codes, scale, low, torch.float32) - values).abs()
    # Half a step, and what float16 rounds scale and offset by.
    assert torch.all(error <= 0.5 * scale.float() + 0.004)


def test_an_outlier_channel_of_keys_spoils_no_other_channel() -> None:
    keys = random(32, 16)
    keys[:, 3] += 50
    per_channel = unpack(pack(keys, 4, "kivi", keys=True), 4, torch.float32)
    per_token = unpack(pack(keys, 4, "kivi", keys=False), 4, torch.float32)
    others = [channel for channel in range(16) if channel != 3]
    assert (per_channel - keys)[:, others].abs().max() < 0.25 < (per_token - keys)[:, others].abs().max()


def test_errors_of_differences_do_not_add_up() -> None:
    values = random(64, 16).cumsum(0)
    packed = pack(values, 4, "delta", keys=True)
    error = (unpack(packed, 4, torch.float32) - values).abs()
    assert error[-16:].max() < 1.5 * packed.scale.float().max()


def test_neighbours_that_hardly_differ_are_coded_finely_by_their_differences() -> None:
    values = 10 * random(1, 16) + 0.01 * random(32, 16, seed=2)
    delta, kivi = (
        (unpack(pack(values, 4, coding, keys=False), 4, torch.float32) - values).abs().mean()
        for coding in ("delta", "kivi")
    )
    assert delta < 0.1 * kivi


@pytest.mark.parametrize("coding", ["kivi", "delta"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_packed_block_weighs_what_the_profiler_says(coding: str, bits: int) -> None:
    compression = Compression(coding, bits, 16, 32)
    block = random(SPEC.kv_heads, 16, SPEC.head_dim)
    weight = sum(pack(block, bits, coding, keys=keys).num_bytes for keys in (True, False))
    assert weight == compression.group_bytes(SPEC.kv_heads, SPEC.head_dim)
    small = cache_of(compression, blocks=40, full=6)
    in_full = 6 * 2 * 2 * SPEC.kv_heads * 16 * SPEC.head_dim * 4
    assert small.num_bytes == 40 * SPEC.layers * weight + in_full


def test_llama_8b_in_four_bits_is_a_third_and_less_of_its_size() -> None:
    from profiler import load_model_spec

    model = load_model_spec("llama-3.1-8b")
    compression = Compression("kivi", 4, 32, 128)
    # Per head and group of 32: 2 x 32 x 64 bytes of codes, 128 channels and 32 tokens with 4 bytes of scale each.
    assert compression.group_bytes(1, 128) == 4096 + 512 + 128
    assert compression.ratio(model, 128) == 1
    assert 3.3 < compression.ratio(model, 100_000) < 16384 / 4736


def cache_of(compression: Compression, blocks: int = 20, full: int = 6) -> CompressedKVCache:
    return CompressedKVCache(SPEC, blocks, compression.group, torch.float32, torch.device("cpu"), compression, full)


def test_old_blocks_are_packed_and_the_window_is_exact() -> None:
    cache = cache_of(Compression("kivi", 8, 4, 8))
    keys, values = random(20, 2, 8), random(20, 2, 8, seed=1)
    table = torch.tensor([3, 5, 2, 9, 1])
    slots = torch.tensor([int(table[position // 4]) * 4 + position % 4 for position in range(20)])
    for layer in range(2):
        cache.store(layer, keys, values, slots)
    cache.seal_old(table, 20)
    assert len(cache._free) == 6 - 2, "8 of 20 tokens are within the window: two blocks"
    got = cache.read(1, table, 20)
    for found, put in zip(got, (keys, values)):
        assert torch.equal(found[:, 12:], put.transpose(0, 1)[:, 12:])
        assert 0 < (found - put.transpose(0, 1)).abs().max() < 0.02
    cache.store(0, keys[:4], values[:4], torch.arange(12, 16))
    assert torch.equal(cache.read(0, table[:1], 4)[0], keys[:4].transpose(0, 1)), "block 3 again, in full"


def test_too_little_room_in_full_precision_is_said() -> None:
    cache = cache_of(Compression("kivi", 4, 4, 8), full=1)
    with pytest.raises(ExecutorError, match="1 blocks in full precision are not enough"):
        cache.store(0, random(8, 2, 8), random(8, 2, 8), torch.arange(4, 12))


@pytest.mark.parametrize("coding", ["kivi8", "delta8"])
def test_a_live_run_over_packed_keys_and_values_answers_almost_alike(coding: str) -> None:
    from executor.config import LiveConfig
    from executor.serving.replay import replay_live

    loaded = load_model(SPEC, device="cpu", dtype="float32", kernels="torch", attention="reading", seed=5)
    trace = small_trace([(prompt + 60, output) for prompt, output in LENGTHS])
    config = LiveConfig(policy="vllm_v1", token_budget=64, as_fast_as_possible=True, block_size=8, num_blocks=60)
    full = replay_live(trace, config, loaded=loaded)
    packed = replay_live(trace, config, loaded=loaded, kv_compression=coding, kv_window=16, prefix_caching=True)
    assert set(packed.tables.column("requests", "status")) == {"finished"}
    same = sum(a == b for row in full.answers for a, b in zip(full.answers[row], packed.answers[row]))
    assert same > 0.7 * sum(map(len, full.answers.values()))
    exact = replay_live(trace, config, loaded=loaded, kv_compression=coding, kv_window=400)
    assert exact.answers == full.answers, "a window that holds everything changes nothing"


def test_mistakes_are_named() -> None:
    with pytest.raises(ProfileError, match="found coding 'zip'"):
        Compression("zip")
    with pytest.raises(ProfileError, match="found 3 bits"):
        Compression("kivi", 3)


def test_packed_runs_climb_the_ladder_too() -> None:
    from executor.config import LiveConfig
    from executor.serving.replay import replay_live

    loaded = load_model(SPEC, device="cpu", dtype="float32", kernels="torch", attention="reading", seed=5)
    config = LiveConfig(
        policy="chunked",
        knobs={"chunk_size": 32},
        as_fast_as_possible=True,
        block_size=8,
        num_blocks=16,
        watermark=0.0,
        kv_compression="kivi8",
        kv_window=16,
        max_num_seqs=3,
        token_budget=64,
        ladder="preempt,plain",
    )
    run = replay_live(small_trace(LENGTHS), config, loaded=loaded)
    assert set(run.tables.column("requests", "status")) == {"finished"}


def packed_model():
    return load_model(SPEC, device="cpu", dtype="float64", kernels="torch", attention="reading", seed=5)


def tight(**options: object):
    """Requests whose old blocks are packed, in a pool that cannot hold them all."""
    from executor.config import LiveConfig

    return LiveConfig(
        policy="vllm_v1",
        token_budget=256,
        as_fast_as_possible=True,
        block_size=8,
        kv_compression="kivi4",
        kv_window=16,
        watermark=0.0,
        swap_gib=0.002,
        swap_page_mib=0.01,
        **options,
    )


@pytest.mark.parametrize("ahead", [False, True])
def test_swapped_packed_requests_answer_as_if_they_had_stayed(ahead: bool) -> None:
    from executor.serving.replay import replay_live

    loaded = packed_model()
    trace = small_trace([(prompt + 10, output + 40) for prompt, output in LENGTHS])
    stayed = replay_live(trace, tight(num_blocks=200), loaded=loaded)
    swapped = replay_live(trace, tight(num_blocks=22, preemption="swap", ahead=ahead), loaded=loaded)
    memory = swapped.config["memory"]
    assert memory["preemptions_by_swap"] > 1
    assert memory["swap_moved_bytes"] > 0
    assert stayed.config["memory"]["preemptions_by_swap"] == 0
    assert swapped.answers == stayed.answers
    assert stayed.answers != replay_live(trace, tight(num_blocks=200), loaded=loaded, kv_compression=None).answers


def test_planning_ahead_over_a_packed_pool_changes_no_answer() -> None:
    from executor.serving.replay import replay_live

    loaded = packed_model()
    trace = small_trace([(prompt + 10, output + 40) for prompt, output in LENGTHS])
    for caching in (False, True):
        each = [
            replay_live(trace, tight(num_blocks=200, ahead=ahead, prefix_caching=caching), loaded=loaded)
            for ahead in (False, True)
        ]
        assert each[0].answers == each[1].answers


def test_packed_and_whole_blocks_come_back_from_host_memory_as_they_went() -> None:
    """Blocks 3 and 5 are packed, 2 is in the window: other blocks get the same bits back, and bytes are counted."""
    cache = cache_of(Compression("kivi", 4, 4, 4))
    keys, values = random(12, 2, 8), random(12, 2, 8, seed=1)
    table = torch.tensor([3, 5, 2])
    slots = torch.tensor([int(table[position // 4]) * 4 + position % 4 for position in range(12)])
    for layer in range(2):
        cache.store(layer, keys, values, slots)
    cache.seal_old(table, 12)
    before = [cache.read(layer, table, 12) for layer in range(2)]
    host = PackedHostCache(cache, 4)
    host.copy_out([Move(0, 3, table.tolist(), [2, 0, 3])])
    cache.drop([3, 5, 2])
    assert len(cache._free) == 6
    host.copy_in([Move(0, 3, [7, 3, 9], [2, 0, 3])])
    after = [cache.read(layer, torch.tensor([7, 3, 9]), 12) for layer in range(2)]
    assert all(torch.equal(a, b) for pair in zip(before, after) for a, b in zip(*pair))
    assert len(cache._free) == 5
    whole = 2 * 2 * 2 * 4 * 8 * 4
    assert host.times.bytes == 2 * (2 * cache.packed_block_bytes + whole)
    # Slot 3 held a whole block; a packed one that goes there is not mistaken for it.
    host.copy_out([Move(1, 1, [7], [3])])
    host.copy_in([Move(1, 1, [1], [3])])
    assert torch.equal(cache.read(0, torch.tensor([1]), 4)[0], before[0][0][:, :4])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("coding", ["kivi", "delta"])
def test_a_packed_pool_on_this_gpu_holds_what_one_on_the_cpu_holds(coding: str) -> None:
    keys, values = random(12, 2, 8), random(12, 2, 8, seed=1)
    table = torch.tensor([3, 5, 2])
    slots = torch.tensor([int(table[position // 4]) * 4 + position % 4 for position in range(12)])
    found = []
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        cache = CompressedKVCache(SPEC, 20, 4, torch.float32, device, Compression(coding, 4, 4, 4), 6)
        for layer in range(2):
            cache.store(layer, keys.to(device), values.to(device), slots.to(device))
        cache.seal_old(table, 12)
        host = PackedHostCache(cache, 4)
        host.copy_out([Move(0, 3, table.tolist(), [2, 0, 3])])
        cache.drop(table.tolist())
        host.copy_in([Move(0, 3, [7, 3, 9], [2, 0, 3])])
        found.append([part.cpu() for part in cache.read(1, torch.tensor([7, 3, 9], device=device), 12)])
    assert all(torch.allclose(here, there, atol=1e-5) for here, there in zip(*found))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_live_run_over_a_packed_pool_on_this_gpu_swaps_and_finishes() -> None:
    from executor.serving.replay import replay_live

    loaded = load_model(SPEC, device="cuda", dtype="float32", kernels="torch", attention="reading", seed=5)
    trace = small_trace([(prompt + 10, output + 40) for prompt, output in LENGTHS])
    stayed = replay_live(trace, tight(num_blocks=200), loaded=loaded)
    swapped = replay_live(trace, tight(num_blocks=22, preemption="swap"), loaded=loaded)
    assert swapped.config["memory"]["preemptions_by_swap"] > 1
    same = sum(a == b for row in stayed.answers for a, b in zip(stayed.answers[row], swapped.answers[row]))
    assert same > 0.9 * sum(map(len, stayed.answers.values()))
