"""A cost model from specifications alone: bytes over bandwidth, FLOPs over peak, tiles, waves and latencies.

It measured nothing of the engine it predicts, so it is marked uncalibrated. Its constants (roofline_constants.py) hold
for every GPU alike; none was chosen to match the published step times it is compared with in docs/concepts/costs.md.

Whatever depends on the number of rows alone (GEMMs, norms, all-reduces) is evaluated once per row count into a table
that the scalar and the vector path share; attention terms are a few multiplications.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from policies.work.batch import BatchShape
from policies.work.request import Ns
from profiler.errors import ProfileError
from profiler.experts.rank_steps import RankSteps
from profiler.roofline.constants import RooflineConstants
from profiler.roofline.row_table import RowTable
from profiler.roofline.row_terms import RowTerms
from profiler.specs.dtypes import dtype_bytes
from profiler.specs.hardware import Hardware
from profiler.specs.layer_split import check_split, split_layers
from profiler.specs.model_spec import AttentionKind, ModelSpec, attended
from profiler.specs.parallel_layout import ParallelLayout
from profiler.specs.shape_columns import Column, ShapeColumns, attended_pairs


class _Stage(NamedTuple):
    """Coefficients of one stage, in ns; attention terms carry +0.5 so that truncation rounds."""

    layers: int
    pair_ns: float  # per 2 query-key pairs of a chunk
    chunk_kv_ns: float  # per token of KV that a chunk reads or writes
    chunk_fixed_ns: float
    decode_kv_ns: float
    decode_fixed_ns: float
    first: bool
    last: bool


class Roofline:
    """CostModel of `model` on `hardware` with `tp` devices a stage and `pp` stages.

    dtype: of weights and activations ("float8": weights and GEMM inputs, the rest in 16 bits). kv_dtype: of the cache;
    "auto" is the dtype of the activations. layer_split: layers per stage, even by default (spare layers to the first
    stages, since the last one has the head). tile: the GEMM's M-quantum in rows. pipeline_link: "link" when stages
    share a node, "network" when they do not.
    """

    kind = "roofline"
    calibrated = False

    def __init__(
        self,
        model: ModelSpec,
        hardware: Hardware,
        *,
        dtype: str = "bfloat16",
        kv_dtype: str = "auto",
        tp: int = 1,
        pp: int = 1,
        layout: ParallelLayout | None = None,
        layer_split: Sequence[int] | None = None,
        tile: int = 128,
        pipeline_link: Literal["link", "network"] = "link",
        constants: RooflineConstants | None = None,
    ) -> None:
        model, self.activation_dtype = model.served_as(dtype)
        self.layout = layout or ParallelLayout(tp)
        self.layout.check(model)
        self.model, self.hardware, self.tp, self.tile = model, hardware, tp, tile
        self.dtype = model.weight_format or self.activation_dtype
        self.kv_dtype = model.kv_dtype(self.activation_dtype, kv_dtype)
        self.ranks = self.layout.dp if model.experts else 1
        self.layer_split = tuple(layer_split) if layer_split is not None else split_layers(model.layers, pp)
        check_split(self.layer_split, model.layers, pp)
        if tile < 1:
            raise ProfileError(f"tile: found {tile}, expected at least 1")
        self.stages = pp
        self.constants = constants or RooflineConstants()
        stages = f" pp{pp}" if pp > 1 else ""
        self.name = f"roofline {model.name} {hardware.name} tp{tp}{stages}{self.layout.words(model)} {self.dtype}"
        self._prepare(pipeline_link)

    def _prepare(self, pipeline_link: str) -> None:
        c, model, hardware = self.constants, self.model, self.hardware
        self._terms = RowTerms(model, hardware, c, self.layout, self.tile, self.activation_dtype)
        if pipeline_link not in ("link", "network"):
            raise ProfileError(f"pipeline_link: found {pipeline_link!r}, expected 'link' or 'network'")
        send = hardware.link_bandwidth if pipeline_link == "link" else hardware.network_bandwidth
        if send is None:
            raise ProfileError(
                f"gpu {hardware.name}: network_bandwidth is not known, so stages cannot sit on two nodes"
            )
        self._send_ns_per_row = model.hidden * dtype_bytes(self.activation_dtype) / (send * c.link_efficiency / 1e9)

        attention_flops_per_ns = hardware.peak(self.activation_dtype) * c.attention_efficiency / 1e9
        kv_bytes_per_ns = hardware.memory_bandwidth * c.kv_efficiency / 1e9
        first, width = model.attention_kinds[0], dtype_bytes(self.kv_dtype)
        pair = first.pair_flops / 2.0 / self.tp / attention_flops_per_ns
        kv = _kv_elements(model, first, self.tp) * width / kv_bytes_per_ns
        # A query of few heads waits for its keys, one of very many for its products.
        decode = 2.0 * pair * c.attention_efficiency
        chunk_kv = kv
        if model.latent:
            # Decodes are absorbed: every head attends to the compressed vector itself. Prompts unfold what they read.
            absorbed = 2.0 * model.heads * (2 * model.kv_latent + model.rope_dim) / self.tp
            decode = absorbed / attention_flops_per_ns * c.attention_efficiency
            unfold = next(gemm for gemm in model.attention_gemms(self.tp) if gemm.name == "kv_up")
            chunk_kv = max(
                kv, 2.0 * unfold.weights / (hardware.peak(self.activation_dtype) * c.matmul_efficiency / 1e9)
            )
        self._stages = tuple(
            _Stage(
                layers=layers,
                pair_ns=pair * layers,
                chunk_kv_ns=chunk_kv * layers,
                chunk_fixed_ns=c.kernel_ns * layers + 0.5,
                decode_kv_ns=max(kv, decode) * layers,
                decode_fixed_ns=2 * c.kernel_ns * layers + 0.5,  # split over the context, then combine
                first=index == 0,
                last=index == self.stages - 1,
            )
            for index, layers in enumerate(self.layer_split)
        )
        # Layers that differ in their windows or heads: each kind's share of the work of layers like the first.
        self._windows = [
            (
                kind.window,
                kind.layers / model.layers * kind.pair_flops / first.pair_flops,
                kind.layers / model.layers * _kv_elements(model, kind, self.tp) / _kv_elements(model, first, self.tp),
            )
            for kind in model.attention_kinds
        ]
        self._differ = len(self._windows) > 1 or bool(first.window)
        self._before_ns = [int(c.host_before_ns + n * c.host_before_per_sequence_ns + 0.5) for n in range(1025)]
        self._after_ns = [int(c.host_after_ns + n * c.host_after_per_sample_ns + 0.5) for n in range(1025)]
        self._rows = [RowTable(partial(self._row_terms, stage), 512) for stage in range(self.stages)]
        self._shared = RowTable(partial(self._terms.together, layers=model.layers), 64)
        self._rows_ns: list[list[int]] = [table.ns for table in self._rows]
        self._sampled = RowTable(self._terms.sampled, 64)
        self._sampled_ns: list[int] = self._sampled.ns

    # --- tables by rows ----------------------------------------------------------------------------------------------

    def _row_terms(self, stage: int, rows: Column) -> dict[str, Column]:
        facts = self._stages[stage]
        own = self._terms.rows(rows, facts.layers, first=facts.first)
        together = self._terms.together(rows * self.ranks, facts.layers) if self.model.experts else {}
        for name, ns in together.items():
            own[name] = own[name] + ns if name in own else ns
        return own

    # --- CostModel ---------------------------------------------------------------------------------------------------

    def host_ns(self, shape: BatchShape) -> tuple[Ns, Ns]:
        """Scheduling and input preparation before, output handling after; per sequence, not per token."""
        c = self.constants
        sequences = len(shape[0]) + shape[1]
        return (
            int(c.host_before_ns + sequences * c.host_before_per_sequence_ns + 0.5),
            int(c.host_after_ns + shape[5] * c.host_after_per_sample_ns + 0.5),
        )

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> Ns:
        """Device time of one stage in ns. The simulator's inner loop: predict_ns is its readable twin."""
        chunks, rows, context, _, dummy, sampled, executed, _, _, _ = shape
        facts = self._stages[stage]
        ns = 0
        pairs: float
        kv: float
        if rows:
            touched = self._decode_kv(rows, context) if self._differ else context + 2 * rows
            ns = int(touched * facts[4] + facts[5])
        rows += dummy
        if chunks:
            pairs = kv = 0.0
            for tokens, prefix in chunks:
                rows += tokens
                pairs += tokens * (2 * prefix + tokens + 1)
                kv += prefix + 2 * tokens
            if self._differ:
                pairs, kv = self._chunk_work(chunks)
            compute, moved = pairs * facts[1], kv * facts[2]
            ns += int((compute if compute > moved else moved) + facts[3])
        if executed > rows:
            rows = executed
        try:
            return ns + self._rows_ns[stage][rows] + (self._sampled_ns[sampled] if facts[7] else 0)
        except IndexError:
            return ns + self._rows[stage].at(rows) + (self._sampled.at(sampled) if facts[7] else 0)

    def iteration_ns(self, shape: BatchShape) -> tuple[Ns, Ns, Ns, bool]:
        """host_ns, stage_ns and inside of a single stage in one call: `profiler.cost_model.QuickCostModel`."""
        chunks, decodes, context, _, dummy, sampled, executed, _, _, _ = shape
        facts = self._stages[0]
        ns = 0
        pairs: float
        kv: float
        rows = decodes
        if decodes:
            touched = self._decode_kv(decodes, context) if self._differ else context + 2 * decodes
            ns = int(touched * facts[4] + facts[5])
        rows += dummy
        if chunks:
            if len(chunks) == 1 and not self._differ:
                tokens, prefix = chunks[0]
                rows += tokens
                pairs = float(tokens * (2 * prefix + tokens + 1))
                kv = float(prefix + 2 * tokens)
            else:
                rows += sum([chunk[0] for chunk in chunks])
                pairs, kv = self._chunk_work(chunks)
            compute, moved = pairs * facts[1], kv * facts[2]
            ns += int((compute if compute > moved else moved) + facts[3])
        if executed > rows:
            rows = executed
        try:
            return (
                self._before_ns[len(chunks) + decodes],
                self._after_ns[sampled],
                ns + self._rows_ns[0][rows] + self._sampled_ns[sampled],
                False,
            )
        except IndexError:
            return (*self.host_ns(shape), self.stage_ns(shape), False)

    def least_ns(self) -> Ns:
        """`profiler.cost_model.QuickCostModel`: one row, no context, nothing sampled."""
        return self._before_ns[1] + self._after_ns[0] + min(self._rows_ns[0][1:])

    def repeat_terms(self, shape: BatchShape) -> tuple[int, int, float, float, Ns] | None:
        """`profiler.cost_model.QuickCostModel`: only contexts grow, and their term is a straight line, truncated."""
        if self._differ:
            return None
        decodes = shape[1]
        facts = self._stages[0]
        kv = shape[2] + 2 * decodes
        return kv, decodes, facts[4], facts[5], self.stage_ns(shape) - int(kv * facts[4] + facts[5])

    def stages_ns(self, shape: BatchShape) -> list[tuple[Ns, Ns]]:
        """(stage_ns, send_ns) of every stage: what they share is worked out once."""
        chunks, decodes, context, _, dummy, sampled, executed, _, _, _ = shape
        rows = decodes + dummy
        touched = self._decode_kv(decodes, context) if self._differ else context + 2 * decodes
        pairs = kv = 0.0
        if chunks:
            rows += sum([chunk[0] for chunk in chunks])
            pairs, kv = self._chunk_work(chunks)
        send = int(max(rows, executed) * self._send_ns_per_row + self.constants.send_ns + 0.5)
        if executed > rows:
            rows = executed
        times = []
        same = None
        ns = 0
        for facts, table in zip(self._stages, self._rows):
            # Inner stages of equal depth cost the same.
            alike = None if facts[6] or facts[7] else facts[0]
            if alike is None or alike != same:
                ns = table.at(rows)
                if decodes:
                    ns += int(touched * facts[4] + facts[5])
                if chunks:
                    compute, moved = pairs * facts[1], kv * facts[2]
                    ns += int((compute if compute > moved else moved) + facts[3])
                same = alike
            if facts[7]:
                times.append((ns + self._sampled.at(sampled), 0))
            else:
                times.append((ns, send))
        return times

    def send_ns(self, shape: BatchShape, stage: int) -> Ns:
        """Hidden states of every row over one link: latency plus bytes over bandwidth; 0 after the last stage."""
        if stage >= self.stages - 1:
            return 0
        return int(shape.rows * self._send_ns_per_row + self.constants.send_ns + 0.5)

    def repeat_ns(self, shape: BatchShape, steps: int, stage: int = 0) -> Column:
        """stage_ns of `steps` iterations in which every decode's context grows by one a step."""
        decodes, context = shape[1], shape[2]
        if not decodes:
            return np.full(steps, self.stage_ns(shape, stage), np.int64)
        facts = self._stages[stage]
        rest = self.stage_ns(shape, stage) - int(self._decode_kv(decodes, context) * facts[4] + facts[5])
        totals = np.arange(context, context + steps * decodes, decodes, dtype=np.int64)
        growing: Column = (self._decode_kv(decodes, totals) * facts[4] + facts[5]).astype(np.int64)
        return growing + rest

    def predict_ns(self, shapes: object, stage: int = 0) -> Column:
        """stage_ns of many shapes: a sequence of BatchShape, or ShapeColumns (faster), in; int64 nanoseconds out."""
        columns = ShapeColumns.of(shapes)
        facts = self._stages[stage]
        rows = columns.rows
        if len(rows) == 0:
            return np.zeros(0, np.int64)
        ns = self._rows[stage].each(rows)
        if facts.last:
            ns = ns + self._sampled.each(columns.sampled)
        decoded = (self._decode_kv(columns.decodes, columns.decode_context_total) * facts[4] + facts[5]).astype(
            np.int64
        )
        ns = ns + np.where(columns.decodes > 0, decoded, 0)
        if len(columns.chunk_tokens):
            tokens, prefix = columns.chunk_tokens, columns.chunk_prefix
            pairs: Any = 0
            kv: Any = 0
            for window, of_pairs, of_kv in self._windows:
                seen = np.minimum(prefix, window) if window else prefix
                pairs = pairs + of_pairs * columns.per_batch(2 * attended_pairs(tokens, prefix, window or None))
                kv = kv + of_kv * columns.per_batch(seen + 2 * tokens)
            attention = (np.maximum(pairs * facts[1], kv * facts[2]) + facts[3]).astype(np.int64)
            ns = ns + np.where(columns.has_chunks, attention, 0)
        return ns

    def breakdown(self, shape: BatchShape) -> Mapping[str, Ns]:
        """Operators over all stages, host and sends; sums exactly to host_ns + all stage_ns + all send_ns."""
        before, after = self.host_ns(shape)
        parts: dict[str, int] = {"host_before": before}
        rows = np.array([shape.rows], np.int64)
        for stage, facts in enumerate(self._stages):
            terms = {name: int(column[0]) for name, column in self._row_terms(stage, rows).items()}
            if shape.chunks:
                pairs, kv = self._chunk_work(shape.chunks)
                terms["prefill_attention"] = int(max(pairs * facts[1], kv * facts[2]) + facts[3])
            if shape.decodes:
                kv = self._decode_kv(shape.decodes, shape.decode_context_total)
                terms["decode_attention"] = int(kv * facts[4] + facts[5])
            if facts.last:
                sampled = self._terms.sampled(np.array([shape.sampled], np.int64))
                terms |= {name: int(column[0]) for name, column in sampled.items()}
            terms["send"] = self.send_ns(shape, stage)
            for name, ns in terms.items():
                parts[name] = parts.get(name, 0) + ns
        parts["host_after"] = after
        return {name: ns for name, ns in parts.items() if ns}

    def inside(self, shape: BatchShape) -> bool:
        """Never: a roofline has no measured region."""
        return False

    def provenance(self) -> Mapping[str, object]:
        return {
            "kind": self.kind,
            "calibrated": self.calibrated,
            "name": self.name,
            "model": self.model.summary(),
            "hardware": self.hardware.summary(),
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "tp": self.tp,
            "pp": self.stages,
            "layer_split": list(self.layer_split),
            "tile": self.tile,
            "constants": asdict(self.constants),
        }

    # --- attention work ----------------------------------------------------------------------------------------------

    def _decode_kv(self, decodes: Any, context: Any) -> Any:
        """Tokens of KV that decodes touch, as layers of the first kind would: their contexts are read, their own token
        is written and read."""
        least = np.minimum if isinstance(context, np.ndarray) else min
        touched: Any = 0
        for window, _, of_kv in self._windows:
            seen = least(context, decodes * window) if window else context
            touched = touched + of_kv * (seen + 2 * decodes)
        return touched

    def _chunk_work(self, chunks: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """(twice the query-key pairs, KV tokens touched) of all chunks of a batch, as layers of the first kind."""
        if not self._differ:
            pairs = kv = 0
            for tokens, prefix in chunks:
                pairs += tokens * (2 * prefix + tokens + 1)
                kv += prefix + 2 * tokens
            return pairs, kv
        all_pairs = all_kv = 0.0
        for window, of_pairs, of_kv in self._windows:
            seen = sum([2 * attended(tokens, prefix, window) for tokens, prefix in chunks])
            all_pairs = all_pairs + of_pairs * seen
            all_kv = all_kv + of_kv * sum(
                [(min(prefix, window) if window else prefix) + 2 * tokens for tokens, prefix in chunks]
            )
        return all_pairs, all_kv


class RankedRoofline(RankSteps, Roofline):
    """Of a model with experts over data-parallel ranks."""


def _kv_elements(model: ModelSpec, kind: AttentionKind, tp: int) -> int:
    """Elements of one token's keys and values in one layer on one device."""
    if model.latent:
        return model.kv_latent + model.rope_dim
    return kind.kv_heads_per_device(tp) * (kind.head_dim + kind.value_dim)
