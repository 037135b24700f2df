"""One batch's attention from tables: the scalar half of `AttentionTables`, in the simulator's inner loop.

Python lists and tuples, because indexing them is several times cheaper than indexing arrays. The vector half does the
same operations in the same order, so both give equal numbers. Times are ns of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Line = tuple[float, float]
Bilinear = tuple[float, float, float, float]
Quadrilinear = tuple[
    float, float, float, float, float, float, float, float, float, float, float, float, float, float, float, float
]
"""The coefficients of a cell, as `attention_cells.polynomials` orders them."""

DECODE_LIMIT = 1024
"""Decodes in the tables; a row more is that of all beyond, a decode of which costs what one of so many does."""
TOKEN_LIMIT = 16384
"""Of a chunk in the tables; the pairs of further ones cost the same each."""
GRAIN = 2.0**-12
"""Nanoseconds that shares of the machine are counted in."""
PACKED = 21
"""Low bits of a share that hold its chunk's tokens, so that columns can tell whose the largest was. Of two equal shares
the one with more tokens is then the larger."""
PACKED_TOKENS = (1 << PACKED) - 1
MOST_CELLS = 1 << 14
"""Cells of a chunk beside decodes kept as tuples (9 MB)."""


class AttentionLookup:
    """What `AttentionTables` hands over.

    wide: cells of a decode's context. decode_cells, lines, beyond: cell by context, line by decodes * wide + cell, and
        by decodes what each token that the largest context has more than the mean costs.
    chunk_starts, prefix_cells, chunk_cells: of a chunk alone, cell of tokens plus cell of prefix.
    beside_starts: of a chunk beside decodes, by tokens, prefix and decodes. beside(at): coefficients of such a cell;
        cells of four axes are many, and few of them are visited: each becomes a tuple when first asked for. None: a
        chunk and decodes cost their sum.
    shares: of the machine, by a chunk's tokens, in GRAINs and PACKED; share_of(tokens) beyond them.
    pair: ns of a query and key of a chunk beyond TOKEN_LIMIT; window: tokens that it looks back, 0 for all.
    uneven: what each token costs by which the longest sequence exceeds what the main one reaches.
    """

    def __init__(
        self,
        *,
        wide: int,
        decode_cells: list[int],
        lines: list[Line],
        beyond: list[float],
        chunk_starts: list[int],
        prefix_cells: list[int],
        context_cells: list[int],
        chunk_cells: list[Bilinear],
        beside_starts: tuple[list[int], list[int], list[int]],
        beside: Callable[[int], Quadrilinear] | None,
        shares: list[tuple[int, int]],
        share_of: Callable[[int], tuple[int, int]],
        uneven: float,
        pair: float,
        window: int,
    ) -> None:
        self._wide, self._decode_cells, self._lines, self._beyond = wide, decode_cells, lines, beyond
        self._chunk_starts, self._prefix_cells, self._chunk_cells = chunk_starts, prefix_cells, chunk_cells
        self._context_cells = context_cells
        self._by_tokens, self._by_prefix, self._by_decodes = beside_starts
        self._beside = beside
        self._visited: dict[int, Quadrilinear] = {}
        self._shares, self._share_of, self._uneven = shares, share_of, uneven
        self._pair, self._window = pair, window

    def decode_ns(self, decodes: int, total: int, largest: int) -> float:
        """A batch of decodes and nothing else."""
        mean = total / decodes
        cells = self._decode_cells
        row = decodes if decodes <= DECODE_LIMIT else DECODE_LIMIT + 1
        at = int(mean)
        base, slope = self._lines[row * self._wide + (cells[at] if at < len(cells) else cells[-1])]
        ns = base + slope * mean
        if largest > mean:
            ns = ns + self._beyond[row] * (largest - mean)
        return ns if decodes <= DECODE_LIMIT else ns * (decodes / DECODE_LIMIT)

    def chunk_ns(self, tokens: int, prefix: int) -> float:
        """One chunk and nothing else."""
        starts, cells = self._chunk_starts, self._prefix_cells
        try:
            at = starts[tokens] + cells[prefix]
        except IndexError:
            if tokens > TOKEN_LIMIT:
                beyond = self._pair * further_pairs(tokens, TOKEN_LIMIT, prefix, self._window)
                return self.chunk_ns(TOKEN_LIMIT, prefix) + beyond
            at = _at(starts, tokens) + _at(cells, prefix)
        one, by_prefix, by_tokens, by_both = self._chunk_cells[at]
        return one + by_tokens * tokens + (by_prefix + by_both * tokens) * prefix

    def batch_ns(self, chunks: Sequence[tuple[int, int]], decodes: int, total: int, largest: int) -> float:
        """Chunks, with or without decodes beside them."""
        further = 0.0
        if len(chunks) == 1:
            tokens, prefix = chunks[0]
            if not decodes:
                return self.chunk_ns(tokens, prefix)
            end = prefix + tokens
        else:
            tokens, prefix, further, end = self._main_chunk(chunks)
        reach = float(prefix + tokens)
        if not decodes:
            ns = self.chunk_ns(tokens, prefix)
        elif self._beside is None:
            return self.chunk_ns(tokens, prefix) + further + self.decode_ns(decodes, total, largest)
        else:
            # One chunk beside decodes of equal context: `attention_cells.evaluated`, written out.
            mean = total / decodes
            by_tokens, by_prefix, by_decodes, cells = (
                self._by_tokens,
                self._by_prefix,
                self._by_decodes,
                self._context_cells,
            )
            try:
                at = by_tokens[tokens] + by_prefix[prefix] + by_decodes[decodes] + cells[int(mean)]
            except IndexError:
                if tokens > TOKEN_LIMIT:
                    further += self._pair * further_pairs(tokens, TOKEN_LIMIT, prefix, self._window)
                    tokens = TOKEN_LIMIT
                at = _at(by_tokens, tokens) + _at(by_prefix, prefix)
                at += _at(by_decodes, decodes) + _at(cells, int(mean))
            try:
                a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = self._visited[at]  # noqa: E741
            except KeyError:
                a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = self._visit(at)  # noqa: E741
            # As floats, or each product would convert them anew.
            x, y, z = tokens + 0.0, prefix + 0.0, decodes + 0.0
            low = a + i * x + (e + m * x) * y + (c + k * x + (g + o * x) * y) * z
            high = b + j * x + (f + n * x) * y + (d + l * x + (h + p * x) * y) * z
            ns = low + high * mean
            if mean > reach:
                reach = mean
            if largest > end:
                end = largest
        if end > reach:
            ns = ns + self._uneven * (end - reach)
        return ns + further

    def _visit(self, at: int) -> Quadrilinear:
        """Coefficients of a cell that was not visited yet (or long ago)."""
        assert self._beside is not None
        visited = self._visited
        if len(visited) >= MOST_CELLS:
            visited.clear()
        found = visited[at] = self._beside(at)
        return found

    def _main_chunk(self, chunks: Sequence[tuple[int, int]]) -> tuple[int, int, float, int]:
        """(tokens, prefix) of the chunk with most work, the others' share of the machine, the furthest end of any."""
        shares = self._shares
        best, total, end, main_tokens, main_prefix = -1, 0, 0, 0, 0
        for tokens, prefix in chunks:
            try:
                start, slope = shares[tokens]
            except IndexError:
                start, slope = self._share_of(tokens)
            share = start + slope * prefix
            total += share
            if share > best:
                best, main_tokens, main_prefix = share, tokens, prefix
            if prefix + tokens > end:
                end = prefix + tokens
        return main_tokens, main_prefix, (total - best >> PACKED) * GRAIN, end


def further_pairs(tokens: int, after: int, prefix: int, window: int) -> int:
    """Query-key pairs of a chunk beyond those of its first `after` tokens; window: keys a query sees at most, or 0."""
    more, before = tokens - after, prefix + after
    growing = max(0, min(more, window - before)) if window else more
    return growing * before + growing * (growing + 1) // 2 + (more - growing) * window


def _at(starts: list[int], coordinate: int) -> int:
    """The entry of a coordinate that may lie beyond the last knot."""
    return starts[coordinate if coordinate < len(starts) else len(starts) - 1]
