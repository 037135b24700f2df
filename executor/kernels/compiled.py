"""The small steps through torch.compile: what the hand-written kernels have to beat.

Each step is one function of tensors alone, compiled once for all row counts. The store of keys and values stays
outside: a compiled write into a slice of the pool may copy the pool.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from executor.batches.batch_arrays import Step
from executor.kernels.device import DeviceKernels
from executor.kv_memory.pool import KVCache


class CompiledKernels(DeviceKernels):
    """`plain_device` with compiled norm, rotation and SiLU times up.

    backend: of torch.compile; compiling takes seconds at the first batch.
    """

    name = "compiled"

    def __init__(self, device: torch.device, dtype: torch.dtype, *, backend: str = "inductor") -> None:
        super().__init__(device, dtype)

        def compiled(function: Callable[..., None]) -> Callable[..., None]:
            return torch.compile(function, dynamic=True, fullgraph=True, backend=backend)

        self._norm, self._silu_mul = compiled(_norm), compiled(_silu_mul)
        self._rotate = compiled(_rotate)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, name: str) -> Tensor:
        if x.dim() != 2:
            return super().rms_norm(x, weight, eps, name)
        out = self.buffer(name, *x.shape)
        self._norm(x, weight, eps, out)
        return out

    def silu_mul(self, both: Tensor, out: Tensor) -> Tensor:
        self._silu_mul(both, out)
        return out

    def rotate(
        self,
        qkv: Tensor,
        step: Step,
        cache: KVCache,
        rope: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        if norms is not None:
            return super().rotate(qkv, step, cache, rope, norms, eps)
        heads = qkv.view(step.rows, -1, cache.head_dim)
        keys_end = heads.shape[1] - cache.kv_heads
        self._rotate(heads[:, :keys_end], step.row_positions, *rope)
        return heads[:, keys_end - cache.kv_heads : keys_end], heads[:, keys_end:]


def _norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    out.copy_((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight)


def _silu_mul(both: Tensor, out: Tensor) -> None:
    gate, up = both.chunk(2, dim=-1)
    out.copy_(functional.silu(gate) * up)


def _rotate(heads: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate [rows, heads, head_dim] in place, pairs (i, i + half)."""
    half = cos.shape[-1]
    at_cos, at_sin = cos[positions][:, None], sin[positions][:, None]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    rotated = torch.cat((first * at_cos - second * at_sin, second * at_cos + first * at_sin), dim=-1)
    heads[..., : 2 * half].copy_(rotated)
