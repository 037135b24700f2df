"""What decodes alone cost in attention, as physics: thread blocks in waves, and keys and values through memory.

A sequence and KV head is a stream; a thread block walks it 128 tokens at a time (32 or 64 in kernels that split
nothing). FlashAttention 2 splits streams of grouped heads while they are too few to fill the processors, by a rule of
its own, and a second kernel puts the parts together; heads with keys of their own it never splits. FlashAttention 3
shares all streams out evenly. Blocks run in waves and wait for memory; kernel tables that repeat one call also show a
cache that serves small batches faster.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.operators.laws.smooth_batch_law import CONTEXT_STEP, context_steps

Array = NDArray[np.float64]

SPLIT_BELOW = 0.8
"""FlashAttention 2 splits contexts while streams stay below this share of two thread blocks a processor
(its num_splits_heuristic); a longest context is then shared out like any other."""
MOST_SPLITS = 128
GOOD_SPLIT = 0.85
"""The first number of splits that fills waves this well, compared with the best, is taken."""
MOST_DYNAMIC = 992
"""Decodes up to which FlashAttention 3 plans its splits on the device, for 31 sequences a warp in 32 warps; from there
on it plans them on the host."""
MISSES_FROM, MISSES_ALL = 0.7, 1.3
"""Of the cache's size: where reads begin to miss, and where all do."""


@dataclass(frozen=True)
class DecodeLaw:
    """Coefficients of `us`, microseconds.

    launch: of the kernel; `lone`: with one KV head (0: the same). combine: of a second one, after splitting. wave,
    step: of a wave of blocks, and of `stride` tokens of each. solo: share by which an odd last wave costs more, where a
    processor holds two blocks and one alone hides less of what it waits for. stream: of 1000 tokens of one stream from
    memory; `warm` times that while a cache of `cache` thousands holds them (0: no cache to be seen). start: of 1000
    streams, however short. alone: of 1000 tokens of one sequence, which nothing shares. seek, seek_many: finding 1000
    decodes' blocks, up to MOST_DYNAMIC of them and beyond. join: >= 1, how sharply blocks and memory meet.
    streams: KV heads of a decode. slots: blocks that run at once.
    splits: processors by which FlashAttention 2's rule splits streams; 0: it does not. even: streams are shared out
    evenly instead of a block each.
    """

    launch: float = 10.0
    lone: float = 0.0
    combine: float = 0.0
    wave: float = 2.0
    step: float = 2.0
    stream: float = 0.3
    warm: float = 1.0
    cache: float = 0.0
    start: float = 0.0
    alone: float = 0.0
    seek: float = 0.0
    seek_many: float = 0.0
    join: float = 2.0
    solo: float = 0.0
    streams: float = 1.0
    slots: int = 128
    splits: int = 0
    stride: int = CONTEXT_STEP
    even: bool = False

    def as_dict(self) -> dict[str, float | int]:
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in asdict(self).items()}

    def us(
        self, decodes: ArrayLike, context: ArrayLike, typical: bool = False, heads: ArrayLike | None = None
    ) -> Array:
        """`decodes` decodes of `context` tokens each and nothing else, one layer; `typical` as in `context_steps`.

        heads: KV heads of each batch, if not the law's own.
        """
        decodes, context, heads = np.broadcast_arrays(
            *(np.asarray(one, float) for one in (decodes, context, self.streams if heads is None else heads))
        )
        streams, steps = decodes * heads, context_steps(context, typical, self.stride)
        parts = split_by(streams, np.ceil((context + 1) / CONTEXT_STEP), self.splits)
        # Rounding up adds half a part on average.
        each = steps / parts + (parts - 1) / parts / 2 if typical else np.ceil(steps / parts)
        return self.priced(context, streams, steps, parts, each, heads)

    def priced(
        self, context: Array, streams: Array, steps: Array, parts: Array, each: Array, heads: Array | float
    ) -> Array:
        """`us` once it is known how many steps and `parts` a stream has, and how many steps `each` part."""
        # Streams that are shared out evenly are split too, while they are few and longer than a step.
        split = (steps > 1) & (streams < SPLIT_BELOW * self.slots) if self.even else parts > 1
        launch = np.where(heads == 1, self.lone or self.launch, self.launch) + np.where(split, self.combine, 0.0)
        if self.even:
            blocks = np.ceil(streams / self.slots) * self.wave + streams / self.slots * self.step * steps
        else:
            waves = np.ceil(streams * parts / self.slots)
            blocks = (waves + self.solo * (waves % 2)) * (self.wave + self.step * each)
        thousands = streams * context / 1000.0
        rate: Array | float = self.stream
        if self.cache:
            missed = np.clip((thousands / self.cache - MISSES_FROM) / (MISSES_ALL - MISSES_FROM), 0.0, 1.0)
            rate = self.stream * (self.warm + (1.0 - self.warm) * missed)
        memory = rate * thousands + self.start * streams / 1000.0
        most = np.maximum(np.maximum(blocks, memory), 1e-30)
        met = most * ((blocks / most) ** self.join + (memory / most) ** self.join) ** (1.0 / self.join)
        decodes = streams / heads
        seek = np.where(decodes <= MOST_DYNAMIC, self.seek, self.seek_many) * decodes / 1000.0
        return np.asarray(launch + met + seek + self.alone * context / 1000.0)

    def resized(self, streams: float, size: float = 1.0) -> DecodeLaw:
        """For another number of KV heads, and heads of `size` times as many elements."""
        return replace(
            self,
            streams=streams,
            step=self.step * size,
            stream=self.stream * size,
            alone=self.alone * size,
            cache=self.cache / size,
        )


