"""What a chunk of prefill costs in attention, as physics: thread blocks dealt to processors one after another.

A kernel that deals its blocks in waves (FlashAttention 2) shows whole waves: 512 tokens of 32 heads are 256 blocks, and
on 188 processors they take exactly twice as long as one block alone. The law deals the blocks of every head, each as
long as the context it walks, to whichever processor is free first; time is that of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

BLOCK_STEPS = (0.0, 0.25, 0.5, 1.0, 2.0)
"""What starting and ending a block may cost, in steps of 128 tokens: a fit tries these."""
BLOCKS_A_PROCESSOR = (1, 2)
TILES = ((64, 128), (128, 64))
"""Query rows of a block and tokens of a step: FlashAttention 2 on a paged cache, and on keys in a row."""
ROW_TILES = (*TILES, (64, 64), (128, 32))
"""And on keys in a row where a processor has little shared memory: with a causal mask, and without."""
ALONE = (1.0, 0.8, 0.65)
"""Of its price in a processor shared by two: what a block may pay that has one to itself."""
LEAST_ROWS = 8
MOST_WAVES = 24
"""Beyond so many waves blocks level out, and the last of them no longer shows."""


@dataclass(frozen=True)
class PrefillLaw:
    """launch: microseconds of the kernels. step: of `stride` tokens of context for a block of `rows` query rows. block:
    starting and ending one, in steps. write: storing keys and values of 1000 tokens. slots: blocks that run at once.
    alone: share of its price that a block pays while it has both slots of a processor to itself (1: the same)."""

    launch: float
    step: float
    block: float
    write: float
    slots: int
    rows: int = 64
    stride: int = 128
    alone: float = 1.0

    def as_dict(self) -> dict[str, float | int]:
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in asdict(self).items()}

    def us(self, heads: ArrayLike, tokens: ArrayLike, prefix: ArrayLike, stored: ArrayLike) -> Array:
        """Chunks of `tokens` on `prefix`; `heads` counts query heads of all equal chunks of the batch, `stored` what
        the batch stores (tokens, or tokens x KV heads: as in the fit)."""
        steps = dealt_steps(heads, tokens, prefix, self)
        return np.asarray(self.launch + self.step * steps + self.write * np.asarray(stored, float) / 1000.0)


def dealt_steps(heads: ArrayLike, tokens: ArrayLike, prefix: ArrayLike, law: PrefillLaw) -> Array:
    """Steps until the last block of a batch ends."""
    columns = np.broadcast_arrays(*(np.asarray(column, float) for column in (heads, tokens, prefix)))
    shapes, back = np.unique(np.stack([column.ravel() for column in columns]), axis=1, return_inverse=True)
    deal = (law.slots, law.block, law.rows, law.stride, law.alone)
    ends = np.array([_last_end(int(h), int(t), int(p), *deal) for h, t, p in shapes.T])
    return ends[back.ravel()].reshape(columns[0].shape)


@lru_cache(maxsize=1 << 16)
def _last_end(
    heads: int, tokens: int, prefix: int, slots: int, block: float, rows: int, stride: int, alone: float
) -> float:
    """Blocks are dealt head by head in the order of their rows; the next one goes to whoever is free first."""
    ends = np.minimum(np.arange(1, -(-tokens // rows) + 1) * rows, tokens)
    lengths = block + np.ceil((prefix + ends) / stride)
    count = len(lengths) * heads
    if alone < 1.0 and count <= slots:
        # A block for every processor, then a second one for the first of them; the longer of two ends alone.
        blocks = np.tile(lengths, heads)
        beside = np.zeros(slots // 2)
        first, second = blocks[: slots // 2], blocks[slots // 2 :]
        beside[: len(second)] = second
        beside = beside[: len(first)]
        shared = np.minimum(first, beside)
        return float((shared + (np.maximum(first, beside) - shared) * alone).max())
    if count > MOST_WAVES * slots:
        return float(lengths.sum() * heads / slots + lengths[-1] / 2)
    dealt = lengths.tolist() * heads
    free = dealt[:slots]
    heapify(free)
    for length in dealt[slots:]:
        heapreplace(free, free[0] + length)
    return max(free)


def fit_prefill_law(
    heads: ArrayLike,
    tokens: ArrayLike,
    prefix: ArrayLike,
    stored: ArrayLike,
    us: ArrayLike,
    sms: int,
    many_layouts: bool = False,
    tiles: Sequence[tuple[int, int]] = TILES,
) -> PrefillLaw | None:
    """The law with the least absolute relative error; None where too few rows were measured to tell.

    many_layouts: rows of many head layouts, which tell what blocks take that share nothing. tiles: those to try.
    """
    columns = (np.asarray(column, float) for column in (heads, tokens, prefix, stored, us))
    heads, tokens, prefix, stored, us = np.broadcast_arrays(*columns)
    if len(us) < LEAST_ROWS:
        return None
    best: tuple[float, PrefillLaw] | None = None
    for blocks, block, (rows, stride) in product(BLOCKS_A_PROCESSOR, BLOCK_STEPS, tiles):
        for alone in ALONE if many_layouts and blocks == 2 else (1.0,):
            law = PrefillLaw(0.0, 1.0, block, 0.0, blocks * sms, rows, stride, alone)
            steps = dealt_steps(heads, tokens, prefix, law)
            design = np.stack([np.ones(len(us)), steps, stored / 1000.0], axis=1)
            launch, step, write = _relative_fit(design, us)
            miss = float(np.mean(np.abs(design @ [launch, step, write] / us - 1.0)))
            if best is None or miss < best[0]:
                best = miss, replace(law, launch=launch, step=step, write=write)
    return best[1] if best is not None else None


def _relative_fit(design: Array, us: Array) -> tuple[float, float, float]:
    """Non-negative prices that fit relative errors, outliers weighted down three times."""
    from scipy.optimize import nnls

    weight = 1.0 / us
    prices = np.zeros(design.shape[1])
    for _ in range(4):
        prices, _ = nnls(design * weight[:, None], us * weight)
        miss = np.abs(design @ prices / us - 1.0)
        weight = 1.0 / (us * np.sqrt(np.maximum(miss, 0.02)))
    return float(prices[0]), float(max(prices[1], 1e-9)), float(prices[2])
