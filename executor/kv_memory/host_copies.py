"""Host memory behind the KV pool: real copies of whole blocks, out of the way of victims and back for resumed requests.

On a GPU the host's side is pinned and copies run on a stream of their own: the batch's kernels wait for them on the
device, the host does not. On a CPU both sides are ordinary memory, and a copy is a copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from executor.errors import ExecutorError
from executor.kv_memory.pool import KVCache
from policies.kv_memory.swap import Move


@dataclass
class SwapTimes:
    """What copies took, as seen by the host (on a GPU: until they were launched). bytes: moved, both ways together."""

    blocks_out: int = 0
    blocks_in: int = 0
    out_ns: int = 0
    in_ns: int = 0
    bytes: int = 0


class HostCache:
    """Room for `blocks` KV blocks in host memory: [blocks, layers, 2, kv_heads, block_size, head_dim], made once."""

    def __init__(self, cache: KVCache, blocks: int) -> None:
        self.cache = cache
        self.times = SwapTimes()
        shape = (blocks, cache.layers, 2, cache.kv_heads, cache.block_size, cache.head_dim)
        self._on_gpu = cache.device.type == "cuda"
        try:
            self.pool = torch.empty(shape, dtype=cache.dtype, pin_memory=self._on_gpu)
        except (RuntimeError, MemoryError):
            gib = blocks * cache.num_bytes / cache.blocks / 2**30
            raise ExecutorError(f"host memory: {gib:.2f} GiB to swap to are not there; lower --swap-gib") from None
        self._stream = torch.cuda.Stream(cache.device) if self._on_gpu else None

    @property
    def num_bytes(self) -> int:
        return self.pool.numel() * self.pool.element_size()

    def copy_out(self, moves: Sequence[Move]) -> None:
        """Device blocks to their slots, before anybody writes into these blocks."""
        started = time.perf_counter_ns()
        blocks, slots = joined(moves)
        if self._stream is None:
            self.pool[torch.tensor(slots)] = self.cache.pool[:, :, torch.tensor(blocks)].permute(2, 0, 1, 3, 4, 5)
        else:
            current = torch.cuda.current_stream(self.cache.device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                index = torch.tensor(blocks, device=self.cache.device)
                there = self.cache.pool[:, :, index].permute(2, 0, 1, 3, 4, 5).contiguous()
                for first, last, slot in _runs(slots):
                    self.pool[slot : slot + last - first].copy_(there[first:last], non_blocking=True)
                there.record_stream(self._stream)
            current.wait_stream(self._stream)
        self.times.blocks_out += len(blocks)
        self.times.bytes += len(blocks) * self.num_bytes // len(self.pool)
        self.times.out_ns += time.perf_counter_ns() - started

    def copy_in(self, moves: Sequence[Move]) -> None:
        """Slots back to device blocks, before anybody reads these blocks."""
        started = time.perf_counter_ns()
        blocks, slots = joined(moves)
        if self._stream is None:
            self.cache.pool[:, :, torch.tensor(blocks)] = self.pool[torch.tensor(slots)].permute(1, 2, 0, 3, 4, 5)
        else:
            current = torch.cuda.current_stream(self.cache.device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                back = torch.empty(
                    (len(blocks), *self.pool.shape[1:]), dtype=self.cache.dtype, device=self.cache.device
                )
                for first, last, slot in _runs(slots):
                    back[first:last].copy_(self.pool[slot : slot + last - first], non_blocking=True)
                index = torch.tensor(blocks, device=self.cache.device)
                self.cache.pool[:, :, index] = back.permute(1, 2, 0, 3, 4, 5)
                back.record_stream(self._stream)
            current.wait_stream(self._stream)
        self.times.blocks_in += len(blocks)
        self.times.bytes += len(blocks) * self.num_bytes // len(self.pool)
        self.times.in_ns += time.perf_counter_ns() - started

    def measured_move_ns(self, blocks: int = 16, repeats: int = 3) -> float:
        """Nanoseconds per block of a copy out, the best of a few, measured on blocks and slots that nobody uses yet."""
        blocks = max(1, min(blocks, self.cache.blocks - 1, len(self.pool)))
        move = Move(-1, blocks, list(range(1, blocks + 1)), list(range(blocks)))
        best = float("inf")
        for _ in range(repeats):
            started = time.perf_counter_ns()
            self.copy_out([move])
            if self._on_gpu:
                torch.cuda.synchronize(self.cache.device)
            best = min(best, (time.perf_counter_ns() - started) / blocks)
        self.times = SwapTimes()
        return best


def joined(moves: Sequence[Move]) -> tuple[list[int], list[int]]:
    """(blocks, slots) of all moves, one after another."""
    blocks: list[int] = []
    slots: list[int] = []
    for move in moves:
        blocks.extend(move.blocks)
        slots.extend(move.slots)
    return blocks, slots


def _runs(slots: list[int]) -> list[tuple[int, int, int]]:
    """(first, one past the last, slot of the first) of every run of neighbouring slots: one copy each."""
    runs = []
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            runs.append((first, at, slots[first]))
            first = at
    return runs
