"""vLLM's balancer over its data-parallel ranks: four times the waiting plus the running requests, seen late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from policies import Request
from policies.contract.policy import knob
from policies.work.request import NS_PER_S, Ns
from simulator.routers.router import ReplicaView, Router


@dataclass
class VllmRanks(Router):
    """The rank with the smallest 4 x waiting + running, as last published; of equals the first.

    vLLM's coordinator publishes waiting and running requests of every rank at most every 100 ms. In between the front
    end adds each request that it sends to the waiting ones of its rank. Here the first request that comes after the
    interval sees fresh numbers.
    """

    paper: ClassVar[str] = "vLLM 0.10 to 0.19, DPLBAsyncMPClient"
    on_demand: ClassVar[bool] = True

    interval_s: float = knob(0.1, "seconds for which published numbers hold; 0: always fresh", least=0)
    waiting_weight: float = knob(4.0, "what a waiting request counts beside a running one", least=0)
    _counts: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)
    _published_ns: Ns = field(default=-1, init=False, repr=False)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        counts, now = self._counts, request.arrival_ns
        old = self._published_ns < 0 or now >= self._published_ns + self.interval_s * NS_PER_S
        if old or len(counts) != len(replicas) or any(replica.number not in counts for replica in replicas):
            counts = self._counts = {each.number: [each.num_waiting, each.num_running] for each in replicas}
            self._published_ns = now
        weight = self.waiting_weight
        best, least = replicas[0], float("inf")
        for replica in replicas:
            waiting, running = counts[replica.number]
            if waiting * weight + running < least:
                best, least = replica, waiting * weight + running
        counts[best.number][0] += 1
        return best
