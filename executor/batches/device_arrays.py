"""A step's index arrays on the device: one packed int32 buffer, one copy, every array a view of it.

Attention kernels and CUDA graphs read a batch through these views only. Their lengths (`Sizes`) may be larger than the
batch: a padded decode has length 0, a padded tile no rows, a padded row slot -1, and nothing is read or written for
them. That is what lets one captured graph serve every batch that fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.batches.batch_arrays import Step
from executor.errors import ExecutorError

Ints = NDArray[np.int32]
ALIGNED = 4
"""int32 numbers in 16 bytes."""
TILE_ROWS = 128
"""Query rows of one program of the chunk kernel, at most."""


@dataclass(frozen=True)
class Sizes:
    """Lengths of a step's arrays, as a kernel launch or a captured graph fixes them.

    chunk_rows: rows before the first decode. decodes: rows that decode. chunks, tiles: prompts' chunks and the query
    tiles that they are cut into. sampled: rows whose logits are wanted. blocks: width of the block tables.
    """

    rows: int
    chunk_rows: int
    decodes: int
    chunks: int
    tiles: int
    tile_rows: int
    sampled: int
    blocks: int

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Length of every array in the packed buffer, in its order."""
        return {
            "positions": self.rows,
            "slots": self.rows,
            "sampled": self.sampled,
            "decode_length": self.decodes,
            "decode_row": self.decodes + 1,
            "decode_start": self.decodes + 1,
            "tile_row": self.tiles,
            "tile_count": self.tiles,
            "tile_position": self.tiles,
            "tile_chunk": self.tiles,
            "chunk_start": self.chunks + 1,
            "context_start": self.chunks + 1,
            "chunk_length": self.chunks,
            "decode_tables": self.decodes * self.blocks,
            "chunk_tables": self.chunks * self.blocks,
        }

    @cached_property
    def places(self) -> dict[str, slice]:
        """Where every array lies. Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for a pointer
        that is aligned otherwise, and reads it one number at a time."""
        found, at = {}, 0
        for name, length in self.lengths.items():
            found[name] = slice(at, at + length)
            at += -(-length // ALIGNED) * ALIGNED
        return found

    @cached_property
    def total(self) -> int:
        return sum(-(-length // ALIGNED) * ALIGNED for length in self.lengths.values())

    def holds(self, other: Sizes) -> bool:
        """Whether a batch of `other` fits into arrays of these sizes."""
        return (
            self.tile_rows == other.tile_rows
            and self.rows >= self.chunk_rows + self.decodes
            and self.chunk_rows >= other.chunk_rows
            and self.decodes >= other.decodes
            and self.chunks >= other.chunks
            and self.tiles >= other.tiles
            and self.sampled >= other.sampled
            and self.blocks >= other.blocks
        )


def tile_rows_for(chunk_tokens: int) -> int:
    """Query rows of a tile for a largest chunk of so many tokens: a power of two from 16 to TILE_ROWS."""
    return min(TILE_ROWS, max(16, 1 << max(0, chunk_tokens - 1).bit_length()))


def sizes_of(step: Step, block_size: int, tile_rows: int | None = None) -> Sizes:
    """The exact sizes of a step. tile_rows: by the largest chunk if not given."""
    tokens = step.chunk_tokens
    if tile_rows is None:
        tile_rows = tile_rows_for(int(tokens.max()) if len(tokens) else 1)
    longest = 1
    if step.num_chunks:
        longest = max(longest, int((step.chunk_prefix + tokens).max()))
    if step.num_decodes:
        longest = max(longest, int(step.decode_context.max()) + 1)
    return Sizes(
        rows=step.rows,
        chunk_rows=int(tokens.sum()),
        decodes=step.num_decodes,
        chunks=step.num_chunks,
        tiles=int((-(-tokens // tile_rows)).sum()),
        tile_rows=tile_rows,
        sampled=len(step.sampled_rows),
        blocks=min(-(-longest // block_size), step.tables.shape[1]),
    )


def pack(step: Step, sizes: Sizes) -> Ints:
    """The step's arrays in one, laid out and padded as `sizes` says: chunks from row 0, decodes from chunk_rows on.

    Raises ExecutorError if the step does not fit.
    """
    useful, decodes, chunks = int(step.chunk_tokens.sum()), step.num_decodes, step.num_chunks
    packed = np.zeros(sizes.total, np.int32)
    part: dict[str, Ints] = {name: packed[place] for name, place in sizes.places.items()}
    first = sizes.chunk_rows
    part["slots"].fill(-1)
    tiles = [
        (row + start, min(sizes.tile_rows, tokens - start), prefix + start, chunk)
        for chunk, (row, tokens, prefix) in enumerate(
            zip(step.chunk_row.tolist(), step.chunk_tokens.tolist(), step.chunk_prefix.tolist())
        )
        for start in range(0, tokens, sizes.tile_rows)
    ]
    if useful > first or decodes > sizes.decodes or len(tiles) > sizes.tiles or chunks > sizes.chunks:
        raise ExecutorError(f"a batch of {useful} + {decodes} rows does not fit into {sizes}")
    part["positions"][:useful] = step.positions[:useful]
    part["slots"][:useful] = step.slots[:useful]
    part["positions"][first : first + decodes] = step.positions[useful : useful + decodes]
    part["slots"][first : first + decodes] = step.slots[useful : useful + decodes]
    sampled = step.sampled_rows
    part["sampled"][: len(sampled)] = np.where(sampled >= useful, sampled + (first - useful), sampled)
    part["decode_length"][:decodes] = step.decode_context + 1
    part["decode_row"][:] = np.arange(sizes.decodes + 1)
    part["decode_start"][1 : decodes + 1] = np.cumsum(step.decode_context + 1)
    part["decode_start"][decodes + 1 :] = part["decode_start"][decodes]
    if tiles:
        columns = np.array(tiles, np.int32).T
        for name, column in zip(("tile_row", "tile_count", "tile_position", "tile_chunk"), columns):
            part[name][: len(tiles)] = column
    lengths = step.chunk_prefix + step.chunk_tokens
    for name, counts in (("chunk_start", step.chunk_tokens), ("context_start", lengths)):
        part[name][1 : chunks + 1] = np.cumsum(counts)
        part[name][chunks + 1 :] = counts.sum()
    part["chunk_length"][:chunks] = lengths
    width = min(sizes.blocks, step.tables.shape[1])
    for name, rows in (("decode_tables", step.decode_table), ("chunk_tables", step.chunk_table)):
        if len(rows):
            part[name].reshape(-1, sizes.blocks)[: len(rows), :width] = step.tables[rows, :width]
    return packed


class DeviceArrays:
    """Views of a packed buffer, int32 on the device.

    positions, slots [rows]; sampled [sampled]: rows whose logits are wanted; decode_length [decodes]: tokens seen,
    the row's own included, 0 for padding; decode_row, decode_start [decodes + 1]: running sums of the decodes' rows
    (one each) and lengths; tile_row, tile_count, tile_position, tile_chunk [tiles]: a query tile's
    first row, number of rows, first position and chunk; chunk_start, context_start [chunks + 1]: running sums of the
    chunks' rows and contexts; chunk_length [chunks]: contexts; decode_tables [decodes, blocks], chunk_tables [chunks,
    blocks].
    most_query, most_context: largest chunk and longest context that a launch has to provide for.
    """

    def __init__(self, buffer: Tensor, sizes: Sizes, most_query: int, most_context: int) -> None:
        self.buffer, self.sizes = buffer, sizes
        self.most_query, self.most_context = most_query, most_context
        parts = {name: buffer[place] for name, place in sizes.places.items()}
        self.positions, self.slots, self.sampled = parts["positions"], parts["slots"], parts["sampled"]
        self.decode_length = parts["decode_length"]
        self.decode_row, self.decode_start = parts["decode_row"], parts["decode_start"]
        self.tile_row, self.tile_count = parts["tile_row"], parts["tile_count"]
        self.tile_position, self.tile_chunk = parts["tile_position"], parts["tile_chunk"]
        self.chunk_start, self.context_start = parts["chunk_start"], parts["context_start"]
        self.chunk_length = parts["chunk_length"]
        self.decode_tables = parts["decode_tables"].view(sizes.decodes, sizes.blocks)
        self.chunk_tables = parts["chunk_tables"].view(sizes.chunks, sizes.blocks)


def blank_arrays(sizes: Sizes, block_size: int, buffer: Tensor) -> DeviceArrays:
    """Arrays of padding alone in a buffer of zeros."""
    arrays = DeviceArrays(buffer, sizes, sizes.chunk_rows, sizes.blocks * block_size)
    arrays.slots.fill_(-1)
    return arrays


def place(step: Step, block_size: int, *, trimmed: bool) -> None:
    """Pack a step and send it to its device now, so that nothing of it is left to do between two launches.

    trimmed: the last layer sees sampled rows only.
    """
    arrays_of(step, block_size)
    if trimmed and step.only_sampled.rows:
        arrays_of(step.only_sampled, block_size)


def arrays_of(step: Step, block_size: int) -> DeviceArrays:
    """The step's arrays on its device: packed and copied at the first call, kept with the step."""
    if step.arrays is None:
        sizes = sizes_of(step, block_size)
        packed = torch.from_numpy(pack(step, sizes))
        if step.device.type == "cuda":
            packed = packed.pin_memory().to(step.device, non_blocking=True)
        most_query = int(step.chunk_tokens.max()) if step.num_chunks else 0
        step.arrays = DeviceArrays(packed, sizes, most_query, sizes.blocks * block_size)
    return step.arrays
