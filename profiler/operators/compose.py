"""A device's measured operators and a model's shape, put together: the cost model of any model on that device.

A model that was profiled itself finds every operator in its own width. For any other, GEMMs and attention come from the
nearest measured ones (`profiler.operators.laws.gemm_law`, `profiler.operators.fitting.attention_family`), norms and
activations by their bytes, and the
result says which operators are composed, so that nothing counts as inside the measured region that is not. Products in
fewer bits, experts, latent attention and windows have files of their own beside a card's fit (`CardFiles`); what a card
has no kernels of is refused by name. Where layers differ, terms are those of the mean layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.errors import ProfileError
from profiler.evidence import BY_LAW, BY_LINK, BY_OTHER_WIDTH, BY_ROOFLINE
from profiler.experts.exchange import Exchange, exchanges
from profiler.experts.expert_law import shape_of
from profiler.experts.routing import Spread
from profiler.operators.attention_tables import AttentionTables
from profiler.operators.card_kernels import CardKernels, read_card
from profiler.operators.composed_engine import Engine, Operator, Region, RisingTerms
from profiler.operators.engine_terms import EngineTerms
from profiler.operators.fitted_model import FittedModel, fitted
from profiler.operators.fitting.device_fit import DeviceFit
from profiler.operators.fitting.error_factors import half_widths
from profiler.operators.fitting.model_file import read_model
from profiler.operators.latent_attention import LatentAttention
from profiler.operators.laws.physical_floor import AttentionFloor, GemmFloor
from profiler.operators.laws.row_curves import RowCurve
from profiler.operators.mixed_attention import MixedTables
from profiler.roofline.constants import RooflineConstants
from profiler.roofline.row_table import TABLED_ROWS
from profiler.specs.hardware import Hardware
from profiler.specs.layer_split import check_split, split_layers
from profiler.specs.model_spec import AttentionKind, ModelSpec
from profiler.specs.number_format import FORMATS
from profiler.specs.parallel_layout import ParallelLayout

Array = NDArray[np.float64]

SUM_BYTES = 4
"""Of a sum in 32 bits."""
ELEMENT_BYTES = 2
"""All profiles are of 16-bit activations."""
MEASURED_LATENT = (7168, 1536, 512, 64, 192, 128)
"""hidden, q_latent, kv_latent, rope_dim, head_dim and value_dim of DeepSeek-V3."""


def compose(
    fit: DeviceFit,
    spec: ModelSpec,
    hardware: Hardware,
    *,
    dtype: str = "bfloat16",
    kv_dtype: str = "auto",
    tp: int = 1,
    pp: int = 1,
    layout: ParallelLayout | None = None,
    layer_split: Sequence[int] | None = None,
    files: CardFiles | None = None,
    terms: EngineTerms | None = None,
    term_widths: Mapping[str, float] | None = None,
    pipeline_link: str = "link",
) -> FittedModel:
    """The cost model of `spec` on the fitted device; arguments as in `profiler.load_cost_model`.

    layout: tensor parallel alone by default. files: what lies beside the fit; without them 16 bits and dense layers
    alone are known. terms: the fit's own where none are given. term_widths: half-widths of 90 % intervals of "host" and
    "sustained".

    Raises ProfileError where the fit cannot serve: another dtype, an odd split, no attention to start from.
    """
    spec, wanted = spec.served_as(dtype)
    layout = layout or ParallelLayout(tp)
    layout.check(spec)
    if {wanted, fit.dtype} - {"bfloat16", "float16"}:
        raise ProfileError(f"fitted model {fit.gpu}: found dtype {wanted}, expected {fit.dtype}, which was measured")
    kept = spec.kv_dtype(wanted, kv_dtype)
    if kept not in ("bfloat16", "float16", "float8"):
        raise ProfileError(f"fitted model {fit.gpu}: found kv_dtype {kept}, expected auto, {fit.dtype} or fp8")
    split = tuple(layer_split) if layer_split is not None else split_layers(spec.layers, pp)
    check_split(split, spec.layers, pp)
    terms = terms or EngineTerms.from_mapping(fit.terms, f"fitted model {fit.gpu}")
    parts = _Parts(fit, spec, hardware, layout, kept, terms, files or CardFiles(None))
    stages = f" pp{pp}" if pp > 1 else ""
    stored = spec.weight_format or wanted
    beside = f" kv {kept}" if kept == "float8" else ""
    name = f"fitted {spec.name} {fit.gpu} tp{tp}{stages}{layout.words(spec)} {stored}{beside}"
    layers, first, last, sampled = parts.layer_rows(), parts.first_rows(), parts.last_rows(), parts.sampled()
    attention = parts.attention()
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
        ranks=layout.dp if spec.experts else 1,
        together=parts.together(),
        sustained=parts.sustained(),
        half_widths={**half_widths(fit.errors, region.composed, frozenset(fit.spreads)), **(term_widths or {})},
        spreads=fit.spreads if parts.plain else {},
        gemms=parts.floored,
        operators=parts.operators,
        provenance=parts.provenance(),
    )
    return fitted(engine)


class CardFiles:
    """Files beside a card's fit, of the same stem: CARD.fp8.json (products, attention over 8-bit keys and values),
    CARD.fp8_block.json, CARD.window128.json (attention with such a window), CARD.experts.json."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def fit(self, part: str) -> DeviceFit | None:
        """A part's fit, None where the card has none."""
        path = self._beside(part)
        return _read_part(path) if path is not None else None

    def kernels(self) -> CardKernels | None:
        """Experts, latent attention and collectives."""
        path = self._beside("experts")
        return read_card(path) if path is not None else None

    def _beside(self, part: str) -> Path | None:
        if self._path is None:
            return None
        path = self._path.with_name(f"{self._path.stem}.{part}.json")
        return path if path.is_file() else None


