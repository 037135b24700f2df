"""Where most of the prompt has been seen before, as long as the load stays even.

The router keeps its own memory of which prefixes it sent where; it asks no replica for its cache. Each prefix hash of
a trace names the whole prefix up to its end, so the longest match is the last hash that is known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from policies import Request
from policies.contract.policy import knob
from simulator.routers.router import ReplicaView, Router, least, outstanding_requests


class PrefixMemory:
    """Which prefix hashes were sent to which replica."""

    def __init__(self) -> None:
        self._seen: dict[int, OrderedDict[int, None]] = {}

    def match(self, number: int, hashes: Sequence[int]) -> int:
        """How many of a prompt's hashes, from its beginning, were sent to a replica."""
        seen = self._seen.get(number)
        if not seen:
            return 0
        for index, name in enumerate(hashes):
            if name not in seen:
                return index
        return len(hashes)

    def remember(self, number: int, hashes: Sequence[int], most: int) -> None:
        """Note a prompt's hashes; of more than `most` the least recently used are forgotten."""
        seen = self._seen.setdefault(number, OrderedDict())
        # Deepest first: what is forgotten first is the end of a prefix, never its beginning.
        for name in reversed(hashes):
            seen[name] = None
            seen.move_to_end(name)
        while len(seen) > most:
            seen.popitem(last=False)


@dataclass
class PrefixAffinity(Router):
    """The replica with the longest known prefix if enough of the prompt matches and loads are even; else the fewest
    requests."""

    least_match: float = knob(0.5, "share of the prompt's hashes that has to match", least=0, most=1)
    uneven_requests: int = knob(32, "loads are uneven when most and least differ by more requests than this", least=0)
    uneven_ratio: float = knob(1.0001, "... and by more than this factor", least=1)
    remembered: int = knob(100_000, "prefix hashes remembered per replica, the least recently used forgotten", least=1)

    on_demand: ClassVar[bool] = True
    routes_by: ClassVar[str] = "prefix_hashes"
    paper: ClassVar[str] = "SGLang's cache-aware router (its defaults)"

    _memory: PrefixMemory = field(default_factory=PrefixMemory, init=False, repr=False)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        hashes = request.prefix_hashes
        chosen = least(replicas, outstanding_requests)
        if hashes and not self._uneven(replicas, chosen):
            matches = {replica.number: self._memory.match(replica.number, hashes) for replica in replicas}
            best = least(replicas, lambda replica: (-matches[replica.number], outstanding_requests(replica)))
            if matches[best.number] > 0 and matches[best.number] >= self.least_match * len(hashes):
                chosen = best
        self._memory.remember(chosen.number, hashes, self.remembered)
        return chosen

    def _uneven(self, replicas: Sequence[ReplicaView], idlest: ReplicaView) -> bool:
        most, fewest = max(map(outstanding_requests, replicas)), outstanding_requests(idlest)
        return most - fewest > self.uneven_requests and most > self.uneven_ratio * fewest
