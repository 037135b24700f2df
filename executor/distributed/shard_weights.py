"""The weights of one rank: its layers, and of every matrix its rows or columns; nothing else is ever read whole.

Matrices whose outputs are split (q, k, v, gate, up, embedding, head) keep rows, those whose inputs are (attention
output, down) keep columns; the biases of the latter belong to the first rank of a stage, because partial sums are added
up. Random weights are slices of the very tensors that one process would draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor.distributed.layout import Shard, Span
from executor.model.loading import ModelSource
from executor.model.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LayerWeights,
    assemble_layers,
    check_all_known,
    check_executable,
    random_names,
    random_tensor,
    stored_tensor,
    tensor_homes,
)
from profiler.specs.model_spec import ModelSpec

Shape = tuple[int, ...]
Stored = Callable[[str, Shape], Any]
"""Name and whole shape -> something that gives the tensor's parts when it is sliced (a tensor, or a file's slice)."""


@dataclass
class StageWeights:
    """What a rank holds. embedding: on the first stage; final_norm and head: on the last. Vocabularies are sliced."""

    layers: list[LayerWeights]
    dtype: torch.dtype
    embedding: Tensor | None = None
    final_norm: Tensor | None = None
    head: Tensor | None = None

    def num_bytes(self) -> int:
        tensors = [self.embedding, self.final_norm, self.head]
        for layer in self.layers:
            tensors += layer.tensors()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


class Part:
    """Which part of a tensor: spans of one dimension, put together, or all of it."""

    def __init__(self, shape: Shape, dimension: int = 0, spans: Sequence[Span] = (), *, empty: bool = False) -> None:
        self.shape, self.dimension, self.spans, self.empty = shape, dimension, spans, empty

    def of(self, stored: Any) -> Tensor:
        if self.empty:
            return torch.zeros(self.shape)
        if not self.spans:
            whole: Tensor = stored[:]
            return whole
        if self.dimension:
            return torch.cat([stored[:, first:last] for first, last in self.spans], dim=1)
        return torch.cat([stored[first:last] for first, last in self.spans])


def shard_weights(
    source: ModelSource, shard: Shard, seed: int, dtype: torch.dtype, device: torch.device
) -> StageWeights:
    """The weights of one rank from wherever the model comes from."""
    spec = shard.whole
    check_executable(spec)
    stored, names = _stored(source, spec, seed, device)
    first_layer = shard.layers[0]

    def take(name: str, shape: Shape) -> Tensor:
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            name = f"model.layers.{int(number) + first_layer}.{rest}"
        part = part_of(name, shard)
        tensor = part.of(stored(name, part.shape)).to(device, dtype).contiguous()
        assert tuple(tensor.shape) == shape, (name, tuple(tensor.shape), shape)
        return tensor

    weights = StageWeights(assemble_layers(shard.spec, take, _shifted(names, first_layer)), dtype)
    words = (shard.vocab[1] - shard.vocab[0], spec.hidden)
    if shard.is_first:
        weights.embedding = take(EMBEDDING, words)
    if shard.is_last:
        weights.final_norm = take(FINAL_NORM, (spec.hidden,))
        tied = spec.tied_embeddings
        both = tied and weights.embedding is not None
        weights.head = weights.embedding if both else take(EMBEDDING if tied else HEAD, words)
    return weights


def _stored(source: ModelSource, spec: ModelSpec, seed: int, device: torch.device) -> tuple[Stored, set[str]]:
    if source.kind == "spec":
        return lambda name, shape: random_tensor(seed, name, shape, device), random_names(spec)
    folder = source.path
    assert isinstance(folder, Path)
    if source.kind == "gguf":
        from executor.model.gguf_file import GgufFile

        file = GgufFile(folder)
        file.check_all_known(spec)
        return lambda name, shape: file.tensor(name, shape, spec), random_names(spec)
    homes = tensor_homes(folder)
    check_all_known(folder, spec, homes)
    return lambda name, shape: stored_tensor(folder, homes, name, shape), set(homes)


def _shifted(names: set[str], first_layer: int) -> set[str]:
    """The names as a model would have them whose first layer is this stage's."""
    found = set()
    for name in names:
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            name = f"model.layers.{int(number) - first_layer}.{rest}"
        found.add(name)
    return found


def part_of(name: str, shard: Shard) -> Part:
    """Shape of a whole tensor by its Hugging Face name, and which part of it a rank holds."""
    spec, d = shard.whole, shard.whole.head_dim
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    columns = (spec.hidden,) if kind == "weight" else ()
    q, kv = _scaled(shard.heads, d), _scaled(shard.kv_heads, d)
    ffn = shard.intermediate
    if module in ("q_proj", "k_proj", "v_proj"):
        return Part((spec.q_size if module == "q_proj" else spec.kv_size, *columns), 0, [q if module[0] == "q" else kv])
    if module == "qkv_proj":
        rows = [q, _moved(kv, spec.q_size), _moved(kv, spec.q_size + spec.kv_size)]
        return Part((spec.q_size + 2 * spec.kv_size, *columns), 0, rows)
    if module in ("gate", "shared_expert_gate"):
        return Part((spec.experts if module == "gate" else 1, spec.hidden))
    width = spec.intermediate
    if ".experts." in name:
        ffn, width = shard.expert_intermediate, spec.expert_intermediate
    elif ".shared_expert." in name:
        ffn, width = shard.shared_intermediate, spec.shared_intermediate
    if module in ("gate_proj", "up_proj", "w1", "w3"):
        return Part((width, *columns), 0, [ffn])
    if module == "gate_up_proj":
        return Part((2 * spec.intermediate, *columns), 0, [ffn, _moved(ffn, spec.intermediate)])
    if module in ("o_proj", "down_proj", "w2"):
        if kind == "bias":
            return Part((spec.hidden,), empty=shard.tp_rank > 0)
        return Part(
            (spec.hidden, spec.q_size if module == "o_proj" else width),
            1,
            [q if module == "o_proj" else ffn],
        )
    if name in (EMBEDDING, HEAD):
        return Part((spec.vocab, spec.hidden), 0, [shard.vocab])
    return Part((d,) if module in ("q_norm", "k_norm") else (spec.hidden,))


def _scaled(span: Span, factor: int) -> Span:
    return span[0] * factor, span[1] * factor


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
