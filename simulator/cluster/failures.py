"""Replicas that die at a moment and may come back later, as a plan that is known when the run begins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from policies.edges.settings import shown
from policies.work.request import NS_PER_S, Ns
from simulator.clock.virtual_time import ARRIVAL, Moment
from simulator.errors import SimulationError

if TYPE_CHECKING:
    from simpy import Event

    from simulator.cluster.cluster import Cluster

_FORM = re.compile(r"(\d{1,9})@(\d{1,9}(?:\.\d+)?)(?:\+(\d{1,9}(?:\.\d+)?))?", re.ASCII)


@dataclass(frozen=True)
class Failure:
    """Replica `replica` dies at down_ns; back_ns is when it is up again, -1 for never."""

    replica: int
    down_ns: Ns
    back_ns: Ns = -1


def parse_failures(texts: Sequence[str], replicas: int | None) -> list[Failure]:
    """`2@30+60`: replica 2 dies 30 s into the run and is back 60 s later; without `+60` it stays down.

    replicas: how many there are, None if their number changes. Raises SimulationError for anything else.
    """
    failures = []
    for text in texts:
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise SimulationError(f"--fail: found {shown(text)}, expected REPLICA@SECONDS or REPLICA@SECONDS+SECONDS")
        replica = int(match[1])
        if replicas is not None and replica >= replicas:
            raise SimulationError(f"--fail {text}: found replica {replica}, expected 0 to {replicas - 1}")
        down = round(float(match[2]) * NS_PER_S)
        failures.append(Failure(replica, down, down + round(float(match[3]) * NS_PER_S) if match[3] else -1))
    return failures


def schedule_failures(cluster: Cluster, failures: Sequence[Failure], *, requeue: bool) -> None:
    """Let each failure happen at its time, before anything else of that moment. One that finds its replica down (or
    not started yet) does nothing. A replica that was leaving anyway does not come back."""
    for failure in failures:
        _schedule(cluster, failure, requeue)


def _schedule(cluster: Cluster, failure: Failure, requeue: bool) -> None:
    def die(event: Event) -> None:
        if failure.replica >= len(cluster.teams):
            return
        team = cluster.teams[failure.replica]
        if failure.back_ns >= 0 and cluster.is_up(team[0]):
            cluster.coming[cluster.pool_number(team[0])] += 1
            cluster.returning[cluster.pool_number(team[0])] += 1
            Moment(cluster.env, failure.back_ns - failure.down_ns, lambda event: come_back(), ARRIVAL)
        cluster.fail(team, f"replica {failure.replica} died", requeue=requeue)

    def come_back() -> None:
        team = cluster.teams[failure.replica]
        cluster.coming[cluster.pool_number(team[0])] -= 1
        cluster.returning[cluster.pool_number(team[0])] -= 1
        cluster.restore(team)

    Moment(cluster.env, failure.down_ns, die, ARRIVAL)
