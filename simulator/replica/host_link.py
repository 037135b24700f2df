"""The link between a device and its host's memory, in virtual time.

Each device has a link of its own, full duplex, over which its share of the KV travels; replicas of one host that share
a link (a PCIe switch, the memory's own bandwidth) queue for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from policies import Ns

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
