"""What is remembered of a request that moves between replicas, and of a replica's time in the cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

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
