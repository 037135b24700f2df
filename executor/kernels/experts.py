"""Mixture of experts: each row goes to its top k experts, and only the experts that a batch touches are read.

A layer's experts are one more kind of `Linear`, so that a model, a tensor-parallel sum and a stopwatch need to know
nothing of them. Every set of kernels has its own; here are what they share and the plain one, which the others are
tested against.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from executor.kernels.base import Linear


@dataclass
class ExpertWeights:
    """One layer's experts of hidden size h and width w. Matrices are [out, in].

    router: [experts, h]. gate_up: [experts, 2 w, h], gate above up. down: [experts, h, w]. shared_gate_up, shared_down:
    the FFN that every row goes through beside them, if any; shared_gate: [1, h], whose sigmoid scales its output.
    top_k: experts of a row. norm_topk: their weights are made to sum to 1.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    top_k: int
    norm_topk: bool
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_gate: Tensor | None = None

    @property
    def experts(self) -> int:
        return len(self.router)

    def tensors(self) -> list[Tensor]:
        values = [getattr(self, field.name) for field in fields(self)]
        return [value for value in values if isinstance(value, Tensor)]


class Experts(Linear):
    """The FFN of an expert layer: router, routed and shared experts.

    counts: int32 [experts], written by every call: how many rows went to each expert. Its memory is the caller's.
    """

    counts: Tensor

    @abstractmethod
    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """out += FFN(x), both [rows, h]."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return self.add(x, out.zero_())

    def warm(self) -> None:
        """Compile whatever batches may launch; most have nothing to compile."""


def route(x: Tensor, router: Tensor, top_k: int, norm_topk: bool) -> tuple[Tensor, Tensor]:
    """(weights, expert ids), each [rows, top_k], the most likely first.

    A softmax over all experts in float32, as Mixtral's and Qwen's reference code has it; weights in x's dtype.
    """
    weights, ids = functional.linear(x, router).softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if norm_topk:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(x.dtype), ids


class PlainExperts(Experts):
    """One expert after the other, over the rows that go to it: any dtype, any device, shapes that depend on values."""

    def __init__(self, weights: ExpertWeights, counts: Tensor) -> None:
        self._weights, self.counts = weights, counts

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        w = self._weights
        weights, ids = route(x, w.router, w.top_k, w.norm_topk)
        self.counts.copy_(torch.bincount(ids.flatten(), minlength=w.experts))
        routed = torch.zeros_like(x)
        for expert in self.counts.nonzero().flatten().tolist():
            rows, place = torch.where(ids == expert)
            active = _gated(functional.linear(x[rows], w.gate_up[expert]))
            product = functional.linear(active, w.down[expert])
            routed.index_add_(0, rows, product * weights[rows, place, None])
        if w.shared_gate_up is not None and w.shared_down is not None:
            shared = functional.linear(_gated(functional.linear(x, w.shared_gate_up)), w.shared_down)
            if w.shared_gate is not None:
                shared = functional.linear(x, w.shared_gate).sigmoid() * shared
            routed += shared
        return out.add_(routed)


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up
