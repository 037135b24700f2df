"""Attention of one layer as dense tables: what the simulator's inner loop looks up.

A fit is evaluated once at every knot; after that a decode-only batch is one cell and one multiply-add, a chunk is a
bilinear cell, and a chunk beside decodes a cell of four axes. `lookup` is the scalar twin of the vector functions here:
same cells, same operations in the same order, so both give equal numbers. Times are ns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.operators.attention_cells import Axis, evaluated, polynomials
from profiler.operators.attention_lookup import (
    DECODE_LIMIT,
    GRAIN,
    PACKED,
    PACKED_TOKENS,
    TOKEN_LIMIT,
    AttentionLookup,
    further_pairs,
)
from profiler.operators.laws.physical_floor import AttentionFloor
from profiler.operators.laws.prefill_law import PrefillLaw
from profiler.operators.laws.smooth_batch_law import CONTEXT_STEP, BatchLaw

Array = NDArray[np.float64]
Column = NDArray[np.int64]

CONTEXT_LIMIT = 131072
MOST_SHARE = 2.0**62.9
"""Packed shares that an int64 holds."""
MOST_ALONE = 64
"""Measured coordinates along an axis that decodes alone, and chunks alone, take as knots: their tables are small."""
_TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, TOKEN_LIMIT)
_BLOCKS = tuple(rows + more for rows in range(64, 1025, 64) for more in (0, 1))
"""Where a chunk alone needs one block more, and may need one wave more."""
_CONTEXTS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, CONTEXT_LIMIT)
_DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, DECODE_LIMIT)


class AttentionSource(Protocol):
    """What tables are built from; `AttentionFit` is one. Microseconds of one layer."""

    batch_law: BatchLaw
    heads: int
    sms: int
    uneven_token_us: float
    prefill_law: PrefillLaw | None

    def decode_us(self, decodes: ArrayLike, context: ArrayLike, typical: bool = False) -> Array: ...

    def prefill_us(self, tokens: ArrayLike, prefix: ArrayLike) -> Array: ...

    def batch_us(
        self, tokens: ArrayLike, prefix: ArrayLike, decodes: ArrayLike, context: ArrayLike, typical: bool = False
    ) -> Array: ...

    def uneven_decode_us(self, decodes: ArrayLike) -> Array: ...

    def knots(self, axis: str, most: int = ...) -> ArrayLike: ...


class AttentionTables:
    """See the module. `layers` scales nothing here: results are ns of one layer."""

    def __init__(
        self,
        source: AttentionSource,
        floor: AttentionFloor,
        *,
        fused: bool = True,
        uneven: bool = True,
        typical: bool = True,
        padded: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
    ) -> None:
        """floor: what no attention on the device beats, with the sliding window. fused False: a chunk and decodes cost
        their sum (an ablation).

        uneven False: contexts are taken as equal (an ablation). typical False: contexts lie just above a step, as
        profiles measure them (an ablation). padded: batch sizes as a CUDA graph was captured for,
        which is when a kernel decides whether to split contexts.
        """
        self._recipe = partial(AttentionTables, floor=floor, fused=fused, uneven=uneven, typical=typical, padded=padded)
        self.source = source
        self.fused = fused
        self.floor, self.window = floor, floor.window
        # A knot at the window: what lies within it and what does not are two straight lines.
        self.contexts = Axis([*_CONTEXTS, *source.knots("context"), *([self.window] * bool(self.window))], far=True)
        self.alone = Axis([*self.contexts.near, *source.knots("context", MOST_ALONE)], far=True)
        self.tokens = Axis([*_TOKENS, *source.knots("tokens")])
        self.decodes = Axis([*_DECODES, *source.knots("decodes")], far=True)
        far = self._seen(self.contexts.near)
        near = self.tokens.knots

        # Decodes alone: for every number of decodes, an intercept and a slope in each context cell.
        counts = np.clip(np.arange(DECODE_LIMIT + 2, dtype=float), 1, DECODE_LIMIT)
        value = source.decode_us(counts[:, None], self._seen(self.alone.near)[None, :], typical) * 1e3
        value = self._physical(value, 0, 0, counts, self.alone)[0, 0]
        lines = [
            np.stack([one[:, :-1] - slope * self.alone.knots[:-1], slope], axis=-1)
            for one in (value, _rising(value, self._at_knots("decode", counts, self.alone)))
            for slope in [np.diff(one, axis=1) / np.diff(self.alone.knots)]
        ]
        measured = self._measured("decode", counts[:, None], middles(self.alone)[None, :])
        measured[-1] = False
        self._decode = np.where(measured[..., None], *lines).reshape(-1, 2)
        captured = padded(counts.astype(np.int64)) if padded else counts
        self._beyond = source.uneven_decode_us(np.maximum(captured, 1)) * (1e3 if uneven else 0.0)

        # One chunk alone, and one chunk beside decodes.
        self.chunks = Axis([*self.tokens.knots, *source.knots("tokens", MOST_ALONE)])
        if source.prefill_law is not None:
            self.chunks = Axis([*self.chunks.knots, *_BLOCKS])
        # A kernel table knows prompts without a prefix alone: they keep their times, whatever one with a prefix takes.
        self.prefixes = Axis([*self.contexts.near, 1], far=True)
        chunk = source.prefill_us(self.chunks.knots[:, None], self._seen(self.prefixes.near)[None, :]) * 1e3
        chunk = self._physical(chunk, self.chunks.knots, self.prefixes, 0, 0)[:, :, 0, 0]
        # Of all chunks whole prompts are known best, by their law where they were not measured themselves.
        whole = self.prefixes.knots == 0
        rising = _rising(chunk, self._at_knots("prefill", self.chunks.knots, self.prefixes) | whole)
        self._chunk = self._chunk_cells(chunk, rising)
        self._beside = np.zeros((0, 16))
        if fused:
            grid = np.meshgrid(near, far, self.decodes.near, far, indexing="ij", sparse=True)
            shape = tuple(axis.size for axis in grid)
            everywhere = np.broadcast_to(source.batch_us(*grid, typical) * 1e3, shape)
            everywhere = self._physical(everywhere, near, self.contexts, self.decodes, self.contexts)
            axes = (self.tokens, self.contexts, self.decodes, self.contexts)
            measured = self._measured("mixed", *np.ix_(*map(middles, axes))).ravel()
            known = self._at_knots("mixed", near, self.contexts, self.decodes, self.contexts)
            # Nor does a decode beside a chunk make it cheaper.
            alone = rising[
                np.ix_(self.chunks.knots.searchsorted(near), self.prefixes.knots.searchsorted(self.contexts.knots))
            ]
            self._beside = polynomials(np.maximum(_rising(everywhere, known), alone[:, :, None, None]), axes)
            if measured.any():
                self._beside = np.where(measured[:, None], polynomials(everywhere, axes), self._beside)
        # A pair of a prompt longer than the table costs what one of the longest there costs.
        longest = float(chunk[self.chunks.knots == TOKEN_LIMIT, 0][0])
        self._pair = longest / further_pairs(TOKEN_LIMIT, 0, 0, self.window)

        law, machine = source.batch_law, source.heads / source.sms * 1e3
        self._query_rows = law.query_rows
        # What a block pays a token of its context, and so for all its rows, is no less than peak and bandwidth allow.
        least = max(floor.pair * law.query_rows, floor.kv) * CONTEXT_STEP
        step = max(law.step * machine, least)
        self._share_block = law.block * machine + 0.5 * (1.0 - law.query_rows / CONTEXT_STEP) * step
        self._share_step = step / CONTEXT_STEP
        self._share_token = law.write
        self._uneven = source.uneven_token_us * 1e3 * (1.0 if uneven else 0.0)
        self._make_lists()

    def _make_lists(self) -> None:
        """The same numbers for the scalar twin."""
        wide, tall = self.contexts.cells, self.decodes.cells
        self._strides = (wide * tall * wide, tall * wide, wide)
        first, second, third = self._strides
        start, slope = self._shares = self._packed(np.arange(TOKEN_LIMIT + 1))
        self._largest_share = (float(start.max()), float(slope.max()))
        by_context = self.contexts.cell
        self._chunk_starts = (self.chunks.cell * self.prefixes.cells, self.prefixes.cell)
        self._beside_starts = (
            self.tokens.cell * first,
            by_context * second,
            self.decodes.cell * third,
            by_context,
        )
        coefficients = self._beside

        def beside(at: int) -> Any:
            return tuple(coefficients[at].tolist())

        def share_of(tokens: int) -> Any:
            # Python's integers hold what a column's do not.
            start, slope = (int(grains) << PACKED for grains in self._share_of(tokens))
            return start + tokens, slope

        self.lookup = AttentionLookup(
            wide=self.alone.cells,
            decode_cells=self.alone.starts(1),
            lines=_tuples(self._decode),
            beyond=self._beyond.tolist(),
            chunk_starts=self.chunks.starts(self.prefixes.cells),
            prefix_cells=self.prefixes.starts(1),
            context_cells=self.contexts.starts(1),
            chunk_cells=_tuples(self._chunk),
            beside_starts=(self.tokens.starts(first), self.contexts.starts(second), self.decodes.starts(third)),
            beside=beside if self.fused else None,
            shares=list(zip(start.tolist(), slope.tolist(), strict=True)),
            share_of=share_of,
            uneven=self._uneven,
            pair=self._pair,
            window=self.window,
        )

    def _packed(self, tokens: Column) -> tuple[Column, Column]:
        """Shares in PACKED integers; IndexError where these do not hold them."""
        grains = self._share_of(tokens)
        if grains.max(initial=0) * 2.0**PACKED >= MOST_SHARE:
            raise IndexError
        packed = grains.astype(np.int64) << PACKED
        return packed[0] + tokens, packed[1]

    def _share_of(self, tokens: Any) -> Array:
        """A chunk's share of the machine: an intercept and a slope over its prefix, by its tokens; in whole GRAINs, so
        that the order of a sum does not matter."""
        rows = self._query_rows
        blocks = (tokens + (rows - 1)) // rows
        start = blocks * (self._share_block + self._share_step * (0.5 * tokens + 0.5 * rows))
        line = np.stack([start + self._share_token * tokens, blocks * self._share_step])
        return np.asarray(np.rint(line / GRAIN))

    def of(self, source: AttentionSource) -> AttentionTables:
        """The tables of another source, made in the same way."""
        return self._recipe(source)

    def _measured(self, kind: str, *places: Any) -> NDArray[np.bool_]:
        """Whether this layout was measured around each place."""
        grid = getattr(self.source, "grids", {}).get(kind) if getattr(self.source, "own", True) else None
        shape = np.broadcast_shapes(*(np.shape(place) for place in places))
        return np.zeros(shape, bool) if grid is None else grid.holds(*places)

    def _at_knots(self, kind: str, *axes: Axis | Array) -> NDArray[np.bool_]:
        """Which knots of a table were measured; those at FAR were not."""
        return self._measured(kind, *np.ix_(*[axis.knots if isinstance(axis, Axis) else axis for axis in axes]))

    def _chunk_cells(self, chunk: Array, rising: Array) -> Array:
        """A chunk alone: cells as they are where it was measured, and that never fall elsewhere."""
        axes = (self.chunks, self.prefixes)
        tokens, prefix = middles(self.chunks)[:, None], middles(self.prefixes)[None, :]
        measured = self._measured("prefill", tokens, prefix)
        cells = np.where(measured.reshape(-1, 1), polynomials(chunk, axes), polynomials(rising, axes))
        # Whole prompts lie on the edge of the first cell, whose other edge is a prefix of 1.
        edge = np.concatenate([chunk[:, :1], rising[:, 1:]], axis=1)
        whole = self._measured("prefill", tokens, np.zeros((1, 1))) & (np.arange(prefix.size) == 0) & ~measured
        return np.where(whole.reshape(-1, 1), polynomials(edge, axes), cells)

    def _physical(self, ns: Array, *coordinates: Any) -> Array:
        """Values in the table, no lower than the floor, and those at FAR: time goes on growing as over the last octave.

        coordinates: tokens, prefix, decodes, context, each an Axis, knots, or 0; the result has all four dimensions.
        """
        knots = [np.ravel(one.knots if isinstance(one, Axis) else one) for one in coordinates]
        near = [len(one.near) if isinstance(one, Axis) else np.size(one) for one in coordinates]
        floor = self.floor.ns(*np.meshgrid(*knots, indexing="ij", sparse=True))
        more = [(0, len(all_of) - some) for all_of, some in zip(knots, near, strict=True)]
        found = np.pad(np.reshape(ns, near), more)
        for dimension, (all_of, some) in enumerate(zip(knots, near, strict=True)):
            if len(all_of) > some:
                values = np.moveaxis(found, dimension, 0)
                half = int(np.searchsorted(all_of[:-1], all_of[-2] / 2))
                run = (all_of[-1] - all_of[-2]) / (all_of[-2] - all_of[half])
                values[-1] = values[-2] + np.maximum(values[-2] - values[half], 0.0) * run
        return np.maximum(found, floor)

    def _seen(self, context: Any) -> Any:
        """Contexts as attention sees them under a sliding window."""
        return np.minimum(context, self.window) if self.window else context

    # --- vector ------------------------------------------------------------------------------------------------------

    def decode_ns_of(self, decodes: Column, total: Column, largest: Column) -> Array:
        """`lookup.decode_ns` of many batches, each with at least one decode."""
        mean = total / decodes
        row = np.minimum(decodes, DECODE_LIMIT + 1)
        found = self._decode[row * self.alone.cells + self.alone.of(mean)]
        ns = found[:, 0] + found[:, 1] * mean
        ns += self._beyond[row] * np.maximum(largest - mean, 0.0)
        if decodes.max(initial=0) > DECODE_LIMIT:
            return np.where(decodes > DECODE_LIMIT, ns * (decodes / DECODE_LIMIT), ns)
        return ns

    def chunk_ns_of(self, tokens: Column, prefix: Column) -> Array:
        """`lookup.chunk_ns` of many chunks."""
        if tokens.max(initial=0) > TOKEN_LIMIT:
            ns = self.chunk_ns_of(np.minimum(tokens, TOKEN_LIMIT), prefix)
            return ns + self._pair * further_pairs_of(tokens, prefix, self.window)
        by_tokens, by_prefix = self._chunk_starts
        cells = by_tokens.take(tokens, mode="clip")
        cells += by_prefix.take(prefix, mode="clip")
        return evaluated(self._chunk, cells, (tokens.astype(float), prefix.astype(float)))

    def batch_ns_of(
        self, tokens: Column, prefix: Column, offsets: Column, decodes: Column, total: Column, largest: Column
    ) -> tuple[Array, Column]:
        """`lookup.batch_ns` of many batches, each with at least one chunk (as in ShapeColumns); and the tokens of each
        one's chunks."""
        further: Array | None = None
        end: Column | None = None
        prompts = tokens
        if len(tokens) > len(decodes):
            if self._uneven:
                end = np.maximum.reduceat(prefix + tokens, offsets[:-1])
            main = self._main_chunks(tokens, prefix, offsets, int((prefix if end is None else end).max()))
            if main is None:
                return self._one_by_one(tokens, prefix, offsets, decodes, total, largest)
            tokens, prefix, further, prompts = main
        mixed = self._beside_ns_of if self.fused else self._apart_ns_of
        if decodes.all():
            ns = mixed(tokens, prefix, further, end, decodes, total, largest)
        else:
            ns = np.empty(len(decodes))
            beside, alone = np.flatnonzero(decodes), np.flatnonzero(decodes == 0)
            ns[alone] = self._alone_ns_of(*_some(alone, tokens, prefix, further, end))
            if len(beside):
                ns[beside] = mixed(*_some(beside, tokens, prefix, further, end, decodes, total, largest))
        return ns, prompts

    def _alone_ns_of(self, tokens: Column, prefix: Column, further: Array | None, end: Column | None) -> Array:
        """Main chunks of batches without decodes, with what the others add."""
        ns = self.chunk_ns_of(tokens, prefix)
        if end is not None:
            ns += self._uneven * (end - (prefix + tokens))
        if further is not None:
            ns += further
        return ns

    def _apart_ns_of(
        self,
        tokens: Column,
        prefix: Column,
        further: Array | None,
        end: Column | None,
        decodes: Column,
        total: Column,
        largest: Column,
    ) -> Array:
        """Chunks and decodes as if they ran one after the other."""
        return self._alone_ns_of(tokens, prefix, further, None) + self.decode_ns_of(decodes, total, largest)

    def _beside_ns_of(
        self,
        tokens: Column,
        prefix: Column,
        further: Array | None,
        end: Column | None,
        decodes: Column,
        total: Column,
        largest: Column,
    ) -> Array:
        """Chunks and decodes in one kernel."""
        mean, reach = total / decodes, prefix + tokens
        if tokens.max() > TOKEN_LIMIT:
            longer: Array = self._pair * further_pairs_of(tokens, prefix, self.window)
            further = longer if further is None else further + longer
            tokens = np.minimum(tokens, TOKEN_LIMIT)
        by_tokens, by_prefix, by_decodes, by_context = self._beside_starts
        cells = by_tokens.take(tokens, mode="clip")
        cells += by_prefix.take(prefix, mode="clip")
        cells += by_decodes.take(decodes, mode="clip")
        cells += by_context.take(mean.astype(np.int64), mode="clip")
        # As floats, or each product would convert them anew.
        ns = evaluated(self._beside, cells, (tokens.astype(float), prefix.astype(float), decodes.astype(float), mean))
        if self._uneven:
            beyond = np.maximum(largest, reach if end is None else end) - np.maximum(mean, reach)
            np.maximum(beyond, 0.0, out=beyond)
            beyond *= self._uneven
            ns += beyond
        if further is not None:
            ns += further
        return ns

    def _main_chunks(
        self, tokens: Column, prefix: Column, offsets: Column, furthest: int
    ) -> tuple[Any, Any, Any, Any] | None:
        """Tokens and prefix of each batch's main chunk, what the others cost, and all tokens; None where shares
        overflow.

        furthest: no prefix is longer. A share ends with its chunk's tokens (`PACKED`): the largest says which chunk it
        was, and its prefix is what is left of it, an exact division.
        """
        shares_of, most = self._shares_of, self._largest_share
        try:
            start, slope = shares_of(tokens)
        except IndexError:
            shares_of = self._packed
            try:
                start, slope = shares_of(tokens)
            except IndexError:
                return None
            most = (float(start.max()), float(slope.max()))
        if most[0] + most[1] * furthest >= MOST_SHARE:
            return None
        slope *= prefix
        slope += start
        share = slope
        best = np.maximum.reduceat(share, offsets[:-1])
        if float(best.max()) * float((offsets[1:] - offsets[:-1]).max()) >= MOST_SHARE:
            return None
        sums = np.empty(len(share) + 1, np.int64)
        sums[0] = 0
        np.cumsum(share, out=sums[1:])
        at = sums.take(offsets)
        rest = at[1:] - at[:-1]
        rest -= best
        main = best & PACKED_TOKENS
        start, slope = shares_of(main)
        if not slope.all():
            return None
        best -= start
        prompts = rest & PACKED_TOKENS
        prompts += main
        rest >>= PACKED
        return main, (best / slope).astype(np.int64), rest * GRAIN, prompts

    def _shares_of(self, tokens: Column) -> tuple[Column, Column]:
        start, slope = self._shares
        return start.take(tokens), slope.take(tokens)

    def _one_by_one(
        self, tokens: Column, prefix: Column, offsets: Column, decodes: Column, total: Column, largest: Column
    ) -> tuple[Array, Column]:
        """The scalar twin's word, for batches that no engine runs: chunks of no token, seconds of attention a layer."""
        chunks = list(zip(tokens.tolist(), prefix.tolist(), strict=True))
        ends, one = offsets.tolist(), self.lookup.batch_ns
        rest = zip(decodes.tolist(), total.tolist(), largest.tolist(), strict=True)
        ns = np.array([one(chunks[ends[i] : ends[i + 1]], *batch) for i, batch in enumerate(rest)])
        return ns, np.add.reduceat(tokens, offsets[:-1])


