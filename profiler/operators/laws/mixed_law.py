"""What a chunk beside decodes costs in attention, as physics: blocks dealt one by one, and a cache that shares reads.

One kernel starts, head by head, a thread block for every 64 query rows of the chunk and one for every decode, which
walks its whole context with one useful row. Blocks go to whichever processor is free first. The query heads of a KV
head read the same keys: heads that run at the same time share one read, heads that run one after another share it only
while the cache holds what one KV head reads. Beyond that every head waits for memory, which is a cliff of a factor of
two to three in the measurements.

Dealing takes 50 microseconds a batch, so this law serves fits; models keep it as evaluated tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.operators.laws.smooth_batch_law import context_steps

Array = NDArray[np.float64]

MOST_WAVES = 6
"""Of blocks are dealt; the heads before them are taken as spread evenly (P95 of the error 3 %, median 0.3 %)."""
TOGETHER = 1024
"""Batches dealt at once."""

BLOCK_STEPS = (0.25, 0.5, 1.0)
EMPTY_STEPS = (0.05, 0.1, 0.2)
"""What blocks may cost besides their context, and blocks with nothing to do, in steps: a fit tries these."""
SAMPLE, MOST_ROWS = 400, 4000
"""Batches that the costs of blocks are chosen on, and prices fitted to."""
CACHES = (40.0, 80.0, 160.0, 320.0)
"""Thousands of tokens of one KV head that a cache may hold: where a fit starts."""
MISSES_FROM, MISSES_ALL = 0.8, 1.6
"""Of the cache's size: where reads of the next head begin to miss, and where all of them do."""


@dataclass(frozen=True)
class MixedLaw:
    """Coefficients of `us`. `slots`, `rows`, `stride` as in `PrefillLaw`; `sharing`: query heads a KV head.

    launch: microseconds of the kernels. step: of `stride` tokens for a block. block, decode_block, empty: of a block of
    the chunk, a decode, a block that finds nothing to do, in steps. write: microseconds to store 1000 tokens.
    read: of 1000 tokens of one KV head from memory. cache: thousands of tokens of one KV head that the cache holds.
    apart, beside: how many waves the heads of one KV head are spread over: apart + those of their decodes + beside x
    those of the chunk's blocks.
    """

    launch: float
    step: float
    block: float
    decode_block: float
    empty: float
    write: float
    read: float
    cache: float
    apart: float
    beside: float
    slots: int
    rows: int
    stride: int
    sharing: int

    def us(
        self,
        heads: int,
        tokens: ArrayLike,
        prefix: ArrayLike,
        decodes: ArrayLike,
        context: ArrayLike,
        typical: bool = False,
    ) -> Array:
        """One chunk beside `decodes` decodes of `context` tokens each, one layer; `typical` as in `context_steps`."""
        columns = np.broadcast_arrays(*(np.asarray(one, float) for one in (tokens, prefix, decodes, context)))
        shapes, back = np.unique(np.stack([one.ravel() for one in columns], axis=1), axis=0, return_inverse=True)
        return self._priced(heads, shapes, dealt(heads, shapes, self, typical))[back.ravel()].reshape(columns[0].shape)

    def _priced(self, heads: int, shapes: Array, steps: Array) -> Array:
        tokens, _, decodes, context = shapes.T
        busy = self.step * steps
        kv_heads = heads / self.sharing
        waves = self.sharing * (decodes + self.beside * np.ceil(tokens / self.rows)) / self.slots
        waves = np.clip(self.apart + waves, 1.0, self.sharing)
        thousands = decodes * context / 1000.0
        missed = np.clip((thousands / self.cache - MISSES_FROM) / (MISSES_ALL - MISSES_FROM), 0.0, 1.0)
        waiting = np.maximum(0.0, self.read * thousands - busy / (kv_heads * waves))
        reads = kv_heads * (1.0 + (waves - 1.0) * missed)
        return np.asarray(self.launch + busy + reads * waiting + self.write * (tokens + decodes) / 1000.0)


