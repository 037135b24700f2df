"""Any replica, with equal chances: the baseline that needs to know nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random as Chance
from typing import ClassVar

from policies import Request
from simulator.routers.router import ReplicaView, Router


@dataclass
class Random(Router):
    """A replica drawn with equal chances (seeded)."""

    oblivious: ClassVar[bool] = True

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Chance) -> ReplicaView:
        return replicas[rng.randrange(len(replicas))]
