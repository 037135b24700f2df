"""Most KV memory to spare: what is in use, and what the queue will need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from policies import Request
from simulator.routers.router import ReplicaView, Router, least


@dataclass
class LeastKV(Router):
    """The replica with the smallest share of KV blocks in use or about to be needed by prompts not yet prefilled."""

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        return least(replicas, self._share)

    @staticmethod
    def _share(replica: ReplicaView) -> float:
        wanted = replica.prefill_tokens / replica.block_size
        return (replica.total_blocks - replica.free_blocks + wanted) / replica.total_blocks
