"""A sum of scores for every replica: how much of the prompt it knows, how short its queue is, how much KV is free.

Like `prefix_affinity` it remembers what it sent where and asks no replica for its cache. It looks at all replicas for
every request, as llm-d's endpoint picker does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from policies import Request
from policies.contract.policy import knob
from simulator.routers.prefix_affinity import PrefixMemory
from simulator.routers.router import ReplicaView, Router


@dataclass
class WeightedScores(Router):
    """The replica with the highest weighted sum of three scores from 0 to 1: share of the prompt's hashes known there,
    queue (1 for the shortest of all, 0 for the longest), share of KV blocks free. Of equals the first."""

    prefix_weight: float = knob(3.0, "weight of the known share of the prompt", least=0)
    queue_weight: float = knob(2.0, "weight of a short queue", least=0)
    kv_weight: float = knob(2.0, "weight of free KV memory", least=0)
    remembered: int = knob(100_000, "prefix hashes remembered per replica, the least recently used forgotten", least=1)

    on_demand: ClassVar[bool] = True
    routes_by: ClassVar[str] = "prefix_hashes"
    paper: ClassVar[str] = "llm-d's endpoint picker: prefix-cache, queue and kv-cache-utilization scorers, max score"

    _memory: PrefixMemory = field(default_factory=PrefixMemory, init=False, repr=False)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        hashes = request.prefix_hashes
        queues = [replica.num_waiting for replica in replicas]
        longest, spread = max(queues), max(queues) - min(queues)
        chosen, best = replicas[0], -1.0
        for replica, queue in zip(replicas, queues):
            score = self.queue_weight * ((longest - queue) / spread if spread else 1.0)
            score += self.kv_weight * replica.free_blocks / replica.total_blocks
            if hashes:
                score += self.prefix_weight * self._memory.match(replica.number, hashes) / len(hashes)
            if score > best:
                chosen, best = replica, score
        self._memory.remember(chosen.number, hashes, self.remembered)
        return chosen
