"""Hand-made batches for the executor's tests: chunks and decodes over shuffled blocks of a small pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor.batches.batch_arrays import Step


def make_step(
    chunks: Sequence[tuple[int, int]],
    decodes: Sequence[int],
    *,
    block_size: int = 16,
    dummies: int = 0,
    vocab: int = 64,
    seed: int = 0,
) -> Step:
    """A step of (tokens, prefix) chunks and decodes with the given contexts; every part is a request of its own."""
    random = np.random.default_rng(seed)
    lengths = [tokens + prefix for tokens, prefix in chunks] + [context + 1 for context in decodes]
    width = max(-(-length // block_size) for length in lengths)
    tables = 1 + random.permutation(len(lengths) * width).reshape(len(lengths), width).astype(np.int32)
    positions: list[int] = []
    slots: list[int] = []
    first_rows = []
    spans = [(prefix, prefix + tokens) for tokens, prefix in chunks] + [(context, context + 1) for context in decodes]
    for request, (start, end) in enumerate(spans):
        first_rows.append(len(positions))
        for position in range(start, end):
            positions.append(position)
            slots.append(int(tables[request, position // block_size]) * block_size + position % block_size)
    rows = len(positions) + dummies
    count = len(chunks)
    last_rows = [row + tokens - 1 for row, (tokens, _) in zip(first_rows, chunks)] + first_rows[count:]

    def ints(values: Sequence[int]) -> np.ndarray:
        return np.asarray(values, np.int32)

    return Step(
        rows=rows,
        token_ids=random.integers(0, vocab, rows),
        positions=ints(positions + [0] * dummies),
        slots=np.asarray(slots + [-1] * dummies, np.int64),
        tables=tables,
        chunk_row=ints(first_rows[:count]),
        chunk_tokens=ints([tokens for tokens, _ in chunks]),
        chunk_prefix=ints([prefix for _, prefix in chunks]),
        chunk_table=ints(list(range(count))),
        decode_row=ints(first_rows[count:]),
        decode_context=ints(list(decodes)),
        decode_table=ints(list(range(count, len(spans)))),
        sampled_rows=ints(last_rows),
        sampled_table=ints(list(range(len(spans)))),
    )


def blocks_needed(step: Step) -> int:
    """Usable blocks that the step's tables name."""
    return int(step.tables.max())
