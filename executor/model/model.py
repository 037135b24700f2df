"""A decoder-only transformer of the Llama family, over one `[rows, hidden]` matrix a batch.

Every linear layer runs once over chunks and decodes together; attention takes its rows by offset. In the last layer
only sampled rows are carried beyond the key/value store: nobody reads the others (`trim_last_layer`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from executor.attention.base import AttentionBackend
from executor.batches.batch_arrays import Step
from executor.kernels.base import Kernels, Linear
from executor.kernels.routing_counts import RoutingCounts
from executor.kv_memory.pool import KVCache
from executor.model.rope import rope_tables
from executor.model.weights import LayerWeights, Weights, check_executable
from profiler.specs.model_spec import ModelSpec


@dataclass
class Layer:
    """One transformer layer as the kernels hold it. gate_up: None in a layer of experts, which are its `down`."""

    attention_norm: Tensor
    qkv: Linear
    norms: tuple[Tensor, Tensor] | None
    attention_out: Linear
    ffn_norm: Tensor
    gate_up: Linear | None
    down: Linear


class Model:
    """Weights, kernels and attention put together; `forward` is one iteration.

    weights: consumed: matrices are repacked one by one and dropped, so that both forms are never held at once.
    max_tokens: longest context (size of the rotary tables). trim_last_layer: see the module's docstring.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kernels: Kernels,
        attention: AttentionBackend,
        max_tokens: int,
        *,
        trim_last_layer: bool = True,
    ) -> None:
        check_executable(spec)
        self.spec, self.kernels, self.attention = spec, kernels, attention
        self.trim_last_layer = trim_last_layer
        self.dtype = weights.embedding.dtype
        self.weight_bytes = weights.num_bytes()
        self.rope = rope_tables(spec, max_tokens, kernels.activation_dtype, kernels.device)
        self.embedding = weights.embedding
        self.routing = RoutingCounts(spec, kernels.device)
        self.layers = []
        while weights.layers:
            self.layers.append(self._layer(weights.layers.pop(0)))
        self.final_norm = kernels.norm_weight(weights.final_norm)
        self.head = kernels.linear(weights.head, None)

    def _layer(self, w: LayerWeights) -> Layer:
        k = self.kernels
        norms = None
        if w.q_norm is not None and w.k_norm is not None:
            norms = (k.norm_weight(w.q_norm), k.norm_weight(w.k_norm))
        gate_up: Linear | None = None
        if w.experts is not None:
            down: Linear = k.experts(w.experts, self.routing.of_layer(len(self.layers)))
        else:
            assert w.gate_up is not None
            assert w.down is not None
            gate_up = k.linear(w.gate_up, w.gate_up_bias, gated=True)
            down = k.linear(w.down, w.down_bias)
        return Layer(
            k.norm_weight(w.attention_norm),
            k.linear(w.qkv, w.qkv_bias),
            norms,
            k.linear(w.attention_out, w.attention_out_bias),
            k.norm_weight(w.ffn_norm),
            gate_up,
            down,
        )

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, step: Step, cache: KVCache) -> Tensor:
        """Logits [sampled rows, vocab] of one batch; keys and values of all its rows are stored in the cache.

        token_ids: int64 [rows], decode rows included; dummy rows may hold any valid id. The result is a buffer that
        the next call overwrites.
        """
        self.kernels.begin()
        self.routing.begin()
        hidden = self.kernels.buffer("hidden", step.rows, self.spec.hidden)
        self.kernels.embed(token_ids, self.embedding, hidden)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            hidden = self._run_layer(index, layer, hidden, step, cache, trim=self.trim_last_layer and index == last)
        if not self.trim_last_layer:
            hidden = hidden[step.sampled_index]
        logits = self.kernels.buffer("logits", hidden.shape[0], self.spec.vocab)
        if hidden.shape[0]:
            self.head(self.kernels.rms_norm(hidden, self.final_norm, self.spec.norm_eps, "normed"), logits)
        return logits

    def _run_layer(self, index: int, layer: Layer, hidden: Tensor, step: Step, cache: KVCache, *, trim: bool) -> Tensor:
        kernels, spec = self.kernels, self.spec
        q_size, eps = spec.q_size, spec.norm_eps
        normed = kernels.rms_norm(hidden, layer.attention_norm, eps, "normed")
        qkv = layer.qkv(normed, kernels.buffer("qkv", step.rows, q_size + 2 * spec.kv_size))
        kernels.rotate_and_store(qkv, index, step, cache, self.rope, layer.norms, eps)
        queries = qkv[:, :q_size]
        if trim and step.only_sampled is not step:
            rows, step = step.sampled_index, step.only_sampled
            hidden, queries = hidden[rows], queries[rows]
            if not step.rows:
                return hidden
        attended = kernels.buffer("attended", step.rows, q_size)
        if len(step.decode_row) + (int(step.chunk_tokens.sum()) if step.num_chunks else 0) < step.rows:
            attended.zero_()  # dummy rows: attention skips them, and stale NaN or infinity must not spread
        self.attention.attend(index, queries, attended, step, cache)
        normed = kernels.add_and_norm(layer.attention_out, attended, hidden, layer.ffn_norm, eps, "normed")
        if layer.gate_up is None:
            return layer.down.add(normed, hidden)
        activated = layer.gate_up(normed, kernels.buffer("activated", step.rows, spec.intermediate))
        return layer.down.add(activated, hidden)