def fit_mixed_law(
    heads: int, kv_heads: int, deal: tuple[int, int, int], columns: Sequence[ArrayLike], us: ArrayLike
) -> MixedLaw:
    """The law with the least relative error over (tokens, prefix, decodes, context) `columns`.

    deal: slots, rows, stride of the chunks' own law. What blocks cost is chosen on a small sample, prices are then
    fitted to a large one, outliers weighted down.
    """
    from scipy.optimize import least_squares

    shapes = np.stack(np.broadcast_arrays(*(np.asarray(one, float) for one in columns)), axis=1)
    times = np.asarray(us, float)
    cores, rows, stride = deal
    law = MixedLaw(4.0, 4.0, 0.5, 0.5, 0.1, 2.0, 0.3, 160.0, 0.5, 1.0, cores, rows, stride, heads // kv_heads)
    chosen = np.random.default_rng(0).permutation(len(times))
    names = ("launch", "step", "write", "read", "cache", "apart", "beside")

    def fitted(law: MixedLaw, some: Array, measured: Array, tries: int = 40) -> tuple[float, MixedLaw]:
        steps = dealt(heads, some, law)

        def law_of(x: Array) -> MixedLaw:
            return replace(law, **dict(zip(names, np.exp(x).tolist(), strict=True)))

        start = np.log([getattr(law, name) for name in names])
        found = least_squares(
            lambda x: np.log(law_of(x)._priced(heads, some, steps) / measured),
            start,
            loss="soft_l1",
            f_scale=0.02,
            bounds=(start - 3.0, start + 3.0),
            max_nfev=tries,
        )
        return float(found.cost), law_of(found.x)

    some, measured = shapes[chosen[:SAMPLE]], times[chosen[:SAMPLE]]
    starts = [replace(law, cache=cache) for cache in CACHES]
    law = min((fitted(start, some, measured) for start in starts), key=lambda one: one[0])[1]
    tried = (
        replace(law, block=block, decode_block=decode_block, empty=empty)
        for block, decode_block, empty in product(BLOCK_STEPS, BLOCK_STEPS, EMPTY_STEPS)
    )
    law = min((fitted(one, some, measured, 6) for one in tried), key=lambda one: one[0])[1]
    many = chosen[:MOST_ROWS]
    return fitted(law, shapes[many], times[many])[1]


_known: dict[tuple[object, ...], dict[bytes, float]] = {}
MOST_KNOWN = 1 << 20


def dealt(heads: int, shapes: Array, law: MixedLaw, typical: bool = False) -> Array:
    """Steps until the last block of each batch ends; batches once dealt are remembered (refits see them again)."""
    deal = (heads, law.slots, law.rows, law.stride, law.block, law.decode_block, law.empty, typical)
    shapes = np.ascontiguousarray(shapes, np.float64)
    keys: list[bytes] = shapes.view(f"V{shapes.itemsize * shapes.shape[1]}").ravel().tolist()
    known = _known.setdefault(deal, {})
    new = [row for row, key in enumerate(keys) if key not in known]
    if new:
        if sum(map(len, _known.values())) + len(new) > MOST_KNOWN:
            _known.clear()
            known = _known.setdefault(deal, {})
            new = list(range(len(keys)))
        steps = _dealt(heads, shapes[new], law, typical).tolist()
        known.update(zip([keys[row] for row in new], steps, strict=True))
    return np.fromiter(map(known.__getitem__, keys), np.float64, len(keys))


def _dealt(heads: int, shapes: Array, law: MixedLaw, typical: bool) -> Array:
    """All batches move in step: block after block goes to the processor of each batch that is free first."""
    tokens, prefix, decodes, context = shapes.T
    blocks = np.ceil(tokens / law.rows).astype(int)
    a_head = blocks + decodes.astype(int)
    dealt_heads = np.minimum(heads, np.ceil(MOST_WAVES * law.slots / a_head).astype(int))
    decode = law.decode_block + context_steps(context, typical)
    before = heads * decodes * (blocks - 1) * law.empty / law.slots
    ends = np.zeros(len(shapes))
    by_size = np.argsort(-dealt_heads * a_head, kind="stable")
    for start in range(0, len(shapes), TOGETHER):
        batch = by_size[start : start + TOGETHER]
        place = np.arange(a_head[batch].max())
        last = prefix[batch, None] + np.minimum((place + 1) * law.rows, tokens[batch, None])
        lengths = np.where(place < blocks[batch, None], law.block + np.ceil(last / law.stride), decode[batch, None])
        lengths = np.where(place < a_head[batch, None], lengths, 0.0)
        skipped = (heads - dealt_heads[batch]) * lengths.sum(axis=1) / law.slots
        ends[batch] = skipped + _last_ends(lengths, a_head[batch], dealt_heads[batch] * a_head[batch], law.slots)
    return ends + before


def _last_ends(lengths: Array, a_head: NDArray[np.int64], total: NDArray[np.int64], slots: int) -> Array:
    """lengths: [batches, blocks of a head], dealt over and over until `total` (descending) blocks are out."""
    lengths = lengths.astype(np.float32)
    free = np.zeros((len(total), slots), np.float32)
    rows, block, active = np.arange(len(total)), np.zeros(len(total), int), len(total)
    for number in range(int(total[0])):
        active = int(np.searchsorted(-total[:active], -number, side="left"))
        at, mine = block[:active], rows[:active]
        first = free[:active].argmin(axis=1) if number >= slots else number
        free[mine, first] += lengths[mine, at]
        at += 1
        np.copyto(at, 0, where=at == a_head[:active])
    return free.max(axis=1).astype(np.float64)
