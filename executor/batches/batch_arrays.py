"""One batch as arrays: which row of the `[rows, hidden]` matrix is whose token, and where its keys and values go.

Rows are laid out as chunks in batch order, then decodes, then dummy rows, so that attention splits the matrix by
offsets without copying and every linear layer sees all of it at once (the linear fusion of SARATHI, section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from executor.batches.device_arrays import DeviceArrays

Ints = NDArray[np.int32]
CPU = torch.device("cpu")


def address(array: NDArray[np.generic]) -> int:
    """Where a contiguous array begins in memory (`ndarray.ctypes` takes three times as long)."""
    return int(array.__array_interface__["data"][0])


@dataclass
class Step:
    """What the model needs to know of one iteration. Arrays are int32 unless said otherwise.

    rows: chunk tokens + decodes + dummy rows. token_ids (int64): ids of chunk rows; decode rows are filled in on the
        device from the last sampled tokens (`decode_table` says from where), so that planning never waits for them.
    positions [rows]; slots [rows] (int64): where each row's keys and values are stored, -1 for dummies.
    tables [table rows, width]: the block table of every running request, one row each.
    chunk_row, chunk_tokens, chunk_prefix, chunk_table: per chunk its first row, size, context before, table row.
    decode_row, decode_context, decode_table: per decode its row, context before its own token, table row.
    sampled_rows, sampled_table: the rows whose logits are wanted, and the table row of the request behind each.
    arrays: the same packed on the device, for kernels that read them there (filled in by `device_step.arrays_of`).
    """

    rows: int
    token_ids: NDArray[np.int64]
    positions: Ints
    slots: NDArray[np.int64]
    tables: Ints
    chunk_row: Ints
    chunk_tokens: Ints
    chunk_prefix: Ints
    chunk_table: Ints
    decode_row: Ints
    decode_context: Ints
    decode_table: Ints
    sampled_rows: Ints
    sampled_table: Ints
    device: torch.device = CPU
    arrays: DeviceArrays | None = None

    @property
    def num_decodes(self) -> int:
        return len(self.decode_row)

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_row)

    def tensor(self, array: NDArray[np.generic]) -> Tensor:
        """The array on this step's device; on a CPU without a copy."""
        there = torch.from_numpy(array)
        return there if self.device.type == "cpu" else there.to(self.device, non_blocking=True)

    @cached_property
    def row_positions(self) -> Tensor:
        return self.tensor(self.positions)

    @cached_property
    def row_slots(self) -> Tensor:
        return self.tensor(self.slots)

    @cached_property
    def block_tables(self) -> Tensor:
        return self.tensor(self.tables)

    @cached_property
    def sampled_index(self) -> Tensor:
        return self.tensor(self.sampled_rows.astype(np.int64))

    @cached_property
    def only_sampled(self) -> Step:
        """The same batch when only sampled rows still matter: each is one decode over its whole context.

        The last layer uses it: once keys and values of all rows are stored, nobody reads the other rows' output. A
        batch of decodes alone is that already, and is returned itself.
        """
        count = len(self.sampled_rows)
        if count == self.rows == self.num_decodes and np.array_equal(self.sampled_rows, self.decode_row):
            return self
        none = np.empty(0, np.int32)
        return Step(
            rows=count,
            token_ids=np.zeros(count, np.int64),
            positions=self.positions[self.sampled_rows],
            slots=self.slots[self.sampled_rows],
            tables=self.tables,
            chunk_row=none,
            chunk_tokens=none,
            chunk_prefix=none,
            chunk_table=none,
            decode_row=np.arange(count, dtype=np.int32),
            decode_context=self.positions[self.sampled_rows],
            decode_table=self.sampled_table,
            sampled_rows=np.arange(count, dtype=np.int32),
            sampled_table=self.sampled_table,
            device=self.device,
        )
