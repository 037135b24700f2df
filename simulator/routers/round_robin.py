"""One after the other, whatever the load."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random
from typing import ClassVar

from policies import Request
from simulator.routers.router import ReplicaView, Router

_by_number = attrgetter("number")


@dataclass
class RoundRobin(Router):
    """The replica after the last one, by number; a replica that is down is skipped."""

    oblivious: ClassVar[bool] = True

    _last: int = field(default=-1, init=False, repr=False)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        at = bisect_right(replicas, self._last, key=_by_number)
        chosen = replicas[at if at < len(replicas) else 0]
        self._last = chosen.number
        return chosen
