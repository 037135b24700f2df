"""The fitted cost model: measured operators of one device, composed into one engine, evaluated into dense tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.work.batch import BatchShape
from policies.work.request import Ns
from profiler.evidence import ASSUMED, BY_LAW, BY_LINK, BY_OTHER_LAYOUT, Part
from profiler.experts.rank_steps import RankSteps
from profiler.operators.attention_lookup import AttentionLookup
from profiler.operators.attention_tables import AttentionTables
from profiler.operators.composed_engine import Engine, RisingTerms, RowTerms
from profiler.operators.drawn_errors import DrawnAttention, ErrorField
from profiler.operators.fitting.error_factors import factors
from profiler.operators.fitting.error_sizes import Spread
from profiler.operators.laws.measured_grid import MeasuredGrid
from profiler.operators.mixed_attention import MixedLookup, kinds_of
from profiler.operators.mixed_attention import changed as attention_changed
from profiler.roofline.row_table import TABLED_ROWS, RowTable
from profiler.specs.shape_columns import ShapeColumns

Column = NDArray[np.int64]

# Arrays have a price of their own, which this many steps of a plain loop would pay.
WORTH_AN_ARRAY = 96

# So many shapes are evaluated at once: their columns stay in a processor's cache.
BLOCK = 8192


class FittedModel:
    """CostModel of one engine from measured operators.

    Every integer is an operator's time over all layers of a stage, rounded once; sums of them are exact, so breakdowns
    add up, and the scalar and the vector path, which share tables and operations, agree.
    """

    kind = "fitted"
    calibrated = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name, self.tile = engine.name, engine.tile
        self.layer_split = engine.layer_split
        self.stages = len(engine.layer_split)
        self._attention = engine.attention
        self._lookup: AttentionLookup | MixedLookup = engine.attention.lookup
        self.ranks = engine.ranks
        self._shared = RowTable(self._shared_terms, 64)
        self._rows = [RowTable(partial(self._row_terms, stage), 2048) for stage in range(self.stages)]
        self._rows_ns: list[list[int]] = [table.ns for table in self._rows]
        self._sampled = RowTable(self._sampled_terms, 256)
        self._sampled_ns: list[int] = self._sampled.ns
        terms = engine.terms
        # Rows that a captured graph holds; what is beyond cannot end before its kernels are launched.
        self._graph_rows = terms.largest_graph if terms.graph_padding else 0
        launch_us = terms.launch_us * engine.kernels
        self._launch_ns = [int(launch_us * layers * 1e3 + 0.5) for layers in engine.layer_split]
        # Host terms of up to 1024 sequences, for the inner loop.
        self._before_ns = [self._host_before_ns(count) for count in range(1025)]
        self._after_ns = [self._host_after_ns(count) for count in range(1025)]
        region = engine.region
        self._bounds: tuple[bool, bool, int, int, int, int, int, int, int] = (
            not region.unmeasured,
            region.mixed,
            region.rows,
            region.decodes,
            region.sampled,
            region.context,
            region.tokens,
            region.prefix,
            engine.layer_split[0],
        )

    # --- terms by rows -----------------------------------------------------------------------------------------------

    def _row_terms(self, stage: int, rows: Column) -> dict[str, Column]:
        """Every term that depends on the rows alone, rounded once each; zero rows cost nothing."""
        engine, layers = self.engine, self.engine.layer_split[stage]
        run = engine.terms.padded(rows).astype(np.float64)
        of_layer = dict(engine.layer_rows(run))
        for name, us_per_row in engine.sustained.items():
            of_layer[name] = np.maximum(of_layer[name], run * us_per_row)
        terms = {name: us * layers for name, us in of_layer.items()}
        least: Any = 0.0
        for name in [name for name in terms if name in engine.gemms]:
            floor = layers * engine.floor.us(run, *engine.gemms[name])
            least, terms[name] = least + floor, np.maximum(terms[name], floor)
        for name, us in engine.first_rows(run).items() if stage == 0 else ():
            terms[name] = terms[name] + us if name in terms else us
        if stage == self.stages - 1:
            terms |= engine.last_rows(run)
            if engine.terms.step_us:
                # Less than nothing explains takes no more than what lies above the floor.
                terms["unexplained"] = np.maximum(engine.terms.step_us, least - sum(terms.values()))
        return {name: np.where(rows > 0, np.floor(us * 1e3 + 0.5), 0.0).astype(np.int64) for name, us in terms.items()}

    def _shared_terms(self, rows: Column) -> dict[str, Column]:
        """What all ranks do together for the rows of all of them, one stage; they step by as many rows as are run."""
        us = self.engine.together(rows.astype(np.float64)) if self.engine.together is not None else {}
        layers = self.engine.layer_split[0]
        terms = {name: np.floor(each * layers * 1e3 + 0.5) for name, each in us.items()}
        return {name: np.where(rows > 0, ns, 0.0).astype(np.int64) for name, ns in terms.items()} or {"": rows * 0}

    def _sampled_terms(self, sampled: Column) -> dict[str, Column]:
        rows = sampled.astype(np.float64)
        terms = dict(self.engine.sampled(rows))
        for name in [name for name in terms if name in self.engine.gemms]:
            terms[name] = np.maximum(terms[name], self.engine.floor.us(rows, *self.engine.gemms[name]))
        return {name: np.where(sampled > 0, us * 1e3 + 0.5, 0.0).astype(np.int64) for name, us in terms.items()}

    # --- CostModel ---------------------------------------------------------------------------------------------------

    def host_ns(self, shape: BatchShape) -> tuple[Ns, Ns]:
        """Planning and input preparation before, output handling after; per step and per sequence."""
        return self._host_before_ns(len(shape[0]) + shape[1]), self._host_after_ns(shape[5])

    def _host_before_ns(self, sequences: int) -> Ns:
        terms = self.engine.terms
        us = terms.host_before_us + sequences * terms.host_before_sequence_us
        if self.engine.tp > 1:
            us += terms.host_tp_step_us + sequences * terms.host_tp_sequence_us
        return int(us * 1e3 + 0.5)

    def _host_after_ns(self, sampled: int) -> Ns:
        terms = self.engine.terms
        return int((terms.host_after_us + sampled * terms.host_after_sample_us) * 1e3 + 0.5)

    def iteration_ns(self, shape: BatchShape) -> tuple[Ns, Ns, Ns, bool]:
        """host_ns, stage_ns and inside of a single stage in one call: `profiler.cost_model.QuickCostModel`."""
        chunks, rows, total, largest, dummy, sampled, executed, _, _, _ = shape
        measured, mixed, most_rows, most_decodes, most_sampled, longest, most_tokens, furthest, layers = self._bounds
        inside = measured and rows <= most_decodes and largest <= longest and sampled <= most_sampled
        sequences = len(chunks) + rows
        ns = 0
        if chunks:
            ns = int(self._lookup.batch_ns(chunks, rows, total, largest) * layers + 0.5)
            if rows and not mixed:
                inside = False
            for tokens, prefix in chunks:
                rows += tokens
                if tokens > most_tokens or prefix > furthest:
                    inside = False
        elif rows:
            ns = int(self._lookup.decode_ns(rows, total, largest) * layers + 0.5)
        rows += dummy
        if executed > rows:
            rows = executed
        try:
            ns += self._rows_ns[0][rows]
            if sampled:
                ns += self._sampled_ns[sampled]
            if rows > self._graph_rows and ns < self._launch_ns[0]:
                ns = self._launch_ns[0]
            return self._before_ns[sequences], self._after_ns[sampled], ns, inside and rows <= most_rows
        except IndexError:
            return (*self.host_ns(shape), self.stage_ns(shape), self.inside(shape))

    def least_ns(self) -> Ns:
        """`profiler.cost_model.QuickCostModel`: host and rows. An eighth of the rows' time is left out for attention,
        which a fit may draw below nothing where there is hardly any."""
        return min(self._before_ns[1:]) + min(self._after_ns) + min(self._rows_ns[0][1:]) * 7 // 8

    def stages_ns(self, shape: BatchShape) -> list[tuple[Ns, Ns]]:
        """(stage_ns, send_ns) of every stage: `profiler.cost_model.QuickCostModel`; attention is looked up once."""
        chunks, decodes, total, largest, *_ = shape
        rows, sampled, attention = shape.rows, shape[5], 0.0
        if chunks:
            attention = self._lookup.batch_ns(chunks, decodes, total, largest)
        elif decodes:
            attention = self._lookup.decode_ns(decodes, total, largest)
        send, last = self.send_ns(shape, 0), self.stages - 1
        times = []
        for stage, layers in enumerate(self.engine.layer_split):
            ns = int(attention * layers + 0.5) + self._rows[stage].at(rows)
            if stage == last and sampled:
                ns += self._sampled.at(sampled)
            if rows > self._graph_rows and ns < self._launch_ns[stage]:
                ns = self._launch_ns[stage]
            times.append((ns, send if stage < last else 0))
        return times

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> Ns:
        """Device time of one stage in ns. The simulator's inner loop; `predict_ns` is its vector twin."""
        chunks, rows, total, largest, dummy, sampled, executed, _, _, _ = shape
        ns = 0
        if chunks:
            attention = self._lookup.batch_ns(chunks, rows, total, largest)
            ns = int(attention * self.engine.layer_split[stage] + 0.5)
            for tokens, _ in chunks:
                rows += tokens
        elif rows:
            attention = self._lookup.decode_ns(rows, total, largest)
            ns = int(attention * self.engine.layer_split[stage] + 0.5)
        rows += dummy
        if executed > rows:
            rows = executed
        last = stage == self.stages - 1
        try:
            ns += self._rows_ns[stage][rows] + (self._sampled_ns[sampled] if last else 0)
        except IndexError:
            ns += self._rows[stage].at(rows) + (self._sampled.at(sampled) if last else 0)
        return self._launch_ns[stage] if rows > self._graph_rows and ns < self._launch_ns[stage] else ns

    def send_ns(self, shape: BatchShape, stage: int) -> Ns:
        """Hidden states of every row to the next stage; 0 after the last."""
        if stage >= self.stages - 1:
            return 0
        fixed, per_row = self.engine.send
        return int(fixed + shape.rows * per_row + 0.5)

    def repeat_ns(self, shape: BatchShape, steps: int, stage: int = 0) -> Column:
        """stage_ns of `steps` iterations in which every decode's context grows by one a step."""
        chunks, decodes, total, largest, _, sampled, executed, _, _, _ = shape
        if not decodes:
            return np.full(steps, self.stage_ns(shape, stage), np.int64)
        floor = self._launch_ns[stage] if shape.rows > self._graph_rows else 0
        rest = self._rows_alone_ns(shape.rows, sampled, stage)
        layers = self.engine.layer_split[stage]
        if steps < WORTH_AN_ARRAY and not chunks:
            one_ns, contexts = self._lookup.decode_ns, range(total, total + steps * decodes, decodes)
            plain = [
                int(one_ns(decodes, context, largest + i) * layers + 0.5) + rest for i, context in enumerate(contexts)
            ]
            return np.maximum(np.array(plain, np.int64), floor)
        ahead = np.arange(steps, dtype=np.int64)
        counts = np.full(steps, decodes, np.int64)
        if chunks:
            one = np.array(chunks, np.int64)
            attention, _ = self._attention.batch_ns_of(
                np.tile(one[:, 0], steps),
                np.tile(one[:, 1], steps),
                np.arange(steps + 1, dtype=np.int64) * len(chunks),
                counts,
                total + ahead * decodes,
                largest + ahead,
            )
        else:
            attention = self._attention.decode_ns_of(counts, total + ahead * decodes, largest + ahead)
        return np.maximum((attention * layers + 0.5).astype(np.int64) + rest, floor)

    def _rows_alone_ns(self, rows: int, sampled: int, stage: int) -> Ns:
        """What rows and sampled rows cost beside attention."""
        ns = self._rows[stage].at(rows)
        return ns + self._sampled.at(sampled) if sampled and stage == self.stages - 1 else ns

    def predict_ns(self, shapes: object, stage: int = 0) -> Column:
        """stage_ns of many shapes: a sequence of BatchShape, or ShapeColumns (faster), in; int64 nanoseconds out."""
        columns = ShapeColumns.of(shapes)
        count = len(columns)
        ns = np.empty(count, np.int64)
        for start in range(0, count, BLOCK):
            block = columns.part(start, min(start + BLOCK, count))
            attention, rows = self._attention_of(block)
            attention *= self.engine.layer_split[stage]
            attention += 0.5
            rows = np.maximum(rows + block.dummy_tokens, block.executed_rows)
            of_block = self._rows[stage].each(rows)
            of_block += attention.astype(np.int64)
            if stage == self.stages - 1:
                of_block += self._sampled.each(block.sampled)
            if self._launch_ns[stage]:
                np.maximum(of_block, self._launch_ns[stage], out=of_block, where=rows > self._graph_rows)
            ns[start : start + BLOCK] = of_block
        return ns

    def _attention_of(self, columns: ShapeColumns) -> tuple[NDArray[np.float64], Column]:
        """One layer's attention of every batch, ns (0 for a batch without any), and its useful tokens."""
        counts, total, largest = columns.decodes, columns.decode_context_total, columns.decode_context_max
        tokens, prefix, offsets = columns.chunk_tokens, columns.chunk_prefix, columns.chunk_offsets
        if not len(tokens) and counts.all():
            return self._attention.decode_ns_of(counts, total, largest), counts
        with_chunks = columns.has_chunks
        if with_chunks.all():
            attention, prompts = self._attention.batch_ns_of(tokens, prefix, offsets, counts, total, largest)
            return attention, prompts + counts
        attention, rows = np.zeros(len(columns)), counts.copy()
        some = np.flatnonzero(with_chunks)
        if len(some):
            # A batch without chunks ends where the next one starts.
            offsets = np.append(offsets.take(some), offsets[-1])
            attention[some], prompts = self._attention.batch_ns_of(
                tokens, prefix, offsets, counts.take(some), total.take(some), largest.take(some)
            )
            rows[some] += prompts
        some = np.flatnonzero(counts > with_chunks * counts)
        if len(some):
            attention[some] = self._attention.decode_ns_of(counts.take(some), total.take(some), largest.take(some))
        return attention, rows

    def breakdown(self, shape: BatchShape) -> Mapping[str, Ns]:
        """Operators over all stages, host and sends; sums exactly to host_ns + all stage_ns + all send_ns."""
        before, after = self.host_ns(shape)
        parts: dict[str, int] = {"host_before": before}
        rows = np.array([shape.rows], np.int64)
        for stage, layers in enumerate(self.engine.layer_split):
            terms = {name: int(column[0]) for name, column in self._row_terms(stage, rows).items()}
            if shape.chunks or shape.decodes:
                name = "mixed_attention" if shape.chunks and shape.decodes else "attention"
                terms[name] = int(self._attention_ns(shape) * layers + 0.5)
            if stage == self.stages - 1:
                sampled = self._sampled_terms(np.array([shape.sampled], np.int64))
                terms |= {name: int(column[0]) for name, column in sampled.items()}
            if shape.rows > self._graph_rows:
                terms["waiting_for_launches"] = max(0, self._launch_ns[stage] - sum(terms.values()))
            terms["send"] = self.send_ns(shape, stage)
            for name, ns in terms.items():
                parts[name] = parts.get(name, 0) + ns
        parts["host_after"] = after
        return {name: ns for name, ns in parts.items() if ns}

    def evidence(self, shapes: object) -> list[Part]:
        """What each operator takes of many batches, and whether it was measured there (`profiler.evidence`)."""
        columns, engine = ShapeColumns.of(shapes), self.engine
        attention, _ = self._attention_of(columns)
        counts, back = np.unique(columns.rows, return_inverse=True)
        sampled, of_sampled = np.unique(columns.sampled, return_inverse=True)
        run = engine.terms.padded(counts).astype(np.float64)
        parts: dict[str, Part] = {}

        def add(name: str, ns: Column, measured: Any, otherwise: str) -> None:
            parts[name] = parts[name]._replace(ns=parts[name].ns + ns) if name in parts else Part(
                name, ns, measured, otherwise
            )  # fmt: skip

        def add_rows(terms: Mapping[str, Column], rows: NDArray[np.float64], place: Column) -> None:
            for name, ns in terms.items():
                operator = engine.operators.get(name)
                # What nothing explains was told by a live run.
                measured = np.broadcast_to(operator.measured(rows) if operator else True, rows.shape)
                add(name, ns.take(place), measured.take(place), operator.otherwise if operator else ASSUMED)

        in_grid = self._attention_measured(columns)
        own = not any(name.startswith("attention") for name in engine.region.unmeasured)
        for stage, layers in enumerate(engine.layer_split):
            add_rows(self._row_terms(stage, counts), run, back)
            ns = (attention * layers + 0.5).astype(np.int64)
            add("attention", ns, own & in_grid, BY_LAW if own else BY_OTHER_LAYOUT)
            if self._launch_ns[stage]:
                ns += self._rows[stage].each(columns.rows)
                ns += self._sampled.each(columns.sampled) if stage == self.stages - 1 else 0
                waits = np.where(columns.rows > self._graph_rows, np.maximum(self._launch_ns[stage] - ns, 0), 0)
                add("waiting_for_launches", waits, False, ASSUMED)
        add_rows(self._sampled_terms(sampled), sampled.astype(float), of_sampled)
        if self.stages > 1:
            fixed, per_row = engine.send
            send = (fixed + columns.rows * per_row + 0.5).astype(np.int64) * (self.stages - 1)
            add("send", send, False, BY_LINK)
        sequences, of_sequences = np.unique(np.diff(columns.chunk_offsets) + columns.decodes, return_inverse=True)
        before = np.array([self._host_before_ns(count) for count in sequences.tolist()], np.int64).take(of_sequences)
        after = np.array([self._host_after_ns(count) for count in sampled.tolist()], np.int64).take(of_sampled)
        told = "host" in str(engine.provenance.get("device_fit", {}).get("calibration", ""))
        add("host", before + after, told, ASSUMED)
        return list(parts.values())

    def _attention_measured(self, columns: ShapeColumns) -> NDArray[np.bool_]:
        """Whether each batch lies in a cell of the grid of its kind, in every kind of layers; batches of several chunks
        were not measured."""
        inside = np.ones(len(columns), bool)
        for tables in kinds_of(self._attention):
            inside &= _measured_by(tables, columns)
        return inside

    def _attention_ns(self, shape: BatchShape) -> float:
        chunks, decodes, total, largest, *_ = shape
        if chunks:
            return self._lookup.batch_ns(chunks, decodes, total, largest)
        return self._lookup.decode_ns(decodes, total, largest) if decodes else 0.0

    def inside(self, shape: BatchShape) -> bool:
        """Whether the shape lies within the measured bounds, and every operator was measured in this width or between
        measured ones (norms and activations may be passes over their bytes)."""
        region = self.engine.region
        return (
            not region.unmeasured
            and (region.mixed or not (shape.chunks and shape.decodes))
            and shape.rows <= region.rows
            and shape.sampled <= region.sampled
            and shape.decodes <= region.decodes
            and shape.decode_context_max <= region.context
            and all(tokens <= region.tokens and prefix <= region.prefix for tokens, prefix in shape.chunks)
        )

    def perturbed(self, seed: int) -> FittedModel:
        """The same model off by errors drawn as its held-out ones are: from shape to shape where they were measured,
        by one factor an operator where they were not, and for the host.

        Runs over many seeds turn the model's uncertainty into intervals of any statistic.
        """
        engine, drawn = self.engine, factors(self.engine.half_widths, seed)
        by_operator: dict[str, list[Spread]] = {}
        for spread in engine.spreads.values():
            by_operator.setdefault(spread.operator, []).append(spread)
        fields = {name: ErrorField(parts, seed) for name, parts in by_operator.items()}
        gemm = fields.get("gemm")

        def off(name: str, rows: NDArray[np.float64]) -> Any:
            factor = drawn.get(name, 1.0)
            shape = engine.gemms.get(name)
            return factor if gemm is None or shape is None else factor * gemm.factors(rows, *shape)[:, 0, 0]

        def scaled(terms: RowTerms) -> RowTerms:
            # Beyond the tables an error stays what it was at their end.
            return RisingTerms(
                lambda rows: {name: us * off(name, np.minimum(rows, TABLED_ROWS)) for name, us in terms(rows).items()},
                engine.operators,
            )

        def drawn_attention(tables: AttentionTables) -> AttentionTables:
            source = DrawnAttention(tables, fields, drawn)
            return tables.of(source) if source.differs else tables

        slower, terms = drawn.get("host", 1.0), asdict(engine.terms)
        host = {name: value * slower for name, value in terms.items() if name.startswith("host_")}
        changed = replace(
            engine,
            name=f"{engine.name} draw {seed}",
            layer_rows=scaled(engine.layer_rows),
            first_rows=scaled(engine.first_rows),
            last_rows=scaled(engine.last_rows),
            sampled=scaled(engine.sampled),
            attention=attention_changed(engine.attention, drawn_attention),
            together=scaled(engine.together) if engine.together is not None else None,
            terms=replace(engine.terms, **host),
            sustained={name: us * drawn.get("sustained", 1.0) for name, us in engine.sustained.items()},
            provenance={**engine.provenance, "perturbed": {"seed": seed, "factors": drawn}},
        )
        return fitted(changed)

    def provenance(self) -> Mapping[str, object]:
        engine = self.engine
        return {
            "kind": self.kind,
            "calibrated": self.calibrated,
            "name": self.name,
            "layer_split": list(engine.layer_split),
            "tile": self.tile,
            "terms": asdict(engine.terms),
            "half_widths_90": dict(engine.half_widths),
            "region": asdict(engine.region),
            **engine.provenance,
        }


