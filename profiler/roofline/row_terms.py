"""The roofline's terms that depend on the number of rows alone: GEMMs, norms, all-reduces, output head, sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from profiler.experts.exchange import Exchange, exchanges
from profiler.experts.expert_law import ExpertLaw, by_knots, shape_of
from profiler.experts.routing import TILES, Spread
from profiler.roofline.constants import RooflineConstants
from profiler.roofline.gemm_time import gemm_ns
from profiler.specs.dtypes import dtype_bytes
from profiler.specs.hardware import Hardware
from profiler.specs.model_spec import Gemm, ModelSpec
from profiler.specs.number_format import FORMATS
from profiler.specs.parallel_layout import ParallelLayout
from profiler.specs.shape_columns import Column

Floats = NDArray[np.float64]

SMALLEST_TILE = 16
"""Rows of the smallest matrix product of a tensor core (m16n8k16)."""
EXPERT_KERNELS = 8
"""Kernels of an expert layer beside its router: top-k, sorting rows, two grouped products, the activation between them,
quantising twice, and the sum."""


@dataclass(frozen=True)
class RowTerms:
    """Columns of nanoseconds by operator for one device of a layout; each is rounded once, and zero rows cost nothing.

    tile: the GEMM's M-quantum in rows. activation_dtype: of whatever is not quantised. Where layers differ, terms are
    those of the mean layer.
    """

    model: ModelSpec
    hardware: Hardware
    constants: RooflineConstants
    layout: ParallelLayout
    tile: int
    activation_dtype: str

    @property
    def tp(self) -> int:
        return self.layout.tp

    @property
    def _act(self) -> int:
        """Bytes of an activation."""
        return dtype_bytes(self.activation_dtype)

    @property
    def _bytes_per_ns(self) -> float:
        return self.hardware.memory_bandwidth * self.constants.memory_efficiency / 1e9

    def _stored(self, part: str) -> tuple[str, float]:
        """How the weights of "blocks" or "experts" are stored: the dtype of their products, bytes of one of them."""
        model = self.model
        if model.weight_bits is None or (part == "blocks" and model.quantised == "experts"):
            return self.activation_dtype, float(self._act)
        products = FORMATS[model.weight_format].products if model.weight_format else ""
        # A card without such products unpacks the weights to 16 bits.
        known = products in self.hardware.peak_flops
        return products if known else self.activation_dtype, model.weight_bits / 8

    def _gemm_ns(self, gemm: Gemm, rows: Floats, part: str = "") -> Floats:
        dtype, weight = self._stored(part) if part else (self.activation_dtype, float(self._act))
        # Kernels that unpack weights on their way work on the smallest tiles, or few rows would wait for products.
        tile = min(self.tile, SMALLEST_TILE) if weight < dtype_bytes(dtype) else self.tile
        return gemm_ns(gemm, rows, self.hardware, self.constants, dtype, self._act, tile, weight)

    def rows(self, rows: Column, layers: int, *, first: bool) -> dict[str, Column]:
        """Of a stage with so many layers, for the rows of one rank. first: it has the embedding."""
        model, c = self.model, self.constants
        r = rows.astype(np.float64)
        terms: dict[str, Floats] = {}

        def add(name: str, share: float, ns: Floats) -> None:
            terms[name] = terms.get(name, 0.0) + layers * share * ns

        inputs, moved = (
            0.0,
            4.0 * model.hidden * model.norms_per_layer,
        )  # input and residual read, sum and normed written
        for kind in model.attention_kinds:
            share = kind.layers / model.layers
            gemms = model.attention_gemms(self.tp, kind)
            for gemm in gemms:
                add(gemm.name, share, self._gemm_ns(gemm, r, "blocks"))
                inputs += share * gemm.k
            q, kv = kind.heads // self.tp * kind.head_dim, kind.kv_heads_per_device(self.tp) * kind.head_dim
            if model.latent:
                kv = model.kv_latent + model.rope_dim
            rotary = 2 * (q + kv) * (2 if model.qk_norm else 1) + 2 * kv  # ... and keys, values read for the cache
            moved += share * rotary
        dense = 1.0 - model.expert_layers / model.layers
        matrices = 3 if model.gated else 2
        for gemm in model.ffn_gemms(self.tp) if dense else ():
            add(gemm.name, dense, self._gemm_ns(gemm, r, "blocks"))
            inputs += dense * gemm.k
        moved += dense * matrices * model.intermediate // self.tp
        if model.experts:
            router = Gemm("router", model.experts + int(model.shared_gate), model.hidden)
            add("router", 1.0 - dense, self._gemm_ns(router, r))
            for gemm in model.shared_gemms(self.tp):
                add(gemm.name, 1.0 - dense, self._gemm_ns(gemm, r, "blocks"))
            moved += (1.0 - dense) * matrices * model.shared_intermediate // self.tp
        kernels = model.norms_per_layer + 3 + (1 if model.qk_norm else 0)
        add("norms_activations", 1.0, moved * self._act * r / self._bytes_per_ns + kernels * c.kernel_ns)
        if self._stored("blocks")[0] != self.activation_dtype:
            # Inputs are read and written once more, in fewer bits; vLLM's compiler joins that to what comes before it.
            add("quantise", 1.0, inputs * (self._act + 1.0) * r / self._bytes_per_ns)
        if self.tp > 1:
            add("all_reduce", 1.0 + dense, self._all_reduce_ns(r))
            if model.qk_norm_whole:
                # Each device has some of the heads that a norm goes over: their squares are added up.
                add("norm_all_reduce", 1.0, self._over_link_ns(2.0 * (self.tp - 1) / self.tp * 8.0, r))
        for exchange in exchanges(model, self.layout) if model.experts else ():
            if not exchange.everywhere:
                add(exchange.operation, 1.0 - dense, self._exchange_ns(exchange, r))
        if first:
            embedding = 2.0 * model.hidden * self._act * r / self._bytes_per_ns + c.kernel_ns
            terms["embedding"] = embedding + (self._all_reduce_ns(r) if self.tp > 1 else 0.0)
        return {name: np.where(rows > 0, ns + 0.5, 0.0).astype(np.int64) for name, ns in terms.items()}

    def together(self, rows: Column, layers: int) -> dict[str, Column]:
        """Of a stage with so many layers, for the rows of all ranks together: experts, and what is sent around them."""
        model = self.model
        if not model.experts:
            return {"experts": np.zeros_like(rows)}
        r = rows.astype(np.float64)
        share = layers * model.expert_layers / model.layers
        terms = {"experts": share * 1e3 * self._experts(r)}
        for exchange in exchanges(model, self.layout):
            if exchange.everywhere:
                terms[exchange.operation] = share * self._exchange_ns(exchange, r)
        return {name: np.where(rows > 0, ns + 0.5, 0.0).astype(np.int64) for name, ns in terms.items()}

    @cached_property
    def _experts(self) -> Callable[[Floats], Floats]:
        c, hardware = self.constants, self.hardware
        products, weight = self._stored("experts")
        law = ExpertLaw(
            memory=c.memory_efficiency,
            # Tiles of few rows leave most of a product's processors waiting for weights.
            efficiency=tuple(c.matmul_efficiency * tile / TILES[-1] for tile in TILES),
            launch=EXPERT_KERNELS * c.kernel_ns * 1e-3,
            per_expert=0.0,
            rows=c.memory_efficiency,
            weight_bytes=weight,
            flops_per_us=hardware.peak(products) / 1e6,
            bytes_per_us=hardware.memory_bandwidth / 1e6,
            sms=hardware.sms,
        )
        shape, spread = shape_of(self.model, self.layout), Spread.parse(self.layout.routing)
        return by_knots(lambda tokens: law.us(shape, tokens, shape.features(spread, tokens.astype(int).tolist())))

    def _exchange_ns(self, exchange: Exchange, rows: Floats) -> Floats:
        return self._over_link_ns(exchange.link_share * exchange.bytes_per_token, rows)

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
        head = self._gemm_ns(model.head_gemm(self.tp), s)  # quantised checkpoints keep the head in 16 bits
        norm = 2.0 * model.hidden * self._act * s / self._bytes_per_ns + c.kernel_ns
        terms = {
            "head": head + norm,
            "sampling": s * (model.vocab * c.sampler_bytes / self._bytes_per_ns) + 4 * c.kernel_ns,
        }
        if self.tp > 1:
            terms["gather_logits"] = self._over_link_ns((self.tp - 1) / self.tp * model.vocab * self._act, s)
        return {name: np.where(sampled > 0, ns + 0.5, 0.0).astype(np.int64) for name, ns in terms.items()}
