"""Host memory behind a compressed KV pool: packed blocks go out packed, windows in full precision.

Both come back as they were, so that a swapped request answers as if it had stayed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from executor.errors import ExecutorError
from executor.kv_memory.compressed_pool import CompressedKVCache
from executor.kv_memory.host_copies import SwapTimes, joined
from policies.kv_memory.swap import Move


class PackedHostCache:
    """Room for `blocks` packed blocks, made once (pinned on a GPU). Blocks of windows come on top, as many as are out.

    times: as of `executor.kv_memory.host_copies.HostCache`, with the bytes that really moved.
    """

    def __init__(self, cache: CompressedKVCache, blocks: int) -> None:
        self.cache = cache
        self.times = SwapTimes()
        self._on_gpu = cache.device.type == "cuda"
        try:
            self._parts = [
                torch.empty((blocks, *part.shape[1:]), dtype=part.dtype, pin_memory=self._on_gpu)
                for part in cache.packed_parts()
            ]
        except (RuntimeError, MemoryError):
            gib = blocks * cache.packed_block_bytes / 2**30
            raise ExecutorError(f"host memory: {gib:.2f} GiB to swap to are not there; lower --swap-gib") from None
        self._whole: dict[int, Tensor] = {}
        self._stream = torch.cuda.Stream(cache.device) if self._on_gpu else None

    def __len__(self) -> int:
        return len(self._parts[0])

    @property
    def num_bytes(self) -> int:
        tensors = [*self._parts, *self._whole.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def copy_out(self, moves: Sequence[Move]) -> None:
        """Device blocks to their slots, before anybody writes into these blocks."""
        started = time.perf_counter_ns()
        blocks, slots = joined(moves)
        packed = self.cache.sealed(blocks)
        with _Beside(self._stream, self.cache.device):
            old = [(block, slot) for block, slot, is_packed in zip(blocks, slots, packed) if is_packed]
            if old:
                index, to = (torch.tensor(column) for column in zip(*old))
                for host, device in zip(self._parts, self.cache.packed_parts()):
                    host[to] = device[index].cpu()
                self.times.bytes += len(old) * self.cache.packed_block_bytes
            for block, slot, is_packed in zip(blocks, slots, packed):
                self._whole.pop(slot, None)
                if not is_packed:
                    self._whole[slot] = self._copied(self.cache.whole(block))
        self.times.blocks_out += len(blocks)
        self.times.out_ns += time.perf_counter_ns() - started

    def copy_in(self, moves: Sequence[Move]) -> None:
        """Slots back to device blocks, before anybody reads these blocks."""
        started = time.perf_counter_ns()
        blocks, slots = joined(moves)
        with _Beside(self._stream, self.cache.device):
            old = [(block, slot) for block, slot in zip(blocks, slots) if slot not in self._whole]
            if old:
                index, origin = (torch.tensor(column) for column in zip(*old))
                for host, device in zip(self._parts, self.cache.packed_parts()):
                    device[index] = host[origin].to(device.device)
                self.cache.came_packed(index.tolist())
                self.times.bytes += len(old) * self.cache.packed_block_bytes
            for block, slot in zip(blocks, slots):
                whole = self._whole.pop(slot, None)
                if whole is not None:
                    self.cache.open(block).copy_(whole, non_blocking=True)
                    self.times.bytes += whole.numel() * whole.element_size()
        self.times.blocks_in += len(blocks)
        self.times.in_ns += time.perf_counter_ns() - started

    def measured_move_ns(self, blocks: int = 16, repeats: int = 3) -> float:
        """Nanoseconds per packed block of a copy out, the best of a few, on blocks and slots that nobody uses yet."""
        blocks = max(1, min(blocks, self.cache.blocks - 1, len(self)))
        numbers = list(range(1, blocks + 1))
        self.cache.came_packed(numbers)
        best = float("inf")
        for _ in range(repeats):
            started = time.perf_counter_ns()
            self.copy_out([Move(-1, blocks, numbers, list(range(blocks)))])
            if self._on_gpu:
                torch.cuda.synchronize(self.cache.device)
            best = min(best, (time.perf_counter_ns() - started) / blocks)
        self.cache.drop(numbers)
        self.times = SwapTimes()
        return best

    def _copied(self, whole: Tensor) -> Tensor:
        there = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=self._on_gpu)
        there.copy_(whole)
        self.times.bytes += there.numel() * there.element_size()
        return there


class _Beside:
    """A side stream that follows the current one and is followed by it; without one nothing."""

    def __init__(self, stream: torch.cuda.Stream | None, device: torch.device) -> None:
        self._stream, self._device = stream, device

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()

    def __exit__(self, *raised: object) -> None:
        if self._stream is not None:
            self._inside.__exit__(None, None, None)
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
