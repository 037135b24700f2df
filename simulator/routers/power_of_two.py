"""Two replicas drawn at random, the less loaded one of them: nearly as even as asking all, at the price of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from policies import Request
from policies.contract.policy import knob
from simulator.routers.router import ReplicaView, Router, least, outstanding_requests, outstanding_tokens


@dataclass
class PowerOfTwo(Router):
    """Of a few replicas drawn at random, the one with the least load."""

    choices: int = knob(2, "replicas that are drawn and asked", least=1)
    by: str = knob("requests", "load that is compared", choices=("requests", "tokens"))

    on_demand: ClassVar[bool] = True
    paper: ClassVar[str] = "Mitzenmacher, The power of two choices in randomized load balancing (TPDS 2001)"

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        drawn = sorted(rng.sample(range(len(replicas)), min(self.choices, len(replicas))))
        load = outstanding_requests if self.by == "requests" else outstanding_tokens
        return least(replicas, load, among=drawn)
