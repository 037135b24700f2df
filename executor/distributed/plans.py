"""A planned batch as bytes: what rank 0 sends to the others, and what every rank (rank 0 too) runs from.

Only what the batch needs goes along: of the block tables the rows of its own requests, as wide as their longest
context. Decode rows carry the ids of their tokens: they have been delivered before the next step is planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from executor.batches.batch_arrays import CPU, Step
from executor.model.sampler import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.serving.runner import Prepared

Bytes = NDArray[np.uint8]
_HEAD = 8
_WARM_UP = -1
"""Number of a batch that nobody records."""


@dataclass
class Plan:
    """One batch for one rank. sampling: None where all rows are greedy. positions: of the sampled rows' tokens.

    poison: KV blocks to fill with NaN before it runs.
    """

    number: int
    step: Step
    sampling: list[Sampling] | None
    positions: list[int]
    poison: list[int]

    @property
    def recorded(self) -> bool:
        return self.number > _WARM_UP


def plan_bytes(prepared: Prepared, block_size: int) -> Bytes:
    """Everything that the ranks need of a batch."""
    return step_bytes(prepared.batch.number, prepared.step, block_size, prepared.sampling, prepared.poison)


def step_bytes(
    number: int, step: Step, block_size: int, sampling: Sequence[Sampling] | None = None, poison: Sequence[int] = ()
) -> Bytes:
    """A step by itself, numbered; a negative number is recorded nowhere."""
    chunks, decodes = step.num_chunks, step.num_decodes
    longest = 1
    if chunks:
        longest = int((step.chunk_prefix + step.chunk_tokens).max())
    if decodes:
        longest = max(longest, int(step.decode_context.max()) + 1)
    width = min(-(-longest // block_size), step.tables.shape[1])
    members = np.concatenate((step.chunk_table, step.decode_table))
    tables = step.tables[members, :width]
    draws = [] if sampling is None else sampling
    wide = [
        np.array(
            [number, step.rows, chunks, decodes, width, len(step.sampled_rows), int(sampling is not None), len(poison)],
            np.int64,
        ),
        step.token_ids,
        step.slots,
        np.array([value for how in draws for value in (how.seed, how.top_k)], np.int64),
        np.array([value for how in draws for value in (how.temperature, how.top_p)], np.float64).view(np.int64),
    ]
    narrow = [
        step.positions,
        step.chunk_row,
        step.chunk_tokens,
        step.chunk_prefix,
        step.decode_row,
        step.decode_context,
        step.sampled_rows,
        np.array(poison, np.int32),
        tables.ravel(),
    ]
    return np.concatenate((np.concatenate(wide).view(np.uint8), np.concatenate(narrow).view(np.uint8)))


def read_plan(data: Bytes, device: torch.device = CPU) -> Plan:
    """The inverse of `plan_bytes`; arrays are views of `data`."""
    head = data[: 8 * _HEAD].view(np.int64).tolist()
    number, rows, chunks, decodes, width, sampled, drawn, poisoned = head
    draws = sampled if drawn else 0
    wide = data[8 * _HEAD : 8 * (_HEAD + 2 * rows + 4 * draws)].view(np.int64)
    narrow = data[8 * (_HEAD + 2 * rows + 4 * draws) :].view(np.int32)
    token_ids, slots, seeds, chances = np.split(wide, (rows, 2 * rows, 2 * rows + 2 * draws))
    counts = (rows, chunks, chunks, chunks, decodes, decodes, sampled, poisoned)
    positions, chunk_row, chunk_tokens, chunk_prefix, decode_row, decode_context, sampled_rows, poison, tables = (
        np.split(narrow, np.cumsum(counts))
    )
    # Table rows in batch order: chunks, then decodes; a sampled row's table is that of its part.
    sampling_chunks = sampled - decodes
    step = Step(
        rows=rows,
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        tables=tables.reshape(-1, width),
        chunk_row=chunk_row,
        chunk_tokens=chunk_tokens,
        chunk_prefix=chunk_prefix,
        chunk_table=np.arange(chunks, dtype=np.int32),
        decode_row=decode_row,
        decode_context=decode_context,
        decode_table=np.arange(chunks, chunks + decodes, dtype=np.int32),
        sampled_rows=sampled_rows,
        sampled_table=np.concatenate(
            (_chunks_of(sampled_rows[:sampling_chunks], chunk_row), np.arange(chunks, chunks + decodes, dtype=np.int32))
        ),
        device=device,
    )
    sampling = None
    if drawn:
        pairs, shares = seeds.reshape(-1, 2).tolist(), chances.view(np.float64).reshape(-1, 2).tolist()
        sampling = [Sampling(heat, top_k, top_p, seed) for (seed, top_k), (heat, top_p) in zip(pairs, shares)]
    return Plan(number, step, sampling, positions[sampled_rows].tolist(), poison.tolist())


def _chunks_of(rows: NDArray[np.int32], chunk_row: NDArray[np.int32]) -> NDArray[np.int32]:
    """The chunk that each row belongs to."""
    return (np.searchsorted(chunk_row, rows, side="right") - 1).astype(np.int32)
