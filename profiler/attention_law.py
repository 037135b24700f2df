"""What an attention kernel costs, as physics: thread blocks dealt to processors in waves, and bytes through memory.

A kernel with queries longer than one token starts one thread block per head and per 64 query rows; a block walks the
context 128 tokens at a time, and a decode beside it is a block with one useful row. So a batch costs its total work
over all processors, joined with the longest block that nothing can share (`batch_us`). Decodes alone split their
context over processors and stream it (`decode_us`). The laws have a handful of coefficients, each a time; what they
miss is kept beside them on a grid (`profiler.attention_fit`), and where nothing was measured they stand alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

QUERY_ROWS = 64
CONTEXT_STEP = 128


@dataclass(frozen=True)
class BatchLaw:
    """Coefficients of `batch_us`, microseconds; `join` >= 1 says how sharply work and the longest block meet."""

    launch: float = 3.0
    block: float = 2.0
    step: float = 4.0
    decode_step: float = 4.0
    empty: float = 0.3
    join: float = 1.5

    def as_dict(self) -> dict[str, float]:
        return {key: round(float(value), 6) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class DecodeLaw:
    """Coefficients of `decode_us`: microseconds a launch, a sequence, and 1000 tokens of context in all or alone."""

    launch: float = 9.0
    sequence: float = 0.2
    stream: float = 4.5
    alone: float = 3.0
    join: float = 1.5

    def as_dict(self) -> dict[str, float]:
        return {key: round(float(value), 6) for key, value in asdict(self).items()}


def chunk_blocks(tokens: ArrayLike, prefix: ArrayLike) -> tuple[Array, Array]:
    """(thread blocks, context steps) of one chunk and one head; steps counted per block and rounded up."""
    tokens, prefix = np.broadcast_arrays(np.asarray(tokens, float), np.asarray(prefix, float))
    blocks = np.ceil(tokens / QUERY_ROWS)
    # Every second block of 64 rows reaches a new step of 128: the sum of ceil() is the smooth sum and half a step each.
    mean_end = prefix + np.minimum(tokens, QUERY_ROWS) + (tokens - np.minimum(tokens, QUERY_ROWS)) / 2
    exact = np.ceil((prefix + tokens) / CONTEXT_STEP)
    steps = np.where(blocks <= 1, exact * blocks, blocks * (mean_end / CONTEXT_STEP + 0.25))
    return blocks, steps


def batch_us(
    law: BatchLaw, heads: int, sms: int, tokens: ArrayLike, prefix: ArrayLike, decodes: ArrayLike, context: ArrayLike
) -> Array:
    """One chunk beside `decodes` decodes of `context` tokens each, one layer, microseconds."""
    tokens, prefix, decodes, context = (np.asarray(a, float) for a in (tokens, prefix, decodes, context))
    blocks, steps = chunk_blocks(tokens, prefix)
    decode_steps = np.where(decodes > 0, np.ceil((context + 1) / CONTEXT_STEP), 0.0)
    empty = decodes * np.maximum(blocks - 1, 0)
    work = law.block * (blocks + decodes) + law.step * steps + law.decode_step * decodes * decode_steps
    shared = heads / sms * (work + law.empty * empty)
    longest = np.where(tokens > 0, np.ceil((prefix + tokens) / CONTEXT_STEP), 0.0)
    alone = law.block + law.step * np.maximum(longest, decode_steps)
    return law.launch + (shared**law.join + alone**law.join) ** (1.0 / law.join)


def chunk_share_us(law: BatchLaw, heads: int, sms: int, tokens: ArrayLike, prefix: ArrayLike) -> Array:
    """What a further chunk adds to a batch whose longest block is another's: its work over all processors."""
    blocks, steps = chunk_blocks(tokens, prefix)
    return heads / sms * (law.block * blocks + law.step * steps)


def decode_us(law: DecodeLaw, decodes: ArrayLike, context: ArrayLike) -> Array:
    """`decodes` decodes of `context` tokens each and nothing else, one layer, microseconds."""
    decodes, context = np.asarray(decodes, float), np.asarray(context, float)
    shared = decodes * (law.sequence + law.stream * context / 1000.0)
    alone = law.alone * context / 1000.0
    return law.launch + (shared**law.join + alone**law.join) ** (1.0 / law.join)


def fit_law(kind: type, predict: Callable[..., Array], measured: Array, weights: Array | None = None) -> object:
    """Coefficients that minimise the log error of `predict(law)`; robust, so that no cliff bends the whole law."""
    from scipy.optimize import least_squares

    names = [field.name for field in fields(kind)]
    start = np.log([getattr(kind(), name) for name in names])
    scale = np.ones_like(measured) if weights is None else np.sqrt(weights)
    target = np.log(measured)

    def law_of(x: Array) -> object:
        values = dict(zip(names, np.exp(x), strict=True))
        values["join"] = max(1.0, float(values["join"]))
        return kind(**{key: float(value) for key, value in values.items()})

    def error(x: Array) -> Array:
        return (np.log(predict(law_of(x))) - target) * scale

    low, high = start - 7.0, start + 7.0
    join = names.index("join")
    low[join], high[join] = 0.0, np.log(20.0)
    found = least_squares(error, start, bounds=(low, high), loss="soft_l1", f_scale=0.1, max_nfev=200)
    return law_of(found.x)
