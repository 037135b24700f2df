"""Fewest requests at hand, waiting and running: join the shortest queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from policies import Request
from simulator.routers.router import ReplicaView, Router, least, outstanding_requests


@dataclass
class LeastOutstandingRequests(Router):
    """The replica with the fewest waiting and running requests."""

    on_demand: ClassVar[bool] = True

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        return least(replicas, outstanding_requests)
