"""Attention of one layer as dense tables: what the simulator's inner loop looks up.

A fit is evaluated once at every knot; after that a decode-only batch is one cell and one multiply-add, a chunk is a
bilinear cell, and a chunk beside decodes a cell of four axes. `lookup` is the scalar twin of the vector functions here:
same cells, same operations in the same order, so both give equal numbers. Times are ns.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.attention_cells import Axis, evaluated, polynomials
from profiler.attention_law import CONTEXT_STEP, BatchLaw
from profiler.attention_lookup import DECODE_LIMIT, GRAIN, AttentionLookup
from profiler.prefill_law import PrefillLaw

Array = NDArray[np.float64]

TOKEN_LIMIT = 16384
CONTEXT_LIMIT = 131072
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
        *,
        window: int | None = None,
        fused: bool = True,
        uneven: bool = True,
        typical: bool = True,
        padded: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
    ) -> None:
        """window: tokens that attention looks back. fused False: a chunk and decodes cost their sum (an ablation).

        uneven False: contexts are taken as equal (an ablation). typical False: contexts lie just above a step, as
        profiles measure them (an ablation). padded: batch sizes as a CUDA graph was captured for,
        which is when a kernel decides whether to split contexts.
        """
        self.window = window or 0
        self.fused = fused
        self.contexts = Axis([*_CONTEXTS, *source.knots("context")])
        self.alone = Axis([*self.contexts.knots, *source.knots("context", MOST_ALONE)])
        self.tokens = Axis([*_TOKENS, *source.knots("tokens")])
        self.decodes = Axis([*_DECODES, *source.knots("decodes")])
        far = self._seen(self.contexts.knots)
        near = self.tokens.knots

        # Decodes alone: for every number of decodes, an intercept and a slope in each context cell.
        counts = np.arange(DECODE_LIMIT + 1, dtype=float)
        seen = self._seen(self.alone.knots)
        value = source.decode_us(np.maximum(counts, 1)[:, None], seen[None, :], typical) * 1e3
        slope = np.diff(value, axis=1) / np.diff(self.alone.knots)
        base = value[:, :-1] - slope * self.alone.knots[:-1]
        self._decode = np.stack([base, slope], axis=-1).reshape(-1, 2)
        captured = padded(np.arange(DECODE_LIMIT + 1)) if padded else counts
        self._beyond = source.uneven_decode_us(np.maximum(captured, 1)) * (1e3 if uneven else 0.0)

        # One chunk alone, and one chunk beside decodes.
        self.chunks = Axis([*self.tokens.knots, *source.knots("tokens", MOST_ALONE)])
        if source.prefill_law is not None:
            self.chunks = Axis([*self.chunks.knots, *_BLOCKS])
        chunk = source.prefill_us(self.chunks.knots[:, None], far[None, :]) * 1e3
        self._chunk = polynomials(chunk, (self.chunks, self.contexts))
        self._beside = np.zeros((0, 16))
        if fused:
            grid = np.meshgrid(near, far, self.decodes.knots, far, indexing="ij", sparse=True)
            shape = tuple(axis.size for axis in grid)
            everywhere = np.broadcast_to(source.batch_us(*grid, typical) * 1e3, shape)
            self._beside = polynomials(everywhere, (self.tokens, self.contexts, self.decodes, self.contexts))

        law, machine = source.batch_law, source.heads / source.sms * 1e3
        self._query_rows = law.query_rows
        self._share_block = (law.block + 0.5 * (1.0 - law.query_rows / CONTEXT_STEP) * law.step) * machine
        self._share_step = law.step * machine / CONTEXT_STEP
        self._share_token = law.write
        self._uneven = source.uneven_token_us * 1e3 * (1.0 if uneven else 0.0)
        self._make_lists()

    def _make_lists(self) -> None:
        """The same numbers for the scalar twin."""
        wide, tall = self.contexts.cells, self.decodes.cells
        self._strides = (wide * tall * wide, tall * wide, wide)
        first, second, third = self._strides
        self._shares = self._share_of(np.arange(TOKEN_LIMIT + 1))
        coefficients = self._beside

        def beside(at: int) -> Any:
            return tuple(coefficients[at].tolist())

        def share_of(tokens: int) -> Any:
            return tuple(self._share_of(np.array(tokens)).tolist())

        self.lookup = AttentionLookup(
            wide=self.alone.cells,
            decode_cells=self.alone.starts(1),
            lines=_tuples(self._decode),
            beyond=self._beyond.tolist(),
            chunk_starts=self.chunks.starts(wide),
            context_cells=self.contexts.starts(1),
            chunk_cells=_tuples(self._chunk),
            beside_starts=(self.tokens.starts(first), self.contexts.starts(second), self.decodes.starts(third)),
            beside=beside if self.fused else None,
            shares=_tuples(self._shares.T),
            share_of=share_of,
            uneven=self._uneven,
        )

    def _share_of(self, tokens: Any) -> NDArray[np.int64]:
        """A chunk's share of the machine: an intercept and a slope over its prefix, by its tokens; in whole GRAINs, so
        that the order of a sum does not matter."""
        rows = self._query_rows
        blocks = (tokens + (rows - 1)) // rows
        start = blocks * (self._share_block + self._share_step * (0.5 * tokens + 0.5 * rows))
        line = np.stack([start + self._share_token * tokens, blocks * self._share_step])
        return np.asarray(np.rint(line / GRAIN), np.int64)

    def scaled(self, decode: float, chunk: float, mixed: float) -> AttentionTables:
        """The same tables with decodes alone, chunks alone and chunks beside decodes multiplied by a factor each."""
        other = copy(self)
        other._decode, other._beyond = self._decode * decode, self._beyond * decode
        other._chunk, other._beside = self._chunk * chunk, self._beside * mixed
        other._share_block, other._share_step = self._share_block * chunk, self._share_step * chunk
        other._share_token = self._share_token * chunk
        other._uneven = self._uneven * mixed
        other._make_lists()
        return other

    def _seen(self, context: Any) -> Any:
        """Contexts as attention sees them under a sliding window."""
        return np.minimum(context, self.window) if self.window else context

    # --- vector ------------------------------------------------------------------------------------------------------

    def decode_ns_of(self, decodes: NDArray[np.int64], total: NDArray[np.int64], largest: NDArray[np.int64]) -> Array:
        """`lookup.decode_ns` of many batches, each with at least one decode."""
        mean = total / decodes
        row = np.minimum(decodes, DECODE_LIMIT)
        found = self._decode[row * self.alone.cells + self.alone.of(mean)]
        ns = found[:, 0] + found[:, 1] * mean
        ns += self._beyond[row] * np.maximum(largest - mean, 0.0)
        if decodes.max(initial=0) > DECODE_LIMIT:
            return np.where(decodes > DECODE_LIMIT, ns * (decodes / DECODE_LIMIT), ns)
        return ns

    def chunk_ns_of(self, tokens: NDArray[np.int64], prefix: NDArray[np.int64]) -> Array:
        """`lookup.chunk_ns` of many chunks."""
        cells = self.chunks.of(tokens) * self.contexts.cells + self.contexts.of(prefix)
        return evaluated(self._chunk, cells, (tokens, prefix))

    def batch_ns_of(
        self,
        tokens: NDArray[np.int64],
        prefix: NDArray[np.int64],
        offsets: NDArray[np.int64],
        decodes: NDArray[np.int64],
        total: NDArray[np.int64],
        largest: NDArray[np.int64],
    ) -> Array:
        """`lookup.batch_ns` of many batches, each with at least one chunk; chunks as in ShapeColumns."""
        further: Array | None = None
        if len(tokens) == len(decodes):
            end = reach = prefix + tokens
        else:
            tokens, prefix, further, end = self._main_chunks(tokens, prefix, offsets)
            reach = prefix + tokens
        ns = np.empty(len(decodes))
        beside = decodes > 0
        if beside.all():
            some: Any = slice(None)
        else:
            alone = ~beside
            ns[alone] = self.chunk_ns_of(tokens[alone], prefix[alone])
            some = beside
        if beside.any():
            t, p, n, all_of_them, longest = tokens[some], prefix[some], decodes[some], total[some], largest[some]
            if not self.fused:
                apart = self.chunk_ns_of(t, p) if further is None else self.chunk_ns_of(t, p) + further[some]
                ns[some] = apart + self.decode_ns_of(n, all_of_them, longest)
            else:
                mean = all_of_them / n
                ns[some] = self._beside_ns_of(t, p, n, mean)
                reach = reach.astype(float)
                reach[some] = np.maximum(reach[some], mean)
                end = end.copy()
                end[some] = np.maximum(end[some], longest)
        if self.fused:
            ns += self._uneven * np.maximum(end - reach, 0.0)
            return ns if further is None else ns + further
        if further is not None:
            ns = np.where(beside, ns, ns + self._uneven * np.maximum(end - reach, 0.0) + further)
        return ns

    def _main_chunks(self, tokens: Any, prefix: Any, offsets: Any) -> tuple[Any, Any, Array, Any]:
        """The main chunk (`lookup`) of many batches."""
        starts, sizes = offsets[:-1], np.diff(offsets)
        inside = tokens.max() <= TOKEN_LIMIT
        share, slope = self._shares.take(tokens, axis=1) if inside else self._share_of(tokens)
        share += slope * prefix
        best = np.maximum.reduceat(share, starts)
        main = np.flatnonzero(share == np.repeat(best, sizes))
        if len(main) > len(starts):
            main = main[np.searchsorted(main, starts)]
        further = (np.add.reduceat(share, starts) - best) * GRAIN
        return tokens[main], prefix[main], further, np.maximum.reduceat(prefix + tokens, starts)

    def _beside_ns_of(self, tokens: Any, prefix: Any, decodes: Any, mean: Any) -> Array:
        first, second, third = self._strides
        cells = self.tokens.of(tokens) * first
        cells += self.contexts.of(prefix) * second
        cells += self.decodes.of(decodes) * third
        cells += self.contexts.of(mean)
        return evaluated(self._beside, cells, (tokens, prefix, decodes, mean))


def _tuples(table: NDArray[Any]) -> list[Any]:
    return list(map(tuple, table.tolist()))

