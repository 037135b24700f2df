"""What a prefill leaves to the steps after it: its rows push weights and contexts out of the caches, and the next few
decodes read them from memory again, a part in each step.

On a CPU the first decode after a chunk of 512 tokens takes 30 to 70 % longer, the one after it half of that, and so on;
batches that hold long contexts take longer to recover. A cost model that sees one batch at a time cannot know it, so
whoever runs batches in order (the simulator, a comparison with a live run) carries what is owed from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.work.batch import BatchShape
from policies.work.request import Ns

Array = NDArray[np.float64]

STEPS = 12
"""Steps after which nothing is owed any more."""
ROW_SIZES = (128, 512, 2048)
HELD_SIZE = 8192
"""A chunk evicts the more, the more rows it has and the more keys and values it reads; what is evicted has an end."""
CONTEXT_CAP = 16384
"""Contexts of the decodes afterwards, in tokens, beyond which they fit no cache anyway."""
RATIOS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FEATURES = (*(f"rows_up_to_{size}" for size in ROW_SIZES), f"held_up_to_{HELD_SIZE}")
PRICES = 2 * len(FEATURES) + 2
"""ns per feature; ns per feature and 1,024 tokens of context afterwards; what is left of the one and of the other
after a step."""
LEAST_ROWS = 60
LEAST_SHARE = 0.01
"""Below this share of the decodes afterwards the effect is left out."""

Owed = list[Ns]
"""Extra device time of the steps to come, the next one last."""


def features(shape: BatchShape) -> list[float]:
    """Of a batch with chunks: rows up to each size, and tokens that its chunks attend to."""
    rows = shape.prefill_tokens
    held = sum([tokens + prefix for tokens, prefix in shape.chunks])
    return [*(float(min(rows, size)) for size in ROW_SIZES), float(min(held, HELD_SIZE))]


def after(shape: BatchShape) -> BatchShape:
    """The batch that decodes everybody who can after `shape`: its decodes, and the chunks that ended their prompt.

    Which chunks those are a shape does not say; the first ones are taken, as the measuring rig has it.
    """
    ended = [tokens + prefix for tokens, prefix in shape.chunks[: max(0, shape.sampled - shape.decodes)]]
    total = shape.decode_context_total + shape.decodes + sum(ended)
    longest = max([shape.decode_context_max + 1 if shape.decodes else 0, *ended])
    decodes = shape.decodes + len(ended)
    return BatchShape((), decodes, total, longest, 0, decodes)


def extra_ns(prices: Sequence[float], shape: BatchShape, factor: float = 1.0) -> Owed:
    """What a batch with chunks leaves to the steps after it, the first of them last; empty without prices."""
    if not prices or not shape.chunks:
        return []
    count = len(FEATURES)
    found = features(shape)
    fixed = factor * sum([value * price for value, price in zip(found, prices)])
    held = min(after(shape).decode_context_total, CONTEXT_CAP) / 1024
    context = factor * held * sum([value * price for value, price in zip(found, prices[count : 2 * count])])
    fixed_ratio, context_ratio = prices[2 * count :]
    owed = []
    for _ in range(STEPS):
        owed.append(int(fixed + context + 0.5))
        fixed *= fixed_ratio
        context *= context_ratio
    return owed[::-1]


def merged(left: Owed, new: Owed) -> Owed:
    """What is owed after a batch with chunks: its own, or what is left of an earlier one, step by step whichever is
    more."""
    if not left:
        return new
    short, long = (left, new) if len(left) < len(new) else (new, left)
    return [*long[: -len(short)], *map(max, short, long[-len(short) :])]


def in_order(cost: Any, shapes: Sequence[BatchShape]) -> NDArray[np.int64]:
    """Extra device time of each of a run's iterations, in the order in which one device ran them; ns.

    Zeros for a cost model that knows no aftermath.
    """
    found = np.zeros(len(shapes), np.int64)
    leaves = getattr(cost, "aftermath", None)
    if leaves is None:
        return found
    owed: Owed = []
    for number, shape in enumerate(shapes):
        if shape.chunks:
            if owed:
                owed.pop()
            owed = merged(owed, leaves(shape))
        elif owed:
            found[number] = owed.pop()
    return found


def fit_aftermath(led: Sequence[BatchShape], steps: NDArray[np.int64], device_ns: Array, base_ns: Array) -> list[float]:
    """Prices (PRICES of them) from measured decodes after batches with chunks; empty where there are too few of them or
    nothing to be seen.

    led: the batch with chunks before each. steps: 1 for the first decode after it. device_ns: measured, at the
    machine's average speed. base_ns: of the same batch long after any chunk, by the fit; it may be off by a factor.
    """
    from sklearn.linear_model import LinearRegression

    if len(led) < LEAST_ROWS:
        return []
    found = np.array([features(shape) for shape in led])
    held = np.array([min(after(shape).decode_context_total, CONTEXT_CAP) / 1024 for shape in led])
    best: tuple[float, list[float]] | None = None
    scale = found.max(axis=0)
    scale[scale == 0] = 1.0
    past = (steps - 1)[:, None]
    for fixed_ratio in RATIOS:
        for context_ratio in RATIOS:
            design = np.concatenate(
                [
                    found / scale * fixed_ratio**past,
                    found / scale * held[:, None] * context_ratio**past,
                    base_ns[:, None],
                    -base_ns[:, None],
                ],
                axis=1,
            )
            target = device_ns - base_ns
            trust = 1.0 / base_ns
            for _ in range(3):
                solver = LinearRegression(positive=True, fit_intercept=False)
                solver.fit(design * trust[:, None], target * trust)
                miss = np.abs(design @ solver.coef_ - target) / base_ns
                bound = max(3 * float(np.median(miss)), 1e-4)
                trust = np.sqrt(np.minimum(1.0, bound / np.maximum(miss, 1e-12))) / base_ns
            loss = float(np.minimum(miss, bound).mean())
            if best is None or loss < best[0]:
                prices = solver.coef_[:-2] / np.concatenate([scale, scale])
                best = loss, [*prices.tolist(), fixed_ratio, context_ratio]
    assert best is not None
    prices = best[1]
    owed = sum(extra_ns(prices, shape)[STEPS - int(step)] for shape, step in zip(led, steps) if step <= STEPS)
    return prices if owed > LEAST_SHARE * float(base_ns.sum()) else []
