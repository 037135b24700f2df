"""A device's measured operators and a model's shape, put together: the cost model of any dense model on that device.

A model that was profiled itself finds every operator in its own width. For any other, GEMMs and attention come from the
nearest measured ones (`profiler.operators.laws.gemm_law`, `profiler.operators.fitting.attention_family`), norms and
activations by their bytes, and the
result says which operators are composed, so that nothing counts as inside the measured region that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.errors import ProfileError
from profiler.evidence import BY_LAW, BY_LINK, BY_OTHER_WIDTH, BY_ROOFLINE
from profiler.operators.attention_tables import AttentionTables
from profiler.operators.composed_engine import Engine, Operator, Region, RisingTerms
from profiler.operators.engine_terms import EngineTerms
from profiler.operators.fitted_model import FittedModel
from profiler.operators.fitting.device_fit import DeviceFit
from profiler.operators.fitting.error_factors import half_widths
from profiler.operators.laws.physical_floor import AttentionFloor, GemmFloor
from profiler.operators.laws.row_curves import RowCurve
from profiler.roofline.constants import RooflineConstants
from profiler.specs.dtypes import canonical_dtype
from profiler.specs.hardware import Hardware
from profiler.specs.layer_split import check_split, split_layers
from profiler.specs.model_spec import ModelSpec

Array = NDArray[np.float64]

ELEMENT_BYTES = 2
"""All profiles are of 16-bit activations."""


def compose(
    fit: DeviceFit,
    spec: ModelSpec,
    hardware: Hardware,
    *,
    dtype: str = "bfloat16",
    kv_dtype: str = "auto",
    tp: int = 1,
    pp: int = 1,
    layer_split: Sequence[int] | None = None,
    terms: EngineTerms | None = None,
    term_widths: Mapping[str, float] | None = None,
    pipeline_link: str = "link",
) -> FittedModel:
    """The cost model of `spec` on the fitted device; arguments as in `profiler.load_cost_model`.

    terms: the fit's own where none are given. term_widths: half-widths of 90 % intervals of "host" and "sustained".

    Raises ProfileError where the fit cannot serve: another dtype, an odd split, no attention to start from.
    """
    spec.check_tp(tp)
    wanted = canonical_dtype(dtype)
    if {wanted, fit.dtype} - {"bfloat16", "float16"}:
        raise ProfileError(f"fitted model {fit.gpu}: found dtype {wanted}, expected {fit.dtype}, which was measured")
    if kv_dtype != "auto" and canonical_dtype(kv_dtype) not in ("bfloat16", "float16"):
        raise ProfileError(f"fitted model {fit.gpu}: found kv_dtype {kv_dtype}, expected auto or {fit.dtype}")
    split = tuple(layer_split) if layer_split is not None else split_layers(spec.layers, pp)
    check_split(split, spec.layers, pp)
    parts = _Parts(fit, spec, hardware, tp, terms or EngineTerms.from_mapping(fit.terms, f"fitted model {fit.gpu}"))
    name = f"fitted {spec.name} {fit.gpu} tp{tp}{f' pp{pp}' if pp > 1 else ''} {wanted}"
    attention = AttentionTables(
        parts.attention(),
        AttentionFloor.of(spec, hardware, fit.dtype, tp),
        fused=parts.terms.fused_batches,
        uneven=parts.terms.uneven_contexts and not spec.sliding_window,
        typical=parts.terms.typical_contexts,
        padded=parts.terms.padded,
    )
    layers, first, last, sampled = parts.layer_rows(), parts.first_rows(), parts.last_rows(), parts.sampled()
    region = parts.region()
    engine = Engine(
        name,
        split,
        layers,
        first,
        last,
        sampled,
        attention,
        region,
        parts.terms,
        GemmFloor.of(hardware, fit.dtype),
        _send(hardware, spec, pipeline_link),
        tp=tp,
        kernels=parts.kernels,
        sustained=parts.sustained(),
        half_widths={**half_widths(fit.errors, region.composed, frozenset(fit.spreads)), **(term_widths or {})},
        spreads=fit.spreads,
        gemms={gemm.name: (gemm.n, gemm.k) for gemm in (*spec.gemms(tp), spec.head_gemm(tp))},
        operators=parts.operators,
        provenance=parts.provenance(),
    )
    return FittedModel(engine)


class _Parts:
    """The operators of one model on one device, each as a function of rows."""

    def __init__(self, fit: DeviceFit, spec: ModelSpec, hardware: Hardware, tp: int, terms: EngineTerms) -> None:
        self.fit, self.spec, self.hardware, self.tp, self.terms = fit, spec, hardware, tp, terms
        self.composed: list[str] = []
        self.unmeasured: list[str] = []
        self.reach: list[float] = []
        self.operators: dict[str, Operator] = {}

    # --- operators ---------------------------------------------------------------------------------------------------

    def gemm(self, name: str, n: int, k: int) -> Operator:
        curve, measured = self.fit.gemm(name, n, k)
        if not measured:
            self.composed.append(f"{name} {n}x{k}")
            if not self.fit.between_gemms(n, k):
                self.unmeasured.append(f"{name} {n}x{k}")
        if name != "head":
            self.reach.append(float(curve.rows[-1]))
        corners = [curve] if measured else self.fit.gemms_around(n, k)
        return Operator(
            lambda rows: self.fit.gemm_us(curve, rows),
            lambda rows: bool(corners) & np.all([_within(one, rows) for one in corners or [curve]], axis=0),
            BY_LAW,
        )

    def elementwise(self, name: str, width: int, moved: float) -> Operator:
        """A norm, activation or rotary embedding: its own curve, another width's by bytes, or one pass over memory."""
        curve = self.fit.nearest(name, width)
        constants = RooflineConstants()
        rate = self.hardware.memory_bandwidth * constants.memory_efficiency * 1e-6

        def one_pass(rows: Array) -> Array:
            return constants.kernel_ns * 1e-3 + rows * (moved * ELEMENT_BYTES / rate)

        if curve is None:
            self.composed.append(name)
            return Operator(one_pass, otherwise=BY_ROOFLINE)
        own = any(one.operator == name and one.n == width for one in self.fit.curves)
        if not self.terms.compiled:
            return Operator(curve.smooth_us, lambda rows: own & _within(curve, rows), BY_LAW if own else BY_OTHER_WIDTH)
        return Operator(
            lambda rows: np.minimum(curve.smooth_us(rows), one_pass(rows)),
            lambda rows: own & _within(curve, rows) & (curve.smooth_us(rows) <= one_pass(rows)),
            BY_ROOFLINE,
        )

    def all_reduce(self) -> Operator:
        """Of one hidden state a row: measured, or bytes over the link where no measurement exists of such a node."""
        width = self.spec.hidden * ELEMENT_BYTES
        for collective in self.fit.collectives:
            if collective.participants == self.tp and self.hardware.p2p and not self.hardware.own_link:
                return _over(collective.curve, width)
        self.composed.append("all_reduce")
        self.unmeasured.append("all_reduce")
        return self._over_link(2.0 * (self.tp - 1) / self.tp * width)

    def _over_link(self, moved: float) -> Operator:
        """`moved` bytes a row over the device's own link, after the latency of a collective on it."""
        before_ns, bytes_per_ns = RooflineConstants().collective(self.hardware)
        return Operator(lambda rows: before_ns * 1e-3 + rows * (moved / bytes_per_ns * 1e-3), otherwise=BY_LINK)

    def _group(self, parts: dict[str, Operator]) -> Callable[[Array], Mapping[str, Array]]:
        self.operators |= parts
        return RisingTerms(lambda rows: {name: operator(rows) for name, operator in parts.items()}, parts)

    # --- groups ------------------------------------------------------------------------------------------------------

    def layer_rows(self) -> Callable[[Array], Mapping[str, Array]]:
        spec, tp = self.spec, self.tp
        parts = {gemm.name: self.gemm(gemm.name, gemm.n, gemm.k) for gemm in spec.gemms(tp)}
        norm = self.elementwise("norm", spec.hidden, 4 * spec.hidden)
        inner = spec.intermediate // tp * (2 if spec.gated else 1)
        q, kv = spec.q_size // tp, spec.kv_heads_per_device(tp) * spec.head_dim
        parts["activation"] = self.elementwise("activation", inner, inner + spec.intermediate // tp)
        if spec.position == "rope":
            parts["rotary"] = self.elementwise("rotary", q + kv, 2 * (q + kv))
        if spec.qk_norm:
            own = self.fit.nearest("qk_norm", q + kv) is not None
            parts["qk_norm"] = self.elementwise("qk_norm" if own else "norm", q + kv, 2 * (q + kv))
        if tp > 1:
            parts["all_reduce"] = self.all_reduce().times(2.0)
        parts["norm"] = norm.times(spec.norms_per_layer)
        self.kernels = kernels = len(spec.gemms(tp)) + spec.norms_per_layer + 3 + (2 if tp > 1 else 0)
        if self.terms.kernel_gap_us:
            gap = kernels * self.terms.kernel_gap_us
            parts["kernel_gaps"] = Operator(lambda rows: np.full(len(rows), gap))
        return self._group(parts)

    def first_rows(self) -> Callable[[Array], Mapping[str, Array]]:
        """The embedding; each of tp devices looks up its part of the vocabulary, and an all-reduce adds them."""
        parts = {"embedding": self.elementwise("embedding", self.spec.hidden, 2 * self.spec.hidden)}
        if self.tp > 1:
            parts["all_reduce"] = self.all_reduce()
        return self._group(parts)

    def last_rows(self) -> Callable[[Array], Mapping[str, Array]]:
        return self._group({"final_norm": self.elementwise("final_norm", self.spec.hidden, 4 * self.spec.hidden)})

    def sampled(self) -> Callable[[Array], Mapping[str, Array]]:
        spec, tp = self.spec, self.tp
        gemm = spec.head_gemm(tp)
        parts = {"head": self.gemm("head", gemm.n, gemm.k)}
        if self.terms.sampler:
            passes = RooflineConstants().sampler_bytes / ELEMENT_BYTES
            parts["sampler"] = self.elementwise("sampler", spec.vocab, passes * spec.vocab)
        if tp > 1:
            parts["gather_logits"] = self._over_link((tp - 1) / tp * spec.vocab * ELEMENT_BYTES)
        return self._group(parts)

    def attention(self) -> Any:
        heads, kv = self.spec.heads // self.tp, self.spec.kv_heads_per_device(self.tp)
        found, measured = self.fit.attention_of(heads, kv, self.spec.head_dim)
        if not measured:
            self.composed.append(f"attention {heads}/{kv}x{self.spec.head_dim}")
            self.unmeasured.append(f"attention {heads}/{kv}x{self.spec.head_dim}")
        self._region, self._mixed = found.region, "mixed" in found.misses
        return replace(found, decode_law=replace(found.decode_law, warm=1.0)) if self.terms.cold_keys else found

    def sustained(self) -> dict[str, float]:
        """Microseconds a row of each linear layer at the rate that the card keeps up for seconds."""
        share = self.hardware.sustained_share
        if not self.terms.sustained_clocks or share is None:
            return {}
        flops_per_us = self.hardware.peak(self.fit.dtype) * share * 1e-6
        return {gemm.name: 2.0 * gemm.n * gemm.k / flops_per_us for gemm in self.spec.gemms(self.tp)}

    def region(self) -> Region:
        measured = self._region
        head = [curve.rows[-1] for curve in self.fit.curves if curve.operator in ("head", "gemm")]
        return Region(
            rows=int(min(self.reach)),
            sampled=int(max(head, default=0)),
            tokens=measured.get("tokens", 0),
            prefix=measured.get("prefix", 0),
            decodes=measured.get("decodes", 0),
            context=measured.get("context", 0),
            mixed=self._mixed,
            composed=tuple(self.composed),
            unmeasured=tuple(self.unmeasured),
        )

    def provenance(self) -> dict[str, Any]:
        return {
            "device_fit": dict(self.fit.provenance),
            "model": self.spec.summary(),
            "hardware": self.hardware.summary(),
            "dtype": self.fit.dtype,
            "tp": self.tp,
            "held_out_errors": {key: dict(value) for key, value in self.fit.errors.items()},
            "profiled": (self.spec.name, self.tp) in self.fit.profiled,
        }


def _over(curve: RowCurve, width: int) -> Operator:
    """A collective by rows of `width` bytes."""
    return Operator(lambda rows: curve.smooth_us(rows * width), lambda rows: _within(curve, rows * width), BY_LAW)


def _within(curve: RowCurve, rows: Array) -> NDArray[np.bool_]:
    return np.asarray((rows >= curve.rows[0]) & (rows <= curve.rows[-1]))


def _send(hardware: Hardware, spec: ModelSpec, pipeline_link: str) -> tuple[float, float]:
    """(ns, ns per row) of hidden states to the next stage, from the link's specification."""
    rate = hardware.link_bandwidth if pipeline_link == "link" else hardware.network_bandwidth
    if rate is None:
        raise ProfileError(f"gpu {hardware.name}: network_bandwidth is not known, so stages cannot sit on two nodes")
    constants = RooflineConstants()
    return constants.send_ns, spec.hidden * ELEMENT_BYTES / (rate * constants.link_efficiency / 1e9)
