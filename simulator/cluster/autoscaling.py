"""A pool that grows when work piles up or the objective is missed, and shrinks when it could do with less.

A controller looks at fixed intervals. It starts replicas, which take requests after a start-up delay (and cost device
time from the moment they are ordered), and drains the least loaded one, which goes when its requests have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import chain
from math import ceil
from typing import TYPE_CHECKING, Any

from policies.contract.policy import knob
from policies.edges.errors import PolicyError
from policies.registry import knob_value, knobs_of
from policies.work.request import NS_PER_S, Ns
from simulator.clock.virtual_time import LOOK, Moment
from simulator.errors import SimulationError
from simulator.routers import outstanding_requests

if TYPE_CHECKING:
    from simpy import Event

    from policies import Track
    from simulator.cluster.cluster import Cluster
    from simulator.cluster.journeys import Journey
    from simulator.cluster.pools import ClusterPlan


@dataclass(frozen=True)
class Autoscaling:
    """When a pool grows and shrinks. The knobs of `--autoscale most=8,by=queue`."""

    pool: int = knob(0, "number of the pool", least=0)
    least: int = knob(1, "fewest replicas", least=1)
    most: int = knob(8, "most replicas, those that start or come back included", least=1)
    by: str = knob("queue", "grow by queue depth, or by missing the objective", choices=("queue", "slo"))
    interval_s: float = knob(10.0, "seconds between two looks", least=0.001)
    startup_s: float = knob(60.0, "seconds from order to first request", least=0)
    queue_high: float = knob(4.0, "by queue: waiting requests per replica above which the pool grows", least=0)
    ttft_s: float = knob(2.0, "by slo: first token expected within", least=0)
    attainment: float = knob(0.95, "by slo: share of requests that must meet it, else the pool grows", least=0, most=1)
    window_s: float = knob(60.0, "by slo: requests that ended within this time are counted", least=0)
    running_low: float = knob(16.0, "shrink if the others would run fewer requests each than this", least=0)
    patience_s: float = knob(60.0, "... for this long without a break", least=0)


def make_autoscaling(values: Mapping[str, Any], plan: ClusterPlan) -> Autoscaling:
    """The settings of `--autoscale`; SimulationError for an unknown key, a wrong value or a pool that is not there."""
    known = knobs_of(Autoscaling)  # type: ignore[arg-type]
    settings = {}
    for key, value in values.items():
        if key not in known:
            names = ", ".join(entry.name for entry in fields(Autoscaling))
            raise SimulationError(f"--autoscale: unknown key {key!r}; known keys: {names}")
        try:
            settings[key] = knob_value("--autoscale", known[key], value)
        except PolicyError as error:
            raise SimulationError(str(error)) from None
    scaling = Autoscaling(**settings)
    if scaling.pool >= len(plan.pools):
        raise SimulationError(f"--autoscale: found pool {scaling.pool}, expected 0 to {len(plan.pools) - 1}")
    start = plan.pools[scaling.pool].replicas
    if not scaling.least <= start <= scaling.most:
        raise SimulationError(
            f"--autoscale: found {start} replicas to start with, expected {scaling.least} (least) to "
            f"{scaling.most} (most)"
        )
    return scaling


class Autoscaler:
    """The controller of one pool; it looks as long as the run has requests to end."""

    def __init__(self, cluster: Cluster, scaling: Autoscaling) -> None:
        self.cluster = cluster
        self.scaling = scaling
        self.starting = 0
        self._first_tokens: deque[tuple[Ns, bool]] = deque()
        self._idle_since: Ns | None = None
        cluster.coming[scaling.pool] += 1  # a pool that is scaled never stays without replicas
        self._look_later()

    def saw(self, ended: Track | Journey) -> None:
        """A request has ended: did its first token come in time?"""
        if self.scaling.by == "slo":
            late = ended.first_token_ns < 0 or self._too_long(ended.first_token_ns - ended.request.arrival_ns)
            self._first_tokens.append((self.cluster.env.now, late))

    def _too_long(self, waited_ns: Ns) -> bool:
        return waited_ns > self.scaling.ttft_s * NS_PER_S

    def _look_later(self) -> None:
        Moment(self.cluster.env, round(self.scaling.interval_s * NS_PER_S), self._look, LOOK)

    def _look(self, event: Event) -> None:
        cluster, scaling = self.cluster, self.scaling
        if cluster.ended >= cluster.expected:
            return
        members = cluster.members(scaling.pool)
        count = len(members) + self.starting + cluster.returning[scaling.pool]
        waiting = sum(rank.num_waiting for member in members for rank in member) + cluster.num_stranded
        wanted = max(scaling.least, count)
        if scaling.by == "queue":
            if waiting > scaling.queue_high * count:
                wanted = ceil(waiting / scaling.queue_high) if scaling.queue_high else scaling.most
        elif self._missed():
            wanted = count + 1
        for _ in range(min(wanted, scaling.most) - count):
            self._start()
        if wanted <= count:
            self._shrink(members, waiting)
        else:
            self._idle_since = None
        self._look_later()

    def _missed(self) -> bool:
        """Too many requests of the last window, or waiting now, had or have no first token in time."""
        now, tokens = self.cluster.env.now, self._first_tokens
        while tokens and tokens[0][0] < now - self.scaling.window_s * NS_PER_S:
            tokens.popleft()
        late, count = sum(late for _, late in tokens), len(tokens)
        # Each one more that waits in vain makes the objective more missed: no need to go through a long queue.
        for member in self.cluster.members(self.scaling.pool):
            for track in chain.from_iterable(rank.scheduler.queues.waiting for rank in member):
                if late > (1 - self.scaling.attainment) * count:
                    return True
                if track.first_token_ns < 0 and self._too_long(now - track.request.arrival_ns):
                    late += 1
                    count += 1
        return late > (1 - self.scaling.attainment) * count

    def _start(self) -> None:
        life = self.cluster.order(self.scaling.pool)
        self.starting += 1

        def begin(event: Event) -> None:
            self.starting -= 1
            if self.cluster.ended < self.cluster.expected:
                self.cluster.start(self.scaling.pool, life)

        Moment(self.cluster.env, round(self.scaling.startup_s * NS_PER_S), begin, LOOK)

    def _shrink(self, members: list[list[Any]], waiting: int) -> None:
        """members: the replicas of the pool, each as its ranks."""
        now, scaling = self.cluster.env.now, self.scaling
        running = sum(rank.num_running for member in members for rank in member)
        enough = len(members) > scaling.least and not waiting and not self.starting
        if not enough or running >= scaling.running_low * (len(members) - 1):
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since >= scaling.patience_s * NS_PER_S:
            self._idle_since = None
            # The youngest of the least loaded goes.
            least = min(members, key=lambda member: (sum(map(outstanding_requests, member)), -member[0].number))
            self.cluster.drain(least, "scaled down")
