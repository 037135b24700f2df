"""A stage of a pipeline, or its share on one tensor-parallel rank, through CUDA graphs.

One graph holds the whole pass of a rank: embedding or the hidden states that came in, its layers with their sums over
the stage's ranks, and on the last stage the choice of tokens. All ranks of a stage capture and replay the same sizes in
the same order, since each captured sum waits for its partners: so nothing is ever dropped for memory here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from executor.batches.batch_arrays import Step
from executor.batches.device_arrays import Sizes, sizes_of
from executor.distributed.stage_model import StageModel
from executor.kv_memory.pool import KVCache
from executor.model.cuda_graphs import (
    MIXED_CHUNK_ROWS,
    MIXED_DECODE_BUCKETS,
    Buckets,
    Capture,
    CudaCapture,
    GraphedModel,
    can_be_captured,
)
from executor.model.loading import Loaded

NO_LIMIT = 1 << 62
"""Bytes: memory taken differs from rank to rank, and a rank that drops a graph alone would wait forever."""


class GraphedStage(GraphedModel):
    """As `GraphedModel`, for the part of a model that a rank has."""

    def __init__(
        self, model: StageModel, cache: KVCache, buckets: Buckets, *, new_capture: Callable[[], Capture] = CudaCapture
    ) -> None:
        super().__init__(model, cache, buckets, most_bytes=NO_LIMIT, new_capture=new_capture)
        self.stage = model

    def fits(self, step: Step) -> Sizes | None:
        """The captured sizes for a batch, None where it runs without a graph; the same on all ranks."""
        exact = sizes_of(step, self.cache.block_size, self.buckets.tile)
        sizes = self.buckets.fit(exact)
        return sizes if sizes is not None and sizes.holds(exact) else None

    @torch.inference_mode()
    def run(self, given: Tensor, step: Step, hidden: Tensor, sizes: Sizes) -> Tensor | None:
        """Run a batch. given: its token ids on the first stage, hidden states on others, [rows] or [rows, hidden].

        Returns greedy ids on the last stage; on others the result is written into `hidden` [rows, hidden].
        """
        graph = self._replay(sizes, given, step, lambda: None)
        if self.stage.shard.is_last:
            return graph.sampled[: len(step.sampled_rows)]
        useful, decodes, first = int(step.chunk_tokens.sum()), step.num_decodes, sizes.chunk_rows
        hidden[:useful].copy_(graph.result[:useful])
        hidden[useful : useful + decodes].copy_(graph.result[first : first + decodes])
        hidden[useful + decodes :].zero_()  # dummy rows: whatever lies there must not spread
        return None

    def _new_input(self, rows: int) -> Tensor:
        if self.stage.shard.is_first:
            return super()._new_input(rows)
        shape = rows, self.stage.shard.whole.hidden
        return torch.zeros(shape, dtype=self.stage.kernels.activation_dtype, device=self.cache.device)

    def _pass(self, given: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        stage = self.stage
        # Layers work in place: what came in stays as it is for the next pass to overwrite.
        hidden = stage.kernels.buffer("stage", step.rows, stage.shard.whole.hidden)
        if stage.shard.is_first:
            stage.kernels.begin()
            stage.embed(given, hidden)
        else:
            hidden.copy_(given)
        out = stage.run_layers(hidden, step, self.cache)
        if stage.shard.is_last:
            return out, stage.sample(out, None, ())
        return out, given[:0]


def stage_graphs_for(loaded: Loaded, cache: KVCache, sums_can_be_captured: bool) -> GraphedStage | None:
    """Graphs for a rank where its kernels, attention and sums can be captured; None where not."""
    if not (can_be_captured(loaded) and sums_can_be_captured):
        return None
    assert isinstance(loaded.model, StageModel)
    blocks = -(-loaded.max_tokens // cache.block_size) + 1
    buckets = Buckets(blocks=blocks, chunk_rows=MIXED_CHUNK_ROWS, mixed_decodes=MIXED_DECODE_BUCKETS)
    return GraphedStage(loaded.model, cache, buckets)
