"""One rank's part of the model: `Model`'s own layers over a shard, with sums over the ranks of a stage where needed.

A layer needs two sums: after the attention output and after the FFN's down matrix, each over partial products that the
ranks of a stage hold (Megatron-LM, Sec. 3). The kernels do not know: a linear layer that sums is one more kind of
`Linear`. The first stage embeds, the last one has the head; the vocabulary of both is split over their ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from executor.attention.base import AttentionBackend
from executor.batches.batch_arrays import Step
from executor.distributed.layout import Shard
from executor.distributed.shard_weights import StageWeights
from executor.kernels.base import Kernels, Linear
from executor.kernels.routing_counts import RoutingCounts
from executor.kv_memory.pool import KVCache
from executor.model.model import Model
from executor.model.rope import rope_tables
from executor.model.sampler import INVALID, Sampling, sample
from executor.model.weights import check_executable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup


class SummedLinear(Linear):
    """A product whose inputs are split over the ranks of a stage: each has a part of the sum."""

    def __init__(self, inner: Linear, kernels: Kernels, group: ProcessGroup) -> None:
        self._inner, self._kernels, self._group = inner, kernels, group

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        self._inner(x, out)
        dist.all_reduce(out, group=self._group)
        return out

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        return out.add_(self(x, self._kernels.buffer("partial", *out.shape)))


class StageModel(Model):
    """The layers of one stage on one rank. group: the ranks of the stage (None for a single one)."""

    def __init__(
        self,
        shard: Shard,
        weights: StageWeights,
        kernels: Kernels,
        attention: AttentionBackend,
        max_tokens: int,
        group: ProcessGroup | None,
        *,
        trim_last_layer: bool = True,
    ) -> None:
        check_executable(shard.whole)
        self.shard, self.spec, self.kernels, self.attention = shard, shard.spec, kernels, attention
        self.trim_last_layer = trim_last_layer and shard.is_last
        self.group = group
        self.dtype = weights.dtype
        self.weight_bytes = weights.num_bytes()
        self.rope = rope_tables(shard.whole, max_tokens, kernels.activation_dtype, kernels.device)
        self.table = weights.embedding
        self.routing = RoutingCounts(shard.spec, kernels.device)
        self.layers = []
        while weights.layers:
            layer = self._layer(weights.layers.pop(0))
            layer.attention_out = self._summed(layer.attention_out)
            layer.down = self._summed(layer.down)
            self.layers.append(layer)
        if weights.head is not None and weights.final_norm is not None:
            self.final_norm = kernels.norm_weight(weights.final_norm)
            self.head = kernels.linear(weights.head, None)

    def _summed(self, linear: Linear) -> Linear:
        return linear if self.group is None else SummedLinear(linear, self.kernels, self.group)

    @torch.inference_mode()
    def embed(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Write the embeddings of a batch's tokens (int64 [rows]) into hidden [rows, hidden]: on the first stage."""
        assert self.table is not None
        if self.group is None:
            return self.kernels.embed(token_ids, self.table, hidden)
        first, last = self.shard.vocab
        elsewhere = (token_ids < first) | (token_ids >= last)
        self.kernels.embed((token_ids - first).masked_fill(elsewhere, 0), self.table, hidden)
        hidden.masked_fill_(elsewhere[:, None], 0)
        dist.all_reduce(hidden, group=self.group)
        return hidden

    @torch.inference_mode()
    def run_layers(self, hidden: Tensor, step: Step, cache: KVCache) -> Tensor:
        """The stage's layers over hidden [rows, hidden], in place; on the last stage only the sampled rows are left."""
        self.kernels.begin()
        self.routing.begin()
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            hidden = self._run_layer(index, layer, hidden, step, cache, trim=self.trim_last_layer and index == last)
        if self.shard.is_last and not self.trim_last_layer:
            hidden = hidden[step.sampled_index]
        return hidden

    @torch.inference_mode()
    def sample(self, hidden: Tensor, sampling: Sequence[Sampling] | None, positions: Sequence[int]) -> Tensor:
        """Token ids (int64) of the sampled rows, `INVALID` where logits hold NaN; the same on all its ranks."""
        kernels, (first, last) = self.kernels, self.shard.vocab
        rows = hidden.shape[0]
        logits = kernels.buffer("logits", rows, last - first)
        self.head(kernels.rms_norm(hidden, self.final_norm, self.spec.norm_eps, "normed"), logits)
        if self.group is None:
            return kernels.argmax(logits) if sampling is None else sample(logits, sampling, positions, kernels)
        if sampling is not None:
            return sample(self._whole_logits(logits), sampling, positions, kernels)
        return self._best_of_all(logits, first)

    def _best_of_all(self, logits: Tensor, first: int) -> Tensor:
        """Greedy ids from each rank's best: [ranks, rows] of value and id change hands, not the logits."""
        ids = self.kernels.argmax(logits)
        values = logits.gather(1, ids.clamp(min=0)[:, None])[:, 0].double()
        # Asked of all rows, whatever they hold: a value read back would end a capture.
        nothing = torch.where(logits.isnan().any(dim=1), float("nan"), float("-inf")).double()
        values = torch.where(ids == INVALID, nothing, values)
        ours = torch.stack((values, (ids + first).double()))
        everyone = [torch.empty_like(ours) for _ in range(self.shard.tp)]
        dist.all_gather(everyone, ours, group=self.group)
        best, owner = torch.stack([each[0] for each in everyone]).max(dim=0)
        chosen = torch.stack([each[1] for each in everyone]).gather(0, owner[None])[0].long()
        return torch.where(best.isfinite(), chosen, INVALID)

    def _whole_logits(self, logits: Tensor) -> Tensor:
        """[rows, vocab] on every rank of the stage."""
        tp, vocab = self.shard.tp, self.shard.whole.vocab
        widest = -(-vocab // tp)
        padded = torch.full((logits.shape[0], widest), float("-inf"), dtype=logits.dtype, device=logits.device)
        padded[:, : logits.shape[1]] = logits
        everyone = [torch.empty_like(padded) for _ in range(tp)]
        dist.all_gather(everyone, padded, group=self.group)
        sizes = [vocab // tp + (rank < vocab % tp) for rank in range(tp)]
        return torch.cat([part[:, :size] for part, size in zip(everyone, sizes)], dim=1)
