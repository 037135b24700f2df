"""Attention over a compressed pool with decodes in Triton: packed blocks are read as they lie.

Chunks, and pools of another coding, go the way of `reading`. Which block is packed is asked once a step, not a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor.attention.reading import ReadingAttention
from executor.batches.batch_arrays import Step
from executor.batches.device_arrays import arrays_of
from executor.kv_memory.compressed_pool import CompressedKVCache
from executor.kv_memory.pool import KVCache
from executor.triton_kernels.runtime import interpreted, triton_reason
from profiler.specs.model_spec import ModelSpec

LOG2_E = 1.4426950408889634


class PackedDecodes(ReadingAttention):
    """`kivi` codes of 2, 4 or 8 bits."""

    name = "packed"

    @classmethod
    def why_not(cls, spec: ModelSpec, device: torch.device, kv_dtype: torch.dtype) -> str:
        if kv_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the packed decode kernel reads float32, bfloat16 and float16 beside its codes, not {kv_dtype}"
        return triton_reason(device)

    def _decodes(self, layer: int, q: Tensor, out: Tensor, step: Step, cache: KVCache) -> None:
        if not isinstance(cache, CompressedKVCache) or cache.compression.coding != "kivi":
            super()._decodes(layer, q, out, step, cache)
            return
        from executor.triton_kernels.packed_attention import packed_decode

        arrays = arrays_of(step, cache.block_size)
        sizes = arrays.sizes
        keys, values = cache.keys(layer), cache.values(layer)
        (key_codes, key_scale, key_low), (value_codes, value_scale, value_low) = cache.coded(layer)
        size, d = cache.block_size, self.head_dim
        share = self.heads // cache.kv_heads
        packed_decode[sizes.decodes, cache.kv_heads](
            q,
            out,
            keys,
            values,
            key_codes,
            key_scale,
            key_low,
            value_codes,
            value_scale,
            value_low,
            arrays.decode_tables,
            arrays.decode_length,
            cache.places(),
            self.scale * LOG2_E,
            sizes.chunk_rows,
            q.stride(0),
            out.stride(0),
            keys.stride(0),
            key_codes.stride(0),
            key_scale.stride(0),
            value_scale.stride(0),
            sizes.blocks,
            SHARE=share,
            BLOCK_SIZE=size,
            HEAD_DIM=d,
            D=max(16, 1 << (d - 1).bit_length()),
            N=max(16, 1 << (size - 1).bit_length()),
            G=max(16, 1 << (share - 1).bit_length()),
            BITS=cache.compression.bits,
            WINDOW=self.window,
            PRECISION="ieee" if q.dtype == torch.float32 or interpreted() else "tf32",
            num_warps=4,
        )
