"""The project's own paged attention kernels: one launch for all chunks of a batch, one (or two) for all its decodes.

Both launches read and write the same buffers by row offset. With `two_streams` the decodes run beside the chunks on a
second stream, forked and joined by events: worth it where neither launch fills the device alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from executor.attention.base import AttentionBackend
from executor.batches.batch_arrays import Step
from executor.batches.device_arrays import TILE_ROWS, DeviceArrays, Sizes, arrays_of, blank_arrays
from executor.kv_memory.pool import KVCache
from executor.triton_kernels.runtime import Processor, interpreted, multiprocessors, processor_of, triton_reason
from profiler.specs.model_spec import ModelSpec

LOG2_E = 1.4426950408889634
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_SPLITS = 32
KEYS_PER_SPLIT = 256
"""A split of fewer keys than this costs more to merge than it saves."""


class TritonAttention(AttentionBackend):
    """Grouped heads, sliding windows, any block size (powers of two from 16 on are aligned best)."""

    name = "triton"
    capturable = True

    def __init__(self, spec: ModelSpec, *, heads: int | None = None, two_streams: bool = False) -> None:
        super().__init__(spec, heads=heads)
        self.two_streams = two_streams
        self.forced_splits = 0
        self._side: torch.cuda.Stream | None = None
        self._parts: tuple[Tensor, Tensor] | None = None

    @classmethod
    def why_not(cls, spec: ModelSpec, device: torch.device, kv_dtype: torch.dtype) -> str:
        if kv_dtype not in DTYPES:
            return f"the Triton kernels read float32, bfloat16 and float16 pools, not {kv_dtype}"
        if spec.head_dim > 256:
            return f"the Triton kernels take heads of up to 256, found {spec.head_dim}"
        return triton_reason(device)

    def held(self) -> list[Tensor]:
        return [] if self._parts is None else list(self._parts)

    def attend(self, layer: int, q: Tensor, out: Tensor, step: Step, cache: KVCache) -> None:
        arrays = arrays_of(step, cache.block_size)
        chunks, decodes = arrays.sizes.tiles > 0, arrays.sizes.decodes > 0
        if chunks and decodes and self.two_streams and q.device.type == "cuda":
            self._both(layer, q, out, arrays, cache)
            return
        if chunks:
            self._chunks(layer, q, out, arrays, cache)
        if decodes:
            self._decodes(layer, q, out, arrays, cache)

    def warm(self, cache: KVCache, dtype: torch.dtype) -> None:
        """Compile every variant that a run may launch: each size of tile and each number of splits, with no work."""
        device = cache.device
        width = self.heads * self.head_dim
        qkv = torch.zeros(TILE_ROWS, width + 2 * cache.kv_heads * self.head_dim, dtype=dtype, device=device)
        q, out = qkv[:, :width], torch.empty(TILE_ROWS, width, dtype=dtype, device=device)
        rows = 16
        while rows <= TILE_ROWS:
            sizes = Sizes(rows, rows, 0, 1, 1, rows, 0, 1)
            self._chunks(0, q[:rows], out[:rows], self._blank(sizes, cache), cache)
            rows *= 2
        arrays = self._blank(Sizes(1, 0, 1, 0, 0, TILE_ROWS, 0, 1), cache)
        before = self.forced_splits
        splits = 1
        while splits <= MOST_SPLITS:
            self.forced_splits = splits
            self._decodes(0, q[:1], out[:1], arrays, cache)
            splits *= 2
        self.forced_splits = before

    @staticmethod
    def _blank(sizes: Sizes, cache: KVCache) -> DeviceArrays:
        buffer = torch.zeros(sizes.total, dtype=torch.int32, device=cache.device)
        return blank_arrays(sizes, cache.block_size, buffer)

    def _both(self, layer: int, q: Tensor, out: Tensor, arrays: DeviceArrays, cache: KVCache) -> None:
        main = torch.cuda.current_stream(q.device)
        if self._side is None:
            self._side = torch.cuda.Stream(q.device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            self._decodes(layer, q, out, arrays, cache)
        self._chunks(layer, q, out, arrays, cache)
        main.wait_stream(self._side)

    def _shared(self, q: Tensor, cache: KVCache) -> dict[str, object]:
        """Constants that both kernels are compiled for."""
        return {
            "SHARE": self.heads // cache.kv_heads,
            "BLOCK_SIZE": cache.block_size,
            "HEAD_DIM": self.head_dim,
            "D": max(16, 1 << (self.head_dim - 1).bit_length()),
            "WINDOW": self.window,
            # The interpreter multiplies bfloat16 matrices wrongly without a word: it gets float32.
            "WIDEN": interpreted(),
            "PRECISION": "ieee" if q.dtype == torch.float32 or interpreted() else "tf32",
        }

    def _chunks(self, layer: int, q: Tensor, out: Tensor, arrays: DeviceArrays, cache: KVCache) -> None:
        from executor.triton_kernels.paged_attention import chunk_attention

        sizes = arrays.sizes
        keys, values = cache.keys(layer), cache.values(layer)
        tile = tile_of(sizes.tile_rows, self.head_dim, q.dtype.itemsize, processor_of(q.device))
        chunk_attention[self.heads, sizes.tiles, sizes.tile_rows // tile.rows](
            q,
            out,
            keys,
            values,
            arrays.chunk_tables,
            arrays.tile_row,
            arrays.tile_count,
            arrays.tile_position,
            arrays.tile_chunk,
            self.scale * LOG2_E,
            q.stride(0),
            out.stride(0),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            sizes.blocks,
            M=tile.rows,
            N=tile.keys,
            num_warps=8 if tile.rows >= 128 else 4,
            num_stages=tile.stages,
            **self._shared(q, cache),
        )

    def _decodes(self, layer: int, q: Tensor, out: Tensor, arrays: DeviceArrays, cache: KVCache) -> None:
        from executor.triton_kernels.paged_attention import decode_attention, merge_splits

        sizes = arrays.sizes
        keys, values = cache.keys(layer), cache.values(layer)
        shared = self._shared(q, cache)
        splits = self.forced_splits or num_splits(
            sizes.decodes * cache.kv_heads, arrays.most_context, multiprocessors(q.device)
        )
        part, weight = self._scratch(sizes.decodes, splits, q.device)
        group = max(16, 1 << (self.heads // cache.kv_heads - 1).bit_length())
        tile = tile_of(group, self.head_dim, q.dtype.itemsize, processor_of(q.device), keys=64, least_rows=group)
        decode_attention[sizes.decodes, cache.kv_heads, splits](
            q,
            out,
            part,
            weight,
            keys,
            values,
            arrays.decode_tables,
            arrays.decode_length,
            self.scale * LOG2_E,
            sizes.chunk_rows,
            q.stride(0),
            out.stride(0),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            sizes.blocks,
            HEADS=self.heads,
            G=group,
            N=tile.keys,
            SPLITS=splits,
            num_warps=4,
            num_stages=2 if q.dtype == torch.float32 else 3,
            **shared,
        )
        if splits > 1:
            merge_splits[sizes.decodes, self.heads](
                part,
                weight,
                out,
                arrays.decode_length,
                sizes.chunk_rows,
                out.stride(0),
                HEADS=self.heads,
                HEAD_DIM=self.head_dim,
                D=shared["D"],
                SPLITS=splits,
                S=1 << (splits - 1).bit_length(),
                num_warps=4,
            )

    def _scratch(self, decodes: int, splits: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Memory for the parts of split decodes; grows, never shrinks, one set for all layers."""
        need = decodes * self.heads * splits if splits > 1 else 1
        if self._parts is None or self._parts[1].numel() < need:
            self._parts = (
                torch.empty(need * self.head_dim, dtype=torch.float32, device=device),
                torch.empty(need, dtype=torch.float32, device=device),
            )
        return self._parts


