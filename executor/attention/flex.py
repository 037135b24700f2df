"""PyTorch's flex_attention over the paged pool in place: the pool is one long sequence, a mask says whose token is
where.

A block's heads lie apart in the pool, so it is seen as one key/value head of blocks * kv_heads * block_size tokens:
every query head is given the blocks of its own head, by number, and the mask turns a place in the pool back into a
position of the request (a table of [requests, blocks], not of [requests, heads, blocks]). On CUDA the call is compiled;
elsewhere it runs as PyTorch writes it out, over the whole pool, which is for tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache as once
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.attention.base import AttentionBackend
from executor.batches.batch_arrays import Ints, Step
from executor.kv_memory.pool import KVCache
from profiler.specs.model_spec import ModelSpec

QUERY_ROWS = 128
"""Rows of chunks that share a list of blocks."""


class _Launch(NamedTuple):
    """One call for all layers: rows of the batch and what they may see. batched: each row a sequence of its own."""

    rows: slice
    batched: bool
    mask: Any


class FlexAttention(AttentionBackend):
    """Block tables through flex_attention: powers of two from 16 on as blocks on CUDA, any on a CPU."""

    name = "flex"

    def __init__(self, spec: ModelSpec, *, heads: int | None = None) -> None:
        super().__init__(spec, heads=heads)
        self._launches: list[tuple[Step, list[_Launch]]] = []

    @classmethod
    def why_not(cls, spec: ModelSpec, device: torch.device, kv_dtype: torch.dtype) -> str:
        try:
            from torch.nn.attention import flex_attention  # noqa: F401
        except ImportError:
            return "flex_attention is not part of this PyTorch"
        if device.type == "cuda" and kv_dtype == torch.float64:
            return "flex_attention compiles no float64"
        return ""

    @classmethod
    def why_not_blocks(cls, block_size: int) -> str:
        if torch.cuda.is_available() and (block_size < 16 or block_size & (block_size - 1)):
            return f"flex_attention reads blocks of a power of two from 16 on, found --block-size {block_size}"
        return ""

    def attend(self, layer: int, q: Tensor, out: Tensor, step: Step, cache: KVCache) -> None:
        keys, values = (part.reshape(1, 1, -1, self.head_dim) for part in (cache.keys(layer), cache.values(layer)))
        if q.device.type != "cuda":
            # Written out, every weight of 0 meets every value: what nobody wrote must not be NaN.
            keys, values = keys.nan_to_num(0.0, 0.0, 0.0), values.nan_to_num(0.0, 0.0, 0.0)
        for launch in self._of(step, cache):
            heads = q[launch.rows].unflatten(-1, (self.heads, self.head_dim)).to(keys.dtype)
            query = heads[:, :, None] if launch.batched else heads.transpose(0, 1)[None]
            result = _attend(q.device.type)(
                query.contiguous(),
                keys,
                values,
                block_mask=launch.mask,
                scale=self.scale,
                enable_gqa=True,
                **_options(q.device.type, cache.block_size),
            )
            back = result[:, :, 0] if launch.batched else result[0].transpose(0, 1)
            out[launch.rows] = back.flatten(1).to(out.dtype)

    def _of(self, step: Step, cache: KVCache) -> list[_Launch]:
        """The step's launches, made once for all layers (the last one may see another step: its sampled rows)."""
        for known, launches in self._launches:
            if known is step:
                return launches
        made = []
        if step.num_chunks:
            made.append(self._chunks(step, cache))
        if step.num_decodes:
            made.append(self._decodes(step, cache))
        self._launches = [*self._launches[-1:], (step, made)]
        return made

    def _chunks(self, step: Step, cache: KVCache) -> _Launch:
        first, tokens = int(step.chunk_row[0]), step.chunk_tokens
        rows = int(tokens.sum())
        owner = np.repeat(np.arange(step.num_chunks, dtype=np.int32), tokens)
        lengths = step.chunk_prefix + tokens
        lists = [
            np.unique(
                np.concatenate(
                    [
                        self._used(step, int(step.chunk_table[chunk]), int(lengths[chunk]), cache)
                        for chunk in np.unique(owner[at : at + QUERY_ROWS]).tolist()
                    ]
                )
            )
            for at in range(0, rows, QUERY_ROWS)
        ]
        where = self._places(step, step.chunk_table, lengths, cache)
        span = slice(first, first + rows)
        mask = self._mask(where, step.positions[span], owner, cache, step)
        return _Launch(span, False, self._block_mask(lists, 1, rows, mask, cache, step))

    def _decodes(self, step: Step, cache: KVCache) -> _Launch:
        first, count = int(step.decode_row[0]), step.num_decodes
        lengths = step.decode_context + 1
        lists = [
            self._used(step, table, length, cache)
            for table, length in zip(step.decode_table.tolist(), lengths.tolist())
        ]
        where = self._places(step, step.decode_table, lengths, cache)
        mask = self._mask(where, step.decode_context, None, cache, step)
        return _Launch(slice(first, first + count), True, self._block_mask(lists, count, 1, mask, cache, step))

    def _used(self, step: Step, table: int, length: int, cache: KVCache) -> Ints:
        """The blocks of a request's first `length` tokens."""
        return step.tables[table, : -(-length // cache.block_size)]

    def _places(self, step: Step, tables: Ints, lengths: Ints, cache: KVCache) -> Tensor:
        """[requests, blocks of the pool]: which block of the request lies there, -1 for none."""
        where = np.full((len(tables), cache.blocks), -1, np.int32)
        for row, (table, length) in enumerate(zip(tables.tolist(), lengths.tolist())):
            used = self._used(step, table, length, cache)
            where[row, used] = np.arange(len(used), dtype=np.int32)
        return step.tensor(where)

    def _mask(
        self, where: Tensor, positions: Ints, owner: Ints | None, cache: KVCache, step: Step
    ) -> Callable[..., Any]:
        """Whether a query may see a place of the pool. owner: each row's request; None: that of the batch index."""
        at, size, kv_heads, window = step.tensor(positions), cache.block_size, cache.kv_heads, self.window
        share = self.heads // kv_heads
        whose = None if owner is None else step.tensor(owner)

        def seen(batch: Tensor, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
            slot = place // size
            request, mine = (batch, at[batch]) if whose is None else (whose[row], at[row])
            block = where[request, slot // kv_heads]
            position = block * size + place % size
            inside = (slot % kv_heads == head // share) & (block >= 0) & (position <= mine)
            return inside & (position > mine - window) if window else inside

        return seen

    def _block_mask(
        self, lists: list[Ints], batch: int, rows: int, mask: Callable[..., Any], cache: KVCache, step: Step
    ) -> Any:
        """Which blocks of the pool each group of rows reads, by the number they have once heads lie apart."""
        from torch.nn.attention.flex_attention import BlockMask

        groups = len(lists) // batch
        width = max(len(numbers) for numbers in lists)
        if step.device.type == "cpu":  # its compiled form wants lists as long as the pool; the kernels of CUDA do not
            width = cache.blocks * cache.kv_heads
        blocks: NDArray[np.int32] = np.zeros((len(lists), width), np.int32)
        for row, numbers in enumerate(lists):
            blocks[row, : len(numbers)] = numbers
        counts = np.array([len(numbers) for numbers in lists], np.int32)
        head = (np.arange(self.heads, dtype=np.int32) // (self.heads // cache.kv_heads))[None, :, None, None]
        indices = blocks.reshape(batch, 1, groups, width) * np.int32(cache.kv_heads) + head
        number = np.broadcast_to(counts.reshape(batch, 1, groups), (batch, self.heads, groups))
        return BlockMask.from_kv_blocks(
            step.tensor(np.ascontiguousarray(number)),
            step.tensor(np.ascontiguousarray(indices)),
            BLOCK_SIZE=(QUERY_ROWS, cache.block_size),
            mask_mod=mask,
            seq_lengths=(rows, cache.blocks * cache.kv_heads * cache.block_size),
            compute_q_blocks=False,
        )


@once
def _attend(kind: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if kind == "cuda":
        compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
        return compiled

    def written_out(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says, rightly, that this is slow
            return flex_attention(*arguments, **options)

    return written_out


def _options(kind: str, block_size: int) -> dict[str, Any]:
    """A kernel's tile of keys may not be larger than a block."""
    return {"kernel_options": {"BLOCK_N": min(64, block_size)}} if kind == "cuda" else {}