class RankedFit(RankSteps, FittedModel):
    """Of a model with experts over data-parallel ranks."""

    @property
    def graph_rows(self) -> int:  # type: ignore[override]
        return self._graph_rows

    def run_rows(self, rows: int) -> int:
        return int(self.engine.terms.padded(np.array([rows]))[0])


def fitted(engine: Engine) -> FittedModel:
    """The cost model of an engine."""
    return RankedFit(engine) if engine.ranks > 1 else FittedModel(engine)


def _measured_by(tables: AttentionTables, columns: ShapeColumns) -> NDArray[np.bool_]:
    grids: Mapping[str, MeasuredGrid] = getattr(tables.source, "grids", {})
    window, inside = tables.window, np.zeros(len(columns), bool)
    chunks, decodes = np.diff(columns.chunk_offsets), columns.decodes
    mean = columns.decode_context_total / np.maximum(decodes, 1)
    mean = np.minimum(mean, window) if window else mean
    prefix = np.minimum(columns.chunk_prefix, window) if window else columns.chunk_prefix
    for kind, some in (
        ("decode", (chunks == 0) & (decodes > 0)),
        ("prefill", (chunks == 1) & (decodes == 0)),
        ("mixed", (chunks == 1) & (decodes > 0)),
    ):
        at = np.flatnonzero(some)
        if not len(at) or kind not in grids:
            continue
        first = columns.chunk_offsets.take(at)
        of_chunk = () if kind == "decode" else (columns.chunk_tokens.take(first), prefix.take(first))
        of_decodes = () if kind == "prefill" else (decodes.take(at), mean.take(at))
        inside[at] = grids[kind].holds(*of_chunk, *of_decodes)
    inside[(chunks == 0) & (decodes == 0)] = True
    return inside


def find_fitted(gpu: str) -> Any:
    """Path of the fitted model that ships for a GPU of the hardware table, or None."""
    from profiler.operators.fitting.model_file import shipped

    return shipped(gpu)


def load_fitted(path: Any, spec: Any, hardware: Any, **engine: Any) -> FittedModel:
    """Read a model file and compose it into a cost model of `spec` (a ModelSpec); see
    `profiler.operators.compose.compose`.
    """
    from profiler.operators.compose import compose
    from profiler.operators.fitting.model_file import read_model

    return compose(read_model(path), spec, hardware, **engine)
