"""Most KV memory to spare: what is in use, and what the queue will need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from policies import Request
from simulator.routers.router import Load, ReplicaView, Router, least


def used_or_wanted(replica: ReplicaView) -> float:
    """Share of the KV blocks in use or about to be needed by prompts not yet prefilled."""
    wanted = replica.prefill_tokens / replica.block_size
    return (replica.total_blocks - replica.free_blocks + wanted) / replica.total_blocks


_load = Load(used_or_wanted)


@dataclass
class LeastKV(Router):
    """The replica with the smallest share of KV blocks in use or about to be needed by prompts not yet prefilled."""

    on_demand: ClassVar[bool] = True

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        return least(replicas, _load)
