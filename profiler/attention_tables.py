"""Attention of one layer as dense tables: what the simulator's inner loop looks up.

`AttentionTables.build` evaluates a fit once at every knot; after that a decode-only batch is one cell and one
multiply-add, a chunk is a bilinear cell, and a chunk beside decodes a cell of four axes. The scalar functions are the
plain twins of the vector ones: same cells, same operations in the same order, so both give equal numbers. Times are ns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.attention_cells import Axis, evaluated, polynomials
from profiler.attention_law import CONTEXT_STEP, BatchLaw
from profiler.prefill_law import PrefillLaw

Array = NDArray[np.float64]

TOKEN_LIMIT = 16384
CONTEXT_LIMIT = 131072
DECODE_LIMIT = 1024
MOST_ALONE = 64
"""Measured coordinates along an axis that decodes alone, and chunks alone, take as knots: their tables are small."""
GRAIN = 2.0**-20
"""Nanoseconds that shares of the machine are counted in."""
MOST_CELLS = 1 << 14
"""Cells of a chunk beside decodes kept as tuples (9 MB)."""
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
        """Python lists and tuples of the same numbers: indexing them is several times cheaper than indexing arrays."""
        wide, tall = self.contexts.cells, self.decodes.cells
        self._strides = (wide * tall * wide, tall * wide, wide)
        first, second, third = self._strides
        context_cell = self.contexts.starts(1)
        self._decode_lookup = (self.alone.cells, self.alone.starts(1), _tuples(self._decode), self._beyond.tolist())
        self._chunk_lookup = (self.chunks.starts(wide), context_cell, _tuples(self._chunk))
        # Cells of four axes are many, and few of them are visited: each becomes a tuple when first asked for.
        cells: dict[int, tuple[float, ...]] = {}
        lists = (self.tokens.starts(first), self.contexts.starts(second), self.decodes.starts(third), context_cell)
        self._beside_lookup = (*lists, cells)
        self._shares = self._share_of(np.arange(TOKEN_LIMIT + 1))
        self._share_list: list[tuple[int, int]] = _tuples(self._shares.T)

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

    # --- scalar ------------------------------------------------------------------------------------------------------

    def decode_ns(self, decodes: int, total: int, largest: int) -> float:
        """A batch of decodes and nothing else."""
        mean = total / decodes
        wide, cells, table, beyond = self._decode_lookup
        row = decodes if decodes < DECODE_LIMIT else DECODE_LIMIT
        try:
            base, slope = table[row * wide + cells[int(mean)]]
        except IndexError:
            base, slope = table[row * wide + cells[-1]]
        ns = base + slope * mean
        if largest > mean:
            ns = ns + beyond[row] * (largest - mean)
        return ns if decodes <= DECODE_LIMIT else ns * (decodes / DECODE_LIMIT)

    def chunk_ns(self, tokens: int, prefix: int) -> float:
        """One chunk and nothing else."""
        starts, cells, table = self._chunk_lookup
        try:
            one, by_prefix, by_tokens, by_both = table[starts[tokens] + cells[prefix]]
        except IndexError:
            one, by_prefix, by_tokens, by_both = table[_at(starts, tokens) + _at(cells, prefix)]
        return one + by_tokens * tokens + (by_prefix + by_both * tokens) * prefix

    def batch_ns(self, chunks: Sequence[tuple[int, int]], decodes: int, total: int, largest: int) -> float:
        """Chunks, with or without decodes beside them."""
        if len(chunks) == 1:
            ((tokens, prefix),) = chunks
            if not decodes:
                return self.chunk_ns(tokens, prefix)
            further, end = 0.0, prefix + tokens
        else:
            tokens, prefix, further, end = self._main_chunk(chunks)
        if not decodes:
            ns, reach = self.chunk_ns(tokens, prefix), prefix + tokens
        elif not self.fused:
            return self.chunk_ns(tokens, prefix) + further + self.decode_ns(decodes, total, largest)
        else:
            # One chunk beside decodes of equal context: `attention_cells.evaluated`, written out.
            mean = total / decodes
            by_tokens, by_prefix, by_decodes, by_mean, cells = self._beside_lookup
            try:
                at = by_tokens[tokens] + by_prefix[prefix] + by_decodes[decodes] + by_mean[int(mean)]
            except IndexError:
                at = _at(by_tokens, tokens) + _at(by_prefix, prefix)
                at += _at(by_decodes, decodes) + _at(by_mean, int(mean))
            try:
                a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = cells[at]  # noqa: E741
            except KeyError:
                a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = self._cell_beside(at)  # noqa: E741
            # As floats, or each product would convert them anew.
            x, y, z = tokens + 0.0, prefix + 0.0, decodes + 0.0
            low = a + i * x + (e + m * x) * y + (c + k * x + (g + o * x) * y) * z
            high = b + j * x + (f + n * x) * y + (d + l * x + (h + p * x) * y) * z
            ns = low + high * mean
            reach = prefix + tokens
            if mean > reach:
                reach = mean
            if largest > end:
                end = largest
        if end > reach:
            ns = ns + self._uneven * (end - reach)
        return ns + further

    def _cell_beside(self, at: int) -> tuple[float, ...]:
        """Coefficients of a cell that was not visited yet (or long ago)."""
        cells = self._beside_lookup[-1]
        if len(cells) >= MOST_CELLS:
            cells.clear()
        cells[at] = tuple(self._beside[at].tolist())
        return cells[at]

    def _main_chunk(self, chunks: Sequence[tuple[int, int]]) -> tuple[int, int, float, int]:
        """(tokens, prefix) of the chunk with most work, the others' share of the machine, the furthest end of any."""
        shares = self._share_list
        best, total, end, main = -1, 0, 0, (0, 0)
        for chunk in chunks:
            tokens, prefix = chunk
            try:
                start, slope = shares[tokens]
            except IndexError:
                start, slope = self._share_of(np.array(tokens)).tolist()
            share = start + slope * prefix
            total += share
            if share > best:
                best, main = share, chunk
            if prefix + tokens > end:
                end = prefix + tokens
        return *main, (total - best) * GRAIN, end

    # --- vector ------------------------------------------------------------------------------------------------------

    def decode_ns_of(self, decodes: NDArray[np.int64], total: NDArray[np.int64], largest: NDArray[np.int64]) -> Array:
        """`decode_ns` of many batches, each with at least one decode."""
        mean = total / decodes
        row = np.minimum(decodes, DECODE_LIMIT)
        found = self._decode[row * self.alone.cells + self.alone.of(mean)]
        ns = found[:, 0] + found[:, 1] * mean
        ns += self._beyond[row] * np.maximum(largest - mean, 0.0)
        if decodes.max(initial=0) > DECODE_LIMIT:
            return np.where(decodes > DECODE_LIMIT, ns * (decodes / DECODE_LIMIT), ns)
        return ns

    def chunk_ns_of(self, tokens: NDArray[np.int64], prefix: NDArray[np.int64]) -> Array:
        """`chunk_ns` of many chunks."""
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
        """`batch_ns` of many batches, each with at least one chunk; chunks as in ShapeColumns."""
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
        """`_main_chunk` of many batches."""
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


def _at(starts: list[int], coordinate: int) -> int:
    """The entry of a coordinate that may lie beyond the last knot."""
    return starts[min(coordinate, len(starts) - 1)]
