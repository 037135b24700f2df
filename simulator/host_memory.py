"""Swapping in virtual time: the link between devices and host memory, and replicas whose batches wait for it.

Each device has a link of its own, full duplex, over which its share of the KV travels; replicas of one host that share
a link (a PCIe switch, the memory's own bandwidth) queue for it. A batch starts when its own transfers are over: what is
swapped out has to leave its blocks before they are written, what comes back has to be there before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from policies import Batch, Ns
from simulator.disaggregation import PrefillReplica
from simulator.replica import Replica

LATENCY_NS: Ns = 10_000
"""Of one transfer: launching copies and waiting for their end."""


@dataclass
class HostLink:
    """First come, first served in each direction. bytes_per_s: in one direction. busy_ns: both directions added up."""

    bytes_per_s: float
    latency_ns: Ns = LATENCY_NS
    busy_ns: Ns = 0
    waited_ns: Ns = 0
    out_free_ns: Ns = 0
    in_free_ns: Ns = 0

    def time_ns(self, size: int) -> Ns:
        """A transfer of `size` bytes when nobody else uses the link."""
        return self.latency_ns + ceil(size * 1e9 / self.bytes_per_s) if size else 0

    def move(self, now_ns: Ns, out_bytes: int, in_bytes: int) -> Ns:
        """Send out, then bring in (into the room that became free), from now on; returns when both are done."""
        at = now_ns
        if out_bytes:
            start = max(at, self.out_free_ns)
            self.waited_ns += start - at
            at = self.out_free_ns = start + self.time_ns(out_bytes)
            self.busy_ns += at - start
        if in_bytes:
            start = max(at, self.in_free_ns)
            self.waited_ns += start - at
            at = self.in_free_ns = start + self.time_ns(in_bytes)
            self.busy_ns += at - start
        return at


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
