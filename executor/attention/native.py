"""Attention in C++ for CPUs: paged, reading the pool in place, chunks and decodes of a batch in one parallel pass."""

from __future__ import annotations

import torch
from torch import Tensor

from executor.attention.base import AttentionBackend
from executor.batches.batch_arrays import Step, address
from executor.kv_memory.pool import KVCache
from executor.native.library import Pool, Work, native_library, native_reason
from profiler.specs.model_spec import ModelSpec


class NativeAttention(AttentionBackend):
    """float32 queries over a float32 or bfloat16 pool, any block size; see native/attention.h for how."""

    name = "native"

    def __init__(self, spec: ModelSpec, *, heads: int | None = None) -> None:
        super().__init__(spec, heads=heads)
        self._library = native_library()
        self._step: Step | None = None
        self._work = Work()
        self._pool = self._work.pool
        self._half = 0

    @classmethod
    def why_not(cls, spec: ModelSpec, device: torch.device, kv_dtype: torch.dtype) -> str:
        if device.type != "cpu":
            return f"the C++ attention runs on a CPU, the device is {device}"
        if kv_dtype not in (torch.float32, torch.bfloat16):
            return f"the C++ attention reads float32 and bfloat16 pools, not {kv_dtype}"
        reason = native_reason()
        if reason:
            return reason
        library = native_library()
        if spec.head_dim % 8:
            return f"the C++ attention needs a head_dim in multiples of 8, found {spec.head_dim}"
        if spec.heads // spec.kv_heads > library.ct_queries():
            return f"{spec.heads // spec.kv_heads} heads share a KV head, more than {library.ct_queries()}"
        return ""

    def attend(self, layer: int, q: Tensor, out: Tensor, step: Step, cache: KVCache) -> None:
        if step is not self._step:
            self._prepare(step, cache)
        work = self._work
        pool = self._pool
        pool.keys, pool.values = cache.addresses(layer)
        work.q, work.ldq = q.data_ptr(), q.stride(0)
        work.out, work.ldo = out.data_ptr(), out.stride(0)
        self._library.ct_attend(work, self._half)

    def _prepare(self, step: Step, cache: KVCache) -> None:
        """What all layers of one step share."""
        self._step = step
        self._work = Work(
            pool=Pool(None, None, cache.block_size, cache.kv_heads, cache.head_dim),
            tables=address(step.tables),
            table_width=step.tables.shape[1],
            heads=self.heads,
            window=self.window,
            scale=self.scale,
            num_chunks=step.num_chunks,
            num_decodes=step.num_decodes,
            chunk_row=address(step.chunk_row),
            chunk_tokens=address(step.chunk_tokens),
            chunk_prefix=address(step.chunk_prefix),
            chunk_table=address(step.chunk_table),
            decode_row=address(step.decode_row),
            decode_context=address(step.decode_context),
            decode_table=address(step.decode_table),
        )
        self._pool = self._work.pool
        self._half = int(cache.dtype == torch.bfloat16)
