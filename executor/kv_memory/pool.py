"""The paged key/value pool: one tensor, allocated once, addressed by block number.

The scheduler's ledger decides which block belongs to whom; this is the memory behind those numbers. A batch's keys and
values are written in one indexed store, at slot = block * block_size + offset.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import Tensor

from executor.errors import ExecutorError
from executor.machine.huge_pages import advise_huge_pages
from profiler.specs.model_spec import ModelSpec


class KVCache:
    """Pool of `blocks` blocks for `layers` layers: [layers, 2, blocks, kv_heads, block_size, head_dim].

    A head's tokens lie together within a block, so that a decode streams whole lines. Freed blocks can be poisoned
    with NaN (`poison`), which turns any read of a stale entry into a visible failure.
    """

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        layers: int | None = None,
        kv_heads: int | None = None,
    ) -> None:
        if blocks < 1 or block_size < 1:
            raise ExecutorError(f"KV pool: found {blocks} blocks of {block_size} tokens, expected at least 1 of each")
        self.blocks, self.block_size, self.dtype, self.device = blocks, block_size, dtype, device
        self.layers = spec.layers if layers is None else layers
        self.kv_heads = spec.kv_heads if kv_heads is None else kv_heads
        self.head_dim = spec.head_dim
        shape = (self.layers, 2, blocks, self.kv_heads, block_size, self.head_dim)
        try:
            # The pool starts finite: some attention kernels load whole blocks and weigh the rest with zero. On a CPU
            # this also brings its pages in now, or the first prompts of a run would pay for them.
            self.pool = advise_huge_pages(_empty_pool(shape, dtype, device)).zero_()
        except (RuntimeError, torch.OutOfMemoryError):
            need = self.layers * 2 * blocks * self.kv_heads * block_size * self.head_dim * dtype.itemsize
            raise ExecutorError(
                f"KV pool: {blocks} blocks of {block_size} tokens need {need / 2**30:.2f} GiB, more than there is; "
                "take fewer (--num-blocks where there is that option), shorter contexts or fewer requests at once"
            ) from None

    @property
    def num_bytes(self) -> int:
        return self.pool.numel() * self.pool.element_size()

    def addresses(self, layer: int) -> tuple[int, int]:
        """Where the keys and the values of a layer begin in memory."""
        side = self.blocks * self.kv_heads * self.block_size * self.head_dim * self.dtype.itemsize
        first = self.pool.data_ptr() + 2 * layer * side
        return first, first + side

    def keys(self, layer: int) -> Tensor:
        """[blocks, kv_heads, block_size, head_dim]"""
        return self.pool[layer, 0]

    def values(self, layer: int) -> Tensor:
        return self.pool[layer, 1]

    def store(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write [rows, kv_heads, head_dim] keys and values; rows with a negative slot are dummies, written nowhere."""
        real = slots >= 0
        if not bool(real.all()):
            keys, values, slots = keys[real], values[real], slots[real]
        block, offset = slots // self.block_size, slots % self.block_size
        self.pool[layer, 0, block, :, offset] = keys.to(self.dtype)
        self.pool[layer, 1, block, :, offset] = values.to(self.dtype)

    def read(self, layer: int, table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one request's first `tokens` tokens, each [kv_heads, tokens, head_dim] (copied)."""
        used = table[: -(-tokens // self.block_size)].long()
        pair = self.pool[layer][:, used]  # [2, used, kv_heads, block_size, head_dim]
        pair = pair.transpose(1, 2).reshape(2, self.kv_heads, -1, self.head_dim)[:, :, :tokens]
        return pair[0], pair[1]

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN: nobody may read them before they are written again."""
        if len(blocks):
            self.pool[:, :, torch.as_tensor(blocks, dtype=torch.long, device=self.device)] = float("nan")


def _empty_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a pool. An engine that has gone refers to itself and may still hold the pool before this one."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.empty(shape, dtype=dtype, device=device)
