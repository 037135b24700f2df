"""One after the other, whatever the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from policies import Request
from simulator.routers.router import ReplicaView, Router


@dataclass
class RoundRobin(Router):
    """The replica after the last one, by number; a replica that is down is skipped."""

    _last: int = field(default=-1, init=False, repr=False)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        chosen = next((replica for replica in replicas if replica.number > self._last), replicas[0])
        self._last = chosen.number
        return chosen