def split_by(streams: ArrayLike, steps: ArrayLike, sms: int) -> Array:
    """Into how many parts FlashAttention 2 splits each stream of `steps` steps (its num_splits_heuristic);
    one where `sms` is 0."""
    streams, steps = np.broadcast_arrays(np.asarray(streams, float), np.asarray(steps, float))
    parts = np.ones(streams.shape)
    if not sms:
        return parts
    few = streams < SPLIT_BELOW * 2 * sms
    if not few.any():
        return parts
    streams, steps = streams[few], steps[few]
    number = np.arange(1, MOST_SPLITS + 1)
    length = np.ceil(steps[:, None] / number)
    new = np.concatenate([np.ones((len(steps), 1), bool), length[:, 1:] != length[:, :-1]], axis=1)
    new &= number <= np.minimum(np.minimum(steps, 2 * sms), MOST_SPLITS)[:, None]
    waves = streams[:, None] * number / (2 * sms)
    filled = np.where(new, waves / np.ceil(waves), 0.0)
    parts[few] = 1 + np.argmax(new & (filled >= GOOD_SPLIT * filled.max(axis=1, keepdims=True)), axis=1)
    return parts


_PRIOR = {"launch": 10.0, "wave": 2.0, "step": 2.5, "stream": 0.3, "start": 1.5}
_ALSO = {"fa2": ("combine",), "fa2 whole": ("solo",), "fa3": ("combine", "alone", "seek", "seek_many")}
WHOLE_STRIDES = (32, 64, CONTEXT_STEP)
"""Tokens of a step of FlashAttention 2's kernels that split nothing, by card and head size; a fit tries these."""
_FIRST = 0.3
"""Where coefficients that a kernel may lack start."""
CACHES = (0.0, 35.0, 70.0, 140.0)
"""Thousands of tokens of one stream that a cache may hold: where a fit starts; 0: no cache to be seen."""
PRIOR_WEIGHT = 0.05
SAMPLE = 400
"""Rows that a rule, the processors' slots and a cache are chosen on."""


