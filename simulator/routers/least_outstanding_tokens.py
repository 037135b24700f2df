"""Least work at hand, counted in tokens still to be computed: a long prompt weighs more than a short one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from policies import Request
from policies.policy import knob
from simulator.routers.router import ReplicaView, Router, least


@dataclass
class LeastOutstandingTokens(Router):
    """The replica with the fewest prompt tokens to prefill and declared output tokens to decode."""

    decode_weight: float = knob(1.0, "what an output token weighs beside a prompt token", least=0)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        weight = self.decode_weight
        return least(replicas, lambda replica: replica.prefill_tokens + weight * replica.decode_tokens_promised)
