"""A session stays where it began, so that its earlier turns are found in that replica's prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from policies import Request
from policies.contract.policy import knob
from simulator.routers.router import ReplicaView, Router, least, numbered, outstanding_requests


@dataclass
class SessionAffinity(Router):
    """The replica that served the session before; a new session, or one that has to move, goes to the fewest requests.

    Requests without a session are routed each by itself. By program, all calls of a tree stay together: sub-agents find
    the system prompt and the beginnings that they share, and nobody else's.
    """

    by: str = knob("session", "what stays together: a session, or a whole program", choices=("session", "program"))
    spill: int = knob(
        0, "a session moves when its replica has so many requests more than the least loaded one; 0: never", least=0
    )

    on_demand: ClassVar[bool] = True
    routes_by: ClassVar[str] = "session"

    _home: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        idlest = least(replicas, outstanding_requests)
        name = request.program if self.by == "program" else request.session
        if name is None:
            return idlest
        home = numbered(replicas, self._home.get(name))
        if home is None or self._too_busy(home, idlest):
            home = idlest
            self._home[name] = home.number
        return home

    def _too_busy(self, home: ReplicaView, idlest: ReplicaView) -> bool:
        return bool(self.spill) and outstanding_requests(home) >= outstanding_requests(idlest) + self.spill