@lru_cache(maxsize=8)
def _read_part(path: Path) -> DeviceFit:
    return read_model(path)


class _Parts:
    """The operators of one model on one device, each as a function of rows."""

    def __init__(
        self,
        fit: DeviceFit,
        spec: ModelSpec,
        hardware: Hardware,
        layout: ParallelLayout,
        kv_dtype: str,
        terms: EngineTerms,
        files: CardFiles,
    ) -> None:
        self.fit, self.spec, self.hardware, self.terms, self.files = fit, spec, hardware, terms, files
        self.layout, self.tp, self.kv_dtype = layout, layout.tp, kv_dtype
        self.composed: list[str] = []
        self.unmeasured: list[str] = []
        self.reach: list[float] = []
        self.operators: dict[str, Operator] = {}
        self.floored: dict[str, tuple[int, int]] = {}
        self.plain = spec.weight_bits is None and kv_dtype != "float8" and not spec.experts and not spec.latent

    # --- operators ---------------------------------------------------------------------------------------------------

    def gemm(self, name: str, n: int, k: int, part: str = "") -> Operator:
        """part: "blocks" for a linear layer that a quantised checkpoint stores in fewer bits."""
        spec = self.spec
        if part and spec.weight_bits is not None and spec.quantised == part:
            return self._few_bits(name, n, k)
        self.floored[name] = (n, k)
        return self._gemm_of(self.fit, name, n, k)

    def _gemm_of(self, fit: DeviceFit, name: str, n: int, k: int) -> Operator:
        curve, measured = fit.gemm(name, n, k)
        if not measured:
            self.composed.append(f"{name} {n}x{k}")
            if not fit.between_gemms(n, k):
                self.unmeasured.append(f"{name} {n}x{k}")
        if name != "head":
            self.reach.append(float(curve.rows[-1]))
        corners = [curve] if measured else fit.gemms_around(n, k)
        return Operator(
            lambda rows: fit.gemm_us(curve, rows),
            lambda rows: bool(corners) & np.all([_within(one, rows) for one in corners or [curve]], axis=0),
            BY_LAW,
        )

    def _few_bits(self, name: str, n: int, k: int) -> Operator:
        """A product in the checkpoint's format: as measured on the card, or, where weights alone have fewer bits, the
        16-bit law with fewer bytes to stream."""
        spec, where = self.spec, f"gpu {self.fit.gpu}"
        assert spec.weight_bits is not None
        known = FORMATS.get(spec.weight_format)
        weight_bytes = spec.weight_bits / 8
        if known is not None and not known.products and self.fit.gemm_law is not None:
            law = replace(self.fit.gemm_law, weight_bytes=weight_bytes)
            self.composed.append(f"{name} {n}x{k}")
            self.unmeasured.append(f"{name} {n}x{k}")
            self.reach.append(float(TABLED_ROWS))
            floor = GemmFloor.of(self.hardware, self.fit.dtype, weight_bytes)
            return Operator(lambda rows: np.maximum(law.us(np.maximum(rows, 1.0), n, k), floor.us(rows, n, k)))
        fit = self.files.fit(spec.weight_format) if spec.weight_format else None
        if fit is None or known is None:
            have = [one for one in FORMATS if self.files.fit(one) is not None or not FORMATS[one].products]
            raise ProfileError(
                f"{where}: products in {spec.quantisation} were not measured on this card, expected one of "
                f"{', '.join(['bfloat16', *have])}; take another --weight-dtype, or --cost-model roofline"
            )
        found = self._gemm_of(fit, name, n, k)
        floor = GemmFloor.of(self.hardware, known.products, weight_bytes)
        scaling = self._scaling(k)
        return replace(found, us=lambda rows: np.maximum(found.us(rows) - scaling(rows), floor.us(rows, n, k)))

    def _scaling(self, width: int) -> Callable[[Array], Any]:
        """What products of a table spend on finding a scale for every row, where a checkpoint has fixed ones."""
        kernels = self.files.kernels()
        if "modelopt" not in self.spec.quantisation or kernels is None or not kernels.scaling:
            return lambda rows: 0.0
        near = min(kernels.scaling, key=lambda one: max(one, width) / min(one, width))
        curve = kernels.scaling[near]
        return lambda rows: curve.smooth_us(np.maximum(rows, 1.0)) * (width / near)

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

    def all_reduce(self, width: int | None = None) -> Operator:
        """Of one hidden state a row, or of `width` bytes: measured, or bytes over the link where no measurement exists
        of such a node."""
        width = self.spec.hidden * ELEMENT_BYTES if width is None else width
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
        """Of the mean layer."""
        spec, tp = self.spec, self.tp
        parts: dict[str, Operator] = {}
        dense = 1.0 - spec.expert_layers / spec.layers
        kinds = spec.attention_kinds
        for kind in kinds if not spec.latent else ():
            mark = f"_{kind.window}" if len({one[2:] for one in kinds}) > 1 and kind.window else ""
            share = kind.layers / spec.layers if mark or len({one[2:] for one in kinds}) > 1 else 1.0
            if not mark and share == 1.0 and parts:
                break
            for gemm in spec.attention_gemms(tp, kind):
                self._add(parts, gemm.name + mark, self.gemm(gemm.name + mark, gemm.n, gemm.k, "blocks"), share)
            q, kv = kind.heads // tp * kind.head_dim, kind.kv_heads_per_device(tp) * kind.head_dim
            if spec.position == "rope":
                self._add(parts, "rotary" + mark, self.elementwise("rotary", q + kv, 2 * (q + kv)), share)
            if spec.qk_norm:
                own = self.fit.nearest("qk_norm", q + kv) is not None
                operator = self.elementwise("qk_norm" if own else "norm", q + kv, 2 * (q + kv))
                self._add(parts, "qk_norm" + mark, operator, share)
            if spec.qk_norm_whole and tp > 1:
                # Each device has some of the heads that a norm goes over: two sums of squares a row.
                self._add(parts, "norm_all_reduce" + mark, self.all_reduce(2 * SUM_BYTES), share)
        if dense:
            for gemm in spec.ffn_gemms(tp):
                self._add(parts, gemm.name, self.gemm(gemm.name, gemm.n, gemm.k, "blocks"), dense)
            inner = spec.intermediate // tp * (2 if spec.gated else 1)
            activation = self.elementwise("activation", inner, inner + spec.intermediate // tp)
            self._add(parts, "activation", activation, dense)
        if spec.experts:
            self._expert_rows(parts, 1.0 - dense)
        if tp > 1:
            parts["all_reduce"] = self.all_reduce().times(1.0 + dense)
        norm = self.elementwise("norm", spec.hidden, 4 * spec.hidden)
        parts["norm"] = norm.times(spec.norms_per_layer)
        linear = len(spec.attention_gemms(tp)) + 2
        self.kernels = kernels = linear + spec.norms_per_layer + 3 + (2 if tp > 1 else 0) + 6 * bool(spec.experts)
        if self.terms.kernel_gap_us:
            gap = kernels * self.terms.kernel_gap_us
            parts["kernel_gaps"] = Operator(lambda rows: np.full(len(rows), gap))
        return self._group(parts)

    def _add(self, parts: dict[str, Operator], name: str, operator: Operator, share: float) -> None:
        """An operator that a share of the layers has."""
        if share != 1.0:
            floor = self.floored.pop(name, None)
            if floor is not None:
                least, us = GemmFloor.of(self.hardware, self.fit.dtype), operator.us
                operator = replace(operator, us=lambda rows: np.maximum(us(rows), least.us(rows, *floor)))
            operator = operator.times(share)
        parts[name] = operator

    def _expert_rows(self, parts: dict[str, Operator], share: float) -> None:
        """Router, shared experts, routed experts and what is sent around them."""
        spec, tp = self.spec, self.tp
        router = self.gemm("router", spec.experts + int(spec.shared_gate), spec.hidden)
        self._add(parts, "router", router, share)
        if share == 1.0:
            self.floored.pop("router", None)
        for gemm in spec.shared_gemms(tp):
            self._add(parts, gemm.name, self.gemm(gemm.name, gemm.n, gemm.k, "blocks"), share)
        if spec.shared_intermediate:
            inner = spec.shared_intermediate // tp * (2 if spec.gated else 1)
            activation = self.elementwise("activation", inner, inner + spec.shared_intermediate // tp)
            self._add(parts, "shared_activation", activation, share)
        for exchange in exchanges(spec, self.layout):
            if not exchange.everywhere:
                name = "combine" if exchange.operation == "all_reduce" else "gather_rows"
                self._add(parts, name, self._exchange(exchange), share)
        # As if every rank ran the same rows; `together` has the rows of all.
        ranks = float(self.layout.dp)
        for name, operator in self._shared_parts.items():
            us, measured = operator.us, operator.measured
            parts[name] = replace(
                operator,
                us=lambda rows, us=us: us(rows * ranks),
                measured=lambda rows, measured=measured: measured(rows * ranks),
            )

    @cached_property
    def _shared_parts(self) -> dict[str, Operator]:
        """Experts and the collectives of all ranks, microseconds of the mean layer by the rows of all ranks."""
        spec = self.spec
        if not spec.experts:
            return {}
        kernels = self.files.kernels()
        if kernels is None:
            raise ProfileError(
                f"gpu {self.fit.gpu}: experts were not measured on this card; take --cost-model roofline"
            )
        share = spec.expert_layers / spec.layers
        stored = spec.weight_format if spec.weight_bits is not None else "bfloat16"
        shape = shape_of(spec, self.layout)
        times = kernels.experts_in(stored or spec.quantisation).times(shape, Spread.parse(self.layout.routing))
        if not times.measured:
            self.composed.append(f"experts {shape.experts} x {shape.width}")
        parts = {"experts": Operator(times.us, lambda rows: times.measured & (rows <= times.most), BY_LAW)}
        for exchange in exchanges(spec, self.layout):
            if exchange.everywhere:
                parts[exchange.operation] = self._exchange(exchange)
        return {name: operator.times(share) for name, operator in parts.items()}

    def together(self) -> Callable[[Array], Mapping[str, Array]] | None:
        """What ranks do together, by the rows of all of them; None without experts."""
        parts = self._shared_parts
        return RisingTerms(lambda rows: {name: one(rows) for name, one in parts.items()}, parts) if parts else None

    def _exchange(self, exchange: Exchange) -> Operator:
        """A collective around experts, over rows: measured, or bytes over the link."""
        if exchange.operation == "all_reduce":
            return self.all_reduce()
        kernels = self.files.kernels()
        known = kernels.collectives.get((exchange.operation, exchange.participants)) if kernels is not None else None
        if known is not None and self.hardware.p2p and not self.hardware.own_link:
            return _over(known, exchange.bytes_per_token)
        self.unmeasured.append(exchange.operation)
        return self._over_link(exchange.link_share * exchange.bytes_per_token)

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

    def attention(self) -> AttentionTables | MixedTables:
        """Tables of every kind of layers."""
        kinds, spec = self.spec.attention_kinds, self.spec
        parts = [(kind.layers / spec.layers, self._tables(kind)) for kind in kinds]
        return parts[0][1] if len(parts) == 1 else MixedTables(parts)

    def _tables(self, kind: AttentionKind) -> AttentionTables:
        few = self.kv_dtype == "float8"
        products = "float8" if few and "float8" in self.hardware.peak_flops else self.fit.dtype
        floor = AttentionFloor.of(kind, self.hardware, products, self.tp, 1 if few else ELEMENT_BYTES)
        if self.spec.latent:
            elements = self.spec.kv_latent + self.spec.rope_dim
            bytes_per_ns = self.hardware.memory_bandwidth / 1e9
            floor = replace(floor, kv=elements * (1 if few else ELEMENT_BYTES) / bytes_per_ns)
            return AttentionTables(self._latent(), floor, uneven=False, typical=False, padded=self.terms.padded)
        return AttentionTables(
            self._source(kind),
            floor,
            fused=self.terms.fused_batches,
            uneven=self.terms.uneven_contexts and not kind.window,
            typical=self.terms.typical_contexts,
            padded=self.terms.padded,
        )

    def _source(self, kind: AttentionKind) -> Any:
        heads, kv = kind.heads // self.tp, kind.kv_heads_per_device(self.tp)
        fit = self.fit
        if self.kv_dtype == "float8":
            few = self.files.fit("fp8")
            if few is None or not few.families:
                raise ProfileError(
                    f"gpu {fit.gpu}: attention over 8-bit keys and values was not measured on this card; take "
                    "--kv-dtype bfloat16, or --cost-model roofline"
                )
            fit = few
        elif kind.window and (own := self.files.fit(f"window{kind.window}")) is not None:
            fit = own
        found, measured = fit.attention_of(heads, kv, kind.head_dim)
        if not measured:
            self.composed.append(f"attention {heads}/{kv}x{kind.head_dim}")
            self.unmeasured.append(f"attention {heads}/{kv}x{kind.head_dim}")
        if not kind.window or len(self.spec.attention_kinds) == 1:
            self._region, self._mixed = found.region, "mixed" in found.misses
        return replace(found, decode_law=replace(found.decode_law, warm=1.0)) if self.terms.cold_keys else found

    def _latent(self) -> LatentAttention:
        """Whole modules, projections included, as they were measured of DeepSeek-V3's sizes."""
        spec, kernels = self.spec, self.files.kernels()
        if kernels is None:
            raise ProfileError(f"gpu {self.fit.gpu}: latent attention was not measured; take --cost-model roofline")
        sizes = (spec.hidden, spec.q_latent, spec.kv_latent, spec.rope_dim, spec.head_dim, spec.value_dim)
        if sizes != MEASURED_LATENT:
            raise ProfileError(
                f"gpu {self.fit.gpu}: latent attention of {spec.name}: found sizes {sizes}, expected those of "
                f"DeepSeek-V3 {MEASURED_LATENT}, which were measured; take --cost-model roofline"
            )
        stored = spec.weight_format if spec.weight_bits is not None and spec.quantised == "blocks" else "bfloat16"
        found = kernels.latent_in(stored or spec.quantisation, self.kv_dtype).of(
            spec.heads // self.tp, self.hardware.sms
        )
        decodes, context = (axis[-1] for axis in found.decodes.axes)
        tokens = found.prompts.axes[0][-1]
        self._region = {"tokens": int(tokens), "prefix": 0, "decodes": int(decodes), "context": int(context)}
        self._mixed = False
        return found

    def sustained(self) -> dict[str, float]:
        """Microseconds a row of each linear layer at the rate that the card keeps up for seconds."""
        share = self.hardware.sustained_share
        if not self.terms.sustained_clocks or share is None:
            return {}
        spec, found = self.spec, {}
        few = spec.weight_bits is not None and spec.quantised == "blocks"
        products = FORMATS[spec.weight_format].products if few and spec.weight_format else ""
        flops_per_us = self.hardware.peak(products or self.fit.dtype) * share * 1e-6
        dense = 1.0 - spec.expert_layers / spec.layers
        attention = (
            () if spec.latent or len({one[2:] for one in spec.attention_kinds}) > 1 else spec.attention_gemms(self.tp)
        )
        for part, gemms in (
            (1.0, attention),
            (dense, spec.ffn_gemms(self.tp) if dense else ()),
            (1.0 - dense, spec.shared_gemms(self.tp)),
        ):
            found |= {gemm.name: part * 2.0 * gemm.n * gemm.k / flops_per_us for gemm in gemms}
        return found

    def region(self) -> Region:
        measured = self._region
        head = [curve.rows[-1] for curve in self.fit.curves if curve.operator in ("head", "gemm")]
        return Region(
            rows=int(min(self.reach, default=0)),
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