def fit_decode_law(
    decodes: ArrayLike,
    context: ArrayLike,
    us: ArrayLike,
    *,
    sms: int,
    heads: ArrayLike,
    kernel: str,
    like: DecodeLaw | None = None,
    cache: float | None = None,
) -> DecodeLaw:
    """Coefficients that minimise the log error over rows, a prior deciding what they leave open. FlashAttention 2 has
    another kernel for one decode, which is for the caller to leave out.

    heads: KV heads of each row. kernel: "fa2", "fa2 whole" (never split) or "fa3". like: the law of another layout with
    this kernel, to start from; otherwise the best on a sample are taken. cache: thousands of tokens of one stream that
    the device's cache holds, if it is known; otherwise it is fitted.
    """
    decodes, context, us, heads = np.broadcast_arrays(
        *(np.asarray(one, float) for one in (decodes, context, us, heads))
    )
    streams = decodes * heads
    both = kernel != "fa3" and (heads == 1).any() and (heads > 1).any()

    def fitted(law: DecodeLaw, some: NDArray[np.int64]) -> tuple[float, DecodeLaw]:
        names = ["launch", "wave", "step", "stream", "start", "join", *_ALSO[kernel]]
        names += ["warm"] if law.cache else []
        names += ["cache"] if law.cache and cache is None else []
        names += ["lone"] if both else []
        columns = [context[some], streams[some], context_steps(context[some], stride=law.stride)]
        parts = split_by(columns[1], columns[2], law.splits)
        return _fitted(law, names, [*columns, parts, np.ceil(columns[2] / parts), heads[some]], us[some])

    if like is None:
        sample = np.random.default_rng(0).permutation(len(us))[:SAMPLE]
        plain = DecodeLaw(**_PRIOR, slots=sms, splits=sms if kernel == "fa2" else 0, even=kernel == "fa3")
        caches = (0.0,) if kernel != "fa3" else CACHES if cache is None else (0.0, cache)
        strides = WHOLE_STRIDES if kernel == "fa2 whole" else (CONTEXT_STEP,)
        starts = [
            replace(plain, join=join, cache=cache, warm=0.5 if cache else 1.0, stride=stride)
            for join, cache, stride in product((1.3, 2.5), caches, strides)
        ]
        like = min((fitted(start, sample) for start in starts), key=lambda one: one[0])[1]
    return fitted(like, np.arange(len(us)))[1]


def fit_single(law: DecodeLaw, context: ArrayLike, us: ArrayLike) -> DecodeLaw:
    """One decode alone is another kernel of FlashAttention 2: it splits by the same rule, and has prices of its own.

    law: of two decodes and more, where prices that few rows leave open stay.
    """
    context, us = np.asarray(context, float), np.asarray(us, float)
    heads = np.full(len(context), law.streams)
    steps = context_steps(context, stride=law.stride)
    parts = split_by(heads, steps, law.splits)
    return _fitted(
        law,
        ["launch", "combine", "wave", "step", "stream"],
        [context, heads, steps, parts, np.ceil(steps / parts), heads],
        us,
    )[1]


def _fitted(law: DecodeLaw, names: list[str], columns: list[Array], us: Array) -> tuple[float, DecodeLaw]:
    from scipy.optimize import least_squares

    start = np.log([getattr(law, name) or (law.launch if name == "lone" else _FIRST) for name in names])

    def law_of(x: Array) -> DecodeLaw:
        values = dict(zip(names, np.exp(x).tolist(), strict=True))
        values["join"] = max(1.0, values.get("join", law.join))
        values["warm"] = min(1.0, values.get("warm", law.warm))
        return replace(law, **values)

    def misses(x: Array) -> Array:
        predicted = law_of(x).priced(*columns)
        return np.concatenate([np.log(np.maximum(predicted, 1e-3) / us), (x - start) * PRIOR_WEIGHT])

    found = least_squares(
        misses,
        start,
        bounds=(start - 7.0, start + 7.0),
        loss="soft_l1",
        f_scale=0.05,
        max_nfev=60,
    )
    return float(found.cost), law_of(found.x)