def middles(axis: Axis) -> Array:
    """The middle of every cell."""
    return np.asarray((axis.knots[1:] + axis.knots[:-1]) / 2)


def _rising(values: Array, measured: NDArray[np.bool_]) -> Array:
    """A curve through `values` that never falls, no lower than what was measured at smaller coordinates.

    Elsewhere it lies midway between the bounds that never fall: the largest of all values at no larger coordinates and
    the smallest at no smaller ones. The upper bound alone would carry every ripple of a law to all sizes beyond it.
    """
    most = least = values
    known = np.where(measured, values, 0.0)
    for dimension in range(values.ndim):
        most = np.maximum.accumulate(most, axis=dimension)
        known = np.maximum.accumulate(known, axis=dimension)
        least = np.flip(np.minimum.accumulate(np.flip(least, dimension), axis=dimension), dimension)
    between: Array = np.maximum(np.sqrt(most * least), known)
    return between


def further_pairs_of(tokens: Column, prefix: Column, window: int) -> Column:
    """`attention_lookup.further_pairs` beyond TOKEN_LIMIT of many chunks; 0 for shorter ones."""
    more = np.maximum(tokens - TOKEN_LIMIT, 0)
    before = prefix + TOKEN_LIMIT
    growing = np.clip(window - before, 0, more) if window else more
    pairs: Column = growing * before + growing * (growing + 1) // 2 + (more - growing) * window
    return pairs


def _some(at: Column, *columns: Any) -> list[Any]:
    return [None if column is None else column.take(at) for column in columns]


def _tuples(table: NDArray[Any]) -> list[Any]:
    return list(map(tuple, table.tolist()))
