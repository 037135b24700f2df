"""Replicas that swap: a batch starts when its own transfers are over.

What is swapped out has to leave its blocks before they are written, and what comes back has to be there before it is
read, so the first stage counts as busy until both are done.
"""

from __future__ import annotations

from policies import Batch
from simulator.cluster.kv_transfer import PrefillReplica
from simulator.replica.host_link import HostLink
from simulator.replica.running_ahead import Replica


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
