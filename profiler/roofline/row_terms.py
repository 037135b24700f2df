"""The roofline's terms that depend on the number of rows alone: GEMMs, norms, all-reduces, output head, sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from profiler.roofline.constants import RooflineConstants
from profiler.roofline.gemm_time import gemm_ns
from profiler.specs.dtypes import dtype_bytes
from profiler.specs.hardware import Hardware
from profiler.specs.model_spec import Gemm, ModelSpec
from profiler.specs.shape_columns import Column

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RowTerms:
    """Columns of nanoseconds by operator for one device of `tp`; each is rounded once, and zero rows cost nothing.

    tile: the GEMM's M-quantum in rows. dtype: of the weights.
    """

    model: ModelSpec
    hardware: Hardware
    constants: RooflineConstants
    tp: int
    tile: int
    dtype: str
    activation_dtype: str

    @property
    def _act(self) -> int:
        """Bytes of an activation."""
        return dtype_bytes(self.activation_dtype)

    @property
    def _bytes_per_ns(self) -> float:
        return self.hardware.memory_bandwidth * self.constants.memory_efficiency / 1e9

    def _gemm_ns(self, gemm: Gemm, rows: Floats, dtype: str) -> Floats:
        return gemm_ns(gemm, rows, self.hardware, self.constants, dtype, self._act, self.tile)

    def rows(self, rows: Column, layers: int, *, first: bool) -> dict[str, Column]:
        """Of a stage with so many layers. first: it has the embedding."""
        model, c = self.model, self.constants
        r = rows.astype(np.float64)
        terms = {gemm.name: layers * self._gemm_ns(gemm, r, self.dtype) for gemm in model.gemms(self.tp)}
        q, kv = model.q_size // self.tp, model.kv_heads_per_device(self.tp) * model.head_dim
        norms = 4 * model.hidden * model.norms_per_layer  # input and residual read, sum and normed written
        rotary = 2 * (q + kv) * (2 if model.qk_norm else 1) + 2 * kv  # ... and keys, values read for the cache
        ffn = (3 if model.gated else 2) * model.intermediate // self.tp
        kernels = model.norms_per_layer + 3 + (1 if model.qk_norm else 0)
        moved = (norms + rotary + ffn) * self._act * r
        terms["norms_activations"] = layers * (moved / self._bytes_per_ns + kernels * c.kernel_ns)
        if self.tp > 1:
            terms["all_reduce"] = layers * 2 * self._all_reduce_ns(r)
        if first:
            embedding = 2.0 * model.hidden * self._act * r / self._bytes_per_ns + c.kernel_ns
            terms["embedding"] = embedding + (self._all_reduce_ns(r) if self.tp > 1 else 0.0)
        return {name: np.where(rows > 0, ns + 0.5, 0.0).astype(np.int64) for name, ns in terms.items()}

    def _all_reduce_ns(self, rows: Floats) -> Floats:
        """Ring all-reduce of one hidden state per row: 2 (tp - 1) / tp of its bytes cross every link."""
        moved = 2.0 * (self.tp - 1) / self.tp * self.model.hidden * self._act
        return self._over_link_ns(moved, rows)

    def _over_link_ns(self, moved: float, rows: Floats) -> Floats:
        before_ns, bytes_per_ns = self.constants.collective(self.hardware)
        return before_ns + rows * (moved / bytes_per_ns)

    def sampled(self, sampled: Column) -> dict[str, Column]:
        """Output head over the sampled rows, gathering of logits from tp devices, and the sampler."""
        model, c = self.model, self.constants
        s = sampled.astype(np.float64)
        head_dtype = self.activation_dtype  # quantised checkpoints keep the head in 16 bits
        head = self._gemm_ns(model.head_gemm(self.tp), s, head_dtype)
        norm = 2.0 * model.hidden * self._act * s / self._bytes_per_ns + c.kernel_ns
        terms = {
            "head": head + norm,
            "sampling": s * (model.vocab * c.sampler_bytes / self._bytes_per_ns) + 4 * c.kernel_ns,
        }
        if self.tp > 1:
            terms["gather_logits"] = self._over_link_ns((self.tp - 1) / self.tp * model.vocab * self._act, s)
        return {name: np.where(sampled > 0, ns + 0.5, 0.0).astype(np.int64) for name, ns in terms.items()}
