"""What a chunk, alone or beside decodes, costs in attention: thread blocks that share processors.

A kernel with queries longer than one token starts one thread block per head and per 64 query rows; a block walks the
context 128 tokens at a time, and a decode beside it is a block with one useful row. So a batch costs its total work
over all processors, joined with the longest block that nothing can share (`batch_us`). The law has a
handful of coefficients, each a time; what it misses is kept beside it on a grid
(`profiler.operators.fitting.attention_fit`), and where
nothing was measured it stands alone. `prefill_law` and `mixed_law` deal blocks one by one instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

QUERY_ROWS = 64
"""Query rows of a thread block: FlashAttention 2 on a paged cache; FlashAttention 3 takes twice as many."""
CONTEXT_STEP = 128


@dataclass(frozen=True)
class BatchLaw:
    """Coefficients of `batch_us`, microseconds.

    launch: of the kernels. block: a thread block. step, decode_step: 128 tokens of context for the query rows of one
    block, for a decode. empty: a block that finds nothing to do. write: storing keys and values of 1000 tokens. join:
    >= 1, how sharply shared work and the longest block meet. query_rows: rows of a thread block.
    """

    launch: float = 3.0
    block: float = 2.0
    step: float = 4.0
    decode_step: float = 4.0
    empty: float = 0.3
    write: float = 1.0
    join: float = 1.5
    query_rows: int = QUERY_ROWS

    @property
    def waves(self) -> bool:
        """Whether blocks are dealt in waves; FlashAttention 3 keeps its blocks resident and balances them."""
        return self.query_rows <= QUERY_ROWS

    def as_dict(self) -> dict[str, float]:
        return {key: round(float(value), 6) for key, value in asdict(self).items()}


def chunk_blocks(tokens: ArrayLike, prefix: ArrayLike, query_rows: int = QUERY_ROWS) -> tuple[Array, Array]:
    """(thread blocks, context steps) of one chunk and one head; steps counted per block and rounded up."""
    tokens, prefix = np.broadcast_arrays(np.asarray(tokens, float), np.asarray(prefix, float))
    blocks = np.ceil(tokens / query_rows)
    half_step = 0.5 * (1.0 - query_rows / CONTEXT_STEP)
    # Every second block of 64 rows reaches a new step of 128: the sum of ceil() is the smooth sum and half a step each.
    mean_end = prefix + np.minimum(tokens, query_rows) + (tokens - np.minimum(tokens, query_rows)) / 2
    exact = np.ceil((prefix + tokens) / CONTEXT_STEP)
    steps = np.where(blocks <= 1, exact * blocks, blocks * (mean_end / CONTEXT_STEP + half_step))
    return blocks, steps


def context_steps(context: ArrayLike, typical: bool = False, stride: int = CONTEXT_STEP) -> Array:
    """Steps of `stride` tokens that a decode with `context` tokens in the cache, and its own, begins.

    typical: the mean over contexts near this one, half a step above the tokens themselves. Profiles measure multiples
    of a step, where one has just begun; contexts in use lie anywhere.
    """
    context = np.asarray(context, float)
    if typical:
        return np.maximum(1.0, (context + 1) / stride + 0.5)
    return np.ceil((context + 1) / stride)


def batch_us(
    law: BatchLaw,
    heads: int,
    sms: int,
    tokens: ArrayLike,
    prefix: ArrayLike,
    decodes: ArrayLike,
    context: ArrayLike,
    typical: bool = False,
) -> Array:
    """One chunk beside `decodes` decodes of `context` tokens each, one layer, microseconds; `typical` as in
    `context_steps`, for the decodes."""
    tokens, prefix, decodes, context = (np.asarray(a, float) for a in (tokens, prefix, decodes, context))
    blocks, steps = chunk_blocks(tokens, prefix, law.query_rows)
    decode_steps = np.where(decodes > 0, context_steps(context, typical), 0.0)
    empty = decodes * np.maximum(blocks - 1, 0)
    work = law.block * (blocks + decodes) + law.step * steps + law.decode_step * decodes * decode_steps
    longest = np.where(tokens > 0, np.ceil((prefix + tokens) / CONTEXT_STEP), 0.0)
    alone = law.block + law.step * np.maximum(longest, decode_steps)
    dealt = heads * (blocks + decodes) / sms
    joined = joined_us(law, heads / sms * (work + law.empty * empty), alone, dealt)
    return law.launch + joined + law.write * (tokens + decodes) / 1000.0


def joined_us(law: BatchLaw, shared: Array, alone: Array, dealt: Array) -> Array:
    """Time of `dealt` thread blocks a processor: the longest one while each has a processor of its own; beyond that,
    the part of the shared work that has to wait for one, and the longest."""
    waiting = shared * np.maximum(0.0, 1.0 - 1.0 / np.maximum(dealt, 1e-9)) if law.waves else shared
    return np.asarray((waiting**law.join + alone**law.join) ** (1.0 / law.join))


def chunk_share_us(law: BatchLaw, heads: int, sms: int, tokens: ArrayLike, prefix: ArrayLike) -> Array:
    """What a further chunk adds to a batch whose longest block is another's: its work over all processors."""
    blocks, steps = chunk_blocks(tokens, prefix, law.query_rows)
    return heads / sms * (law.block * blocks + law.step * steps) + law.write * np.asarray(tokens, float) / 1000.0


BATCH_PRIOR = {"launch": 3.0, "block": 0.5, "step": 0.0, "decode_step": 1.17, "empty": 0.128, "write": 0.3, "join": 1.8}
"""Where coefficients lie that data leave open: block, decode_step, empty and write as multiples of step. Values of
FlashAttention 2 on the RTX 4090 and RTX PRO 6000, the two devices measured with chunks, prefixes and decodes mixed."""

_RELATIVE = ("block", "decode_step", "empty", "write")
PRIOR_WEIGHT = 0.05


def fit_batch_law(predict: Callable[[BatchLaw], Array], measured: Array, query_rows: int = QUERY_ROWS) -> BatchLaw:
    """Coefficients that minimise the log error of `predict(law)` over rows; a prior decides what they leave open."""
    names = list(BATCH_PRIOR)
    prior = np.log([max(BATCH_PRIOR[name], 1e-12) for name in names])
    step = names.index("step")
    start = prior.copy()
    start[step] = np.log(4.0)

    def law_of(x: Array) -> BatchLaw:
        values = dict(zip(names, np.exp(x), strict=True))
        for name in _RELATIVE:
            values[name] *= values["step"]
        values["join"] = max(1.0, values["join"])
        return BatchLaw(**{name: float(value) for name, value in values.items()}, query_rows=query_rows)

    def pull(x: Array) -> Array:
        away = (x - prior) * PRIOR_WEIGHT
        away[step] = 0.0
        return away

    return law_of(_least(lambda x: np.log(predict(law_of(x)) / measured), pull, start))


def _least(miss: Callable[[Array], Array], pull: Callable[[Array], Array], start: Array) -> Array:
    """Robust least squares: a cliff in the data must not bend the whole law."""
    from scipy.optimize import least_squares

    found = least_squares(
        lambda x: np.concatenate([miss(x), pull(x)]),
        start,
        bounds=(start - 7.0, start + 7.0),
        loss="soft_l1",
        f_scale=0.1,
        max_nfev=200,
    )
    return np.asarray(found.x)
