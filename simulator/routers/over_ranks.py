"""Two routers, one behind the other: the first chooses a replica, the second one of its data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from random import Random

from policies import Request
from simulator.routers.router import ReplicaView, Router, choose


class OverRanks(Router):
    """What the cluster asks where replicas have ranks.

    router: sees replicas, each as the sum of its ranks. rank_router: makes the router of one replica's ranks; each
    replica has its own. replica_of: the replica of every engine, by the engine's number.
    """

    def __init__(self, router: Router, rank_router: Callable[[], Router], replica_of: Sequence[int]) -> None:
        self.router, self.rank_router, self.replica_of = router, rank_router, replica_of
        self.rank_routers: dict[int, Router] = {}

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        """replicas: all ranks of all replicas that are up."""
        teams = [
            WholeReplica(number, list(ranks))
            for number, ranks in groupby(replicas, key=lambda rank: self.replica_of[rank.number])
        ]
        chosen = teams[0] if len(teams) == 1 else choose(self.router, request, teams, rng)
        if len(chosen.ranks) == 1:
            return chosen.ranks[0]
        if chosen.number not in self.rank_routers:
            self.rank_routers[chosen.number] = self.rank_router()
        return choose(self.rank_routers[chosen.number], request, chosen.ranks, rng)


class WholeReplica:
    """A replica as a router sees it: all of its ranks together."""

    def __init__(self, number: int, ranks: Sequence[ReplicaView]) -> None:
        self.number, self.ranks = number, ranks
        self.block_size = ranks[0].block_size

    num_requests = property(lambda self: self._sum("num_requests"))
    num_running = property(lambda self: self._sum("num_running"))
    num_waiting = property(lambda self: self._sum("num_waiting"))
    prefill_tokens = property(lambda self: self._sum("prefill_tokens"))
    decode_tokens_promised = property(lambda self: self._sum("decode_tokens_promised"))
    total_blocks = property(lambda self: self._sum("total_blocks"))
    free_blocks = property(lambda self: self._sum("free_blocks"))

    def _sum(self, name: str) -> int:
        return sum([getattr(rank, name) for rank in self.ranks])
