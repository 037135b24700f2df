"""The replicas behind a router that looks, each in its own time: simulated no further than somebody looks at them.

Between two arrivals such replicas feel nothing of each other. Each keeps its own events, and its iterations are played
when the router looks at it or gives it a request: up to that moment, several at once, as fast as on a single replica.
Until its next event nothing of a replica can change but what a leap takes (KV blocks, promised tokens), so whoever
wants the least loaded of a thousand need not ask a thousand (`LeastOf`). Rows are those of replicas side by side; those
of iterations, stages and tokens come in the order in which they are played.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from policies import Ns, Request
from simulator.clock.virtual_time import FAR, VirtualTime
from simulator.cluster.in_own_time_view import SeenReplicas
from simulator.cluster.in_turn import StillReplica
from simulator.cluster.router_checks import RouterChecks
from simulator.errors import SimulationError
from simulator.routers.router import Load, Router, View, chosen_of

if TYPE_CHECKING:
    from simulator.replica.running_ahead import Replica

__all__ = ["Fleet"]

_FAR: Final = FAR

FEW = 32
"""Fewer replicas than so many are asked one by one: quicker than keeping bounds."""


class Fleet:
    """Replicas that only their router joins.

    replicas: all there will ever be, the number of each being its place. up: those that take requests, by number; kept
    by whoever made the fleet, who tells of each change (`joined`, `left`).
    """

    def __init__(
        self, env: VirtualTime, replicas: Sequence[Replica], up: list[Replica], checks: RouterChecks | None = None
    ) -> None:
        self.env = env
        self._checks = checks
        self.replicas = replicas
        self.up = up
        # Each is alone with what it knows of.
        env.sharers = 1
        self._events: list[list[Any]] = [[] for _ in replicas]
        # When the first of them is due. Nothing changes before, except by whoever comes from outside.
        self._next_ns = [_FAR for _ in replicas]
        # Nobody ends before, except by whoever comes from outside; kept once somebody counts requests.
        self._calm_ns = [0 for _ in replicas]
        self._counts = False
        # Both as heaps of (moment, number), entries that no longer hold left in them; none while nobody wants to know.
        self._due: list[tuple[Ns, int]] | None = None
        self._calm: list[tuple[Ns, int]] | None = None
        self._least: dict[Any, LeastOf] = {}
        self._is_up = [replica in up for replica in replicas] if len(up) < len(replicas) else [True] * len(up)
        self._still: list[StillReplica] | None = None
        self._seen = SeenReplicas(self)

    # What a router does with them

    def choose(self, router: Router, request: Request, rng: Random) -> Replica:
        """The replica that a router names."""
        up = self.up
        if len(up) == 1:
            return up[0]
        if router.on_demand:
            checks = self._checks
            if checks is None or not checks.due():
                return chosen_of(router.choose(request, self._seen, rng), router, request, up)
            again, same_rng = checks.copy(self.replicas, rng)
            chosen = chosen_of(router.choose(request, self._seen, rng), router, request, up)
            self.catch_up_all()
            plain = chosen_of(again.choose(request, up, same_rng), router, request, up)
            checks.compare(chosen.number, plain.number, request, self.env.now)
            return chosen
        if router.oblivious:
            if self._still is None:
                self._still = [StillReplica(router, replica) for replica in self.replicas]
            views = [self._still[replica.number] for replica in up]
            return self.replicas[chosen_of(router.choose(request, views, rng), router, request, views).number]
        self.catch_up_all()
        return chosen_of(router.choose(request, up, rng), router, request, up)

    def least(self, load: Load[View], among: Sequence[int] | None = None) -> Replica:
        """The replica up with the smallest load, of equals the one with the lowest number. among: their places."""
        if among is not None:
            asked: list[Any] = [self._for(load, self.up[at]) for at in among]
            return cast("Replica", min(asked, key=load.of))
        if load.only_ends:
            self._catch_up_ends()
        else:
            self.catch_up_all()
        if len(self.up) < FEW:
            return min(self.up, key=load.of)  # type: ignore[arg-type]  # a replica is a view
        least = self._least.get(load)
        if least is None:
            least = self._least[load] = LeastOf(load, len(self.replicas))
            for replica in self.up:
                least.note(replica, self.env.now)
        return self.replicas[least.number(self.replicas, self.env.now)]

    # What the cluster does with them

    def submit(self, replica: Replica, request: Request, output_tokens: int, produced: int) -> None:
        self.catch_up(replica)
        env, self._calm_ns[replica.number] = self.env, 0
        outer = env.schedule_in(self._events[replica.number])
        try:
            replica.submit(request, output_tokens, produced=produced)
        finally:
            env.schedule_in(outer)
        self._note(replica)

    def withdraw(self, replica: Replica, row: int, reason: str) -> None:
        env, self._calm_ns[replica.number] = self.env, 0
        outer = env.schedule_in(self._events[replica.number])
        try:
            replica.withdraw([row], reason)
        finally:
            env.schedule_in(outer)
        self._note(replica)

    def abandon(self, replica: Replica, reason: str) -> list[Any]:
        env = self.env
        outer = env.schedule_in(self._events[replica.number])
        try:
            gone = replica.abandon(reason)
        finally:
            env.schedule_in(outer)
        self._note(replica)
        return gone

    def joined(self, replica: Replica) -> None:
        self._is_up[replica.number] = True
        self._note(replica)

    def left(self, replica: Replica) -> None:
        self._is_up[replica.number] = False
        for least in self._least.values():
            least.leave(replica.number)

    def ended(self, replica: Replica) -> None:
        """A request has ended on a replica, now in its time."""
        if self.env.now < self._calm_ns[replica.number]:
            policy = type(replica.scheduler.policy).__name__
            raise SimulationError(
                f"replica {replica.number}: a request ended at {self.env.now} ns, not before "
                f"{self._calm_ns[replica.number]} ns was expected: policy {policy} does not keep its promise "
                f"`Promises.keeps_running`, or cost model {replica.cost.name} its `least_ns`"
            )

    def finish(self) -> None:
        """Nobody arrives any more: one replica after another does what it has left."""
        for replica in self.replicas:
            self.env.play(self._events[replica.number], _FAR)
            self._note(replica)

    # In time

    def catch_up(self, replica: Replica) -> None:
        """Play a replica up to now: what is due this very moment comes after those who arrive in it."""
        number, now = replica.number, self.env.now
        if self._next_ns[number] < now:
            self.env.play(self._events[number], now)
            self._note(replica)

    def catch_up_all(self) -> None:
        """Play all replicas up to now."""
        if self._due is None:
            self._due = _heap_of(self._next_ns)
        self._catch_up_those(self._due, self._next_ns)

    def _catch_up_ends(self) -> None:
        """Play replicas so far that every end up to now has happened."""
        self._counts = True
        if self._calm is None:
            self._calm = _heap_of(self._calm_ns)
        self._catch_up_those(self._calm, self._calm_ns)

    def _catch_up_those(self, due: list[tuple[Ns, int]], due_ns: list[Ns]) -> None:
        now = self.env.now
        while due and due[0][0] < now:
            at, number = heappop(due)
            if due_ns[number] == at:
                self.env.play(self._events[number], now)
                self._note(self.replicas[number])

    def _for(self, load: Load[View], replica: Replica) -> Any:
        """A replica whose load is that of now."""
        if not load.only_ends:
            self.catch_up(replica)
        else:
            number = replica.number
            self._counts = True
            if self._calm_ns[number] < self.env.now:
                self.env.play(self._events[number], self.env.now)
                self._note(replica)
        return replica

    def _note(self, replica: Replica) -> None:
        """Something has happened on a replica."""
        number, events = replica.number, self._events[replica.number]
        self._next_ns[number] = at = events[0][0] if events else _FAR
        if self._due is not None and at < _FAR:
            if len(self._due) > 8 * len(self._next_ns):
                # Nobody asks for all any more, or mostly what no longer holds.
                self._due = None
            else:
                heappush(self._due, (at, number))
        if self._counts:
            self._calm_ns[number] = at = replica.calm_until(at) if at < _FAR else _FAR
            if self._calm is not None and at < _FAR:
                if len(self._calm) > 8 * len(self._next_ns):
                    self._calm = None
                else:
                    heappush(self._calm, (at, number))
        if self._is_up[number]:
            for least in self._least.values():
                least.note(replica, self.env.now)


def _heap_of(due_ns: list[Ns]) -> list[tuple[Ns, int]]:
    heap = [(at, number) for number, at in enumerate(due_ns) if at < _FAR]
    heapify(heap)
    return heap


class LeastOf:
    """Which replica has the least load, by a lower bound of each load that holds until its next event.

    Within a leap a load grows as blocks are taken and falls, at most so much per ns, as promised tokens are planned
    (`Load`). So the replica with the least bound is asked, its bound mended, and so on until a load is its bound.
    """

    def __init__(self, load: Load[Any], replicas: int) -> None:
        self.load = load
        # Replica i's load at t is at least low[i] - fall[i] * t. Who is not up is never the least.
        self._low = np.full(replicas, np.inf)
        self._fall = np.zeros(replicas) if load.falls else None

    def note(self, replica: Any, now: Ns) -> None:
        """Its state is another than before."""
        number, load = replica.number, self.load
        value = load.of(replica)
        if self._fall is not None:
            fall = 0.0
            decodes, steps, gap = replica.falls_by()
            if decodes and gap > 0:
                fall = load.falls * decodes / gap
                # One iteration may end at once. The rest covers what is lost in rounding.
                value -= load.falls * decodes + 1e-6 + 1e-12 * (abs(value) + fall * now)
                value += fall * now
            elif decodes:
                value -= load.falls * decodes * steps
            self._fall[number] = fall
        self._low[number] = value

    def leave(self, number: int) -> None:
        self._low[number] = np.inf

    def number(self, replicas: Sequence[Any], now: Ns) -> int:
        low, of = self._low, self.load.of
        if self._fall is None:
            while True:
                number = int(low.argmin())
                value = float(of(replicas[number]))
                if not value > low[number]:
                    return number
                low[number] = value
        low = low - self._fall * now
        least, best = np.inf, len(low)
        while True:
            number = int(low.argmin())
            bound = low[number]
            if bound == np.inf:
                # Nobody is left (or no load is a number).
                return min(best, number) if least == np.inf else best
            if bound >= least and (bound > least or number > best):
                return best
            value = float(of(replicas[number]))
            if value < least or (value == least and number < best):
                least, best = value, number
            low[number] = np.inf
