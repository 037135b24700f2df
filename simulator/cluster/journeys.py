"""What is remembered of a request that moves between replicas, and of a replica's time in the cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from policies import Ns, Request, Track


@dataclass(slots=True)
class Journey:
    """A request that moves: what its earlier replicas did for it. output_tokens: its true output length."""

    request: Request
    output_tokens: int
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    produced: int = 0
    admitted_ns: Ns = -1
    first_token_ns: Ns = -1
    preemptions: int = 0
    cached_tokens: int = 0

    def add(self, track: Track, replica: int) -> None:
        """Take over what a track did on a replica that it leaves."""
        self.segments += track.segments
        self.replicas += [replica] * len(track.segments)
        if self.admitted_ns < 0:
            # What it finds on a later replica is its second admission's, as after a preemption.
            self.admitted_ns, self.cached_tokens = track.admitted_ns, track.cached_total
        if self.first_token_ns < 0 and track.segments:
            self.first_token_ns = track.first_token_ns
        self.produced = track.produced
        self.preemptions += track.preemptions


@dataclass(slots=True)
class Life:
    """A replica's time in the cluster, from its order to its end (-1: it lasted), and why it ended.

    It takes requests from up_ns on, and has its devices from ordered_ns to down_ns. The run may be over before it is
    up: it then has no number and no up_ns (both -1).
    """

    replica: int
    pool: int
    role: str
    ordered_ns: Ns
    up_ns: Ns
    down_ns: Ns = -1
    reason: str = ""

    def held_ns(self, end_ns: Ns) -> Ns:
        """How long it had its devices in a run that was over at end_ns."""
        down_ns = min(self.down_ns, end_ns) if self.down_ns >= 0 else end_ns
        return max(0, down_ns - self.ordered_ns)

    def facts(self) -> dict[str, Any]:
        """As plain data, in seconds."""
        return {
            "replica": self.replica,
            "pool": self.pool,
            "role": self.role,
            "ordered_s": self.ordered_ns / 1e9,
            "up_s": self.up_ns / 1e9 if self.up_ns >= 0 else None,
            "down_s": self.down_ns / 1e9 if self.down_ns >= 0 else None,
            "reason": self.reason,
        }
