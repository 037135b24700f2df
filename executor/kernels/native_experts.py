"""Experts on the C++ kernels: all of a layer's weights in one packed array, the touched ones in one parallel loop."""

from __future__ import annotations

import torch
from torch import Tensor

from executor.errors import ExecutorError
from executor.kernels.base import Kernels
from executor.kernels.experts import Experts, ExpertWeights
from executor.machine.huge_pages import advise_huge_pages
from executor.native.library import ExpertLayer, native_library


class NativeExperts(Experts):
    """float32 or bfloat16 weights, float32 activations. The weights' own tensors are dropped once they are packed."""

    def __init__(self, kernels: Kernels, weights: ExpertWeights, counts: Tensor) -> None:
        self._kernels, self.counts = kernels, counts
        self._library = library = native_library()
        w = weights
        experts, hidden, width = w.down.shape
        if w.gate_up.dtype not in (torch.float32, torch.bfloat16):
            raise ExecutorError(f"native kernels: experts of {w.gate_up.dtype}, expected float32 or bfloat16")
        half = int(w.gate_up.dtype == torch.bfloat16)
        # The shared experts' gate is one more row of the router.
        rows = w.router if w.shared_gate is None else torch.cat((w.router, w.shared_gate))
        self._router = kernels.linear(rows, None)
        self._columns = len(rows)
        self._shared = None
        if w.shared_gate_up is not None and w.shared_down is not None:
            self._shared = (kernels.linear(w.shared_gate_up, None, gated=True), kernels.linear(w.shared_down, None))
            self._shared_width = w.shared_down.shape[1]

        def packed(matrices: Tensor, gated: int) -> tuple[Tensor, int]:
            _, n, k = matrices.shape
            panels, panel = int(library.ct_packed_panels(n, gated)), 2 * int(library.ct_lanes())
            out = advise_huge_pages(torch.empty(experts, panels * k * panel, dtype=matrices.dtype))
            for expert, matrix in enumerate(matrices.contiguous()):
                library.ct_pack(matrix.data_ptr(), k, n, k, gated, half, out[expert].data_ptr())
            return out, panels

        self._gate_up, gate_up_panels = packed(w.gate_up, 1)
        self._down, down_panels = packed(w.down, 0)
        self._layer = ExpertLayer(
            hidden=hidden,
            width=width,
            experts=experts,
            top_k=w.top_k,
            norm_topk=int(w.norm_topk),
            half=half,
            shared_gate=int(w.shared_gate is not None),
            gate_up=self._gate_up.data_ptr(),
            down=self._down.data_ptr(),
            gate_up_panels=gate_up_panels,
            down_panels=down_panels,
            counts=counts.data_ptr(),
        )

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        rows, layer, buffer = x.shape[0], self._layer, self._kernels.buffer
        slots = rows * layer.top_k
        logits = self._router(x, buffer("router", rows, self._columns))
        if self._shared is not None:
            gate_up, down = self._shared
            active = gate_up(x, buffer("shared_active", rows, self._shared_width))
            layer.shared = down(active, buffer("shared", rows, layer.hidden)).data_ptr()
        layer.x, layer.ldx, layer.rows = x.data_ptr(), x.stride(0), rows
        layer.logits, layer.ld_logits = logits.data_ptr(), logits.stride(0)
        layer.out, layer.ldo = out.data_ptr(), out.stride(0)
        # Whole numbers as wide as the buffers' floats.
        layer.ids = buffer("expert_ids", 1, slots).data_ptr()
        layer.place = buffer("expert_place", 1, slots).data_ptr()
        layer.weights = buffer("expert_weights", 1, slots).data_ptr()
        layer.gathered = buffer("expert_rows", slots, layer.hidden).data_ptr()
        layer.activated = buffer("expert_active", slots, layer.width).data_ptr()
        layer.products = buffer("expert_products", slots, layer.hidden).data_ptr()
        self._library.ct_experts(layer)
        return out
