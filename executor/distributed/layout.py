"""Which rank holds what: stages of layers (pipeline parallel) times slices of every matrix (tensor parallel).

Ranks are numbered stage by stage, so that the ranks of one stage, which talk in every layer, are neighbours (on one
node, where torchrun deals ranks node by node). Everything that a rank holds follows from the model, the layout and the
rank, so nothing about it has to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from executor.errors import ExecutorError
from profiler.specs.layer_split import check_split, split_layers
from profiler.specs.model_spec import ModelSpec

Span = tuple[int, int]
"""[first, last) of heads, rows, columns or layers."""


@dataclass(frozen=True)
class Layout:
    """tp x pp ranks. split: layers of each stage."""

    tp: int
    pp: int
    split: tuple[int, ...]

    @classmethod
    def of(cls, spec: ModelSpec, tp: int, pp: int, layer_split: Sequence[int] | None = None) -> Layout:
        """The layout of a model; ExecutorError or ProfileError where it cannot be dealt like that."""
        if tp < 1 or pp < 1:
            raise ExecutorError(f"--tp {tp} --pp {pp}: expected at least 1 of each")
        if spec.heads % tp:
            raise ExecutorError(f"--tp {tp}: the {spec.heads} attention heads of {spec.name} are no multiple of it")
        if spec.kv_heads % tp and tp % spec.kv_heads:
            raise ExecutorError(
                f"--tp {tp}: the {spec.kv_heads} KV heads of {spec.name} can neither be split over it (a multiple of "
                "it) nor be repeated on it (a divisor of it)"
            )
        if pp > spec.layers:
            raise ExecutorError(f"--pp {pp}: {spec.name} has {spec.layers} layers, expected at most one stage a layer")
        if layer_split is not None:
            check_split(layer_split, spec.layers, pp)
        return cls(tp, pp, split_layers(spec.layers, pp) if layer_split is None else tuple(layer_split))

    @property
    def world(self) -> int:
        return self.tp * self.pp

    def stage_of(self, rank: int) -> int:
        return rank // self.tp

    def ranks_of(self, stage: int) -> list[int]:
        return list(range(stage * self.tp, (stage + 1) * self.tp))

    @property
    def sampling_rank(self) -> int:
        """The rank whose tokens count: the first of the last stage."""
        return (self.pp - 1) * self.tp

    def name_of(self, rank: int) -> str:
        """What a message calls a rank."""
        parts = [f"stage {self.stage_of(rank)}"] if self.pp > 1 else []
        parts += [f"tensor-parallel rank {rank % self.tp}"] if self.tp > 1 else []
        return f"rank {rank} ({', '.join(parts)})" if parts else f"rank {rank}"


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a model."""

    whole: ModelSpec
    layout: Layout
    rank: int

    @property
    def stage(self) -> int:
        return self.layout.stage_of(self.rank)

    @property
    def tp(self) -> int:
        return self.layout.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.layout.tp

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.layout.pp - 1

    @cached_property
    def layers(self) -> Span:
        first = sum(self.layout.split[: self.stage])
        return first, first + self.layout.split[self.stage]

    @cached_property
    def heads(self) -> Span:
        each = self.whole.heads // self.tp
        return self.tp_rank * each, (self.tp_rank + 1) * each

    @cached_property
    def kv_heads(self) -> Span:
        """A KV head that several ranks' query heads share is held by each of them."""
        if self.whole.kv_heads % self.tp == 0:
            each = self.whole.kv_heads // self.tp
            return self.tp_rank * each, (self.tp_rank + 1) * each
        head = self.tp_rank * self.whole.kv_heads // self.tp
        return head, head + 1

    @cached_property
    def intermediate(self) -> Span:
        return self._even(self.whole.intermediate)

    @cached_property
    def expert_intermediate(self) -> Span:
        """Columns of every routed expert: each rank holds a part of all experts."""
        return self._even(self.whole.expert_intermediate)

    @cached_property
    def shared_intermediate(self) -> Span:
        return self._even(self.whole.shared_intermediate)

    @cached_property
    def vocab(self) -> Span:
        return self._even(self.whole.vocab)

    def _even(self, count: int) -> Span:
        """As evenly as possible, spare ones to the first ranks."""
        each, spare = divmod(count, self.tp)
        first = self.tp_rank * each + min(self.tp_rank, spare)
        return first, first + each + (self.tp_rank < spare)

    @cached_property
    def spec(self) -> ModelSpec:
        """The model as this rank's kernels, attention and KV pool see it: fewer layers, narrower layers."""
        first, last = self.layers
        return replace(
            self.whole,
            layers=_length(self.layers),
            heads=_length(self.heads),
            kv_heads=_length(self.kv_heads),
            intermediate=_length(self.intermediate),
            expert_intermediate=_length(self.expert_intermediate),
            shared_intermediate=_length(self.shared_intermediate),
            dense_layers=tuple(layer - first for layer in self.whole.dense_layers if first <= layer < last),
        )


def _length(span: Span) -> int:
    return span[1] - span[0]
