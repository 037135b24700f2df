"""From logits to token ids: greedy, temperature, top-k, top-p, seeded per request.

A request's draw for the token at position p depends on its seed and p alone: neither the batch around it nor a
preemption changes what it samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.errors import ExecutorError
from executor.kernels.base import Kernels

INVALID = -1
"""What `sample` returns for a row whose logits hold a NaN."""


@dataclass(frozen=True)
class Sampling:
    """How one request samples. temperature 0 is greedy; top_k 0 and top_p 1 keep all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ExecutorError(f"temperature: found {self.temperature}, expected 0 (greedy) or more")
        if self.top_k < 0:
            raise ExecutorError(f"top_k: found {self.top_k}, expected 0 (all tokens) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ExecutorError(f"top_p: found {self.top_p}, expected a number above 0, at most 1")


GREEDY = Sampling()


def sample(logits: Tensor, sampling: Sequence[Sampling], positions: Sequence[int], kernels: Kernels) -> Tensor:
    """Token ids (int64) of [rows, vocab] logits, INVALID where a row holds a NaN.

    positions: of the row's own token in its request; with the seed it names the draw.
    """
    ids = kernels.argmax(logits)
    for row, how in enumerate(sampling):
        if how.temperature > 0.0 and int(ids[row]) != INVALID:
            ids[row] = _draw(logits[row], how, positions[row])
    return ids


def _draw(logits: Tensor, how: Sampling, position: int) -> int:
    above = logits.double() - logits.max().double()  # at most 0: no temperature makes infinities of different signs
    scores, order = torch.sort(above / how.temperature, descending=True, stable=True)
    if how.top_k:
        scores, order = scores[: how.top_k], order[: how.top_k]
    chances = scores.softmax(dim=0)
    cumulated = chances.cumsum(0)
    # Keep the smallest set whose mass reaches top_p: all tokens before which less than top_p lies.
    kept = int((cumulated - chances < how.top_p).sum())
    target = uniform(how.seed, position) * float(cumulated[kept - 1])
    return int(order[min(int(torch.searchsorted(cumulated[:kept], target, right=True)), kept - 1)])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): two rounds of the splitmix64 mixer."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
    for _ in range(2):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return (z >> 11) / (1 << 53)
