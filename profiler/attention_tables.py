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

from profiler.attention_law import CONTEXT_STEP, BatchLaw

Array = NDArray[np.float64]

TOKEN_LIMIT = 16384
CONTEXT_LIMIT = 131072
DECODE_LIMIT = 1024
_TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, TOKEN_LIMIT)
_CONTEXTS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, CONTEXT_LIMIT)
_DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, DECODE_LIMIT)


class AttentionSource(Protocol):
    """What tables are built from; `AttentionFit` is one. Microseconds of one layer."""

    batch_law: BatchLaw
    heads: int
    sms: int
    uneven_token_us: float

    def decode_us(self, decodes: ArrayLike, context: ArrayLike, typical: bool = False) -> Array: ...

    def prefill_us(self, tokens: ArrayLike, prefix: ArrayLike) -> Array: ...

    def batch_us(
        self, tokens: ArrayLike, prefix: ArrayLike, decodes: ArrayLike, context: ArrayLike, typical: bool = False
    ) -> Array: ...

    def uneven_decode_us(self, decodes: ArrayLike) -> Array: ...

    def knots(self, axis: str) -> ArrayLike: ...


class Axis:
    """Knots of one coordinate and, for every whole number up to the last knot, the cell it lies in."""

    def __init__(self, knots: ArrayLike) -> None:
        self.knots = np.unique(np.asarray(knots, float))
        self.cell = np.searchsorted(self.knots, np.arange(int(self.knots[-1]) + 1), side="right") - 1
        self.cell = np.clip(self.cell, 0, len(self.knots) - 2)
        self.last = len(self.cell) - 1
        self.inverse = 1.0 / np.diff(self.knots)

    def as_lists(self) -> tuple[list[int], list[float], list[float], int]:
        """(cells, knots, inverse widths, last whole number), as Python lists."""
        return self.cell.tolist(), self.knots.tolist(), self.inverse.tolist(), self.last

    def locate(self, values: Any) -> tuple[NDArray[np.int64], Array]:
        """(cell, weight of its upper knot); beyond the last knot the last cell is continued in a straight line."""
        cell = self.cell[np.minimum(values, self.last).astype(np.int64)]
        return cell, (values - self.knots[cell]) * self.inverse[cell]


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
        self.tokens = Axis([*_TOKENS, *source.knots("tokens")])
        self.decodes = Axis([*_DECODES, *source.knots("decodes")])
        far = self._seen(self.contexts.knots)
        near = self.tokens.knots

        # Decodes alone: for every number of decodes, an intercept and a slope in each context cell.
        counts = np.arange(DECODE_LIMIT + 1, dtype=float)
        value = source.decode_us(np.maximum(counts, 1)[:, None], far[None, :], typical) * 1e3
        slope = np.diff(value, axis=1) * self.contexts.inverse
        self._decode_slope = np.concatenate([slope, slope[:, -1:]], axis=1)
        self._decode_base = value - self._decode_slope * self.contexts.knots
        self._decode_row = len(self.contexts.knots)
        captured = padded(np.arange(DECODE_LIMIT + 1)) if padded else counts
        self._beyond = source.uneven_decode_us(np.maximum(captured, 1)) * (1e3 if uneven else 0.0)

        # One chunk alone, and one chunk beside decodes.
        self._chunk = source.prefill_us(near[:, None], far[None, :]) * 1e3
        grid = np.meshgrid(near, far, self.decodes.knots, far, indexing="ij", sparse=True)
        shape = tuple(axis.size for axis in grid)
        everywhere = np.broadcast_to(source.batch_us(*grid, typical) * 1e3, shape) if fused else np.zeros(0)
        self._mixed = everywhere.reshape(-1)
        self._strides = (
            len(far) * len(self.decodes.knots) * len(far),
            len(self.decodes.knots) * len(far),
            len(far),
        )
        law, machine = source.batch_law, source.heads / source.sms * 1e3
        self._share_block = (law.block + 0.5 * (1.0 - law.query_rows / CONTEXT_STEP) * law.step) * machine
        self._share_step = law.step * machine / CONTEXT_STEP
        self._share_token = law.write
        self._query_rows = law.query_rows
        self._uneven = source.uneven_token_us * 1e3 * (1.0 if uneven else 0.0)
        self._make_lists()

    def _make_lists(self) -> None:
        """Python lists of the same numbers: indexing them is several times cheaper than indexing arrays."""
        self._base_list: list[float] = self._decode_base.reshape(-1).tolist()
        self._slope_list: list[float] = self._decode_slope.reshape(-1).tolist()
        self._beyond_list: list[float] = self._beyond.tolist()
        self._chunk_list: list[float] = self._chunk.reshape(-1).tolist()
        self._mixed_list: list[float] = self._mixed.tolist()
        self._token_axis = self.tokens.as_lists()
        self._decode_axis = self.decodes.as_lists()
        self._context_axis = self.contexts.as_lists()

    def scaled(self, decode: float, chunk: float, mixed: float) -> AttentionTables:
        """The same tables with decodes alone, chunks alone and chunks beside decodes multiplied by a factor each."""
        other = copy(self)
        other._decode_base, other._decode_slope = self._decode_base * decode, self._decode_slope * decode
        other._beyond = self._beyond * decode
        other._chunk, other._mixed = self._chunk * chunk, self._mixed * mixed
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
        whole = int(mean)
        cells, _, _, end = self._context_axis
        cell = cells[whole if whole < end else end]
        row = decodes if decodes < DECODE_LIMIT else DECODE_LIMIT
        at = row * self._decode_row + cell
        ns = self._base_list[at] + self._slope_list[at] * mean
        if largest > mean:
            ns = ns + self._beyond_list[row] * (largest - mean)
        return ns if decodes <= DECODE_LIMIT else ns * (decodes / DECODE_LIMIT)

    def chunk_ns(self, tokens: int, prefix: int) -> float:
        """One chunk and nothing else."""
        cells, knots, inverse, end = self._token_axis
        i = cells[tokens if tokens < end else end]
        x = (tokens - knots[i]) * inverse[i]
        cells, knots, inverse, end = self._context_axis
        j = cells[prefix if prefix < end else end]
        y = (prefix - knots[j]) * inverse[j]
        width, table = self._decode_row, self._chunk_list
        at = i * width + j
        low, high = table[at], table[at + width]
        low = low + (table[at + 1] - low) * y
        high = high + (table[at + width + 1] - high) * y
        return low + (high - low) * x

    def batch_ns(self, chunks: Sequence[tuple[int, int]], decodes: int, total: int, largest: int) -> float:
        """Chunks, with or without decodes beside them."""
        tokens, prefix = chunks[0]
        further, end = 0.0, prefix + tokens
        if len(chunks) > 1:
            tokens, prefix, further, end = self._main_chunk(chunks)
        if not decodes:
            ns, reach = self.chunk_ns(tokens, prefix), prefix + tokens
        elif not self.fused:
            return self.chunk_ns(tokens, prefix) + further + self.decode_ns(decodes, total, largest)
        else:
            mean = total / decodes
            ns = self._beside_ns(tokens, prefix, decodes, mean)
            reach = prefix + tokens
            if mean > reach:
                reach = mean
            if largest > end:
                end = largest
        if end > reach:
            ns = ns + self._uneven * (end - reach)
        return ns + further

    def _main_chunk(self, chunks: Sequence[tuple[int, int]]) -> tuple[int, int, float, int]:
        """(tokens, prefix) of the chunk with most work, the others' share of the machine, the furthest end of any."""
        block, step, each, rows = self._share_block, self._share_step, self._share_token, self._query_rows
        best, total, end, main = -1.0, 0.0, 0, (0, 0)
        for tokens, prefix in chunks:
            blocks = (tokens + rows - 1) // rows
            share = blocks * (block + step * (prefix + 0.5 * tokens + 0.5 * rows)) + each * tokens
            total = total + share
            if share > best:
                best, main = share, (tokens, prefix)
            if prefix + tokens > end:
                end = prefix + tokens
        return main[0], main[1], total - best, end

    def _beside_ns(self, tokens: int, prefix: int, decodes: int, mean: float) -> float:
        """One chunk beside decodes of equal context: sixteen corners, fewer where a coordinate sits on a knot.

        Written out, since calls would cost as much as the arithmetic: lerp along the mean context (w), the number of
        decodes (z), the prefix (y) and the tokens (x), as `_beside_ns_of` does in columns.
        """
        cells, knots, inverse, end = self._token_axis
        i = cells[tokens if tokens < end else end]
        x = (tokens - knots[i]) * inverse[i]
        cells, knots, inverse, end = self._decode_axis
        k = cells[decodes if decodes < end else end]
        z = (decodes - knots[k]) * inverse[k]
        cells, knots, inverse, end = self._context_axis
        j = cells[prefix if prefix < end else end]
        y = (prefix - knots[j]) * inverse[j]
        whole = int(mean)
        last = cells[whole if whole < end else end]
        w = (mean - knots[last]) * inverse[last]
        first, second, third = self._strides
        v = self._mixed_list
        at = i * first + j * second + k * third + last
        low = v[at]
        low = low + (v[at + 1] - low) * w
        if z:
            over = v[at + third]
            over = over + (v[at + third + 1] - over) * w
            low = low + (over - low) * z
        if y:
            to = at + second
            high = v[to]
            high = high + (v[to + 1] - high) * w
            if z:
                over = v[to + third]
                over = over + (v[to + third + 1] - over) * w
                high = high + (over - high) * z
            low = low + (high - low) * y
        if not x:
            return low
        at += first
        far = v[at]
        far = far + (v[at + 1] - far) * w
        if z:
            over = v[at + third]
            over = over + (v[at + third + 1] - over) * w
            far = far + (over - far) * z
        if y:
            to = at + second
            high = v[to]
            high = high + (v[to + 1] - high) * w
            if z:
                over = v[to + third]
                over = over + (v[to + third + 1] - over) * w
                high = high + (over - high) * z
            far = far + (high - far) * y
        return low + (far - low) * x

    # --- vector ------------------------------------------------------------------------------------------------------

    def decode_ns_of(self, decodes: NDArray[np.int64], total: NDArray[np.int64], largest: NDArray[np.int64]) -> Array:
        """`decode_ns` of many batches, each with at least one decode."""
        mean = total / decodes
        cell = self.contexts.cell[np.minimum(mean, self.contexts.last).astype(np.int64)]
        row = np.minimum(decodes, DECODE_LIMIT)
        ns = self._decode_base[row, cell] + self._decode_slope[row, cell] * mean
        ns = np.where(largest > mean, ns + self._beyond[row] * (largest - mean), ns)
        return np.where(decodes > DECODE_LIMIT, ns * (decodes / DECODE_LIMIT), ns)

    def chunk_ns_of(self, tokens: NDArray[np.int64], prefix: NDArray[np.int64]) -> Array:
        """`chunk_ns` of many chunks."""
        i, x = self.tokens.locate(tokens)
        j, y = self.contexts.locate(prefix)
        low, high = self._chunk[i, j], self._chunk[i + 1, j]
        low = low + (self._chunk[i, j + 1] - low) * y
        high = high + (self._chunk[i + 1, j + 1] - high) * y
        return low + (high - low) * x

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
        starts = offsets[:-1]
        query_rows = self._query_rows
        blocks = (tokens + (query_rows - 1)) // query_rows
        share = blocks * (self._share_block + self._share_step * (prefix + 0.5 * tokens + 0.5 * query_rows))
        share = share + self._share_token * tokens
        sizes = np.diff(offsets)
        best = np.maximum.reduceat(share, starts)
        is_best = np.flatnonzero(share == np.repeat(best, sizes))
        main = is_best[np.searchsorted(is_best, starts)]
        end = np.maximum.reduceat(prefix + tokens, starts)
        summed = _running_sums(share, offsets)
        further = np.where(sizes > 1, summed - best, 0.0)
        main_tokens, main_prefix = tokens[main], prefix[main]
        reach = (main_tokens + main_prefix).astype(float)
        ns = np.empty(len(starts))
        alone = decodes == 0
        ns[alone] = self.chunk_ns_of(main_tokens[alone], main_prefix[alone])
        beside = ~alone
        if beside.any():
            n, mean = decodes[beside], total[beside] / decodes[beside]
            if self.fused:
                ns[beside] = self._beside_ns_of(main_tokens[beside], main_prefix[beside], n, mean)
                reach[beside] = np.maximum(reach[beside], mean)
                end = np.where(beside, np.maximum(end, largest), end)
            else:
                parts = self.chunk_ns_of(main_tokens[beside], main_prefix[beside]) + further[beside]
                ns[beside] = parts + self.decode_ns_of(n, total[beside], largest[beside])
        ns = np.where((end > reach) & (alone | self.fused), ns + self._uneven * (end - reach), ns)
        return np.where(alone | self.fused, ns + further, ns)

    def _beside_ns_of(self, tokens: Any, prefix: Any, decodes: Any, mean: Any) -> Array:
        i, x = self.tokens.locate(tokens)
        j, y = self.contexts.locate(prefix)
        k, z = self.decodes.locate(decodes)
        last, w = self.contexts.locate(mean)
        first, second, third = self._strides
        v = self._mixed
        at = i * first + j * second + k * third + last

        def pair(at: NDArray[np.int64]) -> Array:
            low, high = v[at], v[at + third]
            low = low + (v[at + 1] - low) * w
            high = high + (v[at + third + 1] - high) * w
            return low + (high - low) * z

        low, high = pair(at), pair(at + first)
        low = low + (pair(at + second) - low) * y
        high = high + (pair(at + first + second) - high) * y
        return low + (high - low) * x


def _running_sums(values: Array, offsets: NDArray[np.int64]) -> Array:
    """Sum of each batch's values added one after the other from 0.0, exactly as the scalar loop adds them."""
    total = np.zeros(len(offsets) - 1)
    sizes = np.diff(offsets)
    for step in range(int(sizes.max(initial=0))):
        has = sizes > step
        total[has] = total[has] + values[offsets[:-1][has] + step]
    return total
