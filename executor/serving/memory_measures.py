"""A live run's memory measures: host memory to swap to, measured costs, and the admission control of the simulator."""

from __future__ import annotations

from math import ceil

from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.kv_memory.compressed_pool import CompressedKVCache
from executor.kv_memory.host_copies import HostCache
from executor.kv_memory.packed_host_copies import PackedHostCache
from executor.kv_memory.pool import KVCache
from executor.model.loading import Loaded
from policies.kv_memory.swap import HostMemory, Swap, SwapCosts
from policies.scheduling.overload_ladder import AdmissionControl, Ladder
from profiler.specs.kv_compression import Compression

GIB, MIB = 2**30, 2**20
READ_PACKED = ("packed", "reading", "reference")
"""Attention that reads a compressed pool."""


class MeasuredCosts:
    """Costs of moving and of prefilling, filled in once the engine has warmed up. Both in proportion to their size."""

    def __init__(self) -> None:
        self.block_ns = 0.0
        self.token_ns = 0.0

    def move_ns(self, blocks: int) -> int:
        return ceil(self.block_ns * blocks)

    def prefill_ns(self, tokens: int) -> int:
        return ceil(self.token_ns * tokens)


def moved_block_bytes(config: LiveConfig, loaded: Loaded) -> int:
    """Bytes of a block on its way to host memory, as the simulator counts them."""
    compression = compression_of(config)
    if compression is None:
        return loaded.kv_bytes_per_token * config.block_size
    return round(compression.moved_block_bytes(loaded.spec, loaded.kv_bytes_per_token))


def make_swap(config: LiveConfig, block_bytes: int, costs: MeasuredCosts) -> Swap | None:
    """Host memory as the config wants it; None where preempted requests recompute."""
    ladder = Ladder.of_settings(config)
    if "offload" not in ladder.rungs if ladder is not None else config.preemption == "recompute":
        return None
    memory = HostMemory.of(round(config.swap_gib * GIB), block_bytes, round(config.swap_page_mib * MIB))
    how = "auto" if config.preemption == "recompute" else config.preemption
    return Swap(memory, how, SwapCosts(costs.move_ns, costs.prefill_ns))  # type: ignore[arg-type]


def make_admission(config: LiveConfig) -> AdmissionControl | None:
    ladder = Ladder.of_settings(config)
    return None if ladder is None else AdmissionControl(ladder)


def compression_of(config: LiveConfig) -> Compression | None:
    """What `kivi4` or `delta8` stands for; None for keys and values as they are."""
    text = config.kv_compression
    return None if text is None else Compression.parse(text, config.block_size, config.kv_window)


def full_blocks(config: LiveConfig, rows: int, most_tokens: int) -> int:
    """Blocks in full precision beside a packed pool: everybody's window, and one batch."""
    size = config.block_size
    return rows * (config.kv_window // size + 2) + -(-most_tokens // size)


def make_cache(config: LiveConfig, loaded: Loaded, blocks: int, rows: int, most_tokens: int) -> KVCache:
    """The KV pool of a run. rows: requests at once; most_tokens: of one batch (in full precision, as windows are)."""
    compression = compression_of(config)
    if compression is None:
        return loaded.new_cache(blocks, config.block_size)
    if loaded.model.attention.name not in READ_PACKED or loaded.model.kernels.name != "torch":
        raise ExecutorError(
            f"--kv-compression: found --kernels {loaded.model.kernels.name} and --attention "
            f"{loaded.model.attention.name}, expected torch and one of {', '.join(READ_PACKED)}; leave both out"
        )
    size = config.block_size
    full = min(blocks + 1, full_blocks(config, rows, most_tokens))
    return CompressedKVCache(loaded.spec, blocks + 1, size, loaded.kv_dtype, loaded.device, compression, full)


def make_host_cache(swap: Swap | None, cache: KVCache) -> HostCache | PackedHostCache | None:
    if swap is None:
        return None
    if isinstance(cache, CompressedKVCache):
        return PackedHostCache(cache, swap.memory.blocks)
    return HostCache(cache, swap.memory.blocks)
