"""Least work at hand, counted in tokens still to be computed: a long prompt weighs more than a short one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from policies import Request
from policies.contract.policy import knob
from simulator.routers.router import Load, ReplicaView, Router, least


@dataclass
class LeastOutstandingTokens(Router):
    """The replica with the fewest prompt tokens to prefill and declared output tokens to decode."""

    decode_weight: float = knob(1.0, "what an output token weighs beside a prompt token", least=0)

    on_demand: ClassVar[bool] = True

    _load: Load[ReplicaView] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        weight = self.decode_weight
        self._load = Load(lambda one: one.prefill_tokens + weight * one.decode_tokens_promised, falls=weight)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        return least(replicas, self._load)
