"""Paged attention in plain PyTorch with shapes that depend on array lengths alone: the twin of the device kernels.

It reads a batch through its device arrays only, never through the host's copy, and asks for no synchronisation, so it
can be captured in a CUDA graph and shows, on a CPU, that a graph's padding changes nothing. Slow: it gathers every
row's whole context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor.attention.base import AttentionBackend
from executor.batches.batch_arrays import Step
from executor.batches.device_arrays import arrays_of
from executor.kv_memory.pool import KVCache
from profiler.specs.model_spec import ModelSpec


class PagedAttention(AttentionBackend):
    """Any device, any block size, float64 included."""

    name = "paged"
    capturable = True

    @classmethod
    def why_not(cls, spec: ModelSpec, device: torch.device, kv_dtype: torch.dtype) -> str:
        return ""

    def attend(self, layer: int, q: Tensor, out: Tensor, step: Step, cache: KVCache) -> None:
        arrays = arrays_of(step, cache.block_size)
        sizes = arrays.sizes
        first = sizes.chunk_rows
        if sizes.chunks and first:
            row = torch.arange(first, device=q.device, dtype=torch.int32)
            chunk = torch.searchsorted(arrays.chunk_start[1:], row, right=True).clamp(max=sizes.chunks - 1)
            inside = row < arrays.chunk_start[-1]
            lengths = torch.where(inside, arrays.positions[:first] + 1, 0)
            out[:first] = self._rows(layer, q[:first], arrays.chunk_tables[chunk], lengths, cache)
        if sizes.decodes:
            end = first + sizes.decodes
            out[first:end] = self._rows(layer, q[first:end], arrays.decode_tables, arrays.decode_length, cache)

    def _rows(self, layer: int, q: Tensor, tables: Tensor, lengths: Tensor, cache: KVCache) -> Tensor:
        """Each row over the first `lengths` tokens of its own table; zeros where that is none."""
        rows = q.shape[0]
        dtype = torch.promote_types(q.dtype, torch.float32)
        pair = cache.pool[layer][:, tables.long()]  # [2, rows, blocks, kv_heads, block_size, head_dim]
        pair = pair.transpose(2, 3).flatten(3, 4).to(dtype)
        at = torch.arange(pair.shape[3], device=q.device)
        seen = at[None, :] < lengths[:, None]
        if self.window:
            seen &= at[None, :] >= lengths[:, None] - self.window
        pair = pair.masked_fill(~seen[None, :, None, :, None], 0)  # whatever lies there, NaN included
        share = self.heads // cache.kv_heads
        query = q.reshape(rows, cache.kv_heads, share, self.head_dim).to(dtype) * self.scale
        scores = torch.einsum("rkgd,rknd->rkgn", query, pair[0])
        scores = scores.masked_fill(~seen[:, None, None, :], float("-inf"))
        weights = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)).exp()
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        return torch.einsum("rkgn,rknd->rkgd", weights, pair[1]).reshape(rows, -1).to(q.dtype)
