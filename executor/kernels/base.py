"""What the model asks of its kernels. `torch` (plain, any dtype and device), `native` (C++, CPU) and the sets of
`device.py` (CUDA, capturable) answer.

Each optimisation lives behind this interface beside its plain twin, so that it can be switched and measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from executor.batches.batch_arrays import Step
    from executor.kernels.experts import Experts, ExpertWeights
    from executor.kv_memory.pool import KVCache


class Linear(ABC):
    """y = x W^T + bias, with its weights held the way that its kernels like them."""

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Write the product for x [rows, in] into out [rows, out columns]."""

    @abstractmethod
    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Add the product to out (the residual stream)."""


class Kernels(ABC):
    """Matrix products and the small steps between them, for one device and dtype.

    name: as given to --kernels. activation_dtype: dtype of hidden states (float32 for `native`, whatever the weights').
    capturable: nothing waits for the device and no shape depends on values: a CUDA graph may hold it.
    """

    name: str
    capturable: bool = False
    activation_dtype: torch.dtype

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, rows: int, columns: int) -> Tensor:
        """Reused memory for an intermediate: contents are whatever was there."""
        held = self._buffers.get(name)
        if held is None or held.numel() < rows * columns:
            held = torch.empty(rows * columns, dtype=self.activation_dtype, device=self.device)
            self._buffers[name] = held
        return held[: rows * columns].view(rows, columns)

    def held(self) -> list[Tensor]:
        """The reused memory as it is now: a captured graph goes on writing to it."""
        return list(self._buffers.values())

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Linear:
        """gated: weight is gate above up, [2 n, in]; the result is silu(gate) * up, n columns."""

    @abstractmethod
    def experts(self, weights: ExpertWeights, counts: Tensor) -> Experts:
        """The experts of one layer. weights: may be repacked and dropped. counts: int32 [experts], written by every
        call of what is returned."""

    def begin(self) -> None:  # noqa: B027 (most kernels have nothing to do here)
        """Called before every forward pass."""

    @abstractmethod
    def embed(self, token_ids: Tensor, table: Tensor, out: Tensor) -> Tensor:
        """Write the rows of the embedding `table` that token_ids (int64) name into out."""

    @abstractmethod
    def norm_weight(self, weight: Tensor) -> Tensor:
        """A norm's weight as rms_norm and rotate_and_store want it."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, name: str) -> Tensor:
        """RMSNorm over the last axis into the buffer `name`."""

    def add_and_norm(
        self, linear: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float, name: str
    ) -> Tensor:
        """residual += linear(x), then RMSNorm of the residual into the buffer `name`: a seam for kernels that fuse."""
        return self.rms_norm(linear.add(x, residual), weight, eps, name)

    @abstractmethod
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
        """Norm (where the model has q/k norms) and rotate queries and keys in place; store keys and values."""

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """Per row the index (int64) of the first largest value, -1 where it is not finite or the row holds a NaN."""
