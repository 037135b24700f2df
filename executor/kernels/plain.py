"""Plain PyTorch kernels: any dtype (float64 included) and any device. The twin that the C++ ones are tested against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from executor.batches.batch_arrays import Step
from executor.kernels.base import Kernels, Linear
from executor.kernels.experts import Experts, ExpertWeights, PlainExperts
from executor.kv_memory.pool import KVCache


class PlainLinear(Linear):
    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
        self.weight, self.bias, self.gated = weight, bias, gated

    def _product(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight, self.bias)
        if not self.gated:
            return y
        gate, up = y.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(self._product(x))

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        return out.add_(self._product(x))


class PlainKernels(Kernels):
    """One PyTorch operator a step. Norms are computed in float32 at least, as the reference implementations do."""

    name = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device)
        self.activation_dtype = dtype

    def linear(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Linear:
        return PlainLinear(weight, bias, gated)

    def experts(self, weights: ExpertWeights, counts: Tensor) -> Experts:
        return PlainExperts(weights, counts)

    def embed(self, token_ids: Tensor, table: Tensor, out: Tensor) -> Tensor:
        return out.copy_(table[token_ids])

    def norm_weight(self, weight: Tensor) -> Tensor:
        return weight

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, name: str) -> Tensor:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    def rotate_and_store(
        self,
        qkv: Tensor,
        layer: int,
        step: Step,
        cache: KVCache,
        rope: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> None:
        keys, values = self.rotate(qkv, step, cache, rope, norms, eps)
        cache.store(layer, keys, values, step.row_slots)

    def rotate(
        self,
        qkv: Tensor,
        step: Step,
        cache: KVCache,
        rope: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Norm and rotate in place; returns keys and values, each [rows, kv_heads, head_dim]."""
        heads = qkv.view(step.rows, -1, cache.head_dim)
        num_q = heads.shape[1] - 2 * cache.kv_heads
        keys_end = num_q + cache.kv_heads
        if norms is not None:
            heads[:, :num_q] = self.rms_norm(heads[:, :num_q], norms[0], eps, "")
            heads[:, num_q:keys_end] = self.rms_norm(heads[:, num_q:keys_end], norms[1], eps, "")
        positions = step.row_positions.long()
        cos, sin = rope[0][positions][:, None], rope[1][positions][:, None]
        half = cos.shape[-1]
        first, second = heads[:, :keys_end, :half], heads[:, :keys_end, half : 2 * half]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        heads[:, :keys_end, : 2 * half] = rotated
        return heads[:, num_q:keys_end], heads[:, keys_end:]

    def argmax(self, logits: Tensor) -> Tensor:
        best, index = logits.max(dim=-1)
        # max() passes a NaN on; a row of -inf has nothing to choose.
        return torch.where(best.isfinite(), index, -1)
