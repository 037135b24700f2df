"""Kernels for a device that must not wait: products straight into reused buffers, nothing read back, no shape that
depends on values. What CUDA graphs capture.

Two sets, alike but for the small steps: `plain_device` in PyTorch operators, `triton` fused. Each fusion can be
switched off by itself (`fused`), to see what it buys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from executor.batches.batch_arrays import Step
from executor.batches.device_arrays import arrays_of
from executor.errors import ExecutorError
from executor.kernels.base import Linear
from executor.kernels.experts import Experts, ExpertWeights
from executor.kernels.plain import PlainKernels
from executor.kv_memory.pool import KVCache

FUSIONS = frozenset({"norm", "residual", "rotary", "silu", "experts"})
"""norm: RMSNorm in one pass. residual: the residual sum in the same pass as the norm after it (instead of in the matrix
product's own epilogue). rotary: rotation, q/k norms and the key/value store in one pass. silu: SiLU times up. experts:
grouped products of the experts that a batch touches (instead of all experts for all rows)."""


class DeviceLinear(Linear):
    """One matrix product into the caller's buffer. bias and residual ride on the product (beta = 1)."""

    def __init__(self, kernels: DeviceKernels, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
        self._kernels = kernels
        self.weight, self.bias, self.gated = weight, bias, gated

    def product(self, x: Tensor, out: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if not self.gated:
            return self.product(x, out)
        both = self.product(x, self._kernels.buffer("gate_up", x.shape[0], self.weight.shape[0]))
        return self._kernels.silu_mul(both, out)

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        if self.bias is not None:
            out.add_(self.bias)
        return out.addmm_(x, self.weight.t())


class DeviceKernels(PlainKernels):
    """PyTorch operators only, without a synchronisation: the twin of the fused set, on any device."""

    name = "plain_device"
    capturable = True

    def linear(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Linear:
        return DeviceLinear(self, weight, bias, gated)

    def experts(self, weights: ExpertWeights, counts: Tensor) -> Experts:
        from executor.kernels.device_experts import DeviceExperts

        return DeviceExperts(self, weights, counts)

    def embed(self, token_ids: Tensor, table: Tensor, out: Tensor) -> Tensor:
        return torch.index_select(table, 0, token_ids, out=out)

    def silu_mul(self, both: Tensor, out: Tensor) -> Tensor:
        """silu(gate) * up of rows that hold gate and up side by side."""
        gate, up = both.chunk(2, dim=-1)
        return torch.mul(functional.silu(gate), up, out=out)

    def store(self, layer: int, cache: KVCache, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """As `KVCache.store`, without asking whether there are dummy rows: those write back what lies in block 0."""
        real = slots >= 0
        at = slots.clamp(min=0).long()
        block, offset = at // cache.block_size, at % cache.block_size
        for side, new in ((0, keys), (1, values)):
            old = cache.pool[layer, side, block, :, offset]
            cache.pool[layer, side, block, :, offset] = torch.where(real[:, None, None], new.to(cache.dtype), old)

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
        self.store(layer, cache, keys, values, step.row_slots)


class TritonKernels(DeviceKernels):
    """The small steps as Triton kernels, for float32, bfloat16 and float16. fused: which of FUSIONS."""

    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype, *, fused: frozenset[str] = FUSIONS) -> None:
        from executor.triton_kernels.runtime import triton_reason

        super().__init__(device, dtype)
        reason = triton_reason(device)
        if not reason and dtype not in (torch.float32, torch.bfloat16, torch.float16):
            reason = f"they take float32, bfloat16 and float16, not {dtype}"
        if not reason and fused - FUSIONS:
            reason = f"found fusion {sorted(fused - FUSIONS)[0]!r}, expected some of {', '.join(sorted(FUSIONS))}"
        if reason:
            raise ExecutorError(f"kernels triton: {reason}")
        self.fused = fused

    def experts(self, weights: ExpertWeights, counts: Tensor) -> Experts:
        if "experts" not in self.fused:
            return super().experts(weights, counts)
        from executor.kernels.device_experts import TritonExperts

        return TritonExperts(self, weights, counts)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, name: str) -> Tensor:
        if "norm" not in self.fused or x.dim() != 2:
            return super().rms_norm(x, weight, eps, name)
        return self._norm(x, None, weight, eps, name)

    def _norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, name: str) -> Tensor:
        from executor.triton_kernels.fused import rms_norm_rows

        rows, columns = x.shape
        out = self.buffer(name, rows, columns)
        if rows:
            rms_norm_rows[(rows,)](
                x,
                x if added is None else added,
                weight,
                out,
                x.stride(0),
                0 if added is None else added.stride(0),
                out.stride(0),
                eps,
                COLUMNS=columns,
                C=_power(columns),
                ADD=added is not None,
                num_warps=8 if columns > 2048 else 4,
            )
        return out

    def add_and_norm(
        self, linear: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float, name: str
    ) -> Tensor:
        if "residual" not in self.fused or not isinstance(linear, DeviceLinear):
            return super().add_and_norm(linear, x, residual, weight, eps, name)
        product = linear.product(x, self.buffer("product", x.shape[0], residual.shape[1]))
        return self._norm(residual, product, weight, eps, name)

    def silu_mul(self, both: Tensor, out: Tensor) -> Tensor:
        if "silu" not in self.fused:
            return super().silu_mul(both, out)
        from executor.triton_kernels.fused import silu_mul_rows

        rows, columns = out.shape
        part = min(2048, _power(columns))
        if rows:
            silu_mul_rows[rows, -(-columns // part)](
                both, out, both.stride(0), out.stride(0), COLUMNS=columns, C=part, num_warps=4
            )
        return out

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
        if "rotary" not in self.fused:
            super().rotate_and_store(qkv, layer, step, cache, rope, norms, eps)
            return
        from executor.triton_kernels.fused import rotate_and_store_rows

        arrays = arrays_of(step, cache.block_size)
        d, kv_heads = cache.head_dim, cache.kv_heads
        heads = qkv.shape[1] // d - 2 * kv_heads
        keys, values = cache.keys(layer), cache.values(layer)
        q_norm, k_norm = norms or (rope[0], rope[0])
        if step.rows:
            rotate_and_store_rows[step.rows, heads + 2 * kv_heads](
                qkv,
                arrays.positions,
                arrays.slots,
                *rope,
                q_norm,
                k_norm,
                keys,
                values,
                qkv.stride(0),
                keys.stride(0),
                keys.stride(1),
                keys.stride(2),
                eps,
                HEADS=heads,
                KV_HEADS=kv_heads,
                HEAD_DIM=d,
                D=max(16, _power(d)),
                HALF=rope[0].shape[1],
                BLOCK_SIZE=cache.block_size,
                NORMED=norms is not None,
                num_warps=1 if d <= 128 else 2,
            )


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()
