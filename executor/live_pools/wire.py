"""Keys and values on their way between two processes: whole blocks through one region of shared memory.

On a CPU both sides map the same memory: the sender copies blocks in, the receiver copies them out. Between GPUs the
same two calls would go over NCCL or NIXL; nothing else here knows how blocks travel.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.kv_memory.pool import KVCache
from policies import Ns


@dataclass(frozen=True)
class Moved:
    """One request's KV, from the end of its prompt to its arrival; ns since the run began.

    asked_ns: its first token was there. begun_ns: the decoding side had room. ended_ns: it lies in that side's pool.
    copied_ns: of the time between, what both copies took; the rest is waiting for an engine to end its batch.
    """

    row: int
    tokens: int
    size: int
    asked_ns: Ns
    begun_ns: Ns
    ended_ns: Ns
    copied_ns: Ns

    @property
    def waited_s(self) -> float:
        return (self.begun_ns - self.asked_ns) / 1e9

    @property
    def took_s(self) -> float:
        return (self.ended_ns - self.begun_ns) / 1e9


class Region:
    """Shared memory for one request's blocks at a time: [blocks, layers, 2, kv_heads, block_size, head_dim]."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    @classmethod
    def for_pool(cls, cache: KVCache, blocks: int) -> Region:
        """Room for so many blocks of a pool; both processes may map it."""
        shape = (blocks, cache.layers, 2, cache.kv_heads, cache.block_size, cache.head_dim)
        return cls(torch.zeros(shape, dtype=cache.dtype).share_memory_())

    @property
    def block_bytes(self) -> int:
        return self.memory[0].numel() * self.memory.element_size()

    def put(self, cache: KVCache, blocks: Sequence[int]) -> None:
        """Copy blocks out of a pool."""
        index = torch.tensor(list(blocks))
        self.memory[: len(index)] = cache.pool[:, :, index].permute(2, 0, 1, 3, 4, 5)

    def take(self, cache: KVCache, blocks: Sequence[int]) -> None:
        """Copy what was put into blocks of another pool."""
        index = torch.tensor(list(blocks))
        cache.pool[:, :, index] = self.memory[: len(index)].permute(1, 2, 0, 3, 4, 5)


def copy_times(region: Region, cache: KVCache, repeats: int = 5) -> list[tuple[int, float]]:
    """(bytes, seconds) of copies of rising numbers of blocks in and out again, on blocks that nobody uses yet.

    What a link of the simulator is fitted to before a run: latency and bandwidth.
    """
    found = []
    most = min(len(region.memory), cache.blocks - 1)
    sizes = sorted({max(1, most * share // 8) for share in range(1, 9)})
    for blocks in sizes * (repeats + 1):
        since = time.perf_counter_ns()
        region.put(cache, range(1, blocks + 1))
        region.take(cache, range(1, blocks + 1))
        found.append((blocks * region.block_bytes, (time.perf_counter_ns() - since) / 1e9))
    return found[len(sizes) :]  # the first round brings pages in