def num_splits(programs: int, most_context: int, processors: int) -> int:
    """Parts that each decode's context is cut into: enough to give every processor two programs, none too short.

    A power of two, since the kernel is compiled for each number.
    """
    wanted = -(-2 * processors // max(1, programs))
    most = max(1, min(wanted, most_context // KEYS_PER_SPLIT, MOST_SPLITS))
    return 1 << (most.bit_length() - 1)


class Tile(NamedTuple):
    """Query rows of one program, keys of one of its steps, and steps whose loads are in flight."""

    rows: int
    keys: int
    stages: int


def tile_of(
    rows: int, head_dim: int, item_bytes: int, processor: Processor, *, keys: int = 0, least_rows: int = 16
) -> Tile:
    """The largest tile of at most `rows` rows (a power of two) whose operands fit into shared memory.

    keys: of one step where there is room; by default 64, or 32 for wide rows. No fewer than `least_rows` rows.
    """
    d = max(16, 1 << (head_dim - 1).bit_length())
    wide = d > 128 or item_bytes > 2
    keys = keys or (32 if wide else 64)
    while shared_bytes_of(rows, keys, d, item_bytes, processor.capability) > processor.shared_bytes:
        if rows > max(64, least_rows) or (keys <= 16 and rows > least_rows):
            rows //= 2
        elif keys > 16:
            keys //= 2
        else:
            break
    return Tile(rows, keys, 2 if wide else 3)


def shared_bytes_of(rows: int, keys: int, head_dim: int, item_bytes: int, capability: int) -> int:
    """Shared memory that a tile takes, at most: its queries, keys and values, and weights between two products.

    Where matrix products read their operands from shared memory themselves (9.x and 10.x, half precision), keys and
    values of the next step lie beside those of this one. Held against what the compiler takes in the tests.
    """
    buffers = 2 if item_bytes == 2 and capability // 10 in (9, 10) else 1
    return item_bytes * (rows * head_dim + 2 * buffers * keys * head_dim + rows * keys) + 1024
