"""Attention through PyTorch's fused scaled_dot_product_attention: the fastest way without compiled code of our own.

Chunks run one by one over their gathered context; decodes are batched by length, each batch padded to the longest of
its bucket. Two traps of the CPU kernels are dealt with here: `is_causal` aligns its triangle to the top left, so only
a chunk without prefix may use it, and bfloat16 runs about five times slower than float32 for decodes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from executor.attention.base import AttentionBackend
from executor.batches.batch_arrays import Step
from executor.kv_memory.pool import KVCache
from profiler.specs.model_spec import ModelSpec

BUCKET_TOKENS = 256


class SdpaAttention(AttentionBackend):
    name = "sdpa"

    @classmethod
    def why_not(cls, spec: ModelSpec, device: torch.device, kv_dtype: torch.dtype) -> str:
        return ""

    def attend(self, layer: int, q: Tensor, out: Tensor, step: Step, cache: KVCache) -> None:
        for row, tokens, prefix, table in zip(
            step.chunk_row.tolist(), step.chunk_tokens.tolist(), step.chunk_prefix.tolist(), step.chunk_table.tolist()
        ):
            self._chunk(layer, q[row : row + tokens], out[row : row + tokens], prefix, step.block_tables[table], cache)
        if step.num_decodes:
            self._decodes(layer, q, out, step, cache)

    def _dtype(self, q: Tensor) -> torch.dtype:
        return torch.float32 if q.device.type == "cpu" and q.dtype != torch.float64 else q.dtype

    def _heads(self, q: Tensor) -> Tensor:
        """[rows, heads * head_dim] -> [heads, rows, head_dim]"""
        return q.unflatten(-1, (self.heads, self.head_dim)).transpose(0, 1).to(self._dtype(q))

    def _chunk(self, layer: int, q: Tensor, out: Tensor, prefix: int, table: Tensor, cache: KVCache) -> None:
        tokens = q.shape[0]
        dtype = self._dtype(q)
        keys, values = (part.to(dtype)[None] for part in cache.read(layer, table, prefix + tokens))
        mask = None
        if prefix or self.window:
            at = torch.arange(prefix + tokens, device=q.device)
            rows = at[prefix:, None]
            mask = at[None, :] <= rows
            if self.window:
                mask &= at[None, :] > rows - self.window
        result = scaled_dot_product_attention(
            self._heads(q)[None],
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=cache.kv_heads != self.heads,
        )
        out.copy_(result[0].transpose(0, 1).flatten(1))

    def _decodes(self, layer: int, q: Tensor, out: Tensor, step: Step, cache: KVCache) -> None:
        contexts = step.decode_context + 1
        buckets = -(-contexts // BUCKET_TOKENS)
        for bucket in np.unique(buckets).tolist():
            members = np.flatnonzero(buckets == bucket)
            longest = int(contexts[members].max())
            blocks = -(-longest // cache.block_size)
            rows = step.tensor(step.decode_row[members].astype(np.int64))
            tables = step.block_tables[step.tensor(step.decode_table[members].astype(np.int64)), :blocks].long()
            lengths = step.tensor(contexts[members].astype(np.int64))
            at = torch.arange(blocks * cache.block_size, device=q.device)
            seen = at[None, :] < lengths[:, None]
            if self.window:
                seen &= at[None, :] >= lengths[:, None] - self.window
            dtype = self._dtype(q)
            pair = cache.pool[layer][:, tables]  # [2, members, blocks, kv_heads, block_size, head_dim]
            pair = pair.transpose(2, 3).flatten(3, 4).to(dtype)
            # Slots beyond a context may hold anything, NaN included, and 0 * NaN is NaN: clear them.
            pair = pair.masked_fill(~seen[None, :, None, :, None], 0)
            query = q[rows].unflatten(-1, (self.heads, self.head_dim))[:, :, None].to(dtype)
            result = scaled_dot_product_attention(
                query,
                pair[0],
                pair[1],
                attn_mask=seen[:, None, None, :],
                scale=self.scale,
                enable_gqa=cache.kv_heads != self.heads,
            )
            out[rows] = result.flatten(1).to(out.dtype)
