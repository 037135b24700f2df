"""Attention over a pool that has to be asked for its keys and values: compressed ones are unpacked as they are read."""

from __future__ import annotations

from torch import Tensor

from executor.attention.sdpa import SdpaAttention
from executor.batches.batch_arrays import Step
from executor.kv_memory.pool import KVCache


class ReadingAttention(SdpaAttention):
    """PyTorch's fused attention, one request at a time, over what `KVCache.read` gives."""

    name = "reading"

    def _decodes(self, layer: int, q: Tensor, out: Tensor, step: Step, cache: KVCache) -> None:
        for row, context, table in zip(
            step.decode_row.tolist(), step.decode_context.tolist(), step.decode_table.tolist()
        ):
            self._chunk(layer, q[row : row + 1], out[row : row + 1], context, step.block_tables[table], cache)
