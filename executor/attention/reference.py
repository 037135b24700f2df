"""Attention as its formula says, one request at a time, in the dtype of the activations (float64 included)."""

from __future__ import annotations

import torch
from torch import Tensor

from executor.attention.base import AttentionBackend
from executor.batches.batch_arrays import Step
from executor.kv_memory.pool import KVCache
from profiler.specs.model_spec import ModelSpec


class ReferenceAttention(AttentionBackend):
    """softmax(q k^T / sqrt(d)) v with explicit masks: slow, and what the others are checked against."""

    name = "reference"

    @classmethod
    def why_not(cls, spec: ModelSpec, device: torch.device, kv_dtype: torch.dtype) -> str:
        return ""

    def attend(self, layer: int, q: Tensor, out: Tensor, step: Step, cache: KVCache) -> None:
        tables = step.block_tables
        for row, tokens, prefix, table in zip(
            step.chunk_row.tolist(), step.chunk_tokens.tolist(), step.chunk_prefix.tolist(), step.chunk_table.tolist()
        ):
            out[row : row + tokens] = self._one(layer, q[row : row + tokens], prefix, tables[table], cache)
        for row, context, table in zip(
            step.decode_row.tolist(), step.decode_context.tolist(), step.decode_table.tolist()
        ):
            out[row : row + 1] = self._one(layer, q[row : row + 1], context, tables[table], cache)

    def _one(self, layer: int, q: Tensor, prefix: int, table: Tensor, cache: KVCache) -> Tensor:
        """Rows at positions prefix, prefix + 1, ... of one request."""
        tokens = q.shape[0]
        keys, values = cache.read(layer, table, prefix + tokens)
        dtype = torch.promote_types(q.dtype, torch.float32)
        share = self.heads // cache.kv_heads
        query = q.reshape(tokens, cache.kv_heads, share, self.head_dim).to(dtype)
        scores = torch.einsum("tkgd,knd->kgtn", query * self.scale, keys.to(dtype))
        at = torch.arange(prefix + tokens, device=q.device)
        rows = at[prefix:, None]
        seen = at[None, :] <= rows
        if self.window:
            seen &= at[None, :] > rows - self.window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return torch.einsum("kgtn,knd->tkgd", weights, values.to(dtype)).reshape(tokens, -1).to(q.dtype)
