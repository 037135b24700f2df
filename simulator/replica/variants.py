"""Replicas that do more than run batches: they tell when a prompt is about to end, or they swap.

Where KV is swapped, a batch starts when its own transfers are over.
What is swapped out has to leave its blocks before they are written, and what comes back has to be there before it is
read, so the first stage counts as busy until both are done.
"""

from __future__ import annotations

from collections.abc import Callable

from policies import Batch, Track
from simulator.replica.host_link import HostLink
from simulator.replica.running_ahead import Replica


class PrefillReplica(Replica):
    """A replica that tells when the iteration that ends a prompt begins."""

    on_last_chunk: Callable[[Track, Replica], None]

    def _launch(self, batch: Batch) -> None:
        super()._launch(batch)
        for chunk in batch.chunks:
            if chunk.samples and chunk.track.hands_over:
                self.on_last_chunk(chunk.track, self)


class SwapsKV:
    """What a replica with host memory does in addition: its batches wait for their transfers.

    link: to host memory. device_block_bytes: KV bytes of one block on one device; all devices copy at the same time.
    """

    link: HostLink
    device_block_bytes: int

    def _launch(self, batch: Batch) -> None:
        if batch.swap_out or batch.swap_in:
            # Copies follow the batches in flight, which may still write what goes out.
            free = self._free_ns  # type: ignore[attr-defined]
            begin = max(self.env.now, free[0])  # type: ignore[attr-defined]
            size = self.device_block_bytes
            out_bytes, in_bytes = (
                sum([move.num_blocks for move in moves]) * size for moves in (batch.swap_out, batch.swap_in)
            )
            free[0] = self.link.move(begin, out_bytes, in_bytes)
        super()._launch(batch)  # type: ignore[misc]


class SwapReplica(SwapsKV, Replica):
    """A replica that swaps."""


class SwapPrefillReplica(SwapsKV, PrefillReplica):
    """A prefill replica that swaps and sends its KV layer by layer."""
