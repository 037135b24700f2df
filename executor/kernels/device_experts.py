"""Experts for a device that must not wait: no shape depends on where rows go, so that a CUDA graph may hold them.

`DeviceExperts` computes every expert for every row and weights most of them with zero: the plain twin, which costs
experts / top_k times what it should. `TritonExperts` sorts rows by expert on the device and multiplies tile by tile;
its launches are as large as the worst routing of so many rows could need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from executor.kernels.experts import Experts, ExpertWeights, route

if TYPE_CHECKING:
    from executor.kernels.device import DeviceKernels

MOST_ELEMENTS = 1 << 26
"""Of the largest intermediate of `DeviceExperts`: rows are taken in slices that stay below it."""


class _SharedExperts:
    """The FFN that every row goes through, where a layer has one."""

    def __init__(self, kernels: DeviceKernels, weights: ExpertWeights) -> None:
        self._kernels, self._gate = kernels, weights.shared_gate
        self._linears = None
        if weights.shared_gate_up is not None and weights.shared_down is not None:
            self._linears = (
                kernels.linear(weights.shared_gate_up, None, gated=True),
                kernels.linear(weights.shared_down, None),
            )
            self._width = weights.shared_down.shape[1]

    def add(self, x: Tensor, out: Tensor) -> None:
        if self._linears is None:
            return
        gate_up, down = self._linears
        active = gate_up(x, self._kernels.buffer("shared_active", x.shape[0], self._width))
        if self._gate is None:
            down.add(active, out)
            return
        scale = functional.linear(x, self._gate).sigmoid()
        out.addcmul_(down(active, self._kernels.buffer("shared", *out.shape)), scale)


class DeviceExperts(Experts):
    """Every expert for every row, in PyTorch operators."""

    def __init__(self, kernels: DeviceKernels, weights: ExpertWeights, counts: Tensor) -> None:
        w = weights
        self.counts, self._shared = counts, _SharedExperts(kernels, w)
        self._router, self._top_k, self._norm_topk = w.router, w.top_k, w.norm_topk
        self._experts, hidden, self._width = w.down.shape
        self._gate_up = w.gate_up.reshape(-1, hidden)
        self._down = w.down.permute(0, 2, 1).reshape(-1, hidden).contiguous()

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        weights, ids = route(x, self._router, self._top_k, self._norm_topk)
        ones = torch.ones_like(ids, dtype=torch.int32).flatten()
        self.counts.zero_().scatter_add_(0, ids.flatten(), ones)
        most = max(1, MOST_ELEMENTS // len(self._gate_up))
        for first in range(0, x.shape[0], most):
            rows = slice(first, first + most)
            self._add_rows(x[rows], weights[rows], ids[rows], out[rows])
        self._shared.add(x, out)
        return out

    def _add_rows(self, x: Tensor, weights: Tensor, ids: Tensor, out: Tensor) -> None:
        share = torch.zeros(x.shape[0], self._experts, dtype=x.dtype, device=x.device).scatter_(1, ids, weights)
        gate, up = functional.linear(x, self._gate_up).view(-1, self._experts, 2, self._width).unbind(2)
        active = functional.silu(gate) * up * share[..., None]
        out.addmm_(active.view(x.shape[0], -1), self._down)


class TritonExperts(Experts):
    """The grouped products of `executor.triton_kernels.grouped_experts`."""

    def __init__(self, kernels: DeviceKernels, weights: ExpertWeights, counts: Tensor) -> None:
        self._kernels, self.counts, self._weights = kernels, counts, weights
        self._shared = _SharedExperts(kernels, weights)
        weights.shared_gate_up = weights.shared_down = None  # the shared experts hold them now

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        from executor.triton_kernels.grouped_experts import add_experts

        w = self._weights
        logits = functional.linear(x, w.router)
        add_experts(x, logits, w.gate_up, w.down, w.top_k, w.norm_topk, self.counts, out, self._kernels.buffer)
        self._shared.add(x, out)
        return out

    def warm(self) -> None:
        from executor.triton_kernels.grouped_experts import TILE_SIZES

        experts, hidden, _ = self._weights.down.shape
        for rows_an_expert in TILE_SIZES:
            x = self._weights.router.new_zeros(-(-rows_an_expert * experts // self._weights.top_k), hidden)
            self.add(x, torch.zeros_like(x))
