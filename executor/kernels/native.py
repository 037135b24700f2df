"""The C++ kernels for CPUs: packed weights, float32 activations, any number of rows at full speed.

Weights are float32 or bfloat16 (widened in registers, so bfloat16 halves the memory traffic and costs no accuracy
beyond its own rounding). A row's result does not depend on the rows around it (see native/gemm.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor.batches.batch_arrays import Step, address
from executor.errors import ExecutorError
from executor.kernels.base import Kernels, Linear
from executor.kernels.experts import Experts, ExpertWeights
from executor.kv_memory.pool import KVCache
from executor.machine.huge_pages import advise_huge_pages
from executor.native.library import Rotation, native_library

_STORE, _ADD, _SILU_MUL = 0, 1, 2
DTYPES = (torch.float32, torch.bfloat16)
"""Of weights, and of the pool."""


class NativeLinear(Linear):
    """Weights packed in panels; the unpacked matrix is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
        self._library = library = native_library()
        if weight.dtype not in DTYPES:
            raise ExecutorError(f"native kernels: weights of {weight.dtype}, expected float32 or bfloat16")
        n, k = weight.shape
        self.k, self.columns, self.gated = k, n // 2 if gated else n, gated
        self.half = int(weight.dtype == torch.bfloat16)
        self.panels = int(library.ct_packed_panels(n, int(gated)))
        panel = 2 * int(library.ct_lanes())
        self.packed = advise_huge_pages(torch.empty(self.panels * k * panel, dtype=weight.dtype))
        weight = weight.contiguous()
        library.ct_pack(weight.data_ptr(), k, n, k, int(gated), self.half, self.packed.data_ptr())
        self.bias = None if bias is None else _packed_bias(bias, self.panels, panel, gated)
        self._packed_at = self.packed.data_ptr()
        self._bias_at = None if self.bias is None else self.bias.data_ptr()

    def _run(self, x: Tensor, out: Tensor, epilogue: int) -> Tensor:
        self._library.ct_gemm(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            self._packed_at,
            self.half,
            self.k,
            0,
            self.panels,
            self._bias_at,
            out.data_ptr(),
            out.stride(0),
            self.columns,
            epilogue,
        )
        return out

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return self._run(x, out, _SILU_MUL if self.gated else _STORE)

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        return self._run(x, out, _ADD)


def _packed_bias(bias: Tensor, panels: int, panel: int, gated: bool) -> Tensor:
    flat = torch.zeros(panels * panel)
    if gated:
        pairs = flat.view(panels, 2, panel // 2)
        for side, part in enumerate(bias.float().chunk(2)):
            padded = torch.zeros(panels * panel // 2)
            padded[: len(part)] = part
            pairs[:, side] = padded.view(panels, -1)
    else:
        flat[: len(bias)] = bias.float()
    return flat


class NativeKernels(Kernels):
    name = "native"
    activation_dtype = torch.float32

    def __init__(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ExecutorError(f"native kernels run on a CPU; the device is {device}")
        super().__init__(device)
        self._library = native_library()
        self._step: Step | None = None
        self._rotation = Rotation()

    def linear(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Linear:
        return NativeLinear(weight, bias, gated)

    def experts(self, weights: ExpertWeights, counts: Tensor) -> Experts:
        from executor.kernels.native_experts import NativeExperts

        return NativeExperts(self, weights, counts)

    def begin(self) -> None:
        self._library.ct_set_threads(torch.get_num_threads())

    def embed(self, token_ids: Tensor, table: Tensor, out: Tensor) -> Tensor:
        half = int(table.dtype == torch.bfloat16)
        rows, columns = out.shape
        if rows and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < table.shape[0]:
            raise ExecutorError(f"token ids: found one outside 0 to {table.shape[0] - 1}, the model's vocabulary")
        self._library.ct_embed(token_ids.data_ptr(), rows, table.data_ptr(), half, columns, out.data_ptr())
        return out

    def norm_weight(self, weight: Tensor) -> Tensor:
        return weight.float().contiguous()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, name: str) -> Tensor:
        rows, columns = x.shape
        out = self.buffer(name, rows, columns)
        self._library.ct_rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), eps, rows, columns, out.data_ptr())
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
        if step is not self._step:
            if cache.dtype not in DTYPES:  # the C++ side knows two widths, and would write past the end of others
                raise ExecutorError(f"native kernels: a KV pool of {cache.dtype}, expected float32 or bfloat16")
            # What all layers of one step share.
            self._step = step
            self._rotation = Rotation(
                rows=step.rows,
                positions=address(step.positions),
                slots=address(step.slots),
                cos=rope[0].data_ptr(),
                sin=rope[1].data_ptr(),
                half=rope[0].shape[1],
                heads=qkv.shape[1] // cache.head_dim - 2 * cache.kv_heads,
                kv_heads=cache.kv_heads,
                head_dim=cache.head_dim,
                block_size=cache.block_size,
                eps=eps,
            )
        rotation = self._rotation
        rotation.qkv, rotation.ld = qkv.data_ptr(), qkv.stride(0)
        rotation.keys, rotation.values = cache.addresses(layer)
        if norms is not None:
            rotation.q_norm, rotation.k_norm = norms[0].data_ptr(), norms[1].data_ptr()
        self._library.ct_rotate_and_store(rotation, int(cache.dtype == torch.bfloat16))

    def argmax(self, logits: Tensor) -> Tensor:
        rows, columns = logits.shape
        out = torch.empty(rows, dtype=torch.int64)
        self._library.ct_argmax(logits.data_ptr(), logits.stride(0), rows, columns, out.data_ptr())
        return out
